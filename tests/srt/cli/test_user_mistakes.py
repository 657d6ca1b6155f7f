"""Mistakes of users who know verl, TRL or verifiers: each is refused at once, by name, with what to write instead."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_helpers import ScriptedGenerateFn, call_text
from helpers import QWEN
from typer.testing import CliRunner

from verl_server import BadInputError
from verl_server.agent import (
    RolloutLimits,
    RolloutRunner,
    SampleGroup,
    SingleTurnLoop,
    Task,
    ToolCall,
    ToolRegistry,
    ToolResult,
    parse_hermes_tool_calls,
)
from verl_server.cli.app import app
from verl_server.cli.common import load_tokenizer
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, TrajectoryGraph
from verl_server.validation import NAMES_OF_OTHER_LIBRARIES

Make = Callable[[], object]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def make(renderer: ChatRenderer) -> Callable[..., RolloutRunner]:
    """A runner whose policy calls the tool `act` once and says then that it is done."""
    reply = ScriptedGenerateFn(renderer._tokenizer, lambda prompt: "done" if "tool" in prompt else call_text("act"))

    def make_runner(agent: Any = None, engine: Any = reply, **options: Any) -> RolloutRunner:
        options = {"renderer": renderer, "limits": RolloutLimits(300), **options}
        return RolloutRunner(SingleTurnLoop() if agent is None else agent, engine, **options)

    return make_runner


def collect(runner: RolloutRunner, *tasks: Task) -> list[SampleGroup]:
    async def run() -> list[SampleGroup]:
        return [group async for group in runner.run(list(tasks) or [make_task()])]

    return asyncio.run(run())


def make_task(content: Any = "act", **data: Any) -> Task:
    return Task("t", [{"role": "user", "content": content}], data)


# -- arguments of the public classes ------------------------------------------------------------------


def unchecked(function: Any) -> Any:
    """A function without its types: mypy knows these mistakes, too."""
    return function


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda make: make(group_size=8), r"RolloutRunner has no argument 'group_size'; pass n=8"),
        (lambda make: make(reward_funcs=[len]), r"no argument 'reward_funcs'; pass reward, one function"),
        (lambda make: make(rewrd=len), r"no argument 'rewrd'; did you mean 'reward'\?"),
        (lambda make: make(max_turns=3), r"pass limits=RolloutLimits"),
        (
            lambda make: make().steps([make_task()], num_steps=5),
            r"steps has no argument 'num_steps'; the run ends with",
        ),
        (lambda make: make().run([make_task()], n=8), r"RolloutRunner.run has no argument 'n'; the number of samples"),
        (lambda make: unchecked(RolloutLimits)(max_tokens=9), r"no argument 'max_tokens'; pass max_response_tokens"),
        (lambda make: unchecked(RolloutLimits)(max_response_length=9), "pass max_response_tokens"),
        (lambda make: unchecked(RolloutLimits)(max_turn=9), r"did you mean 'max_turns'\?"),
        (lambda make: unchecked(Task)("t", prompt=[]), r"Task has no argument 'prompt'; pass messages="),
        (lambda make: unchecked(Task)("t", [], answer=3), r"no argument 'answer'; pass data="),
    ],
)
def test_a_wrong_argument_is_refused_with_the_right_name(make: Any, call: Any, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        call(make)


def test_names_of_other_libraries_are_none_of_ours() -> None:
    """Otherwise their cure would never be shown."""
    ours = {"RolloutRunner": RolloutRunner.__init__, "RolloutLimits": RolloutLimits, "Task": Task}
    ours |= {"RolloutRunner.steps": RolloutRunner.steps, "RolloutRunner.run": RolloutRunner.run}
    for name, others in NAMES_OF_OTHER_LIBRARIES.items():
        function = ours[name]
        for other in others:
            with pytest.raises(BadInputError, match=f"has no argument '{other}'; "):
                unchecked(function)(**{other: 1})


# -- functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), torch.tensor(True)])
def test_a_filter_may_return_a_bool_of_another_library(make: Any, true: Any) -> None:
    assert len(collect(make(group_filter=lambda group: true))) == 1
    assert collect(make(group_filter=lambda group: not true)) == []


# -- tools -----------------------------------------------------------------------------------------------


def _no_self(a: int) -> int: ...  # type: ignore[empty-body]


class Opaque:
    """Has no text of its own."""


class Described:
    def __str__(self) -> str:
        return "a lamp"


def _local_object() -> object:
    class Local: ...

    return Local()


async def _inner() -> AsyncIterator[int]:
    yield 1


def call_returning(make_value: Make) -> ToolResult:
    def act() -> Any:
        """Act."""
        return make_value()

    return asyncio.run(ToolRegistry([act]).call(ToolCall("act", {})))


@pytest.mark.parametrize(
    ("make_value", "expected"),
    [
        (
            lambda: {"r": _inner()},
            r"tool .act. returned <async_generator object _inner at .*write `await` before",
        ),
        (lambda: {"r": iter([1])}, "returned <list_iterator object at"),
        (Opaque, "returned <.*Opaque object at .*>.* of which Python writes only the address"),
        (lambda: {"lamp": [Opaque()]}, "Opaque object at"),
        (lambda: {"lamp": ({1: {_local_object()}},)}, "returned <.*<locals>.Local object at"),
        (lambda: ["lamp"].pop, "returned <built-in method pop of list object at"),
        (lambda: itertools.count(), r"returned count\(0\), which is an iterator"),
        (lambda: sys.__stderr__, "returned <_io.TextIOWrapper .*, which is an iterator"),
        (lambda: len, None),
        (lambda: _no_self, "returned <function _no_self at"),
    ],
)
def test_a_result_that_is_no_data_fails_the_sample(make_value: Make, expected: str | None) -> None:
    if expected is None:
        assert call_returning(make_value).content == "<built-in function len>"
        return
    with pytest.raises(BadInputError, match=expected):
        call_returning(make_value)


def test_other_results_keep_their_texts() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    texts = {
        "a lamp": Described,
        "null": lambda: None,
        "[1, [...]]": lambda: ring,
        "<O object at 0x7f00>": lambda: "<O object at 0x7f00>",
        '{"a":1}': lambda: {"a": 1},
        "{(1, 2): 3}": lambda: {(1, 2): 3},
        "{(1, 2): '<O object at 0x7f00>'}": lambda: {(1, 2): "<O object at 0x7f00>"},
        "<x at 0x1>": lambda: RuntimeError("<x at 0x1>"),
        "CompletedProcess(args='a', returncode=0, stdout='<x at 0x1>')": lambda: subprocess.CompletedProcess(
            "a", 0, "<x at 0x1>"
        ),
    }
    for text, make_value in texts.items():
        assert call_returning(make_value).content == text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('{"name": "f", "parameters": {"q": "a"}}', 'the key is "arguments", not "parameters"'),
        ('{"name": "f", "arguments": "{\\"q\\": 1}"}', 'the value of "arguments" is an object, not a string'),
        ('{"name": "f", "arguments": [1]}', 'must be {"name": "...", "arguments": {...}}'),
    ],
)
def test_a_call_of_another_dialect_is_explained_to_the_policy(call: str, expected: str) -> None:
    (result,) = parse_hermes_tool_calls(f"<tool_call>{call}</tool_call>")
    assert isinstance(result, ToolResult)
    assert result.error_type == "malformed"
    assert result.content.endswith(expected)


# -- runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_tokens", "write max_new_tokens"),
        ("max_completion_tokens", "write max_new_tokens"),
        ("logprobs", "always record log probabilities"),
        ("top_logprobs", "always record log probabilities"),
    ],
)
def test_sampling_parameters_of_openai_are_refused(make: Any, name: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=f"'{name}' is no sampling parameter of an agent; .*{expected}"):
        make(sampling_params={name: 5})


def test_a_run_without_steps_warns_of_max_staleness(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    collect(make())
    assert "max_staleness" not in caplog.text
    with caplog.at_level(logging.WARNING):
        collect(make(max_staleness=2))
    assert "max_staleness=2 has no effect on `run`; it is for `steps`" in caplog.text


def test_an_image_for_a_text_model_fails_its_sample(make: Any) -> None:
    (group,) = collect(make(), make_task([{"type": "image", "image": "chart.png"}]))
    assert "a message has an image, which needs the processor" in str((group.samples[0].error or {})["message"])


def test_a_reward_of_a_node_is_a_list() -> None:
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1], sampled=False)
    with pytest.raises(BadInputError, match=r"rewards must be a list of numbers, got 0.5; write \[0.5\]"):
        unchecked(graph.set_rewards)(0, 0.5)


def test_a_refused_prompt_without_a_user_says_what_is_missing(make: Any) -> None:
    (group,) = collect(make(), Task("t", [{"role": "assistant", "content": "hello"}]))
    message = str((group.samples[0].error or {})["message"])
    assert "the chat template refuses these messages" in message
    assert 'the messages have no message of the user: add {"role": "user", "content": "..."}' in message


# -- commands --------------------------------------------------------------------------------------------


def run_command(*words: str) -> str:
    """The error of a command. It has not succeeded."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code != 0
    return str(result.exception)


@pytest.mark.parametrize("content", [b'{"id": "x", "nodes": []}\n', b'{\n  "version": "1.0"\n}\n'])
def test_a_file_of_another_kind_is_no_session(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "o.jsonl"
    file.write_bytes(content)
    expected = "A file of another kind is no recorded session: pass RUN_DIR/NAME.jsonl"
    assert expected in run_command("trajectory", "show", str(file))
    output = str(tmp_path / "out" / "traces.jsonl")
    assert expected in run_command("trajectory", "export", str(file), "--format", "verifiers", "--output", output)


def test_the_folder_of_a_page_is_made(make: Any, tmp_path: Path) -> None:
    collect(make(run_dir=tmp_path / "run"))
    page = tmp_path / "new" / "folder" / "page.html"
    result = CliRunner().invoke(app, ["trajectory", "show", str(tmp_path / "run" / "t-0.jsonl"), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert page.read_bytes().startswith(b"<!doctype html>")
    error = run_command("trajectory", "show", str(tmp_path / "run" / "t-0.jsonl"), "--html", str(page / "x.html"))
    assert "cannot be written" in error


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    weights_only = tmp_path / "weights"
    weights_only.mkdir()
    (weights_only / "config.json").write_text('{"model_type": "qwen3"}')
    cases = ((tmp_path, ""), (weights_only, "it has no files of a tokenizer"), ("./no/such", "there is no such folder"))
    for name, expected in cases:
        with pytest.raises(BadInputError, match=f"the tokenizer '{name}' cannot be loaded: {expected}.*; pass a"):
            load_tokenizer(str(name), "pass a folder")


def test_an_unreachable_hub_is_found_in_time(tmp_path: Path) -> None:
    """transformers alone repeats its requests for 45 s. The port 9 of this machine has no server."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-m", "verl_server.cli", "check-template", "nope"],
        env={**os.environ, **hub},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 2
    assert "'nope' cannot be loaded: We couldn't connect to" in done.stderr
