"""`stream_groups`: one pass over tasks. Groups are yielded in the order in which they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from verl_server.agent.groups.group_filter import GroupFilter, is_kept
from verl_server.agent.groups.group_runner import FinishedGroup, GroupRequest, GroupRunner
from verl_server.agent.groups.running_groups import RunningGroups
from verl_server.agent.groups.task_source import Tasks, TaskSource
from verl_server.agent.samples import SampleGroup, Task


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


async def stream_groups(
    runner: GroupRunner,
    tasks: Tasks,
    check: Callable[[int, Task], None],
    run_dir: Path | None,
    group_filter: GroupFilter | None,
) -> AsyncGenerator[SampleGroup, None]:
    """Yield the groups of all tasks. See `RolloutRunner.run`. `check`: called with every task that is read."""
    schedule = StreamSchedule(runner, run_dir)
    source = TaskSource(tasks, check=check)

    async def finish(finished: FinishedGroup) -> None:
        source.release(finished.request.number)
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
