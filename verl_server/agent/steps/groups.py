"""`GroupRunner`: runs the samples of groups, as many at a time as the concurrency of the runner allows."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from opentelemetry.trace import StatusCode

from verl_server.agent.limits import Phase, measure, measure_sample
from verl_server.agent.sample_runner import Outcome, SampleRunner, SampleSession
from verl_server.agent.samples import SampleGroup, Task
from verl_server.agent.user_code import END_TIMEOUT_S, USER_FAILURES, await_to_its_end, raise_noted, wait_until_done
from verl_server.errors import BadInputError
from verl_server.tracing import span
from verl_server.trajectory.recorder import has_recorded_nodes, session_file
from verl_server.validation import is_bool

logger = logging.getLogger(__name__)


# -- Group runner -----------------------------------------------------------------------------------


@dataclass
class RunnerCounters:
    """Counters of a runner since it was constructed."""

    num_running_samples: int = 0
    """Number of samples whose environment is set up, whose episode runs or whose rewards are computed."""
    num_finished_samples: int = 0
    """Number of finished samples, including failed samples."""
    num_failed_samples: int = 0
    """Number of finished samples with the stop reason `error`."""
    num_turns: int = 0
    """Number of replies of the engine, also of those that a weight update aborted."""
    num_sampled_tokens: int = 0
    """Number of tokens in these replies."""


def session_ids(group: str, n: int) -> list[str]:
    """The ids of the sessions of the samples of a group, after which their files are named."""
    return [f"{group}-{index}" for index in range(n)]


@dataclass(frozen=True)
class GroupRequest:
    """A group that is started."""

    number: int
    """Number of the task, see `TaskSource`."""
    task: Task
    name: str
    """Name of the group. The session of sample 3 is called `NAME-3`."""
    run_dir: Path | None
    """Folder of the recorded sessions. None keeps the sessions in memory."""
    is_load_only: bool = False
    """Whether the samples are recorded, and are only loaded."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose samples have finished."""

    request: GroupRequest
    group: SampleGroup
    failure: Exception | None
    """Exception of the first failed sample. None if at least one sample did not fail."""


class GroupRunner:
    """Runs groups of `n` samples for one iterator of a `RolloutRunner`.

    `max_concurrency`: maximum number of episodes that run at a time. With an `Environment` or a reward, at most twice
    as many samples are active, including those in setup, rewards and teardown.
    """

    def __init__(self, samples: SampleRunner, counters: RunnerCounters, n: int, max_concurrency: int) -> None:
        self.n = n
        has_other_phases = samples.agent.environment is not None or bool(samples.rewards)
        self.max_admitted_samples = max_concurrency * (2 if has_other_phases else 1)
        """Maximum number of active samples: in setup, episode, rewards or teardown."""
        self._samples, self._counters = samples, counters
        self.on_sample: Callable[[], None] = lambda: None
        """Called when a sample has finished or was cancelled."""
        self._admission, self._slots = asyncio.Semaphore(self.max_admitted_samples), asyncio.Semaphore(max_concurrency)
        self.num_unfinished_samples = 0
        """Number of samples of started groups that have not finished."""
        self._digests_of = samples.input_digests()

    async def run(self, request: GroupRequest) -> FinishedGroup:
        """Run the samples of a group. Raises the exception of a sample that cannot be recorded."""
        ids = session_ids(request.name, self.n)
        if request.is_load_only and request.run_dir is not None:
            _require_files(request.run_dir, ids)
        inputs = {} if request.run_dir is None else self._digests_of(request.task)
        self.num_unfinished_samples += self.n
        running = [
            asyncio.create_task(self._run_sample(request, index, session_id, inputs))
            for index, session_id in enumerate(ids)
        ]
        for sample_task in running:
            sample_task.add_done_callback(self._count_finished)  # also of a sample that is cancelled before it begins
        try:
            outcomes = await asyncio.gather(*running)
        except BaseException:  # a sample cannot be recorded, for example: cancel the other samples of the group
            for sample_task in running:
                sample_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        exceptions = [exception for _, exception in outcomes if exception is not None]
        group = SampleGroup(request.task, [sample for sample, _ in outcomes])
        return FinishedGroup(request, group, exceptions[0] if len(exceptions) == self.n else None)

    async def _run_sample(
        self, request: GroupRequest, index: int, session_id: str, inputs: Mapping[str, str]
    ) -> Outcome:
        session = SampleSession(session_id, request.run_dir, inputs, request.is_load_only)
        attributes: dict[str, str | int] = {"verl_server.task": request.task.id, "verl_server.sample_index": index}
        with measure_sample() as figures, span("sample", attributes, is_root=True) as opened:
            with measure(Phase.QUEUE):
                await self._admission.acquire()
            self._counters.num_running_samples += 1
            try:
                sample, exception = await self._samples.run(request.task.copy(), index, session, self._slots)
            finally:
                self._counters.num_running_samples -= 1
                self._admission.release()
            opened.set_attribute("verl_server.stop_reason", sample.stop_reason)
            if exception is not None:
                opened.record_exception(exception)
                opened.set_status(StatusCode.ERROR)
            if sample.reward is not None:
                opened.set_attribute("verl_server.reward", sample.reward)
        self._counters.num_finished_samples += 1
        self._counters.num_failed_samples += sample.stop_reason == "error"
        return dataclasses.replace(sample, times=figures.times, tool_counts=dict(figures.tool_counts)), exception

    def _count_finished(self, sample_task: asyncio.Task[object]) -> None:
        self.num_unfinished_samples -= 1
        self.on_sample()


def _require_files(run_dir: Path, ids: Sequence[str]) -> None:
    """Raise BadInputError if the record of a sample is missing. `ids`: those of the sessions of the samples."""
    for session_id in ids:
        if not session_file(run_dir, session_id).exists():
            raise BadInputError(
                f"the step is recorded, but the file of its session {session_id!r} is missing in {run_dir}; pass a "
                "later start_step, or another run_dir. Only folders of steps before start_step - max_staleness can be "
                "removed",
                argument="run_dir",
            )


# -- Run checker ------------------------------------------------------------------------------------
# `RunChecker`: finds tasks that cannot be part of a run before their samples start.


def session_paths(run_dir: Path, number: int, task: Task, ids: Sequence[str]) -> list[Path]:
    """The files of sessions of a task. Raises BadInputError that names the task if an id is no file name."""
    try:
        return [session_file(run_dir, session_id) for session_id in ids]
    except BadInputError as error:
        raise BadInputError(f"tasks[{number}], {task.id!r:.250}: {error.message}", **error.details) from None


class RunChecker:
    """Checks the tasks of one call of `RolloutRunner.run`. `digests_of`: digests of the inputs of a task's samples."""

    def __init__(self, run_dir: Path | None, n: int, digests_of: Callable[[Task], Mapping[str, str]]) -> None:
        self._run_dir, self._n, self._digests_of = run_dir, n, digests_of
        self._numbers: dict[str, int] = {}
        """Number of each task by its id."""
        self._has_warned = False

    def check(self, number: int, task: Task) -> None:
        """Check a task before its samples start. A task is checked once.

        Raises BadInputError for an id that an earlier task has or that is no file name, and for a sample that is
        recorded with other inputs.
        """
        if (earlier := self._numbers.get(task.id)) == number:
            return
        if earlier is not None:
            raise BadInputError(
                f"tasks {earlier} and {number} have the id {task.id!r}; task ids must be unique. For several samples "
                "of one task, pass n to the runner; `RolloutRunner.steps` also takes tasks that repeat"
            )
        self._numbers[task.id] = number
        if self._run_dir is None:
            return
        paths = session_paths(self._run_dir, number, task, session_ids(task.id, self._n))
        digests = self._digests_of(task)
        if any([has_recorded_nodes(path, digests) for path in paths]) and not self._has_warned:  # all are compared
            self._has_warned = True
            logger.warning(
                "samples of this run are recorded in run_dir %s: finished samples are loaded, and the others "
                "continue. If this is another run, for example the next training step, pass another run_dir",
                self._run_dir,
            )


# -- Group filter -----------------------------------------------------------------------------------
# Filters that decide which groups of samples are used.

GroupFilter = Callable[[SampleGroup], bool | Awaitable[bool]]
"""Decides whether a group is used. May be a coroutine function."""


def has_variance(group: SampleGroup) -> bool:
    """Whether the rewards of the samples that did not fail differ. If not, their advantages in the group are 0."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) > 1


async def is_kept(group_filter: GroupFilter | None, group: SampleGroup) -> bool:
    """Whether the filter keeps a group. Raises the exceptions of the filter."""
    if group_filter is None:
        return True
    task_id = group.task.id
    note = f"raised by group_filter for the group of task {task_id!r}; failed samples have the reward None"
    try:
        kept = group_filter(group)
        if inspect.isawaitable(kept):
            name = f"group_filter, called with the group of task {task_id!r},"
            kept = await await_to_its_end(asyncio.ensure_future(kept), name)
        kept = bool(kept) if getattr(kept, "shape", None) == () else kept  # an array or a tensor
    except USER_FAILURES as error:
        raise_noted(error, note)
    if not is_bool(kept):  # None would reject all groups, and a list of samples would keep the others, too
        raise BadInputError(f"group_filter returned {kept!r:.80} for task {task_id!r}; it must return True or False")
    return bool(kept)


# -- Task source ------------------------------------------------------------------------------------
# `TaskSource`: reads tasks one at a time. The number of a task is its position in the data, from 0.

Tasks = Iterable[Task] | AsyncIterable[Task]
"""Tasks of a run. They may be endless, and are read when a sample can start."""
NUM_READ_PER_PAUSE = 1000
"""Number of tasks that are read before other tasks of the event loop run."""


def require_task(task: object, number: int) -> Task:
    """`task`. Raises BadInputError if it is no task."""
    if not isinstance(task, Task):
        from_row = 'Task(str(number), row["messages"], row)'
        raise BadInputError(f"tasks[{number}] must be a Task, got {type(task).__name__}; write {from_row} for a row")
    return task


class TaskSource:
    """Reads tasks in their order, and keeps those that were read and not yet released.

    `is_needed`: whether the task of a number is kept. `check`: called with every task that is read.
    """

    def __init__(
        self,
        tasks: Tasks,
        is_needed: Callable[[int], bool] = lambda number: True,
        check: Callable[[int, Task], None] = lambda number, task: None,
    ) -> None:
        self._iterator: Iterator[Task] | AsyncIterator[Task]
        self._iterator = aiter(tasks) if isinstance(tasks, AsyncIterable) else iter(tasks)
        self._is_needed, self._check = is_needed, check
        self._num_read, self._is_exhausted = 0, False
        self._kept: dict[int, Task] = {}

    @property
    def is_asynchronous(self) -> bool:
        """Whether other code runs while a task is being read."""
        return isinstance(self._iterator, AsyncIterator)

    async def get(self, number: int) -> Task | None:
        """The task of a number. None if there are fewer tasks.

        Raises BadInputError for an entry that is no task, and the exceptions of the iterator and of `check`.
        """
        while number >= self._num_read and not self._is_exhausted:
            try:
                if isinstance(self._iterator, AsyncIterator):
                    task = await anext(self._iterator)
                else:
                    task = next(self._iterator)
            except (StopIteration, StopAsyncIteration):
                self._is_exhausted = True
                break
            except USER_FAILURES as error:
                note = f"raised by the iterator of the tasks when it was asked for task {self._num_read}"
                raise_noted(error, note)
            self._check(self._num_read, require_task(task, self._num_read))
            if self._is_needed(self._num_read):
                self._kept[self._num_read] = task
            self._num_read += 1
            if self._num_read % NUM_READ_PER_PAUSE == 0:  # a run that is continued skips the tasks of earlier steps
                await asyncio.sleep(0)
        return self._kept.get(number)

    def kept(self, number: int) -> Task | None:
        """The task of a number, if it was read and not released."""
        return self._kept.get(number)

    def release(self, number: int) -> None:
        """The task is not needed any more."""
        self._kept.pop(number, None)


# -- Running groups ---------------------------------------------------------------------------------
# `RunningGroups`: reads tasks and starts their groups in the background, while others wait for finished groups.


class Schedule(Protocol):
    """Decides which group is started next: a `StreamSchedule`, or a `StepStream`, which asks its `StepSchedule`."""

    def next_number(self) -> int | None:
        """Number of the task whose group is to be started now. None if no group may start."""
        ...

    def start(self, number: int, task: Task) -> GroupRequest:
        """Note that the group of this task is started. Returns the group."""
        ...

    def end_tasks(self, number: int) -> None:
        """There is no task with this number, nor with a higher number."""
        ...


class RunningGroups:
    """Starts the groups that a schedule allows, and passes finished groups to `on_finished`.

    An asynchronous context manager. On exit it cancels all groups that run, and waits until they have ended. Agent
    loops, a filter and an iterator of tasks that ignore their cancellation are left running.
    """

    def __init__(
        self,
        source: TaskSource,
        schedule: Schedule,
        runner: GroupRunner,
        on_finished: Callable[[FinishedGroup], Awaitable[None]],
    ) -> None:
        self._source, self._schedule, self._runner, self._on_finished = source, schedule, runner, on_finished
        self._may_start, self._has_news = asyncio.Event(), asyncio.Event()
        self._groups: dict[int, asyncio.Task[None]] = {}
        """Groups that run, by the number of their task."""
        self._cancelled: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._closing = asyncio.Event()
        self._starter: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        """The task that reads tasks of the user, if one is being read."""

    async def __aenter__(self) -> Self:
        self._runner.on_sample = self.notify
        self._starter = asyncio.create_task(self._start_groups())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        tasks = [*self._groups.values(), *self._cancelled, *([] if self._starter is None else [self._starter])]
        for task in tasks:
            task.cancel()
        reading = [] if self._reading is None else [self._reading]
        waits = [wait_until_done(task, 0.0, "the iterator of the tasks", END_TIMEOUT_S) for task in reading]
        await asyncio.gather(*tasks, *waits, return_exceptions=True)

    @property
    def failure(self) -> BaseException | None:
        """The exception of a group, of the tasks or of `on_finished`, after which no other group starts."""
        return self._failure

    @property
    def num_running(self) -> int:
        """Number of groups that run, or that a filter examines."""
        return len(self._groups)

    def notify(self) -> None:
        """Look again whether the schedule allows a group."""
        self._may_start.set()

    async def wait(self) -> BaseException | None:
        """Return when something has happened since the last call: a group has finished, or there are no more tasks.

        Returns `failure`.
        """
        await self._has_news.wait()
        self._has_news.clear()
        return self._failure

    def cancel(self, number: int) -> None:
        """Cancel the group of a task. Its samples are lost. Without effect if it has finished."""
        if (task := self._groups.pop(number, None)) is not None:
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()

    def is_current(self, number: int) -> bool:
        """Whether the task that calls this method is that of the group, and the group was not cancelled."""
        return self._groups.get(number) is asyncio.current_task()

    async def _start_groups(self) -> None:
        try:
            while not self._closing.is_set():  # the tasks may have swallowed the cancellation
                self._may_start.clear()
                number = None if self._failure is not None else self._schedule.next_number()
                if number is not None and (task := self._source.kept(number)) is not None:
                    request = self._schedule.start(number, task)
                    self._groups[number] = asyncio.create_task(self._run_group(request))
                    await asyncio.sleep(0)  # the group counts its samples, on which the schedule depends
                    continue
                if number is not None and not self._source.is_asynchronous:  # no turn of the event loop is in between
                    await self._read(number)
                elif number is not None and self._reading is None:
                    self._reading = asyncio.create_task(self._read(number))
                await self._may_start.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:  # noqa: BLE001 - returned by `wait`
            self._fail(failure)

    async def _read(self, number: int) -> None:
        """Read the task of a number. Other groups start meanwhile: the tasks may wait for the steps."""
        try:
            if await self._source.get(number) is None and not self._closing.is_set():
                self._schedule.end_tasks(number)
                self._has_news.set()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:  # noqa: BLE001 - returned by `wait`
            self._fail(failure)
        finally:
            self._reading = None
            self._may_start.set()

    async def _run_group(self, request: GroupRequest) -> None:
        current = asyncio.current_task()
        try:
            finished = await self._runner.run(request)
            if self._groups.get(request.number) is current and not self._closing.is_set():
                await self._on_finished(finished)
        except asyncio.CancelledError:
            if self._groups.get(request.number) is current and not self._closing.is_set():
                self._fail(RuntimeError(f"the group of task {request.task.id!r} was cancelled from outside"))
            raise
        except BaseException as failure:  # noqa: BLE001 - returned by `wait`
            self._fail(failure)
        finally:
            if self._groups.get(request.number) is current:
                del self._groups[request.number]
                self._has_news.set()
                self._may_start.set()

    def _fail(self, failure: BaseException) -> None:
        """Let `wait` return a failure. KeyboardInterrupt and SystemExit also end the event loop."""
        self._failure = self._failure or failure
        self._has_news.set()
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            raise failure


# -- Group stream -----------------------------------------------------------------------------------
# `stream_groups`: one pass over tasks. Groups are yielded in the order in which they finish.


class StreamSchedule:
    """Starts groups in the order of the tasks, as many as are needed to keep the runner busy."""

    def __init__(self, runner: GroupRunner, run_dir: Path | None) -> None:
        self._runner, self._run_dir = runner, run_dir
        self._next_number = 0
        self.is_exhausted = False
        """Whether all tasks were started."""
        self.finished: deque[SampleGroup] = deque()
        """Groups that were not yielded yet."""
        self.num_examined = 0
        """Number of groups that the filter examines."""

    def next_number(self) -> int | None:
        """A group starts when a sample can run, unless the user of the groups is far behind."""
        runner, max_samples = self._runner, self._runner.max_admitted_samples
        num_waiting = (len(self.finished) + self.num_examined) * runner.n
        may_start = runner.num_unfinished_samples < max_samples and num_waiting < 2 * max_samples
        return self._next_number if may_start and not self.is_exhausted else None

    def start(self, number: int, task: Task) -> GroupRequest:
        self._next_number = number + 1
        return GroupRequest(number, task, task.id, self._run_dir)

    def end_tasks(self, number: int) -> None:
        self.is_exhausted = True


NUM_FAILED_GROUPS = 8
"""Number of groups whose samples must all fail before this is logged. All groups of a run with fewer groups."""


class FailureLog:
    """Logs once that all samples of the first groups have failed, for example for a mistake in the reward function.

    A failure belongs to its sample, and the run goes on: an untrained policy, or tasks that are sorted by length, can
    fail at the beginning. But a run of failed samples would end without a usable sample and without an error.
    """

    def __init__(self) -> None:
        self._num_groups = 0
        self._failure: Exception | None = None
        self._is_decided = False
        """Whether a sample has succeeded, or the failure was logged."""

    def record(self, finished: FinishedGroup) -> None:
        """Record a group that has finished."""
        self._num_groups += 1
        self._is_decided |= finished.failure is None
        self._failure = None if self._is_decided else finished.failure
        if self._num_groups == NUM_FAILED_GROUPS:
            self.log()

    def log(self) -> None:
        """Log the last exception if all groups so far have failed."""
        if self._failure is None:
            return
        logger.error(
            "all samples of the first %d groups have failed, the last group with this exception; if the cause is a "
            "mistake in the reward, a tool or the chat template, stop the run, correct the mistake and run again",
            self._num_groups,
            exc_info=self._failure,
        )
        self._is_decided, self._failure = True, None


async def stream_groups(
    runner: GroupRunner,
    tasks: Tasks,
    check: Callable[[int, Task], None],
    run_dir: Path | None,
    group_filter: GroupFilter | None,
) -> AsyncGenerator[SampleGroup, None]:
    """Yield the groups of all tasks. See `RolloutRunner.run`. `check`: called with every task that is read."""
    schedule, failures = StreamSchedule(runner, run_dir), FailureLog()
    source = TaskSource(tasks, check=check)

    async def finish(finished: FinishedGroup) -> None:
        source.release(finished.request.number)
        failures.record(finished)
        schedule.num_examined += 1
        try:
            if await is_kept(group_filter, finished.group):
                schedule.finished.append(finished.group)
        finally:
            schedule.num_examined -= 1

    running = RunningGroups(source, schedule, runner, finish)
    async with running:
        while not (schedule.is_exhausted and running.num_running == 0 and not schedule.finished):
            failure = await running.wait()
            while schedule.finished:
                yield schedule.finished.popleft()
                running.notify()
            if failure is not None:
                raise failure
        if running.failure is not None:  # of a group that ended while the caller used the last groups
            raise running.failure
        failures.log()
