"""Fleets of real servers: every request returns one sample even when servers and router processes die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from fleet_helpers import (
    LONG,
    RECOVERY,
    RESTART_S,
    busy_replica,
    healthy,
    running_requests,
    scheduler_pid,
    states,
    until_requests,
    until_tokens,
)
from helpers import (
    GREEDY,
    PROMPTS,
    assert_equals_reference,
    change_weights,
    greedy_with_logprobs,
    reference_model,
    server_pid,
    wait_until,
)

from verl_server import RolloutManager, RouterClient, VerlEngine
from verl_server.adapter.sglang.replies import count_requests
from verl_server.errors import BadInputError, DeadlineError, NotReadyError, ServerError, UnsupportedError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def engine(fleet_and_engine: tuple[RolloutManager, VerlEngine]) -> VerlEngine:
    return fleet_and_engine[1]


@pytest.mark.smoke
def test_a_fleet_behaves_as_one_engine(engine: Any, fleet: Any, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=4)
    assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
    assert_equals_reference(engine, model)
    for replica in fleet.replicas:
        assert_equals_reference(replica.adapter, model)


@pytest.mark.smoke
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
                rid=f"survivor {victim}", input_ids=PROMPTS[0], sampling_params=LONG, return_logprob=True, stream=False
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


def test_replicas_send_each_token_of_a_stream_once(fleet: Any) -> None:
    """The adapter joins the tokens: each of its events has all tokens so far, as with any other server."""
    adapter = fleet.replicas[0].adapter
    request: Any = {"input_ids": PROMPTS[0], "return_logprob": True, "sampling_params": {**LONG, "stream_interval": 8}}
    expected = adapter.generate(**request)
    with requests.post(
        f"{adapter.base_url}/generate",
        json={**request, "stream": True},
        headers={"Authorization": f"Bearer {adapter.api_key}"},
        stream=True,
        timeout=60,
    ) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    sent = [token for line in lines[:-1] for token in json.loads(line)["output_ids"]]
    assert (sent, lines[-1]) == (expected["output_ids"], b"[DONE]")
    events = list(adapter.generate_stream(**request))
    assert len(events) > 10
    for event in [*events, expected]:
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == expected["output_ids"][:count]
        tokens = [entry[1] for entry in event["meta_info"]["output_token_logprobs"]]
        assert tokens == expected["output_ids"][:count]
    assert events[-1]["text"] == expected["text"]
    assert events[-1]["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


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
        ({"stream": True}, "a router returns whole generations only"),
        ({"weight_version": "new"}, "whole number"),
        ({"input_ids": [-1]}, "negative value"),
        ({"input_ids": [[1], [2]]}, "one prompt"),
        ({"sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
    ],
)
def test_invalid_requests_are_refused(bad: dict[str, Any], message: str, fleet: Any) -> None:
    with pytest.raises(BadInputError, match=message):
        asyncio.run(fleet.router.generate(**{"input_ids": [1], "sampling_params": GREEDY, **bad}))


def test_invalid_fleets_are_refused(tiny: Callable[..., Path], fleet: Any) -> None:
    with pytest.raises(BadInputError, match="replicas must be a whole number of at least 0"):
        RolloutManager(-1, model_path=str(tiny("qwen3")))
    with pytest.raises(BadInputError, match="there is no replica 'nobody'"):
        fleet.remove_replica("nobody")
    for bad, message in (
        ({"mode": "shared"}, "mode must be one of"),
        ({"tp_size": 2, "ep_size": 3}, "ep_size=3 must divide tp_size=2"),
        ({"tp_size": 4, "nnodes": 3}, "does not spread evenly"),
        ({"dp_size": 2}, "with dp_size=2: use that many replicas"),
        ({"pp_size": 2}, "pp_size=2: use tp_size"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE': it has a draft model"),
        ({"quantization": "fp8"}, "quantization='fp8': serve the model without quantization"),
        ({"tp_size": 0}, "tp_size must be greater than or equal to 1"),
    ):
        with pytest.raises((BadInputError, UnsupportedError), match=message):
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
            return list(await asyncio.gather(*calls))

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
