"""A limit of an episode ends the agent loop of this episode. In other code it is a failure of this code.

No test of this file needs a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_helpers import ScriptedGenerateFn, make_tasks
from helpers import chat_tokenizer
from mcp.server import MCPServer

from verl_server.agent import (
    AgentLoop,
    ChatScheduler,
    Environment,
    Episode,
    EpisodeStopped,
    RolloutLimits,
    RolloutRunner,
    Sample,
    SampleGroup,
    SingleTurnLoop,
    Task,
    ToolCall,
    ToolResult,
    mcp_tools,
    tool,
)
from verl_server.errors import InfrastructureError
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session

USER = [{"role": "user", "content": "x"}]
LIMITS = RolloutLimits(max_response_tokens=400, max_turns=2)
OTHER_EPISODE = "an episode that this code ran has reached its limit max_turns"

Judge = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def policy(tokenizer: Any) -> ScriptedGenerateFn:
    return ScriptedGenerateFn(tokenizer, lambda prompt: "hello")


@pytest.fixture(scope="module")
def judge(policy: ScriptedGenerateFn, renderer: ChatRenderer) -> Judge:
    """Code that runs an episode of its own to a limit, and does not catch EpisodeStopped."""

    async def run(*_: Any) -> float:
        limits = RolloutLimits(max_response_tokens=400, max_turns=1)
        episode = Episode(Task("judge", USER), TrajectoryGraph("judge"), policy, renderer, limits, {})
        await episode.generate()
        await episode.generate(USER)
        return 1.0

    return run


@pytest.fixture(scope="module")
def run(policy: ScriptedGenerateFn, renderer: ChatRenderer) -> Callable[..., list[Sample]]:
    def run(agent: Any, tasks: Any = None, **options: Any) -> list[Sample]:
        async def collect() -> list[Sample]:
            runner = RolloutRunner(agent, policy, renderer=renderer, **{"limits": LIMITS, **options})
            groups = runner.run(make_tasks(2) if tasks is None else tasks)
            return [sample async for group in groups for sample in group.samples]

        return asyncio.run(asyncio.wait_for(collect(), 60.0))

    return run


def in_task_group(judge: Judge) -> Judge:
    async def run(*_: Any) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(judge())
        return 1.0

    return run


@pytest.mark.parametrize("wrap", [lambda judge: judge, in_task_group], ids=["plain", "task group"])
def test_a_limit_of_another_episode_is_a_failure_of_its_code(
    run: Callable[..., list[Sample]], judge: Judge, wrap: Callable[[Judge], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.agent.environments.RETRY_DELAY_S", 0.001)
    call = wrap(judge)

    class SetsUp(Environment):
        async def setup(self) -> None:
            await call()

    class Constructs(Environment):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            raise EpisodeStopped("max_turns", self)

    class Acts(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            await call()

    agents: list[tuple[Any, Any]] = [(SingleTurnLoop(), call), (SetsUp, None), (Acts(), None), (Constructs, None)]
    for agent, reward in agents:
        samples = run(agent, reward=reward)
        assert [sample.stop_reason for sample in samples] == ["error"] * 2
        assert [(sample.error or {})["type"] for sample in samples] == ["RuntimeError"] * 2
        assert all(OTHER_EPISODE in (sample.error or {})["message"] for sample in samples)
        assert [sample.reward for sample in samples] == [None] * 2


def test_a_teardown_whose_episode_reaches_its_limit_is_logged(
    run: Callable[..., list[Sample]], judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    class TearsDown(Environment):
        async def run(self, episode: Episode) -> None:
            await episode.generate()

        async def teardown(self) -> None:
            await judge()

    assert [sample.stop_reason for sample in run(TearsDown)] == ["done"] * 2
    assert caplog.text.count(OTHER_EPISODE) == 2


def test_a_filter_and_tasks_whose_episode_reaches_its_limit_end_the_run(
    run: Callable[..., list[Sample]], judge: Judge
) -> None:
    async def keep(group: SampleGroup) -> bool:
        return bool(await judge())

    def keep_at_once(group: SampleGroup) -> bool:
        raise EpisodeStopped("max_turns", group)

    async def tasks() -> AsyncIterator[Task]:
        yield make_tasks(1)[0]
        await judge()

    for group_filter in (keep, keep_at_once):
        with pytest.raises(RuntimeError, match=OTHER_EPISODE) as raised:
            run(SingleTurnLoop(), group_filter=group_filter)
        assert "raised by group_filter" in "".join(raised.value.__notes__)
    with pytest.raises(RuntimeError, match=OTHER_EPISODE) as raised:
        run(SingleTurnLoop(), tasks())
    assert isinstance(raised.value.__cause__, EpisodeStopped)


def test_a_tool_whose_episode_reaches_its_limit_returns_an_error(
    run: Callable[..., list[Sample]], judge: Judge
) -> None:
    results: list[ToolResult] = []

    async def ask() -> str:
        """Asks a simulated user."""
        return str(await judge())

    class Asks(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            results.append(await self.tools.call(ToolCall("ask", {})))

    samples = run(Asks([ask]), reward=lambda sample: 1.0)
    assert [(sample.stop_reason, sample.reward) for sample in samples] == [("done", 1.0)] * 2
    assert {result.error_type for result in results} == {"raised"}
    assert all(OTHER_EPISODE in result.content for result in results)


@pytest.mark.parametrize("is_thread", [False, True])
def test_a_tool_that_generates_in_the_episode_passes_on_its_limit(
    run: Callable[..., list[Sample]], is_thread: bool
) -> None:
    class Delegates(AgentLoop):
        async def run(self, episode: Episode) -> None:
            async def ask() -> str:
                """Asks a sub-agent."""
                branch = episode.new_root(USER)
                while True:
                    await branch.generate(None if branch.leaf is None else USER)

            def ask_in_thread() -> str:
                """Adds a message without an end."""
                while True:
                    episode.fork().add_messages([{"role": "user", "content": "x" * 2000}])

            await episode.generate()
            tools = type(self)([ask_in_thread if is_thread else ask]).tools
            await tools.call(ToolCall(tools.names[0], {}))

    limit = "max_response_tokens" if is_thread else "max_turns"
    assert [sample.stop_reason for sample in run(Delegates())] == [limit] * 2


def test_a_limit_in_a_task_group_is_the_limit_of_the_sample(run: Callable[..., list[Sample]]) -> None:
    class Team(AgentLoop):
        async def run(self, episode: Episode) -> None:
            async with asyncio.TaskGroup() as outer:
                outer.create_task(episode.fork().generate())
                async with asyncio.TaskGroup() as inner:
                    for _ in range(3):
                        inner.create_task(episode.fork().generate())

    class Fails(AgentLoop):
        async def run(self, episode: Episode) -> None:
            async def fail() -> None:
                raise ValueError("no")

            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(episode.fork().generate())
                group.create_task(fail())

    class WithTools(AgentLoop):
        async def run(self, episode: Episode) -> None:
            async with mcp_tools(MCPServer("empty")):
                await episode.generate()
                while True:
                    await episode.generate(USER)

    for agent in (Team(), WithTools()):
        samples = run(agent, reward=lambda sample: 1.0)
        assert [(sample.stop_reason, sample.error, sample.reward) for sample in samples] == [
            ("max_turns", None, 1.0)
        ] * 2
    assert [(sample.error or {})["type"] for sample in run(Fails())] == ["ExceptionGroup"] * 2


def test_a_callback_that_raises_the_limit_fails(policy: ScriptedGenerateFn, renderer: ChatRenderer) -> None:
    def on_turn(turn: Any, info: Any, error: BaseException | None) -> None:
        if error is not None:
            raise error

    async def talk() -> None:
        scheduler = ChatScheduler([policy], renderer, RolloutLimits(max_response_tokens=400, max_turns=1), {})
        conversation = scheduler.submit(on_turn, USER)
        await scheduler.join()
        scheduler.submit(on_turn, USER, session_id=conversation)
        with pytest.raises(ExceptionGroup, match="callbacks failed") as raised:
            await scheduler.join()
        assert OTHER_EPISODE in str(raised.value.exceptions[0])

    asyncio.run(talk())


# -- loops that repeat their turns, and failures beside a limit ---------------------------------------


class Repeats(AgentLoop):
    """Repeats a turn at once when it fails. `kind`: which failure does not end."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left = kind, list[asyncio.Task[None]]()

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        if self.kind.startswith("left"):  # the first branch reaches the limit, and the other branch is left behind
            self.left.append(asyncio.create_task(self._repeat(episode.fork(), 0.05)))
            await self._repeat(episode.fork(), 0.0)
        while True:
            try:
                await episode.generate([{"role": "user", "content": None}] if self.kind == "refused" else USER)
            except Exception:  # noqa: BLE001
                continue
            except EpisodeStopped:
                assert self.kind == "caught"

    async def _repeat(self, branch: Episode, pause_s: float) -> None:
        while True:
            with contextlib.suppress(Exception):
                if self.kind == "left, add_messages":
                    branch.add_messages(USER)
                    await branch.generate()
                else:
                    await branch.generate(USER)
                await asyncio.sleep(pause_s)


@pytest.mark.parametrize("kind", ["left", "left, add_messages", "refused", "caught"])
def test_a_loop_that_repeats_a_failed_turn_does_not_block_the_event_loop(
    policy: ScriptedGenerateFn, renderer: ChatRenderer, kind: str
) -> None:
    async def run() -> None:
        agent = Repeats(kind)
        runner = RolloutRunner(agent, policy, renderer=renderer, limits=RolloutLimits(400, max_turns=5))
        taking = asyncio.create_task(take(runner))
        await asyncio.wait({taking}, timeout=1.0)
        if kind.startswith("left"):
            assert taking.result().stop_reason == "max_turns"
            await asyncio.wait(agent.left, timeout=5.0)
            assert all(task.cancelled() for task in agent.left)
        else:
            taking.cancel()  # nothing but the caller ends such a loop
            await asyncio.wait({taking}, timeout=5.0)
            assert taking.done()

    async def take(runner: RolloutRunner) -> Sample:
        async for group in runner.run(make_tasks(1)):
            return group.samples[0]
        raise AssertionError

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_failed_call_counts_more_than_a_limit_of_another_call(
    run: Callable[..., list[Sample]],
) -> None:
    """Also if the call that reached the limit comes first, and if the failure is in a task group."""

    class Both(Environment):
        @tool
        async def sub_agent(self) -> str:
            """Generates until the limit."""
            branch = self.episode.fork()
            while True:
                await branch.generate(USER)

        @tool
        async def box(self) -> str:
            """Its container is lost."""
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lose())
            return ""

        async def _lose(self) -> None:
            raise InfrastructureError("the container is lost")

        async def run(self, episode: Episode) -> None:
            self.episode = episode
            await episode.generate()
            await self.tools.call_all([ToolCall("sub_agent", {}), ToolCall("box", {})])

    (sample,) = run(Both, make_tasks(1), max_attempts=1)
    assert sample.stop_reason == "error"
    assert sample.error is not None
    assert sample.error["message"] == "the container is lost"
    assert sample.tool_counts == {"sub_agent/calls": 1, "box/calls": 1, "box/errors/failed": 1}


def test_calls_that_reach_a_limit_or_are_cancelled_are_counted(run: Callable[..., list[Sample]]) -> None:
    """They have no error."""

    class Both(Environment):
        @tool
        async def sub_agent(self) -> str:
            """Generates until the limit."""
            while True:
                await self.episode.generate(USER)

        @tool(max_concurrency=1)
        async def search(self) -> str:
            """Does not end."""
            await asyncio.sleep(100)
            return ""

        async def run(self, episode: Episode) -> None:
            self.episode = episode
            calls = [asyncio.create_task(self.tools.call(ToolCall("search", {}))) for _ in range(2)]
            await episode.generate()  # the first call begins, and the second call waits for it
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            await self.tools.call(ToolCall("sub_agent", {}))

    (sample,) = run(Both, make_tasks(1))
    assert sample.stop_reason == "max_turns"
    assert sample.tool_counts == {"search/calls": 1, "sub_agent/calls": 1}


def test_a_lost_container_in_a_task_group_is_retried(run: Callable[..., list[Sample]]) -> None:
    attempts: list[int] = []

    class Lost(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            attempts.append(1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work())

        async def _work(self) -> None:
            if len(attempts) == 1:
                raise InfrastructureError("the container is lost")

    (sample,) = run(Lost(), make_tasks(1), max_attempts=2)
    assert (sample.stop_reason, len(attempts)) == ("done", 2)


def test_a_branch_that_was_left_behind_is_refused_slowly(
    policy: ScriptedGenerateFn, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it catches everything: the event loop has time for others, and one warning tells of the branch."""

    class Stubborn(AgentLoop):
        num_calls = 0
        has_to_end = False

        async def run(self, episode: Episode) -> None:
            await episode.generate()
            self.left = asyncio.create_task(self._repeat(episode.fork()))

        async def _repeat(self, branch: Episode) -> None:
            while not self.has_to_end:
                self.num_calls += 1
                with contextlib.suppress(BaseException):
                    await branch.generate(USER)

    agent = Stubborn()

    async def run() -> None:
        limits = RolloutLimits(100_000, max_turns=100_000)
        runner = RolloutRunner(agent, policy, renderer=renderer, limits=limits)
        groups = [group async for group in runner.run(make_tasks(1))]
        assert groups[0].samples[0].stop_reason == "done"
        before = agent.num_calls
        await asyncio.sleep(1.5)
        assert agent.num_calls - before <= 3
        agent.has_to_end = True
        await asyncio.wait({agent.left}, timeout=5.0)

    asyncio.run(asyncio.wait_for(run(), 30.0))
    assert caplog.text.count("one of its branches is still used") == 1


@pytest.mark.parametrize("method", ["add_messages", "append_text", "generate"])
def test_a_limit_that_any_method_raises_is_the_stop_reason(run: Callable[..., list[Sample]], method: str) -> None:
    class Catches(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            with contextlib.suppress(EpisodeStopped):
                if method == "append_text":
                    episode.append_text("x" * 500)
                elif method == "add_messages":
                    episode.add_messages([{"role": "user", "content": "x" * 500}])
                else:
                    await episode.generate([{"role": "user", "content": "x" * 500}])

    (sample,) = run(Catches(), make_tasks(1))
    assert (sample.stop_reason, sample.num_turns) == ("max_response_tokens", 1)


@pytest.mark.parametrize("run_dir", [True, False])
@pytest.mark.parametrize("wrong", [[math.nan], 1.0, ["a"], [1.0, 2.0], np.array(0.5), [10**400], {0.5}])
@pytest.mark.parametrize("fails", [False, True])
def test_wrong_rewards_on_the_graph_fail_only_their_sample(
    run: Callable[..., list[Sample]], tmp_path: Path, run_dir: bool, wrong: Any, fails: bool
) -> None:
    class SetsRewards(SingleTurnLoop):
        async def run(self, episode: Episode) -> None:
            await super().run(episode)
            if episode.task.id == "t1":
                assert episode.leaf is not None
                episode.graph.rewards[episode.leaf] = wrong
                if fails:
                    raise ZeroDivisionError

    samples = run(SetsRewards(), make_tasks(4), run_dir=tmp_path if run_dir else None, max_concurrency=1)
    errors = {sample.task.id: sample.error for sample in samples}
    failure = errors.pop("t1")
    assert errors == {"t0": None, "t2": None, "t3": None}
    assert failure is not None
    assert failure["type"] == ("ZeroDivisionError" if fails else "BadInputError")
    if run_dir:
        graph = load_session(tmp_path / "t1-0.jsonl")
        assert graph.last_termination is not None
        assert (graph.last_termination.stop_reason, graph.rewards) == ("error", {})


def test_a_sample_without_room_after_its_compaction_ends_with_its_trained_path(
    run: Callable[..., list[Sample]],
) -> None:
    seen = list[tuple[str, int]]()

    class Compacts(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            episode.adopt(episode.new_root([{"role": "user", "content": "summary"}]))
            await episode.generate()

    def reward(sample: Sample) -> float:
        seen.append((sample.text, sample.num_turns))
        return 1.0

    (sample,) = run(Compacts(), make_tasks(1), limits=RolloutLimits(max_response_tokens=len("hello")), reward=reward)
    assert (sample.stop_reason, sample.num_turns) == ("max_response_tokens", 1)
    assert [segment.leaf for segment in sample.segments] == [sample.leaf]
    assert seen == [(sample.text, 1)]
    assert sample.text.startswith("hel")


def test_a_failed_sample_with_wrong_rewards_keeps_its_turns(run: Callable[..., list[Sample]], tmp_path: Path) -> None:
    """Also when the run that resumes the sample has a reward and the first run had none."""

    class SetsReward(SingleTurnLoop):
        async def run(self, episode: Episode) -> None:
            await super().run(episode)
            if fails:
                episode.graph.rewards[0] = [math.nan]

    def reward(sample: Sample) -> float:
        if sample.task.id == "t1":
            sample.graph.rewards["x"] = [1.0]  # type: ignore[index]
        return 1.0

    fails = True
    (failed,) = run(SetsReward(), make_tasks(1))
    assert failed.error is not None
    assert (failed.stop_reason, failed.num_turns, len(failed.segments)) == ("error", 1, 1)
    fails = False
    run(SetsReward(), make_tasks(3), run_dir=tmp_path)
    samples = run(SetsReward(), make_tasks(3), run_dir=tmp_path, reward=reward)
    assert {sample.task.id: sample.error is None for sample in samples} == {"t0": True, "t1": False, "t2": True}
