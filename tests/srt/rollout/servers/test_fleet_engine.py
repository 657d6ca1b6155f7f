"""A fleet with a `VerlEngine`: weight updates reach every replica, released memory, request ids, two engines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_helpers import (
    LONG,
    RECOVERY,
    RESTART_S,
    healthy,
    states,
    until_tokens,
)
from helpers import (
    GREEDY,
    assert_equals_reference,
    change_weights,
    no_new_shared_memory,
    pid_of,
    reference_model,
    server_pid,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import RolloutManager, VerlEngine, WeightsConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ShutDownError,
    TornWeightsError,
)
from verl_server.rollout.fleet import ReplicaState

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def engine(fleet_and_engine: tuple[RolloutManager, VerlEngine]) -> VerlEngine:
    return fleet_and_engine[1]


def test_a_replica_dies_during_an_update(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    """The other replica gets the weights. The dead one loads them when its server runs again."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=9)
    victim = fleet.replicas[0]
    pid = server_pid(victim)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(model.state_dict().items()):
            if number == 3:
                threading.Timer(0.002, os.kill, (pid, signal.SIGKILL)).start()
            yield item

    assert engine.update_weights_from_tensor(tensors()).num_missing == 0
    assert_equals_reference(engine, model)
    wait_until(
        lambda: healthy(fleet) == 2 and pid_of(victim) not in (None, pid),
        RESTART_S,
        f"not healthy: {states(fleet)}",
    )
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


def test_each_prompt_of_a_batch_has_its_own_values(engine: Any, fleet: Any) -> None:
    replies = engine.generate(
        input_ids=((1, 2), [3, 4]),
        sampling_params=(GREEDY, {**GREEDY, "max_new_tokens": 3}),
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        token_ids_logprob=[[5], None],
    )
    assert ["output_token_logprobs" in reply["meta_info"] for reply in replies] == [True, False]
    assert ["input_token_ids_logprobs" in reply["meta_info"] for reply in replies] == [True, False]
    assert len(replies[1]["output_ids"]) == 3
    assert healthy(fleet) == 2


def generate_over_update(engine: Any, fleet: Any, mode: str, tiny: Callable[..., Path]) -> tuple[Any, Any, int]:
    """Replies of a request that runs during an update and of a later request, and the version before the update."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=17)
    version = engine.weight_version
    request: dict[str, Any] = {"rid": f"over {mode} {version}", "input_ids": [5, 6], "sampling_params": LONG}

    async def run() -> tuple[Any, Any]:
        running = asyncio.ensure_future(fleet.router.generate(**request))
        await until_tokens(fleet, 20, running)
        pairs = model.state_dict().items()
        update = asyncio.ensure_future(
            asyncio.to_thread(engine.update_weights_from_tensor, pairs, pause_mode=mode, flush_cache=mode != "in_place")
        )
        while mode == "wait" and any(replica.admitted for replica in fleet.status().replicas):
            await asyncio.sleep(0.005)
        later = await fleet.router.generate(input_ids=[7], sampling_params={**LONG, "max_new_tokens": 2})
        await update
        return await running, later

    return (*asyncio.run(run()), version)


def test_an_update_waits_for_requests(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, later, before = generate_over_update(engine, fleet, "wait", tiny)
    assert reply["meta_info"]["weight_versions"] == [{"version": before, "start": 0, "end": 400}]
    assert later["meta_info"]["weight_versions"] == [{"version": before + 1, "start": 0, "end": 2}]


def test_requests_continue_over_an_update(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, _, before = generate_over_update(engine, fleet, "in_place", tiny)
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == [before, before + 1]
    assert reply["meta_info"]["attempts"] == 1
    assert len(reply["output_ids"]) == 400
    fleet.flush_cache()


def test_an_update_with_abort_returns_partial_results(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, _, before = generate_over_update(engine, fleet, "abort", tiny)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(reply["output_ids"])
    assert 0 < count < 400
    whole = asyncio.run(fleet.router.generate(rid=f"over abort {before}", input_ids=[5, 6], sampling_params=LONG))
    assert whole["output_ids"][:count] == reply["output_ids"]
    assert whole["meta_info"]["weight_versions"] == [
        {"version": before, "start": 0, "end": count},
        {"version": before + 1, "start": count, "end": 400},
    ]


def test_one_server_has_no_pause_mode_wait(fleet: Any) -> None:
    with pytest.raises(BadInputError, match="one server cannot wait"):
        fleet.replicas[0].adapter.pause_generation("wait")


def test_an_update_during_a_request_with_an_exact_version_is_an_error(
    engine: Any, fleet: Any, tiny: Callable[..., Path]
) -> None:
    model = reference_model(tiny("qwen3"))
    version = engine.weight_version

    async def run() -> Any:
        request = asyncio.ensure_future(
            fleet.router.generate(input_ids=[5, 6], sampling_params=LONG, weight_version=version)
        )
        await until_tokens(fleet, 20, request)
        await asyncio.to_thread(engine.update_weights_from_tensor, model.state_dict().items())
        return await request

    with pytest.raises(NotReadyError, match="the weights changed during the generation"):
        asyncio.run(run())


def test_released_weights_are_not_served_before_they_are_pushed(
    engine: Any, fleet: Any, tiny: Callable[..., Path]
) -> None:
    """A release while a request runs is refused, and the request continues."""
    model = reference_model(tiny("qwen3"))
    engine.update_weights_from_tensor(model.state_dict().items())

    async def release_while_it_runs() -> Any:
        running = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        await until_tokens(fleet, 20, running)
        with pytest.raises(ServerBusyError, match="1 requests run in the fleet"):
            await asyncio.to_thread(engine.release_memory_occupation)
        return await running

    assert len(asyncio.run(release_while_it_runs())["output_ids"]) == 400
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    with pytest.raises(
        NotReadyError, match="no replica serves requests at the moment: verl_server_0 has no whole weights"
    ):
        asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY))
    with pytest.raises(TornWeightsError, match=r"released.*: push all tensors"):
        engine.generate(input_ids=[3])
    with pytest.raises(TornWeightsError, match="push all of them"):
        engine.update_weights_from_tensor([("model.norm.weight", torch.ones(64))])
    engine.update_weights_from_tensor(model.state_dict().items())
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)
    assert asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY))["meta_info"]["attempts"] == 1


def test_a_restarted_replica_is_not_current_after_a_partial_update(
    engine: Any, fleet: Any, tiny: Callable[..., Path]
) -> None:
    """A replica with the weights of its checkpoint needs all tensors, not only those of the update."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=23)
    engine.update_weights_from_tensor(model.state_dict().items())
    lost = fleet.replicas[0]
    os.kill(server_pid(lost), signal.SIGKILL)
    stop = time.monotonic() + RESTART_S
    while lost.state is not ReplicaState.STALE and time.monotonic() < stop and healthy(fleet) < 2:
        time.sleep(0.001)
    some = dict(list(model.state_dict().items())[:3])
    for tensor in some.values():
        tensor.mul_(1.01)
    engine.update_weights_from_tensor(some.items())
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


def test_request_ids_of_the_engine_reach_the_router(engine: Any, fleet: Any) -> None:
    """A repeated id returns the first reply; a batch takes one id for each prompt."""
    sampled = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    first = engine.generate(input_ids=[1, 2], sampling_params=sampled, rid="from the engine")
    again = asyncio.run(engine.async_generate(input_ids=[1, 2], sampling_params=sampled, rid="from the engine"))
    assert again["output_ids"] == first["output_ids"]
    prompts, rids = [[1, 2], [3, 4, 5]], ["batch 0", "batch 1"]
    batch = engine.generate(input_ids=prompts, sampling_params=sampled, rid=rids)
    second = asyncio.run(fleet.router.generate(input_ids=[3, 4, 5], sampling_params=sampled, rid="batch 1"))
    assert second["output_ids"] == batch[1]["output_ids"]
    assert (
        fleet.generate(input_ids=prompts, sampling_params=sampled, rid=rids)[0]["output_ids"]
        == (batch[0]["output_ids"])
    )
    for rid in ("one id", ["batch 0"]):
        with pytest.raises(BadInputError, match="2 prompts need a list of 2 request ids"):
            engine.generate(input_ids=prompts, sampling_params=sampled, rid=rid)


def test_a_fleet_has_one_engine_at_a_time(
    one_rank: DeviceMesh, fleet: Any, engine: Any, tiny: Callable[..., Path]
) -> None:
    """A constructor that fails leaves the fleet and its engine as they are."""
    arguments: dict[str, Any] = {"fleet": fleet, "model_path": str(tiny("qwen3")), "dtype": "float32"}
    with pytest.raises(BadInputError, match="another VerlEngine uses this fleet"):
        VerlEngine(one_rank, **arguments)
    for launch_server in (True, False):
        with pytest.raises(BadInputError, match=f"launch_server={launch_server} and fleet were given"):
            VerlEngine(one_rank, launch_server=launch_server, **arguments)
    assert engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["meta_info"]["weight_version"] == (
        engine.weight_version
    )


def test_engine_of_a_fleet_takes_the_fields_of_the_router(engine: Any) -> None:
    """A stream goes to one replica without the router, so it refuses these fields."""
    version = engine.weight_version
    request = {"input_ids": [1, 2], "sampling_params": GREEDY, "session_id": "conversation"}
    assert engine.generate(**request, min_weight_version=version)["meta_info"]["weight_version"] == version
    for field in ("weight_version", "min_weight_version"):
        with pytest.raises(NotReadyError, match=f"no replica serves weight version {version + 9}"):
            engine.generate(**request, **{field: version + 9})
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        engine.generate(input_ids=[1, 2], sampling_params=LONG, timeout_s=0.1)
    with pytest.raises(BadInputError, match="'timeout_s' is a field of routers"):
        next(engine.generate(input_ids=[1, 2], sampling_params=LONG, timeout_s=0.1, stream=True))


def test_status_is_a_copy_and_replicas_are_views(fleet: Any, engine: Any) -> None:
    status = fleet.status()
    assert status.weight_version == fleet.weight_version == engine.weight_version
    assert status.released_memory == frozenset()
    assert status.router_process is not None
    assert status.router_process.url == fleet.router_url
    for replica, info in zip(fleet.replicas, status.replicas, strict=True):
        assert (replica.name, replica.state, replica.base_url) == (info.name, info.state, info.base_url)
        assert (replica.weight_version, replica.pids, replica.restarts) == (
            info.weight_version,
            info.pids,
            info.restarts,
        )
        assert (info.admitted, info.running_requests, info.tokens_in_flight) == (True, 0, 0)
        with pytest.raises(AttributeError):
            replica.state = ReplicaState.DEAD


def test_a_fleet_outlives_its_engine(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """The fleet serves on after an engine, and the next engine continues its weight versions."""
    folder = str(tiny("qwen3"))
    model = reference_model(folder)
    with no_new_shared_memory(), RolloutManager(1, model_path=folder, dtype="float32", max_total_tokens=4096) as fleet:
        (replica,) = fleet.replicas
        pid = server_pid(replica)
        with VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as first:
            change_weights(model, seed=31)
            assert first.update_weights_from_tensor(model.state_dict().items()).weight_version == 1
        with pytest.raises(ShutDownError):
            first.generate(input_ids=[1, 2], sampling_params=GREEDY)
        assert_equals_reference(fleet, model)
        assert server_pid(replica) == pid

        # The tensors of the first engine are gone, so a replica that is started again waits for the next update.
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: replica.state is ReplicaState.STALE, RESTART_S, "the server is not started again")
        with pytest.raises(NotReadyError):
            fleet.generate(input_ids=[1, 2], sampling_params=GREEDY)
        with VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as second:
            assert second.weight_version == 1
            change_weights(model, seed=32)
            assert second.update_weights_from_tensor(model.state_dict().items()).weight_version == 2
            assert_equals_reference(second, model)
        assert (fleet.weight_version, replica.weight_version, replica.restarts) == (2, 2, 1)
        assert_equals_reference(fleet, model)


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
def test_a_replica_returns_although_the_trainer_pushes_trainable_parameters_only(
    transport: str, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """Starts its server twice, so it takes long. Frozen embeddings come from the checkpoint of the new server.

    A transport that keeps no weights needs one more update of the same tensors.
    """
    folder = str(tiny("qwen3"))
    model = reference_model(folder)
    frozen = {name for name in model.state_dict() if "embed_tokens" in name or "lm_head" in name}
    change_weights(model, seed=4)
    model.load_state_dict({n: t for n, t in reference_model(folder).state_dict().items() if n in frozen}, strict=False)
    trainable = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    with (
        RolloutManager(1, model_path=folder, dtype="float32", max_total_tokens=8192, recovery=RECOVERY) as fleet,
        VerlEngine(
            one_rank, fleet=fleet, weights=WeightsConfig(transport=transport), model_path=folder, dtype="float32"
        ) as engine,
    ):
        update = engine.update_weights_from_tensor(trainable)
        assert (update.num_missing, update.missing_from) == (len(frozen), "checkpoint")
        norm = next(name for name in trainable if "norm" in name)
        update = engine.update_weights_from_tensor({norm: trainable[norm]})
        assert update.missing_from == "earlier updates and checkpoint"
        (replica,) = fleet.replicas
        pid = server_pid(replica)
        os.kill(pid, signal.SIGKILL)
        running = {ReplicaState.STALE, ReplicaState.HEALTHY}
        wait_until(
            lambda: (r := fleet.replicas[0]).state in running and pid_of(r) not in (None, pid),
            RESTART_S,
            f"not running: {states(fleet)}",
        )
        if transport == "buckets":
            with pytest.raises(TornWeightsError, match="this update lacks"):
                engine.update_weights_from_tensor({norm: trainable[norm]})
            assert engine.update_weights_from_tensor(trainable).weight_version == 3
        wait_until(lambda: healthy(fleet) == 1, 20.0, f"not healthy: {states(fleet)}")
        assert_equals_reference(engine, model)
