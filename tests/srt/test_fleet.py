"""Fleets of real servers: every request returns one sample even when servers die; updates reach every replica."""

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
import requests
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    assert_equals_reference,
    change_weights,
    greedy_with_logprobs,
    no_new_shared_memory,
    reference_model,
    server_pid,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import RecoveryConfig, RolloutManager, RouterClient, RouterConfig, VerlEngine
from verl_server.adapter.sglang.replies import count_requests
from verl_server.errors import BadInputError, DeadlineError, NotReadyError, ServerBusyError, ServerError, ShutDownError
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.status import ReplicaView

pytestmark = pytest.mark.timeout(900)

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
RECOVERY = RecoveryConfig(stall_timeout_s=3.0)
#: Router processes that do not report for so long are replaced.
ROUTER = RouterConfig(report_timeout_s=4.0)
#: A start takes ten seconds, and minutes on a machine with other work. The tests do not measure it.
RESTART_S = 250.0


@pytest.fixture(scope="module")
def events() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def fleet_and_engine(
    one_rank: DeviceMesh, tiny: Callable[..., Path], events: list[Any]
) -> Iterator[tuple[RolloutManager, VerlEngine]]:
    """Two replicas, and an engine that has pushed weights into them once."""
    folder = str(tiny("qwen3"))
    with (
        no_new_shared_memory(),
        RolloutManager(
            2,
            model_path=folder,
            dtype="float32",
            max_total_tokens=8192,
            recovery=RECOVERY,
            router=ROUTER,
            router_process=True,
            on_event=events.append,
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        engine.update_weights_from_tensor(reference_model(folder).state_dict().items())
        yield fleet, engine


@pytest.fixture
def engine(fleet_and_engine: tuple[RolloutManager, VerlEngine]) -> VerlEngine:
    return fleet_and_engine[1]


@pytest.fixture
def fleet(fleet_and_engine: tuple[RolloutManager, VerlEngine]) -> RolloutManager:
    """The fleet, with two healthy replicas."""
    fleet = fleet_and_engine[0]
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    return fleet


def states(fleet: RolloutManager) -> dict[str, str]:
    return {replica.name: replica.state.value for replica in fleet.replicas}


def healthy(fleet: RolloutManager) -> int:
    return sum(replica.state is ReplicaState.HEALTHY for replica in fleet.replicas)


def scheduler_pid(replica: ReplicaView) -> int:
    assert replica.pids is not None
    (pid,) = (pid for pid in replica.pids.workers if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def busy_replica(fleet: RolloutManager) -> ReplicaView:
    """The replica on which a request of the router in this process runs."""
    names = [replica.name for replica in fleet.status().replicas if replica.tokens_in_flight]
    return next(replica for replica in fleet.replicas if replica.name in names)


def tokens_in_flight(fleet: RolloutManager) -> int:
    return max((replica.tokens_in_flight for replica in fleet.status().replicas), default=0)


def running_requests(fleet: RolloutManager) -> int:
    return sum(replica.running_requests for replica in fleet.status().replicas)


async def until_tokens(fleet: RolloutManager, count: int, request: asyncio.Future[Any]) -> None:
    """Wait until one replica has `count` tokens in flight."""
    while tokens_in_flight(fleet) < count:
        await asyncio.sleep(0.005)
        assert not request.done()


async def until_requests(fleet: RolloutManager, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while running_requests(fleet) < count:
        assert time.monotonic() < deadline, f"{running_requests(fleet)} of {count} requests run"
        await asyncio.sleep(0.02)


def test_a_fleet_behaves_as_one_engine(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=4)
    assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
    assert_equals_reference(engine, model)
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_request_survives_the_death_of_its_replica(
    victim: str, engine: Any, fleet: Any, tiny: Callable[..., Path]
) -> None:
    """The reply is the one of an undisturbed replica, log probabilities included."""
    model = reference_model(tiny("qwen3"))
    engine.update_weights_from_tensor(model.state_dict().items())
    expected, logprobs = greedy_with_logprobs(model, PROMPTS[0], 400)
    before = fleet.status().router_counters.continued

    async def run() -> Any:
        request = asyncio.ensure_future(
            fleet.router.generate(
                rid=f"survivor {victim}", input_ids=PROMPTS[0], sampling_params=LONG, return_logprob=True
            )
        )
        await until_tokens(fleet, len(PROMPTS[0]) + 30, request)
        killed = busy_replica(fleet)
        os.kill(server_pid(killed) if victim == "server" else scheduler_pid(killed), signal.SIGKILL)
        return await request

    reply = asyncio.run(run())
    assert reply["output_ids"] == expected
    meta = reply["meta_info"]
    assert max(abs(entry[0] - own) for entry, own in zip(meta["output_token_logprobs"], logprobs, strict=True)) < 1e-4
    assert (meta["attempts"], meta["completion_tokens"], meta["prompt_tokens"]) == (2, 400, len(PROMPTS[0]))
    assert fleet.status().router_counters.continued == before + 1
    version = engine.weight_version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 400}]
    # its server is started again with the current weights, without a further update
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    assert {replica.weight_version for replica in fleet.replicas} == {version}
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


def test_a_repeated_request_id_generates_once(fleet: Any) -> None:
    hot = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}

    async def ask(**more: Any) -> Any:
        return await fleet.router.generate(rid="twice", input_ids=[1, 2], sampling_params=hot, **more)

    async def run() -> list[Any]:
        both = list(await asyncio.gather(ask(), ask()))
        return [*both, await ask()]

    before = fleet.status().router_counters.requests
    replies = asyncio.run(run())
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert fleet.status().router_counters.requests == before + 1, "the third call only received the result"
    with pytest.raises(BadInputError, match="belongs to another request"):
        asyncio.run(fleet.router.generate(rid="twice", input_ids=[9], sampling_params=hot))


def test_cancellation_and_deadlines_reach_the_server(fleet: Any) -> None:
    with pytest.raises(DeadlineError, match=r"not finished within 0\.3 s"):
        asyncio.run(
            fleet.router.generate(
                input_ids=[1, 2], sampling_params={"max_new_tokens": 2000, "ignore_eos": True}, timeout_s=0.3
            )
        )
    for replica in fleet.replicas:
        adapter = replica.adapter
        wait_until(lambda adapter=adapter: not count_requests(adapter.get_loads()), 5.0, "still running")  # type: ignore[misc]


def test_a_request_gets_the_weight_version_that_it_requires(engine: Any, fleet: Any) -> None:
    version = engine.weight_version
    reply = asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY, weight_version=version))
    assert reply["meta_info"]["weight_version"] == version
    for need in ({"weight_version": version + 1}, {"min_weight_version": version + 1}):
        with pytest.raises(NotReadyError, match="no replica serves weight version"):
            asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY, **need))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rid": ""}, "rid must be"),
        ({"session_id": "x" * 10_000_000}, "session_id must be .* got 10000000 characters"),
        ({"timeout_s": -1.0}, "the deadline has passed"),
        ({"weight_version": "new"}, "whole number"),
        ({"input_ids": [-1]}, "negative token id"),
        ({"input_ids": [[1], [2]]}, "one prompt"),
        ({"sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
    ],
)
def test_invalid_requests_are_refused(bad: dict[str, Any], message: str, fleet: Any) -> None:
    with pytest.raises(BadInputError, match=message):
        asyncio.run(fleet.router.generate(**{"input_ids": [1], "sampling_params": GREEDY, **bad}))


def test_invalid_fleets_are_refused(tiny: Callable[..., Path], fleet: Any) -> None:
    with pytest.raises(BadInputError, match="replicas must be a whole number of at least 1"):
        RolloutManager(0, model_path=str(tiny("qwen3")))
    with pytest.raises(BadInputError, match="there is no replica 'nobody'"):
        fleet.remove_replica("nobody")
    for bad, message in (
        ({"mode": "shared"}, "mode must be one of"),
        ({"tp_size": 2, "ep_size": 3}, "ep_size=3 must divide tp_size=2"),
        ({"tp_size": 3, "nnodes": 2}, "does not spread evenly"),
        ({"dp_size": 2}, "takes no pushed weights with dp_size=2"),
        ({"tp_size": 0}, "tp_size must be a whole number"),
    ):
        with pytest.raises(BadInputError, match=message):
            RolloutManager(1, model_path=str(tiny("qwen3")), **bad)


def test_a_stalled_scheduler_is_replaced(engine: Any, fleet: Any, events: list[Any]) -> None:
    """A stopped scheduler with a request is detected within the stall timeout; another replica ends the request."""
    del events[:]

    async def run() -> Any:
        request = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        await until_tokens(fleet, 20, request)
        os.kill(scheduler_pid(busy_replica(fleet)), signal.SIGSTOP)
        stopped.append(time.time())
        return await request

    stopped: list[float] = []
    reply = asyncio.run(run())
    assert len(reply["output_ids"]) == 400
    assert reply["meta_info"]["attempts"] == 2
    seen = [event["after"] for event in events]
    assert seen[:2] == ["suspect", "dead"]
    assert events[1]["time"] - stopped[0] < RECOVERY.stall_timeout_s + 5.0
    assert "no progress" in events[1]["error"]
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")


def test_a_paused_fleet_is_healthy(fleet: Any, events: list[Any]) -> None:
    del events[:]

    async def run() -> Any:
        request = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        await until_tokens(fleet, 20, request)
        for replica in fleet.replicas:
            await asyncio.to_thread(replica.adapter.pause_generation, "retract")
        await asyncio.sleep(RECOVERY.stall_timeout_s + 2.0)
        for replica in fleet.replicas:
            await asyncio.to_thread(replica.adapter.continue_generation)
        return await request

    reply = asyncio.run(run())
    assert len(reply["output_ids"]) == 400
    assert reply["meta_info"]["attempts"] == 1
    assert not events


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
        lambda: healthy(fleet) == 2 and victim.pids is not None and server_pid(victim) != pid,
        RESTART_S,
        f"not healthy: {states(fleet)}",
    )
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


def test_replicas_are_added_and_removed_under_load(engine: Any, fleet: Any) -> None:
    stop = threading.Event()
    done: list[Any] = []

    async def ask() -> None:
        while not stop.is_set():
            sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
            done.append(await fleet.router.generate(input_ids=[1, 2, 3], sampling_params=sampling))

    async def load() -> None:
        await asyncio.gather(*(ask() for _ in range(8)))

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    try:
        first = fleet.replicas[0]
        added = fleet.add_replica()
        wait_until(lambda: healthy(fleet) == 3, 10.0, f"not healthy: {states(fleet)}")
        wait_until(lambda: fleet.status().replica(added).tokens_in_flight, 10.0, "the new replica gets no requests")
        fleet.remove_replica(first.name)
        assert (first.adapter, first.base_url, first.pids) == (None, None, None)
        assert first.name not in states(fleet)
    finally:
        stop.set()
        thread.join(30.0)
    assert not thread.is_alive()
    assert len({tuple(reply["output_ids"]) for reply in done}) == 1
    assert all(reply["meta_info"]["attempts"] == 1 for reply in done)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_router_process_is_replaced(how: signal.Signals, fleet: Any) -> None:
    """The new router process has the same address, and every caller gets a whole sample."""
    expected = asyncio.run(fleet.router.generate(input_ids=PROMPTS[0], sampling_params=LONG))["output_ids"]
    before = fleet.status().router_process.restarts

    async def run() -> list[Any]:
        async with RouterClient(fleet.router_url, fleet.router_key) as client:
            calls = [
                asyncio.ensure_future(
                    client.generate(rid=f"{how.name} {n}", input_ids=PROMPTS[0], sampling_params=LONG)
                )
                for n in range(4)
            ]
            await until_requests(fleet, 4)
            os.kill(fleet.status().router_process.pid, how)
            return await asyncio.gather(*calls)

    assert [reply["output_ids"] for reply in asyncio.run(run())] == [expected] * 4
    assert fleet.status().router_process.restarts == before + 1
    wait_until(lambda: running_requests(fleet) == 0, 10.0, "requests of the lost router still run")


def test_the_router_process_answers_as_the_router_in_this_process(fleet: Any, engine: Any) -> None:
    async def run() -> None:
        async with RouterClient(fleet.router_url, fleet.router_key) as client:
            version = engine.weight_version
            reply = await client.generate(input_ids=[3], sampling_params=GREEDY, weight_version=version)
            assert reply["meta_info"]["weight_version"] == version
            with pytest.raises(NotReadyError, match="no replica serves weight version"):
                await client.generate(input_ids=[3], sampling_params=GREEDY, weight_version=version + 1)
            with pytest.raises(BadInputError, match="the deadline has passed"):
                await client.generate(input_ids=[3], sampling_params=GREEDY, timeout_s=-1.0)
            with pytest.raises(DeadlineError, match=r"not finished within 0\.3 s"):
                await client.generate(input_ids=[3], sampling_params=LONG, timeout_s=0.3)
        async with RouterClient(fleet.router_url, "wrong") as stranger:
            with pytest.raises(ServerError, match="the API key is missing or wrong"):
                await stranger.generate(input_ids=[3], sampling_params=GREEDY)
        async with RouterClient("http://127.0.0.1:1", None, reconnect_timeout_s=0.3) as nobody:
            with pytest.raises(ServerError, match="cannot be reached"):
                await nobody.generate(input_ids=[3], sampling_params=GREEDY)

    asyncio.run(run())


def test_a_server_that_only_closes_connections_is_not_retried_forever() -> None:
    """The router client raises after its reconnect timeout, also without a deadline of the caller."""

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with RouterClient(f"http://127.0.0.1:{port}", None, reconnect_timeout_s=0.5) as client:
                with pytest.raises(ServerError, match="cannot be reached"):
                    await client.generate(input_ids=[3], sampling_params=GREEDY)

    asyncio.run(asyncio.wait_for(run(), 30.0))


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
        fleet.adapter.pause_generation("wait")


def test_metrics_of_the_fleet(fleet: Any) -> None:
    text = fleet.metrics().decode()
    for name in (
        "verl_fleet_updates_total",
        "verl_fleet_restarts_total",
        'verl_fleet_sync_seconds_total{phase="load"}',
        'verl_fleet_replicas{state="healthy"} 2.0',
        "verl_router_cached_tokens_total",
    ):
        assert name in text

    def scraped() -> str:
        return requests.get(f"{fleet.router_url}/metrics", timeout=10).text

    wait_until(lambda: "verl_fleet_updates_total" in scraped(), 10.0, "the router does not show the fleet's metrics")
    assert "verl_router_requests_total" in scraped()


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
    with pytest.raises(NotReadyError, match="no replica serves"):
        asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY))
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


# -- the engine and the fleet ------------------------------------------------------------------------


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
