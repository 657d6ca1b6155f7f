"""`RunningGroups`: reads tasks and starts their groups in the background, while others wait for finished groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

from verl_server.agent.groups.group_runner import FinishedGroup, GroupRequest, GroupRunner
from verl_server.agent.groups.task_source import TaskSource
from verl_server.agent.samples import Task
from verl_server.agent.user_code import END_TIMEOUT_S, wait_until_done


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
                if number is not None and not self._source.is_asynchronous:
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
                if self._runner.failures is not None:
                    self._runner.failures.end_tasks()
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
