"""Requests of episodes that an engine aborts for a weight update, and what a generate function is asked for.

No test of this file needs a server: the policies are scripted.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn, make_tasks
from helpers import QWEN, chat_tokenizer

from verl_server.agent import Episode, RolloutLimits, RolloutRunner, SampleGroup, SingleTurnLoop, Task, ToolAgentLoop
from verl_server.agent import generate_fn as generate_fn_module
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
    monkeypatch.setattr(generate_fn_module, "FIRST_RETRY_DELAY_S", 0.0005)
    monkeypatch.setattr(generate_fn_module, "MAX_RETRY_DELAY_S", 0.001)
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
    monkeypatch.setattr(generate_fn_module, "FIRST_RETRY_DELAY_S", 0.001)
    monkeypatch.setattr(generate_fn_module, "MAX_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(generate_fn_module, "ABORT_TIMEOUT_S", 0.1)
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
