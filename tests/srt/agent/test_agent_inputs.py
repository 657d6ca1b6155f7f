"""Mistakes of callers: tasks and runners refuse wrong arguments, and a failure of all samples is logged.

No test of this file needs a server.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_helpers import ScriptedGenerateFn, add, call_text, make_tasks
from helpers import QWEN, chat_tokenizer

from verl_server.agent import (
    AgentLoop,
    ChatScheduler,
    Episode,
    FunctionTool,
    RolloutLimits,
    RolloutRunner,
    Sample,
    SampleGroup,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
    ToolCall,
    as_generate_fn,
)
from verl_server.errors import BadInputError
from verl_server.trajectory import ASSISTANT_PLACEHOLDER, ChatRenderer, TrajectoryGraph

USER_MESSAGE = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    return ChatRenderer(tokenizer)


async def never_called(*, rid: str, session_id: str, **request: Any) -> Any:
    raise AssertionError("a turn was generated")


async def answer_token(*, rid: str, session_id: str, **request: Any) -> Any:
    """A turn of one token."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-0.5, 5, None]]}
    return {"output_ids": [5], "meta_info": meta}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, [USER_MESSAGE]), r"Task.id must be a valid string, got 3 \(int\); pass a text .* str\(number\)"),
        (("", [USER_MESSAGE]), "Task.id must have at least 1 character"),
        (("t", "What is 19 + 23?"), r"messages of task 't' are invalid: messages must be a list, got str.*\"role\""),
        (("t", USER_MESSAGE), "messages must be a list, got dict"),
        (("t", None), "messages must be a list, got NoneType"),
        (("t", []), "there are no messages"),
        (("t", [USER_MESSAGE, "x"]), "message 1: expected a dict, got str"),
        (("t", [USER_MESSAGE, {"content": "x"}]), "message 1: the key 'role' is missing"),
        (("t", [USER_MESSAGE, {"role": "pope", "content": "x"}]), "message 1: the role 'pope' is unknown; valid roles"),
        (("t", [{"role": "user"}]), "message 0: the key 'content' is missing"),
        (("t", [{"role": "user", "content": None}]), "message 0: the key 'content' has the value None"),
        (("t", [{"role": "assistant"}]), "message 0: the key 'content' is missing"),
        (("t", [{"role": "user", "content": 7}]), "message 0: the content has the type int"),
        (("t", [{"role": "user", "content": ["x"]}]), "message 0: content part 0: expected a dict, got str"),
        (("t", [{"role": "user", "content": [{"type": "image"}]}]), "message 0: an image part needs one of the keys"),
        (("t", [{**USER_MESSAGE, "tags": {"a"}}]), "message 0: a value cannot be recorded as JSON"),
        (("t", [{"role": "user", "content": "\ud800"}]), "message 0: a value cannot be recorded as JSON"),
        (("t", [{"role": "user", "content": "\ud800"}]), "message 0: .* lone surrogate.*backslashreplace"),
        (("t", [{"role": "user", "content": ASSISTANT_PLACEHOLDER}]), "message 0: .* reserved placeholder"),
        (("t", np.array([USER_MESSAGE])), r"messages must be a list, got ndarray.*convert it with \.tolist\(\)"),
        (("t", [{"role": "user", "content": np.array(["x"])}]), r"has the type ndarray.*convert it with \.tolist\(\)"),
        (("t", [{**USER_MESSAGE, "n": np.int64(1)}]), r"numpy.int64; pass plain JSON values.*with \.tolist\(\)"),
        (
            ("t", [{"role": "assistant", "content": None, "reasoning_content": "x"}]),
            'also one with .reasoning_content., write "content": ""',
        ),
        ((np.int64(3), [USER_MESSAGE]), r"Task.id must be a valid string, got 3 \(int\)"),
        (("t", [USER_MESSAGE], 42), "Task.data must be an instance of Mapping, got 42 .*; pass a dict such as"),
    ],
)
def test_invalid_tasks_are_refused(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        Task(*arguments)


def test_valid_tasks_are_accepted() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": "a.png"}]}
    text = {"role": np.str_("user"), "content": np.str_("x")}
    answer = {"answer": {1, 2}, "number": np.int64(3)}
    task = Task("a/b c", (text, call, {"role": "tool", "content": ""}, parts), answer)
    assert len(task.messages) == 4


def make_runner(renderer: ChatRenderer, /, **overrides: Any) -> RolloutRunner:
    """A runner that is valid, except for the overrides."""
    arguments: dict[str, Any] = {
        "agent": SingleTurnLoop(),
        "engine": answer_token,
        "renderer": renderer,
        "limits": RolloutLimits(max_response_tokens=10),
        "sampling_params": {},
        **overrides,
    }
    return RolloutRunner(**arguments)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"agent": ToolAgentLoop}, "or a list of tools, got <class .*ToolAgentLoop"),
        ({"agent": add}, "or a list of tools, got <function add"),
        ({"agent": "tool_agnt"}, "there is no agent loop 'tool_agnt'.*did you mean 'tool_agent'"),
        ({"engine": object()}, "engine must be a VerlEngine, a RolloutManager, .*, got object"),
        (
            {"renderer": "Qwen/Qwen3-8B"},
            r"renderer must be .* ChatRenderer, got 'Qwen.*; pass get_renderer\(tokenizer\)",
        ),
        (
            {"limits": {"max_response_tokens": 5}},
            "limits must be an instance of RolloutLimits, got .* dict",
        ),
        (
            {"limits": 100},
            r"limits must be an instance of RolloutLimits, got 100 .*; pass RolloutLimits\(",
        ),
        ({"sampling_params": [("temperature", 1.0)]}, "sampling_params must be a dict"),
        ({"sampling_params": {1: 2}}, "sampling_params must be a dict with strings as keys"),
        ({"sampling_params": {"temperature": "1"}}, r"sampling_params\['temperature'\] must be a valid number"),
        ({"sampling_params": {"n": 4}}, r"sampling_params\['n'\] must be 1 for agents, got 4.*RolloutRunner\(n=...\)"),
        ({"sampling_params": {"max_new_tokens": -5}}, r"sampling_params\['max_new_tokens'\] must be greater than"),
        ({"sampling_params": {"max_new_tokens": 0}}, r"sampling_params\['max_new_tokens'\] must be a whole number"),
        ({"reward": 1.0}, r"reward must be callable, got 1.0 .*; write `def reward\(sample"),
        ({"sampling_params": {"lora_path": "a"}}, r"functools.partial\(fleet.router.generate, lora_path=...\)"),
        ({"sampling_params": {"return_logprob": True}}, "always record log probabilities, so leave it out"),
        ({"sampling_params": {"timeout_s": 5}}, r"RolloutLimits\(timeout_s=...\)"),
        ({"sampling_params": {"stream": True}}, "generate whole turns, so leave it out"),
        ({"run_dir": "/proc/x"}, "run_dir: no file can be created in the folder /proc/x"),
        ({"run_dir": 7}, "run_dir must be an instance of Path or must be a valid string, got 7"),
        ({"run_dir": __file__}, "run_dir: no file can be created in the folder .*: File exists; pass a folder"),
        ({"max_concurrency": 0}, "max_concurrency must be greater than or equal to 1, got 0"),
        ({"max_concurrency": "8"}, "max_concurrency must be a valid integer, got '8'"),
        ({"n": 0}, "n must be greater than or equal to 1, got 0"),
        ({"n": -1}, "n must be greater than or equal to 1, got -1"),
        ({"n": 1.5}, "n must be a valid integer, got 1.5"),
        ({"max_staleness": -1}, "max_staleness must be greater than or equal to 0, got -1"),
        (
            {"group_filter": 3},
            r"group_filter must be callable or must be .*, got 3 .*; write `def keep\(group",
        ),
        ({"group_filter": "has_variance", "reward": len}, "keeps no group; it needs groups of n=2 samples or more"),
        ({"group_filter": "has_variance", "n": 2}, "keeps no group; .* and reward=... or an Environment with a method"),
        ({"group_filter": "all"}, "group_filter must be callable or must be 'has_variance', got 'all'"),
    ],
)
def test_runner_refuses_wrong_arguments(renderer: ChatRenderer, overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        make_runner(renderer, **overrides)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tasks": make_tasks(1) * 8}, "tasks 0 and 1 have the id 't0'.* pass n to the runner"),
        (
            {"tasks": [*make_tasks(1), Task("a/b", [USER_MESSAGE])]},
            r"tasks\[1\], 'a/b': the id of a recorded session .*'a/b-0'",
        ),
    ],
)
def test_run_refuses_wrong_arguments_at_once(
    renderer: ChatRenderer, tmp_path: Path, arguments: dict[str, Any], expected: str
) -> None:
    """The call itself raises the error, before the first group is requested, and no file is written."""
    runner = make_runner(renderer, run_dir=tmp_path)
    with pytest.raises(BadInputError, match=expected):
        runner.run(**{"tasks": make_tasks(1), **arguments})
    assert list(tmp_path.iterdir()) == []


async def read_all(groups: AsyncIterator[Any]) -> list[Any]:
    return [group async for group in groups]


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("method", ["run", "steps"])
def test_what_is_no_task_is_refused_when_it_is_read(renderer: ChatRenderer, method: str, kind: Any) -> None:
    """Also a dict, which has a method `copy` as a task has."""
    tasks: Any = kind([*make_tasks(2), {"id": "t", "messages": [USER_MESSAGE]}])
    runner = make_runner(renderer)
    with pytest.raises(BadInputError, match=r"tasks\[2\] must be a Task, got dict; write Task\(.* for a row"):
        asyncio.run(read_all(runner.run(tasks) if method == "run" else runner.steps(tasks, num_groups=1)))


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("method", ["run", "steps"])
def test_a_task_that_is_read_later_and_cannot_be_recorded_is_named(
    renderer: ChatRenderer, tmp_path: Path, method: str, is_asynchronous: bool
) -> None:
    """The iterator raises the error. No session of the task is recorded."""

    def read_tasks() -> Iterator[Task]:
        yield from make_tasks(2)
        yield Task("a/b", [USER_MESSAGE])
        raise AssertionError("a task was read after the error")

    async def read_tasks_later() -> AsyncIterator[Task]:
        for task in read_tasks():
            await asyncio.sleep(0)
            yield task

    runner = make_runner(renderer, run_dir=tmp_path)
    tasks: Any = read_tasks_later() if is_asynchronous else read_tasks()
    groups: Any = runner.run(tasks) if method == "run" else runner.steps(tasks, num_groups=1)
    with pytest.raises(BadInputError, match=r"^tasks\[2\], 'a/b': the id of a recorded session .*'a/b-"):
        asyncio.run(read_all(groups))
    assert not [path for path in tmp_path.rglob("*b*.jsonl")]


def test_other_constructors_refuse_wrong_arguments(renderer: ChatRenderer) -> None:
    limits = RolloutLimits(max_response_tokens=10)
    servers: Any = never_called
    for call, expected in (
        (
            lambda: ChatScheduler(servers, renderer, limits, {}),
            "servers must be .*; pass a list of generate functions",
        ),
        (lambda: ChatScheduler([servers], renderer, 3, {}), "limits must be an instance of RolloutLimits, got 3"),  # type: ignore[arg-type]
        (lambda: as_generate_fn(object()), "AsyncHttpServerEngineAdapter, for .*; got object"),  # type: ignore[arg-type]
        (lambda: FunctionTool(add, name=3), "name must be a valid string, got 3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadInputError, match=expected):
            call()


def test_chat_scheduler_refuses_wrong_turns(renderer: ChatRenderer) -> None:
    """No request is made: `submit` or the callback has the error."""
    errors: list[Any] = []

    def on_turn(turn: Any, info: Any, error: Any) -> None:
        errors.append(error)

    async def run() -> None:
        scheduler = ChatScheduler([never_called], renderer, RolloutLimits(max_response_tokens=10), {})
        submit: Any = scheduler.submit
        with pytest.raises(BadInputError, match="message 0: the role 'pope'"):
            submit(on_turn, [{"role": "pope", "content": "x"}], session_id=None)
        submit(on_turn, [USER_MESSAGE], sampling_params={"temperature": 0.0})
        submit(on_turn, [USER_MESSAGE], max_new_tokens=0)
        await scheduler.join()

    asyncio.run(run())
    assert [type(error) for error in errors] == [BadInputError] * 2
    assert "write the parameters themselves" in str(errors[0])
    assert "max_new_tokens" in str(errors[1])


def test_wrong_parameters_of_a_turn_change_nothing(renderer: ChatRenderer) -> None:
    graph = TrajectoryGraph("s")
    episode = Episode(Task("t", [USER_MESSAGE]), graph, never_called, renderer, RolloutLimits(10), {})
    with pytest.raises(BadInputError, match="write the parameters themselves"):
        asyncio.run(episode.generate([USER_MESSAGE], sampling_params={"temperature": 0.0}))
    assert graph.nodes == []
    with pytest.raises(BadInputError, match=r"cannot be tokenized: surrogates not allowed; .*backslashreplace"):
        episode.append_text("\ud800")


@pytest.mark.parametrize("is_kept", [True, False])
def test_group_filter_may_be_a_coroutine_function(renderer: ChatRenderer, is_kept: bool) -> None:
    async def keep(group: SampleGroup) -> bool:
        await asyncio.sleep(0)
        return is_kept

    async def run() -> list[SampleGroup]:
        runner = make_runner(renderer, agent=ReturningLoop(), group_filter=keep)
        return [group async for group in runner.run(make_tasks(2))]

    assert len(asyncio.run(run())) == 2 * is_kept


def call_through(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without `functools.wraps`."""

    def call(*args: Any) -> Any:
        return method(*args)

    return call


class DecoratedLoop(AgentLoop):
    @call_through
    async def run(self, episode: Episode) -> None:
        await episode.generate()


class DecoratedSyncLoop(AgentLoop):
    @call_through
    def run(self, episode: Episode) -> None:
        return


def test_run_of_an_agent_loop_may_be_decorated(renderer: ChatRenderer) -> None:
    """Only the call shows whether a decorated method returns a coroutine."""

    def run_loop(loop: AgentLoop) -> Sample:
        (group,), error = collect_groups(make_runner(renderer, agent=loop), make_tasks(1))
        assert error is None
        return group.samples[0]

    assert run_loop(DecoratedLoop()).stop_reason == "done"
    failed = run_loop(DecoratedSyncLoop())
    assert failed.stop_reason == "error"
    assert failed.error is not None
    assert "can't be used in 'await' expression" in failed.error["message"]


class ReturningLoop(AgentLoop):
    """Generates a turn of one token. The sample fails in its reward only."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()


class NoTurnLoop(AgentLoop):
    """Generates no turn."""

    async def run(self, episode: Episode) -> None:
        return


class CallingLoop(ToolAgentLoop):
    """Calls its tool once."""

    async def run(self, episode: Episode) -> None:
        await self.tools.call_all([ToolCall("search", {"query": "x"})])


def search(query: str) -> str:
    """Search the documents."""
    return documents[query]  # type: ignore[name-defined, no-any-return] # noqa: F821


async def search_index(query: str) -> str:
    """Search the documents."""
    import no_such_module  # type: ignore[import-not-found]

    return str(no_such_module.search(query))


search_index.__name__ = "search"


def raise_key_error(sample: Sample) -> float:
    return float(sample.task.data["answer"])


async def return_nothing(sample: Sample) -> float:
    return None  # type: ignore[return-value]


def collect_groups(runner: RolloutRunner, tasks: list[Task]) -> tuple[list[SampleGroup], Exception | None]:
    """The groups that a run yields, and the exception that ends it."""
    groups: list[SampleGroup] = []

    async def run() -> None:
        async for group in runner.run(tasks):
            groups.append(group)

    try:
        asyncio.run(run())
    except Exception as error:  # noqa: BLE001 - the exception of the samples is examined
        return groups, error
    return groups, None


class PromptLoop(AgentLoop):
    """Generates a turn, and changes the data of its task. Its attributes are settings, and the URL of a service."""

    def __init__(self, style: str = "brief", rounds: float = 3, url: str = "http://a:1", **public: Any) -> None:
        super().__init__([add])
        self.style, self.rounds, self._url = style, rounds, url
        self.prompt: str | None = None
        self.shots: list[Any] = []
        self.table, self.index = list(range(200_000)), object()  # data, which is not compared
        vars(self).update(public)

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        episode.task.data["log"].append(self._url)


class OtherPromptLoop(PromptLoop):
    """Another class with the same attributes."""


def run_in(run_dir: Path, renderer: ChatRenderer, task: Task, **overrides: Any) -> Sample:
    groups, error = collect_groups(make_runner(renderer, run_dir=run_dir, **overrides), [task])
    if error is not None:
        raise error
    return groups[0].samples[0]


def make_logged_task() -> Task:
    return Task("t", [USER_MESSAGE], {"answer": 42, "log": []})


def test_task_that_its_agent_loop_changes_is_loaded(renderer: ChatRenderer, tmp_path: Path) -> None:
    """By a second run of this process, and of another process, where the task is as it was."""
    task = make_logged_task()
    recorded = run_in(tmp_path, renderer, task, agent=PromptLoop())
    assert task.data["log"] == ["http://a:1"]
    for same in (task, make_logged_task()):
        assert run_in(tmp_path, renderer, same, agent=PromptLoop()).graph == recorded.graph
        assert len(same.data["log"]) == (same is task), "the recorded sample was run again"
    with pytest.raises(BadInputError, match=r"a different task\.data\."):
        run_in(tmp_path, renderer, Task("t", [USER_MESSAGE], {"answer": 43, "log": []}), agent=PromptLoop())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"agent": PromptLoop("long")}, "agent loop PromptLoop: attribute 'style'. .*begin its name with '_'"),
        ({"agent": PromptLoop(prompt="x")}, "agent loop PromptLoop: attribute 'prompt'. "),
        (
            {"agent": PromptLoop(shots=[{"role": "system", "content": "x"}])},
            "agent loop PromptLoop: attribute 'shots'. ",
        ),
        ({"agent": PromptLoop(rounds=4)}, "agent loop PromptLoop: attribute 'rounds'. "),
        ({"agent": OtherPromptLoop("long")}, "agent loop. "),
        ({"agent": ReturningLoop([search])}, "agent loop, tool 'add', tool 'search', tools. "),
        ({"limits": RolloutLimits(max_response_tokens=10, max_turns=3)}, "limits.max_turns. "),
        ({"sampling_params": {"temperature": 0.5}}, r"sampling_params\['temperature'\]. "),
    ],
)
def test_changed_input_is_named(
    renderer: ChatRenderer, tmp_path: Path, overrides: dict[str, Any], expected: str
) -> None:
    same = {"agent": PromptLoop(), "sampling_params": {"temperature": 1.0}}
    recorded = run_in(tmp_path, renderer, make_logged_task(), **same)
    with pytest.raises(BadInputError, match=f"was recorded with other inputs: a different {expected}"):
        run_in(tmp_path, renderer, make_logged_task(), **{**same, **overrides})
    for loop in (PromptLoop(url="http://b:2"), PromptLoop(rounds=3.0), PromptLoop(new="x")):
        same = {"agent": loop, "sampling_params": {"temperature": 1}}
        assert run_in(tmp_path, renderer, make_logged_task(), **same).graph == recorded.graph


async def generate_tokens(*, rid: str, session_id: str, **request: Any) -> Any:
    """As an engine that samples up to eight tokens."""
    await asyncio.sleep(0)
    count = min(8, request["sampling_params"]["max_new_tokens"])
    logprobs = [[-1.0, token, None] for token in range(count)]
    meta = {"finish_reason": {"type": "length"}, "weight_version": "1", "output_token_logprobs": logprobs}
    return {"output_ids": list(range(count)), "meta_info": meta}


@pytest.mark.parametrize(
    ("max_response_tokens", "context_room", "expected"),
    [(8, 99, "max_response_tokens"), (99, 5, "max_context_tokens"), (9, 99, "done")],
)
def test_turn_that_a_limit_cut_off_stops_at_the_limit(
    renderer: ChatRenderer, max_response_tokens: int, context_room: int, expected: str
) -> None:
    """In the last case, the engine cuts the turn off, and no limit does."""
    graph, max_context_tokens = TrajectoryGraph("s"), len(renderer.render_prompt([USER_MESSAGE])) + context_room
    limits = RolloutLimits(max_response_tokens=max_response_tokens, max_context_tokens=max_context_tokens)
    episode = Episode(Task("t", [USER_MESSAGE]), graph, generate_tokens, renderer, limits, {})
    assert asyncio.run(SingleTurnLoop().run_episode(episode)) == episode.stop_reason == expected
    assert [node.finish_reason for node in graph.nodes] == [None, "length"]


@pytest.mark.parametrize("sampling_params", [{}, {"max_new_tokens": 3}])
def test_a_sample_whose_turn_the_engine_cut_off_is_done(
    renderer: ChatRenderer, sampling_params: dict[str, Any]
) -> None:
    """The engine samples up to `most` tokens. No call of the turn that was cut off is executed."""
    call, requests = call_text("search", query="x"), list[str]()
    generate = ScriptedGenerateFn(renderer._tokenizer, lambda prompt: call * 2)
    most = len(renderer.encode(call)) + 2

    async def cut_off(*, rid: str, session_id: str, **request: Any) -> Any:
        requests.append(rid)
        params = request["sampling_params"]
        params["max_new_tokens"] = min(params["max_new_tokens"], most)
        return await generate(rid=rid, session_id=session_id, **request)

    runner = make_runner(
        renderer,
        agent=ToolAgentLoop([search]),
        engine=cut_off,
        limits=RolloutLimits(500),
        sampling_params=sampling_params,
    )
    (group,) = asyncio.run(read_all(runner.run(make_tasks(1))))
    (sample,) = group.samples
    assert (sample.stop_reason, sample.error, sample.num_turns, len(requests)) == ("done", None, 1, 1)
    turn = sample.graph.node(sample.leaf)
    assert (turn.finish_reason, len(turn.token_ids)) == ("length", sampling_params.get("max_new_tokens", most))


def test_turns_of_one_episode_are_generated_one_after_the_other(renderer: ChatRenderer) -> None:
    """Two turns at a time would be recorded one below the other, which the engine never saw."""
    episode = Episode(Task("t", [USER_MESSAGE]), TrajectoryGraph("s"), generate_tokens, renderer, RolloutLimits(99), {})

    async def run() -> None:
        generating = asyncio.create_task(episode.generate([USER_MESSAGE]))
        await asyncio.sleep(0)
        with pytest.raises(BadInputError, match="'t' is generating a turn; await it first"):
            await episode.generate()
        with pytest.raises(BadInputError, match="is generating a turn"):
            episode.add_messages([USER_MESSAGE])
        with pytest.raises(BadInputError, match="is generating a turn"):
            episode.append_text("x")
        branch = episode.fork()
        with pytest.raises(BadInputError, match="is generating a turn"):
            episode.adopt(branch)
        await asyncio.gather(generating, branch.generate())

    asyncio.run(run())
    assert [(node.parent, node.sampled) for node in episode.graph.nodes] == [(None, False), (0, True), (0, True)]


def generate_in_thread(*, rid: str, session_id: str, **request: Any) -> Any:
    return {}


def test_mistakes_that_only_the_run_shows_are_named(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Arguments of the runner of the right kind that do something else than expected."""
    groups, _ = collect_groups(make_runner(renderer, engine=generate_in_thread), make_tasks(1))
    expected = "can't be used in 'await' expression"
    assert expected in (groups[0].samples[0].error or {})["message"]

    def keep(group: SampleGroup) -> bool:
        return max(sample.reward or {} for sample in group.samples) > 0  # type: ignore[type-var, operator]

    async def run() -> None:
        runner = make_runner(renderer, agent=ReturningLoop(), reward=raise_first, group_filter=keep)
        _ = [group async for group in runner.run(make_tasks(1))]

    with pytest.raises(TypeError) as raised:
        asyncio.run(run())
    assert "raised by group_filter for the group of task 't0'; failed samples" in raised.value.__notes__[0]

    async def run_filter_with_stop_iteration() -> None:
        runner = make_runner(renderer, group_filter=lambda group: next(iter(())))
        _ = [group async for group in runner.run(make_tasks(1))]

    with pytest.raises(RuntimeError, match="StopIteration") as stopped:
        asyncio.run(run_filter_with_stop_iteration())
    assert "raised by group_filter for the group of task 't0'" in stopped.value.__notes__[0]

    groups, _ = collect_groups(make_runner(renderer, agent=NoTurnLoop()), make_tasks(1))
    with pytest.raises(BadInputError, match=r"has no tokens: .*NoTurnLoop.run returned without a turn.*; leave out su"):
        _ = groups[0].samples[0].path


class UnknownIdentityLoop(ReturningLoop):
    @property
    def identity(self) -> Any:
        raise AssertionError("digests are computed without a run_dir")


def test_digests_are_computed_for_a_run_dir_only(renderer: ChatRenderer) -> None:
    groups, error = collect_groups(make_runner(renderer, agent=UnknownIdentityLoop()), make_tasks(1))
    assert (len(groups), error) == (1, None)


@pytest.mark.parametrize(
    ("loop", "reward", "expected_type", "expected"),
    [
        (ReturningLoop(), raise_key_error, KeyError, "in raise_key_error"),
        (ReturningLoop(), return_nothing, BadInputError, "must return a finite number, got None"),
        (CallingLoop([search]), None, NameError, "in search"),
        (CallingLoop([search_index]), None, ImportError, "in search"),
        (SingleTurnLoop(), None, BadInputError, "the chat template refuses these messages"),
    ],
    ids=["reward raises", "reward returns None", "unknown name in tool", "unknown module in tool", "template raises"],
)
@pytest.mark.parametrize(("num_tasks", "n"), [(20, 2), (1, 3), (1, 1)])
def test_mistake_common_to_all_samples_is_logged(
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
    loop: AgentLoop,
    reward: Any,
    expected_type: type[Exception],
    expected: str,
    num_tasks: int,
    n: int,
) -> None:
    """The exception of the samples is logged once, with its traceback. The run goes on."""
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = QWEN
    renderer = ChatRenderer(tokenizer)
    if isinstance(loop, SingleTurnLoop):
        tokenizer.chat_template = "{{ raise_exception('no') }}"  # every prompt of a run fails
    groups, error = collect_groups(make_runner(renderer, agent=loop, reward=reward, n=n), make_tasks(num_tasks))
    assert error is None
    (record,) = caplog.records
    assert record.exc_info is not None
    logged = record.exc_info[1]
    assert isinstance(logged, expected_type)
    assert expected in "".join(traceback.format_exception(logged))
    assert f"all samples of the first {min(8, num_tasks)} groups have failed" in record.getMessage()
    assert len(groups) == num_tasks
    assert all(sample.stop_reason == "error" for group in groups for sample in group.samples)


def raise_first(sample: Sample) -> float:
    raise ValueError("first place")


def test_failures_of_some_samples_are_not_logged(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    """Failures belong to their samples if a sample of the first groups succeeds."""
    runner = make_runner(
        renderer,
        agent=ReturningLoop(),
        reward=lambda sample: raise_first(sample) if (sample.task.id, sample.index) != ("t3", 1) else 1.0,
        n=2,
    )
    groups, error = collect_groups(runner, make_tasks(12))
    assert error is None
    assert not caplog.records
    assert len(groups) == 12
    assert runner.counters.num_failed_samples == 23


def test_failures_that_finish_first_are_not_logged(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    """All ten samples of the first task fail at once, before any other sample finishes."""

    async def reward(sample: Sample) -> float:
        if sample.task.id == "t0":
            raise ValueError("this task is invalid")
        await asyncio.sleep(0.05)
        return 1.0

    groups, error = collect_groups(make_runner(renderer, agent=ReturningLoop(), reward=reward, n=10), make_tasks(3))
    assert error is None
    assert not caplog.records
    assert [group.samples[0].stop_reason for group in groups] == ["error", "done", "done"]
