"""Standalone fleets take weights by broadcast only; colocated ones keep their own and lend their memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from helpers import (
    GREEDY,
    PROMPTS,
    assert_equals_reference,
    change_weights,
    no_new_shared_memory,
    reference_model,
    wait_until,
)

from verl_server import VerlEngine
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, NotReadyError
from verl_server.rollout import RolloutManager
from verl_server.rollout.health import ReplicaState

pytestmark = pytest.mark.timeout(900)

RESTART_S = 250.0


def pid_of(replica: Any) -> int:
    return replica.adapter.pids.main


def are(fleet: RolloutManager, count: int) -> Callable[[], bool]:
    return lambda: sum(one.state is ReplicaState.HEALTHY for one in fleet.replicas) == count


def workers_of(port: int) -> set[str]:
    return {worker["url"] for worker in requests.get(f"http://127.0.0.1:{port}/workers", timeout=10).json()["workers"]}


def test_standalone(one_rank: Any, tiny: Callable[..., Path], sglang_router: int) -> None:
    """And an `sglang-router` is kept told of those that serve."""
    folder = str(tiny("qwen3"))
    config = AdapterConfig(router_ip="127.0.0.1", router_port=sglang_router)

    def all_registered() -> bool:
        return workers_of(sglang_router) >= {one.adapter.base_url for one in fleet.replicas if one.adapter}

    model = reference_model(folder)
    with no_new_shared_memory():
        fleet = RolloutManager(
            2, mode="standalone", config=config, model_path=folder, dtype="float32", max_total_tokens=4096
        )
        with VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine:
            change_weights(model, seed=3)
            assert engine.update_weights_from_tensor(model.state_dict().items()).transport == "distributed"
            assert_equals_reference(engine, model)
            with pytest.raises(BadInputError, match="has its devices for itself"):
                engine.release_memory_occupation()

            wait_until(all_registered, 30.0, "the router does not know the replicas")
            gone = fleet.replicas[0].adapter
            assert gone is not None
            os.kill(pid_of(fleet.replicas[0]), signal.SIGKILL)
            wait_until(lambda: not are(fleet, 2)(), 10.0, "the loss is not seen")
            wait_until(lambda: gone.base_url not in workers_of(sglang_router), 30.0, "the router keeps the dead")
            wait_until(are(fleet, 2), RESTART_S, "it does not come back")
            assert_equals_reference(fleet.replicas[0].adapter, model)
            wait_until(all_registered, 30.0, "the router does not know the new server")

            change_weights(model, seed=4)
            engine.update_weights_from_tensor(model.state_dict().items())
            for one in fleet.replicas:
                assert_equals_reference(one.adapter, model)
    wait_until(lambda: not workers_of(sglang_router), 30.0, "the router keeps replicas that were shut down")


@pytest.fixture(scope="module")
def judge(tiny: Callable[..., Path]) -> Iterator[RolloutManager]:
    with (
        no_new_shared_memory(),
        RolloutManager(
            1, mode="colocated", model_path=str(tiny("qwen3")), dtype="float32", max_total_tokens=4096
        ) as judge,
    ):
        yield judge


def test_colocated(judge: RolloutManager, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    assert_equals_reference(judge, model)
    for tags in (None, ["kv_cache"], ["weights"]):
        judge.release_memory_occupation(tags)
        with pytest.raises(NotReadyError, match="is lent"):
            judge.add_replica()
        with pytest.raises(BadInputError, match="released already"):
            judge.release_memory_occupation(tags)
        with pytest.raises(NotReadyError, match="their memory is released"):
            judge.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        judge.resume_memory_occupation()
        assert_equals_reference(judge, model)
    with pytest.raises(BadInputError, match="nothing is released"):
        judge.resume_memory_occupation()


def test_colocated_memory_comes_back_in_parts(judge: RolloutManager, tiny: Callable[..., Path]) -> None:
    pid = pid_of(judge.replicas[0])
    judge.release_memory_occupation()
    judge.resume_memory_occupation(["weights"])
    with pytest.raises(NotReadyError, match="their memory is released"):
        judge.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    judge.resume_memory_occupation()
    assert_equals_reference(judge, reference_model(tiny("qwen3")))
    assert pid_of(judge.replicas[0]) == pid


def test_a_colocated_replica_that_dies_asleep(judge: RolloutManager, tiny: Callable[..., Path]) -> None:
    """It is started when its memory is its own again, not before."""
    judge.release_memory_occupation()
    os.kill(pid_of(judge.replicas[0]), signal.SIGKILL)
    wait_until(lambda: judge.replicas[0].state is ReplicaState.RESTARTING, 20.0, "the loss is not seen")
    assert judge.replicas[0].adapter is None
    judge.resume_memory_occupation()
    wait_until(are(judge, 1), RESTART_S, "it does not come back")
    assert_equals_reference(judge, reference_model(tiny("qwen3")))


def test_a_colocated_fleet_takes_no_weights(judge: RolloutManager, one_rank: Any, tiny: Callable[..., Path]) -> None:
    """The last test: an engine that does not start ends the fleet that it was given."""
    folder = str(tiny("qwen3"))
    with pytest.raises(BadInputError, match="keeps the weights of its checkpoint"):
        VerlEngine(one_rank, fleet=judge, model_path=folder, dtype="float32")
