"""Rollout modes: standalone fleets take weights by broadcast only; colocated fleets keep their weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import (
    GREEDY,
    PROMPTS,
    assert_equals_reference,
    change_weights,
    no_new_shared_memory,
    reference_model,
    server_pid,
    wait_until,
    workers_of,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import AdapterConfig, RolloutManager, VerlEngine
from verl_server.errors import BadInputError, NotReadyError
from verl_server.rollout.fleet import ReplicaState

pytestmark = pytest.mark.timeout(900)

RESTART_S = 250.0


def all_healthy(fleet: RolloutManager, count: int) -> Callable[[], bool]:
    """A condition: `count` replicas are healthy."""
    return lambda: sum(replica.state is ReplicaState.HEALTHY for replica in fleet.replicas) == count


def test_standalone(one_rank: DeviceMesh, tiny: Callable[..., Path], sglang_router: int) -> None:
    """Also: an `sglang-router` has exactly the replicas that serve as its workers."""
    folder = str(tiny("qwen3"))
    config = AdapterConfig(router_ip="127.0.0.1", router_port=sglang_router)

    def all_registered() -> bool:
        return workers_of(sglang_router) >= {replica.base_url for replica in fleet.replicas if replica.base_url}

    model = reference_model(folder)
    with (
        no_new_shared_memory(),
        RolloutManager(
            2, mode="standalone", config=config, model_path=folder, dtype="float32", max_total_tokens=4096
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        change_weights(model, seed=3)
        assert engine.update_weights_from_tensor(model.state_dict().items()).transport == "distributed"
        assert_equals_reference(engine, model)
        with pytest.raises(BadInputError, match="has its devices for itself"):
            engine.release_memory_occupation()

        wait_until(all_registered, 30.0, "the router does not have the replicas")
        killed_url = fleet.replicas[0].base_url
        os.kill(server_pid(fleet.replicas[0]), signal.SIGKILL)
        wait_until(lambda: not all_healthy(fleet, 2)(), 10.0, "the death is not detected")
        wait_until(lambda: killed_url not in workers_of(sglang_router), 30.0, "the router keeps the dead server")
        wait_until(all_healthy(fleet, 2), RESTART_S, "the server is not started again")
        assert_equals_reference(fleet.replicas[0].adapter, model)
        wait_until(all_registered, 30.0, "the router does not have the new server")

        change_weights(model, seed=4)
        engine.update_weights_from_tensor(model.state_dict().items())
        for replica in fleet.replicas:
            assert_equals_reference(replica.adapter, model)
    wait_until(lambda: not workers_of(sglang_router), 30.0, "the router keeps replicas that were shut down")


@pytest.fixture(scope="module")
def judge(tiny: Callable[..., Path]) -> Iterator[RolloutManager]:
    with (
        no_new_shared_memory(),
        RolloutManager(
            1,
            mode="colocated",
            router_process=True,
            host="127.0.0.2",
            model_path=str(tiny("qwen3")),
            dtype="float32",
            max_total_tokens=4096,
        ) as judge,
    ):
        assert judge.router_url.startswith("http://127.0.0.2:")
        yield judge


def test_colocated(judge: RolloutManager, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    assert_equals_reference(judge, model)
    for tags in (None, ["kv_cache"], ["weights"]):
        judge.release_memory_occupation(tags)
        with pytest.raises(NotReadyError, match="memory of this fleet is released"):
            judge.add_replica()
        with pytest.raises(BadInputError, match="released already"):
            judge.release_memory_occupation(tags)
        with pytest.raises(NotReadyError, match="has released its memory"):
            judge.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        judge.resume_memory_occupation()
        assert_equals_reference(judge, model)
    with pytest.raises(BadInputError, match="nothing is released"):
        judge.resume_memory_occupation()


def test_colocated_memory_comes_back_in_parts(judge: RolloutManager, tiny: Callable[..., Path]) -> None:
    pid = server_pid(judge.replicas[0])
    judge.release_memory_occupation()
    judge.resume_memory_occupation(["weights"])
    with pytest.raises(NotReadyError, match="has released its memory"):
        judge.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    judge.resume_memory_occupation()
    assert_equals_reference(judge, reference_model(tiny("qwen3")))
    assert server_pid(judge.replicas[0]) == pid


def test_a_colocated_replica_that_dies_while_its_memory_is_released(
    judge: RolloutManager, tiny: Callable[..., Path]
) -> None:
    """Its server is started again only after the memory was resumed."""
    judge.release_memory_occupation()
    os.kill(server_pid(judge.replicas[0]), signal.SIGKILL)
    wait_until(
        lambda: judge.replicas[0].state is ReplicaState.RESTARTING, 20.0, "the death of the server is not detected"
    )
    assert judge.replicas[0].base_url is None
    judge.resume_memory_occupation()
    wait_until(all_healthy(judge, 1), RESTART_S, "the server is not started again")
    assert_equals_reference(judge, reference_model(tiny("qwen3")))


def test_a_colocated_fleet_takes_no_weights(
    judge: RolloutManager, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """The engine does not start, and the fleet continues to serve."""
    folder = str(tiny("qwen3"))
    with pytest.raises(BadInputError, match="keeps the weights of its checkpoint"):
        VerlEngine(one_rank, fleet=judge, model_path=folder, dtype="float32")
    assert_equals_reference(judge, reference_model(folder))
