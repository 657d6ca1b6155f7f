"""Runs items: each in a process of its own, with a deadline, so that one crash does not end the other items."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_proof.entry_points import write_entry_points
from gpu_proof.items import Item
from gpu_proof.settings import DEVICE_VARIABLE, RECORDS_VARIABLE

ROOT = Path(__file__).parents[2]
RAN, FAILED, NOT_RUN = "ran", "failed", "not run"
PARALLEL_ITEMS = 6
"""Maximum number of items that run at the same time, of those that neither measure time nor memory."""
TERMINATION_S = 5.0
"""Seconds from the request to end a process until it is killed, and from then until it is left behind."""
MIN_ITEM_S = 20.0
"""An item is not started when less of the budget is left than this number of seconds."""
POLL_INTERVAL_S = 0.1
REASON_LINES = 12
"""Number of the last lines of an item's output in the reason of its failure."""


@dataclass
class Outcome:
    """What became of one item."""

    item: Item
    status: str
    """`RAN`, `FAILED` or `NOT_RUN`."""
    reason: str = ""
    """Why the item failed or was not run."""
    started_s: float = 0.0
    """Seconds from the start of the proof to that of the item."""
    seconds: float = 0.0
    """Duration of the item."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """What the item has measured."""
    output: str = ""
    """Standard output and standard error of the item."""


class Runner:
    """Runs items on `device` ("cuda" or "cpu"), and calls `on_outcome` after each of them.

    `budget_s`: maximum number of seconds for all items. Items for which no time is left are not run.
    """

    def __init__(self, device: str, budget_s: float, on_outcome: Callable[[Outcome], None]) -> None:
        self._device, self._budget_s, self._on_outcome = device, budget_s, on_outcome
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Run the items in their order. On a GPU, consecutive items that are not exclusive run at the same time."""
        outcomes: list[Outcome] = []
        for exclusive, group in itertools.groupby(items, key=lambda item: item.exclusive):
            workers = 1 if exclusive or self._device == "cpu" else PARALLEL_ITEMS
            with ThreadPoolExecutor(workers) as pool:
                try:
                    outcomes += pool.map(self._run_one, group)
                except BaseException:
                    self._stopped.set()  # the pool waits for its items: after Ctrl-C they end, and no process is left
                    raise
        return outcomes

    def _run_one(self, item: Item) -> Outcome:
        elapsed_s = time.monotonic() - self._started
        left_s = self._budget_s - elapsed_s
        if self._device == "cpu" and not item.runs_on_cpu:
            outcome = Outcome(item, NOT_RUN, "needs an NVIDIA GPU", elapsed_s)
        elif self._device == "cuda" and item.cpu_only:
            outcome = Outcome(item, NOT_RUN, item.cpu_only, elapsed_s)
        elif left_s < MIN_ITEM_S:
            outcome = Outcome(item, NOT_RUN, f"the budget of {self._budget_s:g} s was used up", elapsed_s)
        else:
            outcome = run_item(item, self._device, min(item.deadline_s, left_s - TERMINATION_S), self._stopped)
            outcome.started_s = elapsed_s
        with self._lock:
            self._on_outcome(outcome)
        return outcome


def run_item(item: Item, device: str, deadline_s: float, stopped: threading.Event) -> Outcome:
    """Run one item in a process of its own. End its processes after `deadline_s` seconds or when `stopped` is set."""
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder, tempfile.TemporaryFile() as output:
        records = Path(folder) / "records"
        write_entry_points(Path(folder))
        started = time.monotonic()
        process = subprocess.Popen(
            item.argv(device),
            cwd=ROOT,
            env=_environment(device, Path(folder), records),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - started < deadline_s and not stopped.is_set():
                time.sleep(POLL_INTERVAL_S)
        finally:
            end_group(process)
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
        outcome = Outcome(item, RAN, seconds=seconds, records=_read_records(records), output=text)
    if code != 0:
        end = f"ended with exit code {code}"
        if code is None:
            end = "was interrupted" if stopped.is_set() else f"exceeded its deadline of {deadline_s:.0f} s"
        last_lines = "\n".join(text.strip().splitlines()[-REASON_LINES:])
        outcome.status, outcome.reason = FAILED, f"{end}:\n{last_lines}"
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group. Servers end with it, because their wardens watch it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)


def _environment(device: str, entry_points: Path, records: Path) -> dict[str, str]:
    """The environment of an item: the package of this repository and its `entry_points` come before installed ones."""
    own = [str(entry_points), str(ROOT), str(ROOT / "benchmarks")]
    python_path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        DEVICE_VARIABLE: device,
        RECORDS_VARIABLE: str(records),
    }


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The records of an item. A last line that was not written completely is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
