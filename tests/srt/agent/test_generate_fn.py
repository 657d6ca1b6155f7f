"""Requests of episodes that an engine aborts for a weight update, and what a generate function is asked for.

The policies are scripted, except in the test of the limit of one server.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn, make_tasks
from helpers import QWEN, chat_tokenizer

from verl_server.adapter.sglang.replies import max_running_requests
from verl_server.agent import (
    Episode,
    RolloutLimits,
    RolloutRunner,
    SampleGroup,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
    engines,
)
from verl_server.agent.engines import limit_concurrency
from verl_server.agent.limits import LoopSlots
from verl_server.trajectory import ChatRenderer, TrajectoryGraph

USER_MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    return tokenizer


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer)


class AbortingGenerateFn(ScriptedGenerateFn):
    """A policy whose first `num_aborts` replies are aborted after a few tokens."""

    def __init__(self, tokenizer: Any, num_aborts: float) -> None:
        super().__init__(tokenizer, lambda prompt: "a whole turn of the policy")
        self._num_aborts = num_aborts

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        reply = await super().__call__(rid=rid, session_id=session_id, **request)
        if len(self.prompts) <= self._num_aborts:
            reply["output_ids"] = reply["output_ids"][:3]
            meta = reply["meta_info"]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:3]
            meta["finish_reason"] = {"type": "abort", "message": "paused"}
        return reply


def make_episode(generate: Any, renderer: ChatRenderer) -> Episode:
    return Episode(Task("t", [USER_MESSAGE]), TrajectoryGraph("s"), generate, renderer, RolloutLimits(500), {})


def test_a_turn_that_is_aborted_many_times_is_a_whole_turn(
    renderer: ChatRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last reply is recorded. Thirty pauses of the real length would last 25 seconds."""
    monkeypatch.setattr(engines, "FIRST_RETRY_DELAY_S", 0.0005)
    monkeypatch.setattr(engines, "MAX_RETRY_DELAY_S", 0.001)
    generate = AbortingGenerateFn(tokenizer, num_aborts=30)
    episode = make_episode(generate, renderer)
    assert asyncio.run(SingleTurnLoop().run_episode(episode)) == "done"
    turns = [node for node in episode.graph.nodes if node.sampled]
    assert [tokenizer.decode(node.token_ids) for node in turns] == ["a whole turn of the policy"]
    assert [node.finish_reason for node in turns] == ["stop"]
    assert len(generate.prompts) == 31
    assert len(set(generate.prompts)) == 1, "no attempt continues the tokens of an aborted reply"


def test_a_turn_that_is_aborted_for_too_long_fails_with_a_deadline_error(
    renderer: ChatRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "FIRST_RETRY_DELAY_S", 0.001)
    monkeypatch.setattr(engines, "MAX_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(engines, "ABORT_TIMEOUT_S", 0.1)
    generate = AbortingGenerateFn(tokenizer, num_aborts=float("inf"))
    episode = make_episode(generate, renderer)
    stop_reason = asyncio.run(asyncio.wait_for(SingleTurnLoop().run_episode(episode), 30.0))
    assert (stop_reason, (episode.error or {})["type"]) == ("error", "DeadlineError")
    assert "a weight update does not end, or generation was paused and never continued" in str(episode.exception)
    assert len(generate.prompts) > 3
    assert not any(node.sampled for node in episode.graph.nodes), "an aborted reply is no turn"


async def answer_token(*, rid: str, session_id: str, log: list[Any], **request: Any) -> Any:
    """A turn of one token."""
    log.append(request.get("lora_path"))
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-0.5, 5, None]]}
    return {"output_ids": [5], "meta_info": meta}


def test_each_request_has_the_arguments_of_a_partial_engine(renderer: ChatRenderer, tmp_path: Path) -> None:
    """`functools.partial(fleet.router.generate, lora_path="a")`, as the errors of `generate` recommend."""
    log: list[Any] = []
    engine = functools.partial(answer_token, log=log, lora_path="a")

    async def run() -> list[SampleGroup]:
        limits = RolloutLimits(500)
        runner = RolloutRunner(ToolAgentLoop(), engine, renderer=renderer, limits=limits, n=2, run_dir=tmp_path)
        return [group async for group in runner.run(make_tasks(3))]

    samples = [sample for group in asyncio.run(run()) for sample in group.samples]
    assert [sample.stop_reason for sample in samples] == ["done"] * 6
    assert log == ["a"] * 6


def test_a_limited_generate_fn_runs_a_number_of_requests_in_the_order_of_arrival() -> None:
    """A request that is cancelled while it waits or runs takes no place from the others."""
    started: list[str] = []

    async def run() -> None:
        may_end = asyncio.Event()

        async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
            started.append(rid)
            await may_end.wait()
            return {"rid": rid}

        limited = limit_concurrency(generate, 2)
        calls = [asyncio.create_task(limited(rid=str(index), session_id="s")) for index in range(6)]
        await asyncio.sleep(0.01)
        assert started == ["0", "1"]
        calls[2].cancel()  # waits
        calls[0].cancel()  # runs
        await asyncio.sleep(0.01)
        assert started == ["0", "1", "3"]
        may_end.set()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert [reply if isinstance(reply, dict) else type(reply) for reply in replies] == [
            asyncio.CancelledError,
            {"rid": "1"},
            asyncio.CancelledError,
            *({"rid": str(index)} for index in range(3, 6)),
        ]
        assert started == ["0", "1", "3", "4", "5"]

    asyncio.run(run())


def test_a_limited_generate_fn_can_be_used_in_several_event_loops() -> None:
    limited = limit_concurrency(functools.partial(answer_token, log=[]), 1)

    async def run() -> int:
        return len(await asyncio.gather(*(limited(rid=str(index), session_id="s") for index in range(3))))

    assert [asyncio.run(run()) for _ in range(2)] == [3, 3]


def test_slots_of_event_loops_that_have_ended_are_freed() -> None:
    slots = LoopSlots(1)

    async def run() -> int:
        async def use() -> None:
            async with slots.of_running_loop():
                await asyncio.sleep(0)

        await asyncio.gather(*(use() for _ in range(3)))  # they wait, so the semaphore refers to its event loop
        return len(slots._semaphores)

    assert [asyncio.run(run()) for _ in range(4)] == [1] * 4


@pytest.mark.parametrize(
    ("server_info", "expected"),
    [
        ({"internal_states": [{"effective_max_running_requests_per_dp": 32}]}, 32),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 32}], "dp_size": 4}, 128),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 32}], "dp_size": 1, "attn_dp_size": 4}, 128),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 0}]}, None),
        ({"internal_states": [{"effective_max_running_requests_per_dp": "?"}]}, None),
        ({"internal_states": [None]}, None),
        ({"internal_states": []}, None),
        ({}, None),
    ],
)
def test_number_of_requests_that_a_server_runs(server_info: Any, expected: int | None) -> None:
    assert max_running_requests(server_info) == expected
