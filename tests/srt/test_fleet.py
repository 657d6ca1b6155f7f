"""A fleet of real servers: one sample once, whatever dies; updates that leave nobody behind."""

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
    tree_of,
    wait_until,
)

from verl_server import VerlEngine
from verl_server.config import RecoveryConfig
from verl_server.errors import BadInputError, DeadlineError, NotReadyError, ServerBusyError, ServerError
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.manager import RolloutManager
from verl_server.router import process as router_process
from verl_server.router.client import RouterClient

pytestmark = pytest.mark.timeout(900)

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
RECOVERY = RecoveryConfig(stall_timeout_s=3.0)
#: A start takes ten seconds, and minutes on a machine that has other work. Nothing here is timed.
RESTART_S = 250.0


@pytest.fixture(scope="module")
def events() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def engine(one_rank: Any, tiny: Callable[..., Path], events: list[Any]) -> Iterator[Any]:
    """Two replicas behind one engine, with weights that were pushed once."""
    folder = str(tiny("qwen3"))
    with no_new_shared_memory():
        fleet = RolloutManager(
            2,
            model_path=folder,
            dtype="float32",
            max_total_tokens=8192,
            recovery=RECOVERY,
            router_process=True,
            on_event=events.append,
        )
        with VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine:
            engine.update_weights_from_tensor(reference_model(folder).state_dict().items())
            yield engine


@pytest.fixture
def fleet(engine: Any) -> Any:
    """Both of its replicas at their work."""
    fleet = engine._backend
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    return fleet


def states(fleet: RolloutManager) -> dict[str, str]:
    return {one.name: one.state.value for one in fleet.replicas}


def healthy(fleet: RolloutManager) -> int:
    return sum(one.state is ReplicaState.HEALTHY for one in fleet.replicas)


def pid_of(replica: Any) -> int:
    return int(replica.adapter.asynchronous.process.pid)


def scheduler_of(replica: Any) -> int:
    (found,) = (pid for pid in tree_of(pid_of(replica)) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def where_it_runs(fleet: RolloutManager) -> Any:
    """The replica that works on requests."""
    busy = [name for name, one in fleet._core.replicas.items() if one.tokens]
    return next(one for one in fleet.replicas if one.name in busy)


def tokens_there(fleet: RolloutManager) -> int:
    return max((sum(one.tokens.values()) for one in fleet._core.replicas.values()), default=0)


def test_the_fleet_is_one_engine(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=4)
    assert engine.update_weights_from_tensor(model.state_dict().items()).missing == 0
    assert_equals_reference(engine, model)
    for one in fleet.replicas:
        assert_equals_reference(one.adapter, model)


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_sample_survives_its_replica(victim: str, engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    """Killed in the middle: the caller gets the sample that an undisturbed replica makes, logprobs included."""
    model = reference_model(tiny("qwen3"))
    engine.update_weights_from_tensor(model.state_dict().items())
    expected, logprobs = greedy_with_logprobs(model, PROMPTS[0], 400)
    before = fleet._core.counters.continued

    async def run() -> Any:
        asking = asyncio.ensure_future(
            fleet.router.generate(
                rid=f"precious {victim}", input_ids=PROMPTS[0], sampling_params=LONG, return_logprob=True
            )
        )
        while tokens_there(fleet) < len(PROMPTS[0]) + 30:
            await asyncio.sleep(0.005)
            assert not asking.done()
        lost = where_it_runs(fleet)
        os.kill(pid_of(lost) if victim == "server" else scheduler_of(lost), signal.SIGKILL)
        return await asking

    reply = asyncio.run(run())
    assert reply["output_ids"] == expected
    meta = reply["meta_info"]
    assert max(abs(entry[0] - own) for entry, own in zip(meta["output_token_logprobs"], logprobs, strict=True)) < 1e-4
    assert (meta["attempts"], meta["completion_tokens"], meta["prompt_tokens"]) == (2, 400, len(PROMPTS[0]))
    assert fleet._core.counters.continued == before + 1
    version = engine._weights.version
    assert meta["weight_versions"] == [{"version": str(version), "start": 0, "end": 400}]
    # it comes back by itself, with the current weights, before any further update
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    assert {one.version for one in fleet.replicas} == {version}
    for one in fleet.replicas:
        assert_equals_reference(one.adapter, model)


def test_a_request_asked_twice_is_sampled_once(fleet: Any) -> None:
    hot = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}

    async def ask(**more: Any) -> Any:
        return await fleet.router.generate(rid="twice", input_ids=[1, 2], sampling_params=hot, **more)

    async def run() -> list[Any]:
        both = list(await asyncio.gather(ask(), ask()))
        return [*both, await ask()]

    before = fleet._core.counters.requests
    replies = asyncio.run(run())
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert fleet._core.counters.requests == before + 2, "the third call only got the result"
    with pytest.raises(BadInputError, match="belongs to another request"):
        asyncio.run(fleet.router.generate(rid="twice", input_ids=[9], sampling_params=hot))


def test_cancelling_and_deadlines_reach_the_engine(fleet: Any) -> None:
    with pytest.raises(DeadlineError, match=r"not finished within 0\.3 s"):
        asyncio.run(
            fleet.router.generate(
                input_ids=[1, 2], sampling_params={"max_new_tokens": 2000, "ignore_eos": True}, timeout_s=0.3
            )
        )
    for one in fleet.replicas:
        wait_until(lambda one=one: not _running(one), 5.0, "the request runs on")  # type: ignore[misc]


def _running(replica: Any) -> int:
    from verl_server.adapter import sglang as api

    return int(api.requests_in(replica.adapter.get_loads()))


def test_versions_are_kept(engine: Any, fleet: Any) -> None:
    version = engine._weights.version
    reply = asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY, weight_version=version))
    assert reply["meta_info"]["weight_version"] == str(version)
    for need in ({"weight_version": version + 1}, {"min_weight_version": version + 1}):
        with pytest.raises(NotReadyError, match="no replica serves weight version"):
            asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY, **need))


@pytest.mark.parametrize(
    ("bad", "words"),
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
def test_bad_requests(bad: dict[str, Any], words: str, fleet: Any) -> None:
    with pytest.raises(BadInputError, match=words):
        asyncio.run(fleet.router.generate(**{"input_ids": [1], "sampling_params": GREEDY, **bad}))


def test_bad_fleets(tiny: Callable[..., Path], fleet: Any) -> None:
    with pytest.raises(BadInputError, match="1 or more replicas"):
        RolloutManager(0, model_path=str(tiny("qwen3")))
    with pytest.raises(BadInputError, match="there is no replica 'nobody'"):
        fleet.remove_replica("nobody")
    for bad, words in (
        ({"mode": "shared"}, "mode must be one of"),
        ({"tp_size": 2, "ep_size": 3}, "ep_size=3 must divide tp_size=2"),
        ({"tp_size": 3, "nnodes": 2}, "does not spread evenly"),
        ({"dp_size": 2}, "takes no pushed weights with dp_size=2"),
        ({"tp_size": 0}, "tp_size must be a whole number"),
    ):
        with pytest.raises(BadInputError, match=words):
            RolloutManager(1, model_path=str(tiny("qwen3")), **bad)


def test_a_wedged_scheduler_is_replaced(engine: Any, fleet: Any, events: list[Any]) -> None:
    """It stands still with work: noticed within the configured time; its request is finished elsewhere."""
    del events[:]

    async def run() -> Any:
        asking = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        while tokens_there(fleet) < 20:
            await asyncio.sleep(0.005)
        os.kill(scheduler_of(where_it_runs(fleet)), signal.SIGSTOP)
        stopped.append(time.time())
        return await asking

    stopped: list[float] = []
    reply = asyncio.run(run())
    assert len(reply["output_ids"]) == 400
    assert reply["meta_info"]["attempts"] == 2
    seen = [event["after"] for event in events]
    assert seen[:2] == ["suspect", "dead"]
    assert events[1]["time"] - stopped[0] < RECOVERY.stall_timeout_s + 5.0
    assert "no progress" in events[1]["error"]
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")


def test_a_paused_fleet_is_not_sick(fleet: Any, events: list[Any]) -> None:
    del events[:]

    async def run() -> Any:
        asking = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        while tokens_there(fleet) < 20:
            await asyncio.sleep(0.005)
        for one in fleet.replicas:
            await asyncio.to_thread(one.adapter.pause_generation, "retract")
        await asyncio.sleep(RECOVERY.stall_timeout_s + 2.0)
        for one in fleet.replicas:
            await asyncio.to_thread(one.adapter.continue_generation)
        return await asking

    reply = asyncio.run(run())
    assert len(reply["output_ids"]) == 400
    assert reply["meta_info"]["attempts"] == 1
    assert not events


def test_one_dies_during_an_update(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    """The others get the weights; the dead one catches up."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=9)
    victim = fleet.replicas[0]
    pid = pid_of(victim)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(model.state_dict().items()):
            if number == 3:
                threading.Timer(0.002, os.kill, (pid, signal.SIGKILL)).start()
            yield item

    assert engine.update_weights_from_tensor(tensors()).missing == 0
    assert_equals_reference(engine, model)
    wait_until(lambda: healthy(fleet) == 2 and pid_of(victim) != pid, RESTART_S, f"not healthy: {states(fleet)}")
    for one in fleet.replicas:
        assert_equals_reference(one.adapter, model)


def test_replicas_come_and_go_under_load(engine: Any, fleet: Any) -> None:
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
        wait_until(lambda: fleet._core.replicas[added].tokens, 10.0, "the new replica gets no requests")
        fleet.remove_replica(first.name)
        assert first.adapter is None
        assert first.name not in states(fleet)
    finally:
        stop.set()
        thread.join(30.0)
    assert not thread.is_alive()
    assert len({tuple(reply["output_ids"]) for reply in done}) == 1
    assert all(reply["meta_info"]["attempts"] == 1 for reply in done)


def seen_requests(fleet: RolloutManager) -> int:
    return sum(fleet._targets.seen(one.name).requests for one in fleet.replicas)


async def until_requests(fleet: RolloutManager, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while seen_requests(fleet) < count:
        assert time.monotonic() < deadline, f"{seen_requests(fleet)} of {count} requests run"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_router_process_is_replaced(how: signal.Signals, fleet: Any, monkeypatch: Any) -> None:
    """Callers go on with the next one, at the same address; each gets its whole sample."""
    monkeypatch.setattr(router_process, "SILENT_S", 3.0)
    expected = asyncio.run(fleet.router.generate(input_ids=PROMPTS[0], sampling_params=LONG))["output_ids"]
    before = fleet._router_process.restarts

    async def run() -> list[Any]:
        async with RouterClient(fleet.router_url, fleet.router_key) as client:
            asking = [
                asyncio.ensure_future(
                    client.generate(rid=f"{how.name} {n}", input_ids=PROMPTS[0], sampling_params=LONG)
                )
                for n in range(4)
            ]
            await until_requests(fleet, 4)
            os.kill(fleet._router_process.pid, how)
            return await asyncio.gather(*asking)

    assert [reply["output_ids"] for reply in asyncio.run(run())] == [expected] * 4
    assert fleet._router_process.restarts == before + 1
    wait_until(lambda: seen_requests(fleet) == 0, 10.0, "requests of the lost router run on")


def test_the_router_process_answers_like_the_router(fleet: Any, engine: Any) -> None:
    async def run() -> None:
        async with RouterClient(fleet.router_url, fleet.router_key) as client:
            version = engine._weights.version
            reply = await client.generate(input_ids=[3], sampling_params=GREEDY, weight_version=version)
            assert reply["meta_info"]["weight_version"] == str(version)
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


def test_what_accepts_and_closes_is_no_router() -> None:
    """And is not asked for ever, without any deadline of the caller's."""

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with RouterClient(f"http://127.0.0.1:{port}", None, reconnect_timeout_s=0.5) as client:
                with pytest.raises(ServerError, match="cannot be reached"):
                    await client.generate(input_ids=[3], sampling_params=GREEDY)

    asyncio.run(asyncio.wait_for(run(), 30.0))


def ask_over_update(engine: Any, fleet: Any, mode: str, tiny: Callable[..., Path]) -> tuple[Any, Any, int]:
    """A sample that runs while weights change, and one that is asked for meanwhile; and the version before."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=17)
    version = engine._weights.version
    request: dict[str, Any] = {"rid": f"over {mode} {version}", "input_ids": [5, 6], "sampling_params": LONG}

    async def run() -> tuple[Any, Any]:
        running = asyncio.ensure_future(fleet.router.generate(**request))
        while tokens_there(fleet) < 20:
            await asyncio.sleep(0.005)
        pairs = model.state_dict().items()
        update = asyncio.ensure_future(
            asyncio.to_thread(engine.update_weights_from_tensor, pairs, pause_mode=mode, flush_cache=mode != "in_place")
        )
        while mode == "wait" and any(one.load.admitted for one in fleet._core.replicas.values()):
            await asyncio.sleep(0.005)
        later = await fleet.router.generate(input_ids=[7], sampling_params={**LONG, "max_new_tokens": 2})
        await update
        return await running, later

    return (*asyncio.run(run()), version)


def test_an_update_waits_for_requests(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, later, before = ask_over_update(engine, fleet, "wait", tiny)
    assert reply["meta_info"]["weight_versions"] == [{"version": str(before), "start": 0, "end": 400}]
    assert later["meta_info"]["weight_versions"] == [{"version": str(before + 1), "start": 0, "end": 2}]


def test_requests_go_on_over_an_update(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, _, before = ask_over_update(engine, fleet, "in_place", tiny)
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == [str(before), str(before + 1)]
    assert reply["meta_info"]["attempts"] == 1
    assert len(reply["output_ids"]) == 400
    fleet.flush_cache()


def test_an_update_collects_partial_results(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    reply, _, before = ask_over_update(engine, fleet, "abort", tiny)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(reply["output_ids"])
    assert 0 < count < 400
    whole = asyncio.run(
        fleet.router.generate(rid=f"over abort {before}", input_ids=[5, 6], sampling_params=LONG)
    )
    assert whole["output_ids"][:count] == reply["output_ids"]
    assert whole["meta_info"]["weight_versions"] == [
        {"version": str(before), "start": 0, "end": count},
        {"version": str(before + 1), "start": count, "end": 400},
    ]


def test_one_server_cannot_wait(fleet: Any) -> None:
    with pytest.raises(BadInputError, match="one server cannot wait"):
        fleet.adapter.pause_generation("wait")


def test_the_fleet_is_counted(fleet: Any) -> None:
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


def test_who_asks_for_one_version_gets_no_other(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    """Though the update comes after it was placed."""
    model = reference_model(tiny("qwen3"))
    version = engine._weights.version

    async def run() -> Any:
        asking = asyncio.ensure_future(
            fleet.router.generate(input_ids=[5, 6], sampling_params=LONG, weight_version=version)
        )
        while tokens_there(fleet) < 20:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(engine.update_weights_from_tensor, model.state_dict().items())
        return await asking

    with pytest.raises(NotReadyError, match="the weights changed during the generation"):
        asyncio.run(run())


def test_released_weights_are_not_served_before_they_are_pushed(
    engine: Any, fleet: Any, tiny: Callable[..., Path]
) -> None:
    """Also while a request runs: refused as a whole, and nobody is harmed."""
    model = reference_model(tiny("qwen3"))
    engine.update_weights_from_tensor(model.state_dict().items())

    async def release_while_it_runs() -> Any:
        running = asyncio.ensure_future(fleet.router.generate(input_ids=[5, 6], sampling_params=LONG))
        while tokens_there(fleet) < 20:
            await asyncio.sleep(0.005)
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
    for one in fleet.replicas:
        assert_equals_reference(one.adapter, model)
    assert asyncio.run(fleet.router.generate(input_ids=[3], sampling_params=GREEDY))["meta_info"]["attempts"] == 1


def test_who_starts_again_while_a_part_is_pushed(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    """An update of some tensors makes no replica current that has the others from its checkpoint."""
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=23)
    engine.update_weights_from_tensor(model.state_dict().items())
    lost = fleet.replicas[0]
    os.kill(pid_of(lost), signal.SIGKILL)
    stop = time.monotonic() + RESTART_S
    while lost.state is not ReplicaState.STALE and time.monotonic() < stop and healthy(fleet) < 2:
        time.sleep(0.001)
    some = dict(list(model.state_dict().items())[:3])
    for tensor in some.values():
        tensor.mul_(1.01)
    engine.update_weights_from_tensor(some.items())
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    for one in fleet.replicas:
        assert_equals_reference(one.adapter, model)
