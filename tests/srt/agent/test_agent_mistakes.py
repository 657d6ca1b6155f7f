"""Mistakes in agents that would train a policy on wrong samples without an error. The policy is scripted."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn, add, call_text, renderer_with_template
from helpers import QWEN
from typer.testing import CliRunner

from verl_server import BadInputError
from verl_server.agent import (
    AgentLoop,
    Environment,
    Episode,
    EpisodeStopped,
    LocalSandbox,
    RolloutLimits,
    RolloutRunner,
    RolloutStep,
    Sample,
    SingleTurnLoop,
    Task,
    Tool,
    ToolAgentLoop,
    ToolCall,
    ToolResult,
    Turn,
    reward,
    tool,
)
from verl_server.agent.tools.tool import _LOGGED
from verl_server.cli.app import app
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer

CALLS = (
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}CALL{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template. `CALL` stands for how it writes a tool call."""
HERMES = "<tool_call>{{ call.function | tojson }}</tool_call>"
PYTHON_TAG = "<|python_tag|>{{ call.function | tojson }}"
CODER = (
    "<tool_call>\n<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>\n</tool_call>"
)


def make_renderer(folder: Path, template: str = QWEN, special: tuple[str, ...] = ()) -> ChatRenderer:
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return renderer_with_template(tokenizer, template)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


def runner_of(agent: Any, renderer: ChatRenderer, reply: Callable[[str], str], **options: Any) -> RolloutRunner:
    generate = ScriptedGenerateFn(renderer.tokenizer, reply)
    return RolloutRunner(agent, generate, renderer=renderer, **{"limits": RolloutLimits(600), **options})


def run(
    agent: Any, renderer: ChatRenderer, reply: Callable[[str], str] = lambda prompt: "yes", **options: Any
) -> Sample:
    async def collect() -> list[Sample]:
        runner = runner_of(agent, renderer, reply, **options)
        return [sample async for group in runner.run(make_tasks(1)) for sample in group.samples]

    return asyncio.run(collect())[0]


def first_step(
    agent: Any, renderer: ChatRenderer, reply: Callable[[str], str] = lambda prompt: "yes", **options: Any
) -> RolloutStep:
    async def collect() -> list[RolloutStep]:
        runner = runner_of(agent, renderer, reply, **options)
        return [step async for step in runner.steps(make_tasks(4), 2)]

    return asyncio.run(collect())[0]


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{index}", [{"role": "user", "content": "add"}]) for index in range(count)]


def calls_once(name: str, **arguments: Any) -> Callable[[str], str]:
    """A policy that calls a tool in its first turn, and ends with its second turn."""
    return lambda prompt: "done" if "<|im_start|>tool" in prompt else call_text(name, **arguments)


def error_of(sample: Sample) -> str:
    assert (sample.stop_reason, sample.reward) == ("error", None)
    return str((sample.error or {})["message"])


# -- calls that are not found --------------------------------------------------------------------------


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")], ids=["text", "special tokens"])
def test_calls_are_found_whether_their_tags_are_special_tokens_or_text(
    tmp_path: Path, special: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    renderer = make_renderer(tmp_path, CALLS.replace("CALL", HERMES), special)
    sample = run([add], renderer, calls_once("add", a=40, b=2))
    assert (sample.num_turns, sample.text, sample.stop_reason) == (2, "done", "done")
    assert not caplog.records


def test_a_call_without_its_end_tag_is_read_without_the_end_marker(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path, special=("<tool_call>", "</tool_call>"))
    turns: list[Turn] = []

    class Reads(ToolAgentLoop):
        def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
            turns.append(turn)
            return super().parse_tool_calls(turn)

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}'
    sample = run(Reads([add]), renderer, lambda prompt: "x" if "tool\n" in prompt else f"{call}<|im_end|>")
    assert sample.num_turns == 2
    assert (turns[0].raw_text, turns[0].text) == (call, call.removeprefix("<tool_call>"))


@pytest.mark.parametrize(
    ("prompt_end", "turn", "num_calls"),
    [
        ("<think>\n", "Not CALL. <think> No.</think>So", 0),
        ("<think>\n", "Why</think>CALL</think>", 1),
        ("", "CALL</think>So", 1),
    ],
)
def test_calls_in_a_thought_that_the_prompt_has_opened_are_not_executed(
    tmp_path: Path, prompt_end: str, turn: str, num_calls: int
) -> None:
    template = CALLS.replace("CALL", HERMES).replace("assistant\n{% endif", f"assistant\n{prompt_end}{{% endif")
    text = turn.replace("CALL", call_text("add", a=1))
    sample = run([add], make_renderer(tmp_path, template), lambda prompt: "done" if "|>tool" in prompt else text)
    assert (sample.num_turns, sample.stop_reason) == (1 + num_calls, "done")
    assert sample.tool_counts.get("add/calls", 0) == num_calls


class Adder(Environment):
    @tool
    def add(self, a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @reward
    def is_right(self, sample: Sample) -> float:
        return 1.0


class OwnParser(ToolAgentLoop):
    def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        return []


@pytest.mark.parametrize(
    ("agent", "form", "expected"),
    [
        ([add], PYTHON_TAG, "in which ToolAgentLoop finds no call"),
        (Adder, PYTHON_TAG, "in which ToolAgentLoop finds no call"),
        ([add], CODER, "which ToolAgentLoop reads as 'Error: this tool call is not valid JSON"),
        ([add], HERMES, ""),
        ([add], "", ""),
        ([], PYTHON_TAG, ""),
        (OwnParser([add]), PYTHON_TAG, ""),
        (SingleTurnLoop([add]), PYTHON_TAG, ""),
    ],
    ids=["python tag", "environment", "coder", "hermes", "not shown", "no tools", "own parser", "other loop"],
)
def test_a_runner_warns_of_calls_that_its_loop_does_not_find(
    tmp_path: Path, agent: Any, form: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = make_renderer(tmp_path, CALLS.replace("CALL", form), ("<|python_tag|>",))
    runner_of(agent, renderer, str)
    assert len(caplog.records) == bool(expected)
    if expected:
        assert expected in caplog.text
        assert "so no call of the tools ['add'] is executed. Pass the renderer of the model family" in caplog.text


def test_check_template_names_calls_that_are_not_found(tmp_path: Path) -> None:
    for form, expected in (
        (
            PYTHON_TAG,
            'not found: the chat template writes the call of a tool as \'<|python_tag|>{"name": "count_fruit"',
        ),
        (HERMES, "found"),
        ("", "not checked: the template does not show how a call is written"),
    ):
        make_renderer(tmp_path, CALLS.replace("CALL", form), ("<|python_tag|>",)).tokenizer.save_pretrained(tmp_path)
        report = json.loads(CliRunner().invoke(app, ["check-template", str(tmp_path), "--json"]).stdout)
        assert report["tool_calls"].startswith(expected)
        lines = CliRunner().invoke(app, ["check-template", str(tmp_path)]).stdout.splitlines()
        assert lines[-1] == f"tool calls: {report['tool_calls']}"


# -- rewards -------------------------------------------------------------------------------------------


def test_a_reward_function_has_the_options_of_its_decorator(renderer: ChatRenderer) -> None:
    @reward(weight=0.5)
    def half(sample: Sample) -> float:
        return 3.0

    @reward(weight=0)
    def metric(sample: Sample) -> float:
        return 3.0

    @reward(timeout_s=0.1)
    async def slow(sample: Sample) -> float:
        await asyncio.sleep(30)
        return 3.0

    assert (run(SingleTurnLoop(), renderer, reward=half).reward) == 1.5
    sample = run(SingleTurnLoop(), renderer, reward=metric)
    assert (sample.reward, sample.rewards) == (None, {"reward": 3.0})
    assert "took longer than 0.1 s" in error_of(run(SingleTurnLoop(), renderer, reward=slow))


class SetsNodeReward(AgentLoop):
    async def run(self, episode: Episode) -> None:
        turn = await episode.generate()
        episode.graph.set_rewards(turn.node, [0.5])


@pytest.mark.parametrize(
    ("agent", "options", "num_warnings"),
    [
        (SingleTurnLoop(), {}, 1),
        (SingleTurnLoop(), {"reward": reward(weight=0)(lambda sample: 1.0)}, 1),
        (SingleTurnLoop(), {"reward": lambda sample: 1.0}, 0),
        (Adder, {}, 0),
        (SetsNodeReward(), {}, 0),
    ],
    ids=["none", "metric", "function", "environment", "node"],
)
def test_steps_without_rewards_are_told_once(
    renderer: ChatRenderer, agent: Any, options: Any, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    first_step(agent, renderer, **options)  # and a second step
    assert [message[:45] for message in caplog.messages] == [
        "no sample of the first step has a reward" + (" (['r" if options else ", so ")
    ] * num_warnings


def test_the_batch_has_the_outcome_reward_of_each_row(renderer: ChatRenderer) -> None:
    """Beside rewards of turns, which only `rm_scores` have, and the same in each segment of a sample."""

    class TwoSegments(AgentLoop):
        async def run(self, episode: Episode) -> None:
            turn = await episode.generate()
            episode.graph.set_rewards(turn.node, [0.5])
            await episode.new_root([{"role": "user", "content": "again"}]).generate()
            await episode.generate([{"role": "user", "content": "more"}])

    step = first_step(TwoSegments(), renderer, n=3, reward=lambda sample: float(sample.index))
    batch = step.batch()
    assert batch["reward"].tolist() == batch["sample_index"].float().tolist()
    assert len(batch["reward"]) == 12
    assert sorted(set(batch["rm_scores"].sum(-1).tolist())) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert math.isnan(first_step(SingleTurnLoop(), renderer).batch()["reward"][0])


# -- failures of tools ---------------------------------------------------------------------------------


class Careless(Environment):
    """Has mistakes in its tools."""

    @tool
    def attribute(self) -> str:
        """Fails."""
        return str(self.missing)  # type: ignore[attr-defined]

    @tool
    def key(self) -> str:
        """Fails."""
        return str(self.task.data["corpus"])

    @tool
    def answer(self) -> str:
        """Tells the policy that it has made a mistake."""
        raise ValueError("there is no such file")

    @tool
    def condition(self) -> None:
        """Tells the policy that it has made a mistake, in one line."""
        if self.task: raise ValueError("é: there is no such file")  # fmt: skip # noqa: E701

    @tool
    def key_of_answer(self) -> str:
        """Fails before the statement `raise` has an exception."""
        raise ValueError(self.task.data["corpus"])

    @tool(timeout_s=0.05)
    async def slow(self) -> str:
        """Takes too long."""
        await asyncio.sleep(30)
        return ""

    @reward
    def outcome(self, sample: Sample) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("name", "error_type", "exception"),
    [
        ("attribute", "raised", AttributeError),
        ("key", "raised", KeyError),
        ("answer", "raised", None),
        ("condition", "raised", None),
        ("key_of_answer", "raised", KeyError),
        ("slow", "timeout", None),
    ],
)
def test_failed_calls_are_counted_and_mistakes_are_logged_once(
    renderer: ChatRenderer,
    caplog: pytest.LogCaptureFixture,
    name: str,
    error_type: str,
    exception: type[Exception] | None,
) -> None:
    _LOGGED.clear()
    step = first_step(Careless, renderer, calls_once(name), n=3)
    assert [sample.tool_counts for sample in step.samples] == [
        {f"{name}/calls": 1, f"{name}/errors/{error_type}": 1}
    ] * 6
    tools = {key: value for key, value in step.metrics.items() if key.startswith("tools/")}
    assert tools == {f"tools/{name}/calls": 6, f"tools/{name}/errors/{error_type}": 6}
    assert len(caplog.records) == (exception is not None)
    if exception is not None:
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.exc_info is not None
        assert record.exc_info[0] is exception
        assert f"the tool '{name}' has raised an exception, which the policy reads" in record.getMessage()


class ToolOfClass(Tool):
    """Raises an exception on purpose, as the tools of an MCP server do."""

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        raise RuntimeError("the server says that the call is wrong")


def test_answers_of_a_class_of_tools_are_not_logged(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    _LOGGED.clear()
    step = first_step([ToolOfClass("of_class", "A tool.", {}, 1.0)], renderer, calls_once("of_class"))
    assert step.metrics["tools/of_class/errors/raised"] == 2
    assert not [message for message in caplog.messages if "has raised an exception" in message]


def test_calls_of_no_tool_are_counted(renderer: ChatRenderer) -> None:
    step = first_step([add], renderer, calls_once("subtract"))
    assert step.metrics["tools/errors/unknown_tool"] == 2
    assert step.samples[0].tool_counts == {"errors/unknown_tool": 1}
    malformed = first_step([add], renderer, lambda prompt: "x" if "tool\n" in prompt else "<tool_call>{</tool_call>")
    assert malformed.metrics["tools/errors/malformed"] == 2
    right = first_step([add], renderer, calls_once("add", a=1))
    assert {key: value for key, value in right.metrics.items() if "tools" in key} == {"tools/add/calls": 2}


class NotStarted(Environment):
    """Uses a sandbox that does not run in the event loop of the sample."""

    async def setup(self) -> None:
        self.box = LocalSandbox()

    @tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return (await self.box.run(command)).text

    @reward
    def outcome(self, sample: Sample) -> float:
        return 1.0


class OtherLoop(NotStarted):
    """Uses a sandbox in a thread."""

    async def setup(self) -> None:
        await super().setup()
        await self.box.start()

    @tool
    def bash(self, command: str) -> str:  # type: ignore[override]
        """Run a command."""
        return asyncio.run(self.box.run(command)).text

    async def teardown(self) -> None:
        await self.box.close()


@pytest.mark.parametrize(
    ("agent", "expected"),
    [(NotStarted, "the sandbox was not started: write"), (OtherLoop, "the sandbox was started in another event loop")],
)
def test_a_wrong_use_of_a_sandbox_fails_the_sample(
    renderer: ChatRenderer, agent: type[Environment], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception is logged with the traceback of the tool, and the policy does not read it."""
    policy = ScriptedGenerateFn(renderer.tokenizer, calls_once("bash", command="ls"))

    async def collect() -> list[Sample]:
        runner = RolloutRunner(agent, policy, renderer=renderer, limits=RolloutLimits(600))
        return [sample async for group in runner.run(make_tasks(1)) for sample in group.samples]

    (sample,) = asyncio.run(collect())
    assert expected in error_of(sample)
    assert len(policy.prompts) == 1
    assert "self.box.run(command)" in caplog.text


# -- decorators of other kinds of methods -----------------------------------------------------------------


class Mixin:
    @staticmethod
    @reward(weight=0.5)
    def of_the_mixin(sample: Sample) -> float:
        return 1.0


class Static(Mixin, Environment):
    @staticmethod
    @tool
    def add(a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @classmethod
    @reward
    def of_the_class(cls, sample: Sample) -> float:
        return float(cls is Static)


@reward
def decorated_reward(sample: Sample) -> float:
    """A reward that is no method."""
    return 1.0


@tool
def decorated_tool(text: str) -> str:
    """A tool that is no method."""
    return text


@pytest.mark.parametrize("function", [decorated_reward, decorated_tool])
@pytest.mark.parametrize("wrapper", [property, functools.cached_property])
def test_tools_and_rewards_that_would_be_lost_are_refused(renderer: ChatRenderer, wrapper: Any, function: Any) -> None:
    with pytest.raises(BadInputError, match=r"^E\.check has the decorator .*, but is no method"):
        run(type("E", (Environment,), {"check": wrapper(function)}), renderer)
    with pytest.raises(BadInputError, match="'run' is a method of every environment; give the tool or reward another"):
        run(type("E", (Environment,), {"run": function}), renderer)
    with pytest.raises(BadInputError, match="check is a tool and a reward"):
        run(type("E", (Environment,), {"check": tool(reward(lambda sample: 1.0))}), renderer)


def test_static_methods_and_class_methods_are_tools_and_rewards(renderer: ChatRenderer) -> None:
    sample = run(Static, renderer, calls_once("add", a=1))
    assert (sample.num_turns, sample.reward) == (2, 1.5)
    assert sample.rewards == {"of_the_mixin": 1.0, "of_the_class": 1.0}
    assert sample.tool_counts == {"add/calls": 1}


# -- agent loops ---------------------------------------------------------------------------------------


class ForgetsAwait(AgentLoop):
    async def run(self, episode: Episode) -> None:
        episode.generate()  # type: ignore[unused-coroutine]


class LeavesTask(AgentLoop):
    async def run(self, episode: Episode) -> None:
        self._task = asyncio.create_task(episode.generate())


class ReturnsReward(AgentLoop):
    async def run(self, episode: Episode) -> Any:
        await episode.generate()
        return {"reward": 1.0}


@pytest.mark.filterwarnings("ignore:coroutine 'Episode.generate' was never awaited")
@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (ForgetsAwait(), "ForgetsAwait.run returned without a turn of the policy, .* `await episode.generate"),
        (LeavesTask(), "LeavesTask.run returned without a turn"),
        (
            ReturnsReward(),
            "ReturnsReward.run returned {'reward': 1.0}, but it must return None: .*belongs in reward=",
        ),
    ],
)
def test_an_agent_loop_without_a_turn_or_with_a_value_fails_the_sample(
    renderer: ChatRenderer, agent: AgentLoop, expected: str
) -> None:
    assert re.search(expected, error_of(run(agent, renderer, reward=lambda sample: 1.0)))


class CatchesLimits(AgentLoop):
    """Generates until anything is raised. `goes_on`: at the end of another branch after that."""

    def __init__(self, goes_on: bool = False) -> None:
        super().__init__()
        self.goes_on = goes_on

    async def run(self, episode: Episode) -> None:
        try:
            await episode.generate()
            while True:
                await episode.generate([{"role": "user", "content": "more"}])
        except EpisodeStopped:
            if self.goes_on:
                branch = episode.new_root([{"role": "user", "content": "again"}])
                await branch.generate()
                episode.adopt(branch)


@pytest.mark.parametrize(
    ("agent", "limits", "expected", "num_turns"),
    [
        (CatchesLimits(), RolloutLimits(600, max_turns=3), "max_turns", 3),
        (CatchesLimits(), RolloutLimits(60), "max_response_tokens", 3),
        (CatchesLimits(), RolloutLimits(2), "max_response_tokens", 1),
        (CatchesLimits(), RolloutLimits(max_context_tokens=10), "max_context_tokens", 0),
        (CatchesLimits(goes_on=True), RolloutLimits(max_context_tokens=90), "done", 1),
    ],
)
def test_a_limit_that_the_loop_catches_is_the_stop_reason(
    renderer: ChatRenderer, agent: AgentLoop, limits: RolloutLimits, expected: str, num_turns: int
) -> None:
    """Unless the branch goes on at the end of another branch."""
    sample = run(agent, renderer, limits=limits, reward=lambda sample: 1.0)
    assert (sample.stop_reason, sample.num_turns, sample.reward) == (expected, num_turns, 1.0)


def test_a_reward_with_the_parameters_of_another_library_is_named(renderer: ChatRenderer) -> None:
    def exact(sample: Sample, answer: str) -> float:
        return float(sample.text == answer)

    sample = run(SingleTurnLoop(), renderer, reward=exact)
    assert "the reward function 'reward' is called with one argument, the sample" in (sample.error or {})["message"]
    assert "(sample: 'Sample', answer: 'str')" in (sample.error or {})["message"]


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.2}, {"logit_bias": {"3": 1.0}}, {"regex": "[a-z]+", "min_new_tokens": 2}]
)
def test_what_a_trainer_does_not_compute_is_warned_of(
    params: dict[str, Any], renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    runner_of(SingleTurnLoop(), renderer, lambda prompt: "yes", sampling_params=params)
    assert f"log probabilities contain the effect of {', '.join(sorted(params))}, and a trainer" in caplog.text
    caplog.clear()
    runner_of(SingleTurnLoop(), renderer, lambda prompt: "yes", sampling_params={"temperature": 0.5, "top_p": 0.9})
    assert not caplog.records


def test_the_seed_of_vllm_has_another_name_here(renderer: ChatRenderer) -> None:
    with pytest.raises(BadInputError, match="'seed' is no sampling parameter of an agent; write sampling_seed"):
        runner_of(SingleTurnLoop(), renderer, lambda prompt: "yes", sampling_params={"seed": 1})
