"""Episodes and agent loops on a real server: trainers get exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import (
    TOOL_CALL_REGEX,
    ForcedToolCallsLoop,
    ForkingLoop,
    RecordingGenerateFn,
    add,
    assert_exact,
    assert_logprobs_match,
    assert_prompts_are_paths,
    make_episode,
)
from helpers import LLAMA, QWEN, adapter_of, chat_tokenizer, reference_model
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import (
    Episode,
    InterleavedLoop,
    RolloutLimits,
    Task,
    ToolAgentLoop,
    ToolCall,
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


@pytest.mark.smoke
def test_concurrent_episodes_with_tools_record_exact_tokens(
    shared_engine: VerlEngine, renderer: ChatRenderer, tiny: Callable[..., Path], tmp_path: Path
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


@pytest.mark.slow
def test_two_hundred_sessions_with_two_chat_templates(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path
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
                limits=RolloutLimits(max_response_tokens=600, max_turns=4),
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


def test_tool_agent_loop_executes_calls_of_the_policy(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
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
    assert num_results == 4, "the results of the last turn are not added, because no turn follows"


def test_forks_and_appended_text_are_exact(
    shared_engine: VerlEngine, renderer: ChatRenderer, tiny: Callable[..., Path]
) -> None:
    graph, model = TrajectoryGraph("s"), reference_model(tiny("qwen3"))
    limits = RolloutLimits(max_response_tokens=600)
    episode, generate = make_episode(
        shared_engine, renderer, graph, sampling_params={"max_new_tokens": 12}, limits=limits
    )

    async def run() -> None:
        first = await episode.generate(episode.task.messages)
        episode.append_text("<result>5</result>")
        await episode.generate()
        episode.adopt(episode.fork(0, ForkReason.SAMPLE))
        await episode.generate()
        episode.adopt(episode.fork(first.node, ForkReason.EDITED))
        await episode.generate([{"role": "user", "content": "again"}])

    asyncio.run(run())
    fork_reasons = [node.fork_reason for node in graph.nodes if node.fork_reason]
    assert fork_reasons == [ForkReason.SAMPLE, ForkReason.EDITED]
    assert len(graph.leaves) == 3
    assert_exact(graph, generate, model)


@pytest.mark.smoke
def test_turn_continues_after_a_weight_update_aborts_it(
    shared_engine: VerlEngine, renderer: ChatRenderer, tiny: Callable[..., Path]
) -> None:
    """A turn that is paused with `abort` still gets all of its tokens, each with its own log probability."""
    graph = TrajectoryGraph("s")
    params = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
    episode, _ = make_episode(shared_engine, renderer, graph, sampling_params=params)
    adapter = adapter_of(shared_engine).asynchronous

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


def test_interleaved_loop_appends_results_within_the_turn(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
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
