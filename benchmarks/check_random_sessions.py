"""Checks random sessions of agents on a real server: exact prompts, masks, log probabilities, records and resumptions.

`test_random_sessions.py` checks 40 sessions. This program checks as many as asked for, with another seed each
time, and prints what they contained. It exits with 1 on a violation, and prints the smallest plan that violates.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import CONSOLE, start_check
from servers import one_rank_engine, tiny_model

if TYPE_CHECKING:
    from random_sessions.logprobs import Reference
    from random_sessions.running import Server
    from random_sessions.statistics import Statistics

SESSIONS_PER_BATCH = 5
"""Number of sessions that run concurrently, with the same limits, kills and resumptions."""


def main() -> int:
    """Check the sessions. Returns the exit code."""
    options = start_check("check_random_sessions", __doc__ or "", "sessions", 500, "number of sessions")
    start = time.perf_counter()
    with (
        tiny_model() as model,
        one_rank_engine(model_path=str(model), dtype="float32", max_total_tokens=16384) as engine,
        tempfile.TemporaryDirectory(prefix="verl-bench-") as folder,
    ):
        from helpers import adapter_of, reference_model
        from random_sessions.logprobs import Reference
        from random_sessions.running import Server
        from random_sessions.statistics import Statistics
        from transformers import AutoTokenizer

        from verl_server.agent import as_generate_fn
        from verl_server.trajectory import ChatRenderer

        adapter, renderer = adapter_of(engine), ChatRenderer(AutoTokenizer.from_pretrained(model))
        server = Server(as_generate_fn(adapter.asynchronous), adapter.base_url, adapter.api_key, model, renderer)
        statistics = Statistics()
        reference = Reference({engine.weight_version: reference_model(model).double()})
        check = _make_check(options.sessions, options.seed, server, reference, Path(folder), statistics)
        try:
            check()
        except AssertionError as violation:
            CONSOLE.print(f"VIOLATION: {violation}")
            CONSOLE.print("\n".join(getattr(violation, "__notes__", ())), markup=False)
            return 1
        finally:
            CONSOLE.print("\n".join(statistics.lines()), markup=False)
            CONSOLE.print(f"seed {options.seed}, {time.perf_counter() - start:.0f} s")
    return 0


def _make_check(
    num_sessions: int, seed: int, server: Server, reference: Reference, folder: Path, statistics: Statistics
) -> Callable[[], None]:
    import hypothesis
    from random_sessions.checking import find_violations
    from random_sessions.plans import BatchPlan
    from random_sessions.strategies import batches

    num_batches = -(-num_sessions // SESSIONS_PER_BATCH)
    quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    numbers = iter(range(10**9))

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=num_batches, database=None, deadline=None, suppress_health_check=quiet)
    @hypothesis.given(batches(SESSIONS_PER_BATCH))
    def check(plan: BatchPlan) -> None:
        violations = find_violations(plan, server, reference, folder / str(next(numbers)), statistics)
        assert violations == [], "\n".join(violations)
        if (done := statistics.counts["sessions"]) % 100 == 0:
            CONSOLE.print(f"{done} sessions are exact", style="dim")

    return check


if __name__ == "__main__":
    sys.exit(main())
