"""The case of many updates: log probabilities stay right, and nothing grows."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.footprint import Footprint
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.reference import describe_gap, require_gap
from verl_server.types import Json

SAMPLES = 100
"""Number of comparisons with Hugging Face, spread evenly over the updates."""
WARM_UP = 20
"""Number of updates before the footprint at the start is measured, at most half of all updates."""
MAX_MORE_BYTES, MAX_MORE_FILES = 64 << 20, 8
"""Largest accepted growth of resident memory and of open files."""
MIN_SAMPLES_FOR_DRIFT, MAX_DRIFT = 40, 2.0
"""The median gap of the last quarter may be this multiple of that of the first quarter, if there are enough samples."""


def many_updates(trial: Trial) -> str:
    """Push other weights `trial.updates` times, and compare and measure again and again."""
    system, every = trial.system, max(1, trial.updates // SAMPLES)
    pids = [os.getpid(), *system.server_pids()]
    warm_at = min(WARM_UP, trial.updates // 2)
    gaps: list[list[float]] = []
    seconds: list[float] = []
    footprints: list[Json] = []
    trial.figures.update(updates=0, gaps=gaps, update_s=seconds, footprints=footprints)
    for number in range(1, trial.updates + 1):
        weights = trial.reference.weights(1000 + number)
        started = time.monotonic()
        system.update(weights)
        seconds.append(round(time.monotonic() - started, 5))
        trial.figures["updates"] = number
        if number % every == 0 or number == trial.updates:
            gap = require_gap(trial.reference.measure(system, weights), f"after update {number}")
            gaps.append([number, float(f"{gap:.3g}")])
        if number == warm_at or (number > warm_at and number % every == 0) or number == trial.updates:
            footprints.append({"update": number, **asdict(Footprint.of(pids))})
    _require_no_growth(footprints)
    _require_no_drift([gap for _, gap in gaps])
    rate = f"{1e3 * statistics.median(seconds):.0f} ms per update"
    return f"{trial.updates} updates, {describe_gap(max(gap for _, gap in gaps))}, {rate}"


def _require_no_growth(footprints: list[Json]) -> None:
    first, last = footprints[0], footprints[-1]
    since = f"from update {first['update']} to {last['update']}"
    more = {name: last[name] - first[name] for name in ("resident_bytes", "open_files", "shared_memory_files")}
    if more["resident_bytes"] > MAX_MORE_BYTES:
        raise CheckFailedError(f"resident memory grew by {more['resident_bytes'] / 2**20:.0f} MiB {since}")
    if more["open_files"] > MAX_MORE_FILES:
        raise CheckFailedError(f"the number of open files grew by {more['open_files']} {since}")
    if more["shared_memory_files"] > 0:
        raise CheckFailedError(f"the number of files in shared memory grew by {more['shared_memory_files']} {since}")


def _require_no_drift(gaps: list[float]) -> None:
    if len(gaps) < MIN_SAMPLES_FOR_DRIFT:
        return
    quarter = len(gaps) // 4
    first, last = statistics.median(gaps[:quarter]), statistics.median(gaps[-quarter:])
    if last > MAX_DRIFT * first:
        raise CheckFailedError(f"the median log-prob gap grew from {first:.1e} to {last:.1e}")


CASES = (
    Case(
        "repeated",
        "After many updates, log probabilities are as close to Hugging Face as after the first, and memory, open files "
        "and files in shared memory have not grown.",
        ("https://github.com/vllm-project/vime/issues/64", "https://github.com/sgl-project/sglang/pull/4446"),
        many_updates,
        deadline_s=240.0,
        deadline_per_update_s=2.0,
    ),
)
