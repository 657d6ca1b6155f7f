"""`RolloutRunner.steps`: endless tasks, filters, staleness, resumption, and failures. The policy is scripted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import make_tasks
from transformers import AutoTokenizer

from verl_server.agent import (
    AgentLoop,
    Episode,
    RolloutLimits,
    RolloutRunner,
    RolloutStep,
    Sample,
    SampleGroup,
    SingleTurnLoop,
    Task,
)
from verl_server.agent.steps.journal import StepJournal
from verl_server.errors import BadInputError, ServerBusyError
from verl_server.trajectory import ChatRenderer, load_session, to_batch
from verl_server.trajectory.recorder import close_locked, open_locked


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


class Policy:
    """Answers each request with one token when its gate is open. Counts requests, and the weights have a version."""

    def __init__(self) -> None:
        self.version = 0
        self.num_in_flight = self.num_requests = 0
        self.sessions: Counter[str] = Counter()
        self.closed: set[str] = set()
        """Beginnings of session ids whose requests are not answered."""
        self.changed = asyncio.Event()

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.num_requests += 1
        self.num_in_flight += 1
        self.sessions[session_id] += 1
        version = self.version
        try:
            await asyncio.sleep(0)
            while any(session_id.startswith(name) for name in self.closed):
                self.changed.clear()
                await self.changed.wait()
        finally:
            self.num_in_flight -= 1
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": str(version),
            "output_token_logprobs": [[-0.5, 5, None]],
        }
        return {"output_ids": [5], "meta_info": meta}

    def open(self) -> None:
        self.closed.clear()
        self.changed.set()


def endless_tasks(num_ids: int = 10**9, log: list[int] | None = None) -> Iterator[Task]:
    for number in itertools.count():
        if log is not None:
            log.append(number)
        yield Task(f"t{number % num_ids}", [{"role": "user", "content": f"add {number}"}], {"number": number})


def runner_of(policy: Any, renderer: ChatRenderer, **options: Any) -> RolloutRunner:
    agent = options.pop("agent", SingleTurnLoop())
    return RolloutRunner(agent, policy, renderer=renderer, limits=RolloutLimits(500), **options)


async def take(steps: AsyncIterator[RolloutStep], count: int) -> list[RolloutStep]:
    """The first steps. The iterator stays open."""
    return [await anext(steps) for _ in range(count)]


def numbers_of(step: RolloutStep) -> list[int]:
    return [group.task.data["number"] for group in step.groups]


async def settle() -> None:
    """Let everything happen that can happen."""
    for _ in range(200):
        await asyncio.sleep(0)


# -- steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_async", [False, True])
def test_endless_tasks_are_read_when_a_sample_can_run(renderer: ChatRenderer, as_async: bool) -> None:
    """Groups without variance are replaced. Tasks that repeat are tasks of their own."""
    read: list[int] = []

    async def as_asynchronous() -> AsyncIterator[Task]:
        for task in endless_tasks(3, read):
            yield task

    async def run() -> None:
        policy = Policy()
        runner = runner_of(
            policy,
            renderer,
            n=4,
            reward=lambda sample: float(sample.task.data["number"] % 2 and sample.index),
            group_filter="has_variance",
        )
        tasks = as_asynchronous() if as_async else endless_tasks(3, read)
        async with contextlib.aclosing(runner.steps(tasks, num_groups=5)) as steps:
            for index in range(4):
                step = await anext(steps)
                assert step.index == index
                assert len(step.groups) == 5
                assert all(number % 2 for number in numbers_of(step))
                assert step.metrics["reward/mean"] == 1.5
                assert step.metrics["groups/rejected"] >= 5
                assert step.metrics["groups/equal_rewards"] == 0
                await settle()
                assert policy.num_in_flight == 0, "samples of the next step were generated with the old weights"
        assert len(read) <= 20 + 20 + 5
        assert policy.sessions.keys() >= {"t1-1-0", "t0-3-3", "t1-7-2"}
        assert set(policy.sessions.values()) == {1}

    asyncio.run(run())


def test_tasks_of_run_may_be_endless(renderer: ChatRenderer) -> None:
    """Groups are yielded at once. If they are not taken, the tasks are not read."""
    read: list[int] = []

    async def run() -> None:
        runner = runner_of(Policy(), renderer, n=2, max_concurrency=4)
        async with contextlib.aclosing(runner.run(endless_tasks(log=read))) as groups:
            taken = [await anext(groups) for _ in range(50)]
            assert len({group.task.id for group in taken}) == 50
            await settle()
            assert len(read) <= 50 + 8
            num_read = len(read)
            await settle()
            assert len(read) == num_read

    asyncio.run(run())


def test_samples_of_later_steps_are_generated_while_the_trainer_trains(renderer: ChatRenderer) -> None:
    """No sample is older than `max_staleness`, and a slow sample is waited for and not lost."""

    async def run() -> None:
        policy = Policy()
        policy.closed = {"t1-1-"}
        runner = runner_of(policy, renderer, n=2, max_staleness=1)
        async with contextlib.aclosing(runner.steps(endless_tasks(), num_groups=3)) as steps:
            (first,) = await take(steps, 1)
            assert numbers_of(first) == [0, 2, 3]
            await settle()
            assert policy.num_requests >= 12, "no sample of the next step is generated while the trainer trains"
            policy.version = 1
            waiting = asyncio.ensure_future(take(steps, 1))
            await settle()
            assert not waiting.done(), "a group of step 0 would be two steps old in the next step"
            policy.open()
            (second,) = await waiting
            assert numbers_of(second)[0] == 1
            assert second.metrics["staleness/max"] == 1
            versions = {
                span.version for group in second.groups for sample in group.samples for span in spans_of(sample)
            }
            assert versions == {0}
            policy.version = 2
            for index in range(2, 6):
                (step,) = await take(steps, 1)
                oldest = min(span.version for sample in step.samples for span in spans_of(sample))
                assert oldest >= index - 1
                policy.version = index + 1
        assert set(policy.sessions.values()) == {1}, "a sample was generated twice"

    asyncio.run(run())


def spans_of(sample: Sample) -> list[Any]:
    return [span for node in sample.graph.nodes for span in node.spans]


class TwoTurns(AgentLoop):
    async def run(self, episode: Episode) -> None:
        await episode.generate(episode.task.messages)
        await episode.generate([{"role": "user", "content": "again"}])


def test_tasks_may_wait_for_the_steps(renderer: ChatRenderer) -> None:
    """The body of the loop feeds the tasks. A group that was left behind starts again without a new task."""

    async def run() -> None:
        policy, ready = Policy(), asyncio.Event()
        policy.closed = {"t2-2-"}

        async def tasks() -> AsyncIterator[Task]:
            for task in endless_tasks():
                if task.data["number"] == 3:
                    await ready.wait()
                yield task

        def keep(group: SampleGroup) -> bool:
            return bool(group.task.data["number"])

        runner = runner_of(policy, renderer, group_filter=keep)
        async with contextlib.aclosing(runner.steps(tasks(), num_groups=1, num_extra_groups=2)) as steps:
            assert numbers_of(await anext(steps)) == [1]
            assert numbers_of(await asyncio.wait_for(anext(steps), 10.0)) == [2]
            assert policy.sessions["t2-2.1-0"] == 1
            ready.set()
            assert numbers_of(await anext(steps)) == [3]

    asyncio.run(run())


def test_a_filter_that_ignores_its_cancellation_decides_nothing(renderer: ChatRenderer) -> None:
    """The groups in the filter are abandoned, and generated again."""
    examined: Counter[int] = Counter()

    async def keep(group: SampleGroup) -> bool:
        number = group.task.data["number"]
        examined[number] += 1
        if number in (1, 2) and examined[number] == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
        return bool(number != 1)

    async def run() -> list[list[int]]:
        runner = runner_of(Policy(), renderer, group_filter=keep)
        async with contextlib.aclosing(runner.steps(make_tasks_with_numbers(4), 1, num_extra_groups=2)) as steps:
            return [numbers_of(step) async for step in steps]

    delivered = [number for numbers in asyncio.run(asyncio.wait_for(run(), 20.0)) for number in numbers]
    assert sorted(delivered) == [0, 2, 3]
    assert examined[1] == 2


def make_tasks_with_numbers(count: int) -> list[Task]:
    return list(itertools.islice(endless_tasks(), count))


def test_the_last_step_has_the_groups_that_are_left(renderer: ChatRenderer) -> None:
    async def run() -> list[list[int]]:
        runner = runner_of(Policy(), renderer, max_staleness=1)
        tasks = list(itertools.islice(endless_tasks(), 7))
        return [numbers_of(step) async for step in runner.steps(tasks, num_groups=3)]

    assert asyncio.run(run()) == [[0, 1, 2], [3, 4, 5], [6]]
    assert asyncio.run(take_all(runner_of(Policy(), renderer).steps([], num_groups=3))) == []


async def take_all(steps: AsyncIterator[RolloutStep]) -> list[RolloutStep]:
    return [step async for step in steps]


def test_extra_groups_spare_the_wait_for_a_slow_group(renderer: ChatRenderer) -> None:
    """The group that is left over is started again in the next step, with new samples."""

    async def run() -> None:
        policy = Policy()
        policy.closed = {"t0-0-"}
        runner = runner_of(policy, renderer, n=2)
        async with contextlib.aclosing(runner.steps(endless_tasks(), num_groups=2, num_extra_groups=1)) as steps:
            (first,) = await take(steps, 1)
            assert numbers_of(first) == [1, 2]
            await settle()
            assert policy.num_in_flight == 0, "an abandoned sample still generates"
            (second,) = await take(steps, 1)
            assert 0 in numbers_of(second)
            assert policy.sessions["t0-0.1-1"] == 1

    asyncio.run(run())


def test_extra_groups_that_are_young_enough_belong_to_the_next_step(renderer: ChatRenderer) -> None:
    async def run() -> list[RolloutStep]:
        runner = runner_of(Policy(), renderer, max_staleness=1)
        async with contextlib.aclosing(runner.steps(endless_tasks(), num_groups=2, num_extra_groups=2)) as steps:
            return await take(steps, 2)

    first, second = asyncio.run(run())
    assert [numbers_of(step) for step in (first, second)] == [[0, 1], [2, 3]]
    assert first.metrics["groups/abandoned"] == 0
    assert second.metrics["staleness/max"] == 1


def test_the_batch_has_no_failed_sample_also_if_it_was_given_a_reward(renderer: ChatRenderer) -> None:
    class FailsOnce(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate(episode.task.messages)
            if episode.graph.session_id.endswith("-1"):
                raise RuntimeError("no")

    async def run() -> RolloutStep:
        runner = runner_of(Policy(), renderer, agent=FailsOnce(), n=2, reward=lambda sample: 1.0)
        (step,) = await take_all(runner.steps(make_tasks_with_numbers(1), num_groups=1))
        return step

    step = asyncio.run(run())
    finished, failed = step.samples
    assert (finished.error, failed.stop_reason) == (None, "error")
    assert failed.leaf is not None
    failed.graph.set_rewards(failed.leaf, [-1.0])
    assert failed.reward is None
    assert step.batch()["sample_index"].tolist() == [0]
    both = to_batch([finished.path, failed.path], renderer.pad_token_id)
    assert both["rm_scores"].sum(-1).tolist() == [1.0, -1.0]


def test_the_batch_has_all_trained_rows(renderer: ChatRenderer) -> None:
    class Forking(AgentLoop):
        async def run(self, episode: Episode) -> None:
            if episode.task.data["number"] == 1:
                raise RuntimeError("no")
            other = episode.fork()
            other.loss_weight = 0.25
            await other.generate()
            await episode.generate(episode.task.messages)

    async def run() -> RolloutStep:
        runner = runner_of(Policy(), renderer, agent=Forking(), n=2, reward=lambda sample: float(sample.index))
        tasks = list(itertools.islice(endless_tasks(), 3))
        (step,) = await take_all(runner.steps(tasks, num_groups=3))
        return step

    step = asyncio.run(run())
    assert [group.task.id for group in step.groups] == ["t0", "t2"]
    batch = step.batch()
    assert batch["group_index"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch["sample_index"].tolist() == [0, 0, 1, 1] * 2
    assert sorted(set(batch["loss_weight"].tolist())) == [0.25, 1.0]
    uids = list(batch["uid"])
    assert len(set(uids)) == 2
    assert len(set(uids[:4])) == 1
    assert batch["rm_scores"].sum(-1).tolist() == [0.0, 0.0, 1.0, 1.0] * 2
    assert batch["input_ids"][batch["attention_mask"] == 0].unique().tolist() in ([], [renderer.pad_token_id])
    assert step.metrics["groups/failed"] == 1
    assert step.metrics["turns/mean"] == 2.0
    fixed = step.batch(prompt_length=100, response_length=10)
    assert (fixed["prompts"].shape, fixed["responses"].shape) == ((8, 100), (8, 10))
    assert fixed["reward"].tolist() == batch["reward"].tolist()
    with pytest.raises(BadInputError, match=r"the prompt of path 0 .* but prompt_length is 1;"):
        step.batch(prompt_length=1)


# -- failures ----------------------------------------------------------------------------------------


def test_a_policy_that_always_fails_ends_the_steps(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The tasks are not used up, and a later run tries them again."""
    read: list[int] = []

    async def refuse(**request: Any) -> Any:
        raise ConnectionError("no fleet")

    async def run() -> None:
        runner = runner_of(refuse, renderer, n=8, run_dir=tmp_path)
        await anext(runner.steps(endless_tasks(log=read), num_groups=4))

    with pytest.raises(ConnectionError, match="no fleet") as raised:
        asyncio.run(run())
    assert "groups have failed, the last with this exception" in raised.value.__notes__[-1]
    assert "start_step=0" in raised.value.__notes__[-1]
    assert len(read) <= 20

    async def run_again() -> RolloutStep:
        async with contextlib.aclosing(
            runner_of(Policy(), renderer, n=8, run_dir=tmp_path).steps(endless_tasks(), num_groups=4)
        ) as steps:
            return await anext(steps)

    assert numbers_of(asyncio.run(run_again())) == [0, 1, 2, 3]


def test_many_tasks_that_fail_at_once_do_not_end_a_healthy_run(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures finish first. Healthy samples still run, so the failures are those of their tasks."""

    class SomeFail(SingleTurnLoop):
        async def run(self, episode: Episode) -> None:
            if episode.task.data["number"] < 12:
                raise RuntimeError("this task is broken")
            await super().run(episode)

    async def run() -> None:
        policy = Policy()
        policy.closed = {"t"}
        runner = runner_of(policy, renderer, agent=SomeFail(), n=8)
        async with contextlib.aclosing(runner.steps(endless_tasks(), num_groups=20)) as steps:
            waiting = asyncio.ensure_future(take(steps, 1))
            await settle()
            assert not waiting.done()
            policy.open()
            (step,) = await waiting
        assert numbers_of(step) == list(range(12, 32))
        assert step.metrics["groups/failed"] == 12

    asyncio.run(run())
    assert (
        "all samples of 12 groups have failed and are not in the step; the last exception: RuntimeError" in caplog.text
    )


def test_a_filter_that_rejects_everything_is_told(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    def run(tasks: Any, num_groups: int = 2, **options: Any) -> Any:
        runner = runner_of(Policy(), renderer, n=2, reward=lambda sample: 0.25, **options)
        return asyncio.run(take_all(runner.steps(tasks, num_groups)))

    assert run(make_tasks(40), group_filter="has_variance") == []
    first, second, last = [record.getMessage() for record in caplog.records]
    assert (
        "group_filter has rejected 16 groups one after the other, whose mean reward is 0.25; the run goes on" in first
    )
    assert "rejected 32 groups" in second
    assert "rejected 40 groups one after the other, whose mean reward is 0.25; the run ends without a step" in last
    for group_filter in (lambda group: None, lambda group: group.samples):
        with pytest.raises(BadInputError, match=r"group_filter returned .* for task 't0'; it must return True or"):
            run(make_tasks(2), group_filter=group_filter)


def test_a_body_that_blocks_the_event_loop_is_told(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    async def run(max_staleness: int, sleep: Callable[[], Any]) -> None:
        runner = runner_of(Policy(), renderer, max_staleness=max_staleness, reward=lambda sample: 1.0)
        async for _ in runner.steps(make_tasks(6), 2):
            result = sleep()
            if result is not None:
                await result

    asyncio.run(run(1, lambda: asyncio.sleep(1.1)))
    asyncio.run(run(0, lambda: time.sleep(1.1)))
    assert not caplog.records
    asyncio.run(run(1, lambda: time.sleep(1.1)))
    (record,) = caplog.records
    assert "has blocked the event loop for 1.1 s" in record.getMessage()


def test_few_tasks_that_all_fail_raise_their_exception(renderer: ChatRenderer) -> None:
    def fail(sample: Sample) -> float:
        raise ZeroDivisionError("in the reward")

    runner = runner_of(Policy(), renderer, reward=fail)
    with pytest.raises(ZeroDivisionError, match="in the reward"):
        asyncio.run(take_all(runner.steps(make_tasks(2), num_groups=4)))


def test_errors_of_the_caller_end_the_steps(renderer: ChatRenderer) -> None:
    def failing_tasks() -> Iterator[Any]:
        yield from make_tasks(1)
        raise OSError("the data set is gone")

    def wrong_tasks() -> Iterator[Any]:
        yield from make_tasks(1)
        yield {"id": "x"}

    def keep(group: SampleGroup) -> bool:
        raise LookupError("in the filter")

    for tasks, options, expected in (
        (failing_tasks(), {}, OSError),
        (wrong_tasks(), {}, BadInputError),
        (make_tasks(1), {"group_filter": keep}, LookupError),
    ):
        with pytest.raises(expected):
            asyncio.run(take_all(runner_of(Policy(), renderer, **options).steps(tasks, num_groups=4)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tasks": [], "num_groups": 0}, "num_groups must be greater than or equal to 1, got 0"),
        (
            {"tasks": [], "num_groups": 1, "num_extra_groups": -1},
            "num_extra_groups must be .* equal to 0, got -1",
        ),
        ({"tasks": [], "num_groups": 1, "start_step": -1}, "start_step must be greater than or equal to 0, got -1"),
    ]
    for arguments, message in wrong:
        with pytest.raises(BadInputError, match=message):
            runner_of(Policy(), renderer).steps(**arguments)


# -- resumption --------------------------------------------------------------------------------------


def test_steps_continue_after_a_crash(renderer: ChatRenderer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Recorded steps are yielded again, and samples that had begun continue. Nothing is sampled twice."""

    async def run(policy: Policy, count: int, **options: Any) -> list[RolloutStep]:
        runner = runner_of(policy, renderer, agent=TwoTurns(), n=2, max_staleness=1, run_dir=tmp_path)
        async with contextlib.aclosing(runner.steps(endless_tasks(4), num_groups=3, **options)) as steps:
            taken = await take(steps, count)
            await settle()
            return taken

    async def crash(count: int, closed: str, **options: Any) -> tuple[list[RolloutStep], Policy]:
        policy = Policy()
        policy.closed = {closed}
        return await run(policy, count, **options), policy

    first, _ = asyncio.run(crash(1, "t1-5-"))
    numbers = numbers_of(first[0])  # groups that have begun for the next step may be faster
    assert set(numbers) < set(range(5))
    again, policy = asyncio.run(crash(1, "t"))
    assert numbers_of(again[0]) == numbers
    nodes = [sample.graph.nodes for sample in first[0].samples]
    assert [sample.graph.nodes for sample in again[0].samples] == nodes
    assert policy.sessions.keys() == {"t1-5-0", "t1-5-1"}
    (warning,) = [message for message in caplog.messages if "the steps 0 to 0 are recorded in run_dir" in message]
    assert "pass start_step=1" in warning

    later, policy = asyncio.run(crash(3, "none", start_step=1))
    assert set(range(5)) - set(numbers) < set(numbers_of(later[0]))
    assert later[0].metrics["staleness/max"] == 1
    assert not {int(session.split("-")[1]) for session in policy.sessions} & set(range(5))
    delivered = [number for step in (*first, *later) for number in numbers_of(step)]
    assert sorted(delivered) == list(range(12))
    for path in sorted(tmp_path.glob("step-*/*.jsonl")):
        graph = load_session(path)
        assert len(graph.leaves) <= 1, "a turn was sampled twice"


def test_a_recorded_step_has_the_same_samples(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Failed samples stay failed. A record that was removed is missed."""

    class SomeFail(SingleTurnLoop):
        async def run(self, episode: Episode) -> None:
            if episode.task.data["number"] == 0 and failing:
                raise RuntimeError("before the first prompt")
            await super().run(episode)

    async def run(count: int, start_step: int = 0) -> list[RolloutStep]:
        def reward(sample: Sample) -> float:
            if sample.index == 1 and failing:
                raise RuntimeError("in the reward")
            return 1.0

        runner = runner_of(Policy(), renderer, agent=SomeFail(), n=3, reward=reward, max_staleness=1, run_dir=tmp_path)
        async with contextlib.aclosing(
            runner.steps(endless_tasks(), 2, num_extra_groups=1, start_step=start_step)
        ) as steps:
            return await take(steps, count)

    failing = True
    first = asyncio.run(run(2))
    failing = False
    again = asyncio.run(run(2))
    for before, after in zip(first, again, strict=True):
        assert numbers_of(before) == numbers_of(after)
        assert [sample.reward for sample in before.samples] == [sample.reward for sample in after.samples]
        assert [sample.error is None for sample in before.samples] == [sample.error is None for sample in after.samples]
        assert before.metrics["samples/failed"] == after.metrics["samples/failed"] == 2
    name = first[1].samples[-1].graph.session_id  # which of the additional groups are in a step depends on their speed
    (path,) = tmp_path.glob(f"step-*/{name}.jsonl")
    path.unlink()
    with pytest.raises(BadInputError, match=f"the file of its session '{name}' is missing"):
        asyncio.run(run(1, start_step=1))


def test_a_group_that_fails_while_the_caller_uses_another_ends_the_run(renderer: ChatRenderer) -> None:
    """The last group fails when nobody waits for groups. Also with an exception that is no `Exception`."""

    class Stop(BaseException):
        pass

    for failure in (ValueError("t1"), Stop("t1")):

        async def keep(group: SampleGroup) -> bool:
            if group.task.id == "t1":
                await asyncio.sleep(0.1)
                raise failure  # noqa: B023
            return True

        async def run() -> None:
            async for _ in runner_of(Policy(), renderer, group_filter=keep).run(make_tasks(2)):
                await asyncio.sleep(0.4)

        with pytest.raises(type(failure), match="t1"):
            asyncio.run(run())


def test_a_journal_that_cannot_be_written_while_the_caller_trains_ends_the_run(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    """The disk is full when the last group is rejected, and nobody waits for groups."""
    trains = asyncio.Event()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def keep(group: SampleGroup) -> bool:
        if group.task.id == "t0":
            return True
        await trains.wait()
        size = (tmp_path / "steps.journal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # the next line of the journal does not fit
        return False

    async def run() -> None:
        runner = runner_of(Policy(), renderer, group_filter=keep, max_staleness=3, run_dir=tmp_path)
        async for _ in runner.steps(make_tasks(2), 1):
            await settle()
            trains.set()
            await settle()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        with pytest.raises(OSError, match="File too large"):
            asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("method", ["run", "steps"])
def test_tasks_that_raise_no_exception_class_end_the_run(renderer: ChatRenderer, method: str) -> None:
    class Stop(BaseException):
        pass

    def tasks() -> Iterator[Task]:
        yield from make_tasks(1)
        raise Stop

    async def run() -> None:
        runner = runner_of(Policy(), renderer)
        groups: Any = runner.run(tasks()) if method == "run" else runner.steps(tasks(), 2)
        async for _ in groups:
            pass

    with pytest.raises(Stop):
        asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("stops_at_limit", [False, True])
def test_a_step_is_free_when_the_caller_drops_it(renderer: ChatRenderer, stops_at_limit: bool) -> None:
    """While the next step is generated, the memory of the last one is free, also without the garbage collector."""
    alive = list[int]()

    async def run() -> None:
        before: list[weakref.ref[Any]] = []

        class Looks(SingleTurnLoop):
            async def run(self, episode: Episode) -> None:
                alive.append(sum(graph() is not None for graph in before))
                await super().run(episode)
                if stops_at_limit:
                    await episode.generate([{"role": "user", "content": "x" * 10_000}])

        runner = runner_of(Policy(), renderer, agent=Looks())
        async with contextlib.aclosing(runner.steps(endless_tasks(), 2)) as steps:
            async for step in steps:
                number, before[:] = step.index, [weakref.ref(sample.graph) for sample in step.samples]
                reasons.update(sample.stop_reason for sample in step.samples)
                del step
                if number == 2:
                    break

    reasons = set[str]()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
    assert reasons == {"max_response_tokens" if stops_at_limit else "done"}
    assert len(alive) >= 6
    assert set(alive) == {0}


def test_forked_processes_do_not_keep_the_locks(renderer: ChatRenderer, tmp_path: Path) -> None:
    """A reward in a pool of processes: their descriptors would hold the locks after this process has ended."""

    async def run(directory: Path) -> list[str | None]:
        def reward(sample: Sample) -> float:
            return pool.submit(abs, -1.0).result()

        groups = runner_of(Policy(), renderer, reward=reward, run_dir=directory).run(make_tasks(2))
        return [
            None if sample.error is None else str(sample.error) async for group in groups for sample in group.samples
        ]

    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        assert set(asyncio.run(run(tmp_path))) == {None}
        assert set(asyncio.run(run(tmp_path))) == {None}


def test_locks_are_given_up_whenever_another_thread_forks(tmp_path: Path) -> None:
    """Also between the opening of a file and its lock, and between the close and the start of a command."""
    stopped, failures, repeats = threading.Event(), list[Exception](), [0]

    def open_and_close() -> None:
        path = tmp_path / threading.current_thread().name
        while not stopped.is_set():
            try:
                close_locked(open_locked(path, "busy"))
                repeats[0] += 1
            except ServerBusyError as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    processes = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(50)]
    started = []
    for thread in threads:
        thread.start()
    try:
        for process in processes:
            process.start()
            started.append(process)
            subprocess.run(["true"], check=True, timeout=20)
    finally:
        stopped.set()
        for process in started:
            process.kill()
            process.join()
            process.close()
        for thread in threads:
            thread.join(20)
    assert repeats[0] > 100
    assert not failures


def test_a_process_that_is_forked_while_a_step_is_written_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The journal has a second descriptor while the step is written to the disk. The trainer is killed meanwhile."""
    script = """
import os, sys, threading, time
from pathlib import Path
from verl_server.agent.steps.journal import StepJournal

writes, write = threading.Event(), os.fdatasync

def write_slowly(fd):
    writes.set()
    time.sleep(60)
    write(fd)

os.fdatasync = write_slowly
journal = StepJournal(Path(sys.argv[1]), 0, 1)
journal.write_started(0, 0, "a")
threading.Thread(target=journal.write_step, args=(0, [0]), daemon=True).start()
assert writes.wait(20)
reading, writing = os.pipe()
if (child := os.fork()) == 0:
    os.write(writing, b"x")
    os.read(0, 1)
    os._exit(0)
os.read(reading, 1)  # the child has given up its locks
print(child, flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        trainer.kill()
        trainer.wait(20)
        os.kill(child, 0)  # it still runs
        StepJournal(tmp_path, 0, 1).close()
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_forked_process_without_a_free_descriptor_gives_up_the_locks(tmp_path: Path) -> None:
    script = """
import os, resource, sys, threading
from pathlib import Path
from verl_server.trajectory.recorder import open_locked

open_locked(Path(sys.argv[1]), "busy")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
if (child := os.fork()) == 0:
    for fd in taken:
        os.close(fd)
    opened = threading.Event()
    other = Path(sys.argv[1] + "-2")
    threading.Thread(target=lambda: (open_locked(other, "busy"), opened.set()), daemon=True).start()
    print("opened" if opened.wait(20) else "blocked", flush=True)
    os.read(0, 1)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "opened\n"
        assert trainer.wait(20) == -signal.SIGKILL
        close_locked(open_locked(tmp_path / "a", "busy"))
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_run_dir_belongs_to_one_kind_of_run(renderer: ChatRenderer, tmp_path: Path) -> None:
    asyncio.run(take_all(runner_of(Policy(), renderer, run_dir=tmp_path / "a").steps(make_tasks(1), 1)))
    with pytest.raises(BadInputError, match="belongs to the steps of a training run; pass another run_dir"):
        runner_of(Policy(), renderer, run_dir=tmp_path / "a").run(make_tasks(1))

    async def run() -> None:
        async for _ in runner_of(Policy(), renderer, run_dir=tmp_path / "b").run(make_tasks(1)):
            pass

    asyncio.run(run())
    with pytest.raises(BadInputError, match="belongs to a call of `run`; pass another run_dir"):
        runner_of(Policy(), renderer, run_dir=tmp_path / "b").steps(make_tasks(1), 1)


def test_a_run_that_does_not_fit_is_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    def steps(tasks: Any = None, num_groups: int = 2, start_step: int = 0, **options: Any) -> Any:
        runner = runner_of(Policy(), renderer, run_dir=tmp_path, **options)
        return runner.steps(endless_tasks() if tasks is None else tasks, num_groups, start_step=start_step)

    async def run(count: int, **options: Any) -> None:
        async with contextlib.aclosing(steps(**options)) as opened:
            await take(opened, count)
            with pytest.raises(ServerBusyError, match=r"uses the run_dir.* contextlib.aclosing"):
                await anext(steps(**options))

    asyncio.run(run(2, start_step=3))
    other = (Task(f"x{number}", [{"role": "user", "content": "y"}]) for number in itertools.count())
    for options, expected in (
        ({"start_step": 2}, "begins with step 3 and has 2 steps, so start_step must be a number from 3 to 5, got 2"),
        ({"start_step": 6}, "begins with step 3 and has 2 steps, so start_step must be a number from 3 to 5, got 6"),
        ({"start_step": 5, "tasks": other}, "task 0 is 'x0', but 't0' in the run that is recorded"),
        ({"start_step": 4, "tasks": make_tasks(2)}, "there are 2 tasks, but the run that is recorded"),
        ({"start_step": 4, "agent": TwoTurns()}, "was recorded with other inputs: a different agent loop"),
        ({"start_step": 4, "n": 2}, "is of a run with n=1, so it cannot continue with n=2"),
        ({"start_step": 5, "tasks": iter([Task("../x", [{"role": "user", "content": "y"}])])}, "task 0 is '../x'"),
    ):
        with pytest.raises(BadInputError, match=expected):
            asyncio.run(run(1, **options))


def test_a_run_that_had_no_step_begins_with_its_first_step_again(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def start(start_step: int) -> None:
        policy = Policy()
        policy.closed = {"t"}
        async with contextlib.aclosing(
            runner_of(policy, renderer, run_dir=tmp_path).steps(endless_tasks(), 2, start_step=start_step)
        ) as steps:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(steps), 0.3)

    asyncio.run(start(5))
    with pytest.raises(BadInputError, match=r"begins with step 5 and has 0 steps, .* from 5 to 5, got 3"):
        asyncio.run(start(3))


def test_groups_continue_with_the_weights_of_their_step(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The checkpoint is one step older than the crash: while it trains again, nothing generates with its weights."""

    async def run(policy: Policy, count: int, closed: str) -> RolloutStep:
        policy.closed = {closed}
        async with contextlib.aclosing(
            runner_of(policy, renderer, run_dir=tmp_path).steps(endless_tasks(), 2)
        ) as steps:
            *_, last = await take(steps, count)
            if closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(steps), 0.3)
            return last

    asyncio.run(run(Policy(), 1, "t2"))  # the groups 2 and 3 of step 1 have begun

    async def again() -> None:
        policy = Policy()
        async with contextlib.aclosing(
            runner_of(policy, renderer, run_dir=tmp_path).steps(endless_tasks(), 2)
        ) as steps:
            assert numbers_of(await anext(steps)) == [0, 1]
            await settle()
            assert policy.num_requests == 0
            policy.version = 1
            step = await anext(steps)
            assert numbers_of(step) == [2, 3]
            assert spans_of(step.samples[0])[0].version == 1

    asyncio.run(again())


def test_a_task_that_arrives_late_waits_for_the_weights(renderer: ChatRenderer) -> None:
    """Its step was delivered while the task was being read."""

    async def run() -> None:
        policy, arrives = Policy(), asyncio.Event()

        async def tasks() -> AsyncIterator[Task]:
            for task in endless_tasks():
                if task.data["number"] == 2:
                    await arrives.wait()
                yield task

        async with contextlib.aclosing(
            runner_of(policy, renderer).steps(tasks(), num_groups=2, num_extra_groups=1)
        ) as steps:
            assert numbers_of(await anext(steps)) == [0, 1]
            arrives.set()
            await settle()
            assert policy.num_requests == 2
            step = await anext(steps)
            assert step.metrics["staleness/max"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["run", "steps"])
def test_code_of_users_that_cancels_itself_is_an_error(renderer: ChatRenderer, kind: str) -> None:
    async def cancel() -> Any:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    async def keep(group: SampleGroup) -> bool:
        return bool(await cancel())

    async def tasks() -> AsyncIterator[Task]:
        yield make_tasks(1)[0]
        await cancel()

    async def run(tasks: Any, group_filter: Any) -> None:
        runner = runner_of(Policy(), renderer, group_filter=group_filter)
        iterator: Any = runner.run(tasks) if kind == "run" else runner.steps(tasks, 3)
        async for _ in iterator:
            pass

    for arguments in ((make_tasks(2), keep), (tasks(), None)):
        with pytest.raises(RuntimeError, match="awaited something that was cancelled"):
            asyncio.run(asyncio.wait_for(run(*arguments), 20.0))


@pytest.mark.parametrize("kind", ["run", "steps"])
def test_code_of_users_that_never_ends_does_not_block_the_end(
    renderer: ChatRenderer, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent loop, a filter and tasks that ignore each cancellation are left running, and a warning names them."""
    monkeypatch.setattr("verl_server.agent.user_code.END_TIMEOUT_S", 0.2)
    monkeypatch.setattr("verl_server.agent.steps.groups.END_TIMEOUT_S", 0.2)
    released = asyncio.Event()  # of the only event loop of this test

    async def ignore_cancellation() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    class Stubborn(SingleTurnLoop):
        async def run(self, episode: Episode) -> None:
            await super().run(episode)
            if episode.task.id == "t1":
                await ignore_cancellation()

    async def keep(group: SampleGroup) -> bool:
        if group.task.id == "t1":
            await ignore_cancellation()
        return True

    async def tasks() -> AsyncIterator[Task]:
        yield make_tasks(1)[0]
        await ignore_cancellation()

    async def close(tasks: Any, options: dict[str, Any]) -> None:
        released.clear()
        runner = runner_of(Policy(), renderer, max_staleness=1, **options)
        groups: Any = runner.run(tasks) if kind == "run" else runner.steps(tasks, 1)
        await anext(groups)
        await settle()
        closing = asyncio.create_task(groups.aclose())
        try:
            done, _ = await asyncio.wait({closing}, timeout=10.0)
            assert done
        finally:
            released.set()
            await closing

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (make_tasks(2), {"agent": Stubborn()}, "the agent loop of task 't1'"),
        (make_tasks(2), {"group_filter": keep}, "the group of task 't1'"),
        (tasks(), {}, "the iterator of the tasks"),
    ]

    async def close_all() -> None:
        for source, options, name in cases:
            caplog.clear()
            await close(source, options)
            assert name in caplog.text
            assert "has ignored its cancellation" in caplog.text

    asyncio.run(close_all())


@pytest.mark.parametrize("kind", ["run", "steps"])
def test_tasks_that_swallow_their_cancellation_do_not_block_the_end(renderer: ChatRenderer, kind: str) -> None:
    async def tasks() -> AsyncIterator[Task]:
        for task in make_tasks(2):
            yield task
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

    async def run() -> None:
        runner = runner_of(Policy(), renderer)
        iterator: Any = runner.run(tasks()) if kind == "run" else runner.steps(tasks(), 2)
        async with contextlib.aclosing(iterator):
            await anext(iterator)

    asyncio.run(asyncio.wait_for(run(), 20.0))


def test_groups_in_a_slow_filter_count(renderer: ChatRenderer) -> None:
    """A judge that does not answer: the tasks are not used up."""
    read: list[int] = []

    async def keep(group: SampleGroup) -> bool:
        await asyncio.sleep(600)
        return True

    async def run() -> None:
        runner = runner_of(Policy(), renderer, group_filter=keep, max_concurrency=4)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(runner.run(endless_tasks(log=read))), 0.5)

    asyncio.run(run())
    assert len(read) <= 13


def test_a_group_that_finishes_when_the_tasks_fail_is_yielded(renderer: ChatRenderer) -> None:
    def failing_tasks() -> Iterator[Task]:
        yield from make_tasks(2)
        time.sleep(0.2)
        raise OSError("the data set is gone")

    async def run() -> int:
        count = 0
        with contextlib.suppress(OSError):
            async for _ in runner_of(Policy(), renderer, max_concurrency=2).run(failing_tasks()):
                count += 1
        return count

    assert asyncio.run(run()) >= 1
