"""Random sessions of agents on a real server, with failures, kills and resumptions.

The program `benchmarks/check_random_sessions.py` runs the same check with 500 sessions.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import adapter_of, change_weights, reference_model
from hypothesis import HealthCheck, given, settings
from random_sessions.checking import find_violations
from random_sessions.logprobs import Reference
from random_sessions.plans import BatchPlan
from random_sessions.running import Server
from random_sessions.statistics import Statistics
from random_sessions.strategies import batches
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import as_generate_fn
from verl_server.trajectory import ChatRenderer

REPRODUCIBLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def server(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> Server:
    adapter, model = adapter_of(shared_engine), tiny("qwen3")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    return Server(as_generate_fn(adapter.asynchronous), adapter.base_url, adapter.api_key, model, renderer)


def test_random_sessions_are_exact(
    shared_engine: VerlEngine, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """40 sessions: forks, sub-agents, compactions, failures of the server and of tools, kills and resumptions."""
    reference = Reference({shared_engine.weight_version: reference_model(server.model).double()})
    statistics = Statistics()

    @settings(REPRODUCIBLE, max_examples=8)
    @given(batches(5))
    def check(plan: BatchPlan) -> None:
        folder = tmp_path_factory.mktemp("batch") / "runs"
        assert find_violations(plan, server, reference, folder, statistics) == []

    check()
    print("\n".join(statistics.lines()))
    assert statistics.counts["sessions"] >= 40
    for name in (
        "runs cancelled", "runs killed with SIGKILL", "sessions resumed in the middle", "tool calls: timeout",
        "tool calls: raised", "requests with the fault 'before'", "requests with the fault 'after'",
        "forks: sample", "forks: sub_agent", "forks: compacted", "sessions that ended with error",
    ):  # fmt: skip
        assert statistics.counts[name], f"the random sessions have no case of: {name}"


def test_random_sessions_are_exact_while_weights_are_updated(
    shared_engine: VerlEngine, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Updates begin between and during turns. Each span of tokens has the log probabilities of its version."""
    original = reference_model(server.model)
    changed = copy.deepcopy(original)
    change_weights(changed, seed=1)
    trainers, exact = (original, changed), (copy.deepcopy(original).double(), copy.deepcopy(changed).double())
    models: dict[int, Any] = {shared_engine.weight_version: exact[0]}
    statistics, lock = Statistics(), threading.Lock()

    def push_other_weights() -> None:
        with lock:
            index = len(models) % 2
            models[shared_engine.weight_version + 1] = exact[index]
            shared_engine.update_weights_from_tensor(trainers[index].state_dict().items())

    async def push() -> None:
        await asyncio.to_thread(push_other_weights)

    @settings(REPRODUCIBLE, max_examples=3)
    @given(batches(5, with_updates=True))
    def check(plan: BatchPlan) -> None:
        folder = tmp_path_factory.mktemp("batch") / "runs"
        assert find_violations(plan, server, Reference(models), folder, statistics, push) == []

    try:
        check()
    finally:
        shared_engine.update_weights_from_tensor(original.state_dict().items())
    print("\n".join(statistics.lines()))
    assert len(models) > 3
