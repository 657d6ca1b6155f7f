"""Helpers for tests of agents: a recording generate function, episodes and runners with short defaults, and tools."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from verl_server.agent import (
    AgentLoop,
    Episode,
    RolloutLimits,
    RolloutRunner,
    Task,
    ToolAgentLoop,
    ToolCall,
    ToolResult,
    Turn,
    as_generate_fn,
)
from verl_server.trajectory import ChatRenderer, ForkReason, TrajectoryGraph

TOOL_CALL_REGEX = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


async def wait_a_minute() -> None:
    """Exceeds its timeout."""
    await asyncio.sleep(60)


def block_forever() -> None:
    """Neither the call nor the end of the process may wait for this thread."""
    threading.Event().wait()


def raise_runtime_error() -> None:
    """Fails."""
    raise RuntimeError("no")


def exit_process() -> None:
    """Must end only the call."""
    sys.exit(3)


def raise_stop_iteration() -> Any:
    """Raises an exception that asyncio does not raise through a future."""
    return next(iter(()))


def return_long_text() -> str:
    """Returns ten megabytes."""
    return "x" * 10_000_000


class RecordingGenerateFn:
    """Forwards requests to the engine's server and stores the prompts."""

    def __init__(self, engine: Any) -> None:
        self._generate: Any = as_generate_fn(engine.adapter.asynchronous)
        self.prompts: list[list[int]] = []

    async def __call__(self, *, rid: str, session_id: str, on_tokens: Any = None, **request: Any) -> Any:
        self.prompts.append(list(request["input_ids"]))
        return await self._generate(rid=rid, session_id=session_id, on_tokens=on_tokens, **request)


class ScriptedGenerateFn:
    """A policy whose turns a function writes. No server is needed.

    `reply`: gets the text of the prompt and returns the text of the turn.
    """

    def __init__(self, tokenizer: Any, reply: Callable[[str], str]) -> None:
        self._tokenizer, self._reply = tokenizer, reply
        self.prompts: list[str] = []

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        await asyncio.sleep(0)
        self.prompts.append(self._tokenizer.decode(request["input_ids"]))
        max_new_tokens = request["sampling_params"]["max_new_tokens"]
        token_ids = self._tokenizer.encode(self._reply(self.prompts[-1]), add_special_tokens=False)
        meta = {
            "finish_reason": {"type": "stop" if len(token_ids) <= max_new_tokens else "length"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in token_ids[:max_new_tokens]],
        }
        return {"output_ids": token_ids[:max_new_tokens], "meta_info": meta}


def renderer_with_template(tokenizer: Any, template: str) -> ChatRenderer:
    """The generic renderer of a tokenizer, whose chat template is replaced."""
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def call_text(name: str, **arguments: Any) -> str:
    """A turn with one tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_episode(
    engine: Any, renderer: ChatRenderer, record: Any, **overrides: Any
) -> tuple[Episode, RecordingGenerateFn]:
    """An episode with short defaults, and the generate function that it uses."""
    generate = RecordingGenerateFn(engine)
    arguments: dict[str, Any] = {
        "task": Task("t", [{"role": "user", "content": "add"}]),
        "limits": RolloutLimits(max_response_tokens=600, max_turns=3),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 100},
        **overrides,
    }
    return Episode(record=record, generate=generate, renderer=renderer, **arguments), generate


def make_runner(engine: Any, renderer: ChatRenderer, /, **overrides: Any) -> RolloutRunner:
    """A runner whose policy calls the tool `add` in every turn, because a grammar forces it."""
    arguments: dict[str, Any] = {
        "agent": ToolAgentLoop([add]),
        "engine": as_generate_fn(engine.adapter.asynchronous),
        "renderer": renderer,
        "limits": RolloutLimits(max_response_tokens=1000, max_turns=2),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 100, "regex": TOOL_CALL_REGEX},
        **overrides,
    }
    return RolloutRunner(**arguments)


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{index}", [{"role": "user", "content": f"add {index}"}]) for index in range(count)]


def make_changed_task(task_id: str, messages: list[Any]) -> Task:
    """A task whose list of messages was changed after the check of its constructor, so that the episode must check."""
    first_messages = [{"role": "user", "content": "add"}]
    task = Task(task_id, first_messages)
    first_messages[:] = messages
    return task


class ForcedToolCallsLoop(ToolAgentLoop):
    """Makes two tool calls after every turn, also after a truncated turn.

    A policy with random weights does not call tools by itself.
    """

    async def run(self, episode: Episode) -> None:
        turn = await episode.generate(episode.task.messages)
        while True:
            results = await self.tools.call_all(self.parse_tool_calls(turn))
            turn = await episode.generate([result.message for result in results])

    def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        return [ToolCall("add", {"a": len(turn.text), "b": b}) for b in (1, 2)]


class ForkingLoop(ForcedToolCallsLoop):
    """Generates three turns. Tasks with an id divisible by 4 also fork once at the prompt."""

    async def run(self, episode: Episode) -> None:
        turn = await episode.generate(episode.task.messages)
        for iteration in range(2):
            results = await self.tools.call_all(self.parse_tool_calls(turn))
            turn = await episode.generate([result.message for result in results])
            if iteration == 0 and int(episode.task.id) % 4 == 0:
                episode.adopt(episode.fork(0, ForkReason.SAMPLE))
                turn = await episode.generate()


class ThreeUserMessagesLoop(AgentLoop):
    """Generates three turns, of which the first has at most 15 tokens."""

    async def run(self, episode: Episode) -> None:
        await episode.generate(episode.task.messages, max_new_tokens=15)
        await episode.generate([{"role": "user", "content": "x"}], max_new_tokens=1000)
        await episode.generate([{"role": "user", "content": "y"}])


def assert_prompts_are_paths(graph: TrajectoryGraph, generate: RecordingGenerateFn) -> None:
    """Every prompt was the recorded path before the turn."""
    sampled = [node for node in graph.nodes if node.sampled]
    paths = [graph.token_ids(node.parent) for node in sampled if node.parent is not None]
    assert sorted(generate.prompts) == sorted(paths)


def assert_logprobs_match(graph: TrajectoryGraph, leaf: int, model: Any) -> None:
    """Hugging Face computes the recorded log probability for each sampled token. (A grammar would change them.)"""
    sequence = graph.token_sequence(leaf)
    with torch.no_grad():
        logprobs = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
    for position, bit in enumerate(sequence.loss_mask):
        if bit:
            expected = float(logprobs[position - 1, sequence.token_ids[position]])
            assert abs(expected - sequence.logprobs[position]) < 1e-4


def assert_exact(graph: TrajectoryGraph, generate: RecordingGenerateFn, model: Any) -> None:
    """Prompts and log probabilities of all paths are exact."""
    assert_prompts_are_paths(graph, generate)
    for leaf in graph.leaves:
        assert_logprobs_match(graph, leaf, model)
