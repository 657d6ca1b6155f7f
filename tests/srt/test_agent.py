"""Episodes and agent loops on a real server: trainers get exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import (
    TOOL_CALL_REGEX,
    ForcedToolCallsLoop,
    ForkingLoop,
    RecordingGenerateFn,
    ThreeUserMessagesLoop,
    add,
    assert_exact,
    assert_logprobs_match,
    assert_prompts_are_paths,
    block_forever,
    make_episode,
    raise_runtime_error,
    return_long_text,
    wait_a_minute,
)
from helpers import LLAMA, QWEN, chat_tokenizer, reference_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_server.agent import (
    Episode,
    FunctionTool,
    InterleavedLoop,
    RolloutLimits,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
    ToolCall,
    ToolResult,
    Turn,
    get_agent_loop,
    parse_hermes_tool_calls,
    register_agent_loop,
)
from verl_server.errors import BadInputError
from verl_server.trajectory import (
    ChatRenderer,
    ForkReason,
    Recorder,
    TrajectoryGraph,
    find_divergences,
    image_sources,
    load_session,
    session_file,
    to_batch,
)


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def test_concurrent_episodes_with_tools_record_exact_tokens(
    shared_engine: Any, renderer: ChatRenderer, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """24 concurrent episodes with two tool calls per turn. The files contain what was sampled."""
    loop, model = ForcedToolCallsLoop([add]), reference_model(tiny("qwen3"))

    async def run_all() -> list[tuple[str, Episode, RecordingGenerateFn]]:
        async def run_one(index: int) -> tuple[str, Episode, RecordingGenerateFn]:
            params = {"temperature": 1.0, "max_new_tokens": 20 + index, "ignore_eos": index % 2 == 0}
            recorder = Recorder(tmp_path, f"s{index}", sync=False)
            episode, generate = make_episode(shared_engine, renderer, recorder, sampling_params=params)
            with recorder:
                return await loop.run_episode(episode), episode, generate

        return list(await asyncio.gather(*(run_one(index) for index in range(24))))

    for index, (stop_reason, episode, generate) in enumerate(asyncio.run(run_all())):
        graph = episode.graph
        assert stop_reason == "max_turns", episode.error
        assert episode.leaf is not None
        assert graph.num_turns(episode.leaf) == 3
        assert load_session(session_file(tmp_path, f"s{index}")) == graph
        for node in graph.nodes:
            if node.message and "messages" in node.message and node.parent is not None:
                length = len((graph.node(node.parent).message or {})["content"])
                contents = [message["content"] for message in node.message["messages"]]
                assert contents == [str(length + 1), str(length + 2)]
        assert_exact(graph, generate, model)
        batch = to_batch([(graph, episode.leaf)], pad_token_id=0)
        assert int(batch["response_mask"].sum()) == graph.num_sampled_tokens(episode.leaf)


def test_two_hundred_sessions_with_two_chat_templates(
    shared_engine: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Sessions with Qwen's and Llama's template are exact in every turn and diverge only at requested forks."""
    model = reference_model(tiny("qwen3"))

    async def run_all() -> list[tuple[str, Episode, RecordingGenerateFn]]:
        async def run_one(index: int) -> tuple[str, Episode, RecordingGenerateFn]:
            task = Task(str(index), [{"role": "system", "content": "s"}, {"role": "user", "content": f"add {index}"}])
            episode, generate = make_episode(
                shared_engine,
                renderers[index % 2],
                TrajectoryGraph(str(index)),
                task=task,
                sampling_params={"temperature": 1.0, "max_new_tokens": 8 + index % 9},
                limits=RolloutLimits(max_response_tokens=600, max_turns=3),
            )
            return await loop.run_episode(episode), episode, generate

        return list(await asyncio.gather(*(run_one(index) for index in range(200))))

    renderers = []
    for template in (QWEN, LLAMA):
        tokenizer = chat_tokenizer(tmp_path)
        tokenizer.chat_template = template
        renderers.append(ChatRenderer(tokenizer))
    loop = ForkingLoop([add])
    for index, (stop_reason, episode, generate) in enumerate(asyncio.run(run_all())):
        assert stop_reason == "done", episode.error
        assert_exact(episode.graph, generate, model)
        forks = [(divergence.fork_reason, divergence.num_turns) for divergence in find_divergences(episode.graph)]
        assert forks == ([(ForkReason.SAMPLE, 0)] if index % 4 == 0 else [])


def test_tool_agent_loop_executes_calls_of_the_policy(shared_engine: Any, renderer: ChatRenderer) -> None:
    """A grammar forces the policy to make two calls per turn. The prompts contain the correct sums."""
    graph = TrajectoryGraph("s")
    params = {"temperature": 1.0, "max_new_tokens": 200, "regex": f"{TOOL_CALL_REGEX}{TOOL_CALL_REGEX}"}
    episode, _ = make_episode(
        shared_engine,
        renderer,
        graph,
        sampling_params=params,
        limits=RolloutLimits(max_response_tokens=1500, max_turns=3),
    )
    assert asyncio.run(ToolAgentLoop([add]).run_episode(episode)) == "max_turns"
    num_results = 0
    for node in graph.nodes:
        if node.message and "messages" in node.message and node.parent is not None:
            calls = parse_hermes_tool_calls((graph.node(node.parent).message or {})["content"])
            sums = [call.arguments["a"] + call.arguments["b"] for call in calls if isinstance(call, ToolCall)]
            assert [int(message["content"]) for message in node.message["messages"]] == sums
            num_results += len(sums)
    assert num_results == 6


def test_forks_and_appended_text_are_exact(
    shared_engine: Any, renderer: ChatRenderer, tiny: Callable[..., Path]
) -> None:
    graph, model = TrajectoryGraph("s"), reference_model(tiny("qwen3"))
    episode, generate = make_episode(shared_engine, renderer, graph, sampling_params={"max_new_tokens": 12})

    async def run() -> None:
        first = await episode.generate(episode.task.messages)
        episode.append_text("<result>5</result>")
        await episode.generate()
        episode.fork(0, ForkReason.SAMPLE)
        await episode.generate()
        episode.fork(first.node, ForkReason.EDITED)
        await episode.generate([{"role": "user", "content": "again"}])

    asyncio.run(run())
    fork_reasons = [node.fork_reason for node in graph.nodes if node.fork_reason]
    assert fork_reasons == [ForkReason.SAMPLE, ForkReason.EDITED]
    assert len(graph.leaves) == 3
    assert_exact(graph, generate, model)


def test_turn_continues_after_a_weight_update_aborts_it(
    shared_engine: Any, renderer: ChatRenderer, tiny: Callable[..., Path]
) -> None:
    """A turn that is paused with `abort` still gets all of its tokens, each with its own log probability."""
    graph = TrajectoryGraph("s")
    params = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
    episode, _ = make_episode(shared_engine, renderer, graph, sampling_params=params)
    adapter = shared_engine.adapter.asynchronous

    async def run() -> Turn:
        generating = asyncio.ensure_future(episode.generate(episode.task.messages))
        await asyncio.sleep(0.4)
        assert not generating.done()
        await adapter.pause_generation("abort")
        await adapter.continue_generation()
        return await generating

    turn = asyncio.run(run())
    assert (len(turn.token_ids), turn.finish_reason) == (300, "length")
    assert graph.num_sampled_tokens(turn.node) == 300
    assert_logprobs_match(graph, turn.node, reference_model(tiny("qwen3")))


def test_interleaved_loop_appends_results_within_the_turn(shared_engine: Any, renderer: ChatRenderer) -> None:
    graph = TrajectoryGraph("s")
    params = {"max_new_tokens": 100, "regex": r'<call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</call>'}
    episode, generate = make_episode(
        shared_engine,
        renderer,
        graph,
        sampling_params=params,
        limits=RolloutLimits(max_response_tokens=900, max_turns=2),
    )
    assert asyncio.run(InterleavedLoop([add]).run_episode(episode)) == "max_turns"
    appended = [node for node in graph.nodes if node.message and "appended_text" in node.message]
    assert len(appended) == 2
    assert_prompts_are_paths(graph, generate)


def test_limits_stop_an_episode(shared_engine: Any, renderer: ChatRenderer) -> None:
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
        {"max_response_tokens": 5, "max_context_tokens": 0},
    ):
        with pytest.raises(BadInputError, match="RolloutLimits"):
            RolloutLimits(**bad)


def test_max_context_tokens_counts_prompt_and_response(shared_engine: Any, renderer: ChatRenderer) -> None:
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


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "no messages"),
        ([{"role": "pope", "content": "x"}], "role 'pope'"),
        ([{"role": "user", "content": "x" * 5000}], "the server takes prompts of up to"),
    ],
)
def test_failed_episode_has_its_error(shared_engine: Any, renderer: ChatRenderer, messages: Any, expected: str) -> None:
    episode, _ = make_episode(shared_engine, renderer, TrajectoryGraph("s"), task=Task("t", messages))
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(MESSAGE, max_size=3),
    turn_text=st.lists(TOOL_CALL_TEXT | st.text(max_size=30), max_size=3).map("".join),
)
def test_any_task_and_turn_end_with_a_stop_reason(
    shared_engine: Any, renderer: ChatRenderer, messages: Any, turn_text: str
) -> None:
    """An episode ends with a stop reason and records what was sampled, for any messages and any text of the policy."""

    class FixedTextLoop(ToolAgentLoop):
        def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
            return parse_hermes_tool_calls(turn_text)

    slow_tools = (FunctionTool(one, timeout_s=0.02) for one in (wait_a_minute, block_forever, raise_runtime_error))
    loop = FixedTextLoop([add, *slow_tools, return_long_text])
    graph = TrajectoryGraph("s")
    limits = RolloutLimits(max_response_tokens=200, max_turns=2, max_tool_tokens=20)
    params = {"max_new_tokens": 4, "ignore_eos": True}
    episode, _ = make_episode(
        shared_engine, renderer, graph, task=Task("t", messages), limits=limits, sampling_params=params
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


def test_agent_loops_are_registered_by_name() -> None:
    assert get_agent_loop("tool_agent") is ToolAgentLoop
    with pytest.raises(BadInputError, match="there is no agent loop 'x'"):
        get_agent_loop("x")
    with pytest.raises(BadInputError, match="already registered"):
        register_agent_loop("single_turn")(ToolAgentLoop)


def test_images_of_a_message() -> None:
    parts: list[Any] = [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image", "url": "http://x/b.png"},
    ]
    message = {"role": "user", "content": parts}
    assert image_sources(message) == ["a.png", "data:image/png;base64,AA", "http://x/b.png"]
    for bad in ({"type": "image"}, {"type": "image", "image": 3}):
        with pytest.raises(BadInputError, match="an image part needs one of the keys"):
            image_sources({"role": "user", "content": [bad]})


IMPORT_CHECK = """
import sys

def loaded(names):
    return [name for name in names if name in sys.modules]

import verl_server.agent, verl_server.trajectory
heavy = loaded(["torch", "sglang", "ray", "renderers", "mcp", "numpy", "aiohttp", "transformers", "pydantic", "rich"])
assert not heavy, f"importing the packages loads {heavy}"
for package in (verl_server.agent, verl_server.trajectory):
    for name in package.__all__:
        for attempt in range(2):
            value = getattr(package, name)
            assert type(value).__name__ != "module", f"{package.__name__}.{name} is a module"
heavy = loaded(["torch", "sglang", "ray"])
assert not heavy, f"importing the public names loads {heavy}"
"""


def test_public_names_exist_and_are_imported_lazily() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
