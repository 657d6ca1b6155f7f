"""Episodes stop at their limits and at errors, for any task and any text of the policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import (
    ScriptedGenerateFn,
    ThreeUserMessagesLoop,
    add,
    block_forever,
    call_text,
    make_changed_task,
    make_episode,
    raise_runtime_error,
    return_long_text,
    wait_a_minute,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import (
    Episode,
    FunctionTool,
    RolloutLimits,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
    ToolCall,
    ToolResult,
    Turn,
    parse_hermes_tool_calls,
)
from verl_server.errors import BadInputError
from verl_server.trajectory import ChatRenderer, TrajectoryGraph


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def test_limits_stop_an_episode(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    params = {"temperature": 1.0, "ignore_eos": True}
    graph = TrajectoryGraph("s")
    limits = RolloutLimits(max_response_tokens=40)
    episode, _ = make_episode(shared_engine, renderer, graph, sampling_params=params, limits=limits)
    assert asyncio.run(ThreeUserMessagesLoop().run_episode(episode)) == "max_response_tokens"
    assert episode.stop_reason == "max_response_tokens"
    assert episode.num_response_tokens == 40, "max_new_tokens of the last turn must be the remaining tokens"
    assert graph.node(episode.leaf or 0).finish_reason == "length"

    limits = RolloutLimits(max_response_tokens=40, timeout_s=0.001)
    expired, _ = make_episode(shared_engine, renderer, TrajectoryGraph("s"), limits=limits)
    time.sleep(0.01)
    assert asyncio.run(SingleTurnLoop().run_episode(expired)) == "timeout_s"
    slow, generate = make_episode(
        shared_engine,
        renderer,
        TrajectoryGraph("s"),
        sampling_params={"max_new_tokens": 1500, "ignore_eos": True},
        limits=RolloutLimits(max_response_tokens=1500, timeout_s=0.5),
    )
    assert asyncio.run(SingleTurnLoop().run_episode(slow)) == "timeout_s", "the timeout must also end a running turn"
    assert len(generate.prompts) == 1
    assert [node.sampled for node in slow.graph.nodes] == [False]
    for bad in (
        {"max_response_tokens": 0},
        {"max_response_tokens": 5, "max_turns": 0},
        {"max_response_tokens": 5, "timeout_s": -1.0},
        {"max_response_tokens": 5, "timeout_s": "5"},
        {"max_response_tokens": 5, "timeout_s": float("inf")},
        {"max_response_tokens": 5, "max_context_tokens": 0},
    ):
        with pytest.raises(BadInputError, match="RolloutLimits"):
            RolloutLimits(**bad)


def test_max_context_tokens_counts_prompt_and_response(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    params = {"temperature": 1.0, "ignore_eos": True}
    task = Task("t", [{"role": "user", "content": "add"}])
    prompt_length = len(renderer.render_prompt(task.messages))
    max_context_tokens = prompt_length + 40

    limits = RolloutLimits(max_response_tokens=600, max_context_tokens=max_context_tokens)
    episode, generate = make_episode(
        shared_engine, renderer, TrajectoryGraph("s"), task=task, sampling_params=params, limits=limits
    )
    assert asyncio.run(ThreeUserMessagesLoop().run_episode(episode)) == "max_context_tokens"
    assert episode.leaf is not None
    assert episode.graph.num_tokens(episode.leaf) == max_context_tokens
    assert len(generate.prompts) == 2
    assert episode.graph.node(episode.leaf).finish_reason == "length"

    limits = RolloutLimits(max_response_tokens=600, max_context_tokens=prompt_length)
    too_long, generate = make_episode(shared_engine, renderer, TrajectoryGraph("s"), task=task, limits=limits)
    assert asyncio.run(SingleTurnLoop().run_episode(too_long)) == "max_context_tokens"
    assert generate.prompts == [], "a prompt without room for a response must not be sent"


def test_results_of_many_calls_that_do_not_fit_are_not_all_tokenized(tiny: Callable[..., Path]) -> None:
    """A thousand results would block the event loop for seconds, and the episode stops anyway."""
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))

    class CountingRenderer(ChatRenderer):
        num_characters = 0

        def encode(self, text: str) -> list[int]:
            self.num_characters += len(text)
            return super().encode(text)

    async def lookup() -> str:
        """Look up a text."""
        return "text " * 400

    renderer = CountingRenderer(tokenizer)
    generate = ScriptedGenerateFn(tokenizer, lambda prompt: call_text("lookup") * 100)
    limits = RolloutLimits(max_response_tokens=20_000)
    episode = Episode(
        Task("t", [{"role": "user", "content": "q"}]), TrajectoryGraph("s"), generate, renderer, limits, {}, [lookup]
    )
    assert asyncio.run(ToolAgentLoop([lookup]).run_episode(episode)) == "max_response_tokens"
    assert episode.num_response_tokens < 10_000, "the turn alone fits into the limits"
    assert renderer.num_characters < 100_000

    fitting = [{"role": "tool", "content": "text " * 100}] * 10
    roomy = RolloutLimits(max_response_tokens=30_000)
    episode = Episode(episode.task, TrajectoryGraph("s2"), generate, renderer, roomy, {}, [lookup])
    asyncio.run(episode.generate())
    episode.add_messages(fitting)
    assert renderer.decode(episode.graph.node(episode.leaf or 0).token_ids).count("text " * 100) == 10


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "no messages"),
        ([{"role": "pope", "content": "x"}], "role 'pope'"),
        ([{"role": "user", "content": "x" * 5000}], "the server accepts at most"),
    ],
)
def test_failed_episode_has_its_error(
    shared_engine: VerlEngine, renderer: ChatRenderer, messages: Any, expected: str
) -> None:
    episode, _ = make_episode(shared_engine, renderer, TrajectoryGraph("s"), task=make_changed_task("t", messages))
    assert asyncio.run(SingleTurnLoop().run_episode(episode)) == "error"
    assert episode.error is not None
    assert expected in episode.error["message"]


JUNK = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "pope", ""]) | JUNK,
        "content": st.text(max_size=20) | st.text(min_size=1, max_size=3).map(lambda text: text * 1000) | JUNK,
    }
)
TOOL_CALL_TEXT = st.builds(
    lambda name, arguments: f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
    st.sampled_from(
        ["add", "raise_runtime_error", "return_long_text", "wait_a_minute", "block_forever", "unknown_tool"]
    ),
    st.sampled_from(["{}", '{"a": 1}', '{"a": "x"}', "[]", '{"a": 1', "null"]),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(MESSAGE, max_size=3),
    turn_text=st.lists(TOOL_CALL_TEXT | st.text(max_size=30), max_size=3).map("".join),
)
def test_any_task_and_turn_end_with_a_stop_reason(
    shared_engine: VerlEngine, renderer: ChatRenderer, messages: Any, turn_text: str
) -> None:
    """An episode ends with a stop reason and records what was sampled, for any messages and any text of the policy."""

    class FixedTextLoop(ToolAgentLoop):
        def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
            return parse_hermes_tool_calls(turn_text)

    functions = (wait_a_minute, block_forever, raise_runtime_error)
    slow_tools = (FunctionTool(function, timeout_s=0.02) for function in functions)
    loop = FixedTextLoop([add, *slow_tools, return_long_text])
    graph = TrajectoryGraph("s")
    limits = RolloutLimits(max_response_tokens=200, max_turns=2, max_tool_tokens=20)
    params = {"max_new_tokens": 4, "ignore_eos": True}
    episode, _ = make_episode(
        shared_engine, renderer, graph, task=make_changed_task("t", messages), limits=limits, sampling_params=params
    )
    stop_reason = asyncio.run(loop.run_episode(episode))
    assert stop_reason in ("done", "max_turns", "max_response_tokens", "error")
    assert (stop_reason == "error") == (episode.error is not None)
    if stop_reason == "error":
        assert episode.error is not None
        assert episode.error["type"] == "BadInputError", episode.error
        assert not any(node.sampled for node in graph.nodes)
    else:
        assert graph.num_turns(episode.leaf or 0) in (1, 2)
        for node in graph.nodes:
            assert len(node.token_ids) <= 3 * 60 or node.parent is None, "a tool result was not truncated"
