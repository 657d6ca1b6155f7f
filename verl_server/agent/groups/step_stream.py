"""`StepStream`: yields the groups of each training step, and generates for later steps in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from verl_server.agent.groups.group_filter import GroupFilter, is_kept
from verl_server.agent.groups.group_runner import FinishedGroup, GroupRequest, GroupRunner, session_ids
from verl_server.agent.groups.run_checker import session_paths
from verl_server.agent.groups.running_groups import RunningGroups
from verl_server.agent.groups.step import RolloutStep, step_metrics
from verl_server.agent.groups.step_journal import StepJournal, StepLog
from verl_server.agent.groups.step_schedule import Delivery, StepSchedule
from verl_server.agent.groups.step_watch import StepWatch
from verl_server.agent.groups.task_source import Tasks, TaskSource
from verl_server.agent.sample_runner import flush_pool
from verl_server.agent.samples import Task
from verl_server.agent.user_code import wait_despite_cancellation
from verl_server.errors import BadInputError
from verl_server.trajectory.batches.routed_experts import ExpertLayout

logger = logging.getLogger(__name__)

MAX_ATTEMPT = 999
"""Number of starts of a group for which the length of its file names is checked."""


@dataclass(frozen=True)
class StepOptions:
    """Arguments of `RolloutRunner.steps` and of its runner."""

    num_groups: int
    num_extra_groups: int
    max_staleness: int
    start_step: int
    run_dir: Path | None
    group_filter: GroupFilter | None
    pad_token_id: int
    expert_layout: ExpertLayout | None = None


class StepStream:
    """The steps of one call of `RolloutRunner.steps`, and the `Schedule` of its groups. Iterate `steps()` once."""

    def __init__(self, options: StepOptions, tasks: Tasks, runner: GroupRunner) -> None:
        self._options, self._tasks, self._runner = options, tasks, runner
        self._journal: StepJournal | None = None
        self._log = StepLog()
        self._finished: dict[int, FinishedGroup] = {}
        """Groups that were accepted and not delivered."""
        self._watch = StepWatch(options.num_groups, runner.n)

    async def steps(self) -> AsyncGenerator[RolloutStep, None]:
        options = self._options
        try:
            if options.run_dir is not None:
                self._journal = StepJournal(options.run_dir, options.start_step, self._runner.n)
                self._log = self._journal.log
                self._warn_of_recorded_steps(options.run_dir)
            self._schedule = StepSchedule(
                options.num_groups, options.num_extra_groups, options.max_staleness, options.start_step, self._log
            )
            self._source = TaskSource(self._tasks, self._log.is_needed, self._check_task)
            self._running = RunningGroups(self._source, self, self._runner, self._finish)
            async with self._running:
                while (step := await self._next_step()) is not None:
                    with self._watch.body(is_asynchronous=options.max_staleness > 0):
                        yield step
                    del step  # the caller may have dropped it, and the next step needs the memory
        finally:
            if self._journal is not None:
                self._journal.close()

    async def _next_step(self) -> RolloutStep | None:
        started = time.monotonic()
        self._schedule.open_step()
        self._running.notify()
        while not self._schedule.is_ready:
            if self._running.failure is not None:  # of a group that ended while the caller used the last step
                raise self._running.failure
            if self._schedule.is_done:
                self._watch.end_run(self._schedule.step)
                return None
            if self._watch.is_suspicious and self._running.num_running == 0:
                self._watch.raise_failure(self._schedule.step)
            if (failure := await self._running.wait()) is not None:
                raise failure
        is_recorded = self._schedule.is_step_recorded
        delivery = self._schedule.deliver()
        for number in delivery.abandoned:
            self._forget(number)
        groups = [self._finished[number].group for number in delivery.numbers]
        for number in delivery.numbers:
            self._forget(number)
            self._source.release(number)
        self._watch.check_rewards(groups)
        metrics = step_metrics(groups, delivery.ages) | self._watch.end_step(delivery.abandoned)
        if self._journal is not None and not is_recorded:
            await _write_step(self._journal, delivery)
        metrics["time/wait_s"] = time.monotonic() - started
        return RolloutStep(delivery.step, groups, metrics, self._options.pad_token_id, self._options.expert_layout)

    # -- starting groups ----------------------------------------------------------------------------

    def next_number(self) -> int | None:
        """A group starts when a sample can run, and unless all groups seem to fail."""
        is_full = self._runner.num_unfinished_samples >= self._runner.max_admitted_samples
        if is_full or self._watch.is_suspicious:
            return None
        return self._schedule.next_number()

    def start(self, number: int, task: Task) -> GroupRequest:
        is_load_only = self._schedule.is_step_recorded
        started = self._schedule.start(number)
        if started.is_new and self._journal is not None:
            self._journal.write_started(number, started.step, task.id)
        run_dir = self._options.run_dir and self._options.run_dir / f"step-{started.step:06d}"
        return GroupRequest(number, task, _group_name(task, number, started.attempt), run_dir, is_load_only)

    def end_tasks(self, number: int) -> None:
        self._schedule.end_tasks(number)

    # -- finished groups ----------------------------------------------------------------------------

    async def _finish(self, finished: FinishedGroup) -> None:
        if finished.request.is_load_only:
            self._accept(finished)
        elif finished.failure is not None:
            self._drop(finished)
            self._watch.record_failure(finished)
        else:
            for number in self._watch.record_success():
                self._write_dropped(number, "failed")
            kept = await is_kept(self._options.group_filter, finished.group)
            if not self._running.is_current(finished.request.number):
                return  # the group was abandoned, and the filter has ignored its cancellation
            if kept:
                self._watch.record_kept()
                self._accept(finished)
            else:
                self._drop(finished)
                self._write_dropped(finished.request.number, "rejected by group_filter")
                self._watch.record_rejected(finished.group)

    def _accept(self, finished: FinishedGroup) -> None:
        self._finished[finished.request.number] = finished
        self._schedule.finish(finished.request.number)

    def _drop(self, finished: FinishedGroup) -> None:
        self._schedule.drop(finished.request.number)
        self._source.release(finished.request.number)

    def _forget(self, number: int) -> None:
        """Forget a group that was delivered or is abandoned."""
        self._running.cancel(number)
        self._finished.pop(number, None)

    def _write_dropped(self, number: int, reason: str) -> None:
        if self._journal is not None:
            self._journal.write_dropped(number, reason)

    # -- the run that is continued ------------------------------------------------------------------

    def _check_task(self, number: int, task: Task) -> None:
        """Raise BadInputError if the run that is continued had another task with this number."""
        started = self._log.started.get(number)
        if started is not None and started.task_id != task.id:
            raise BadInputError(
                f"task {number} is {task.id!r}, but {started.task_id!r} in the run that is recorded in run_dir; pass "
                "the same tasks in the same order, from the first task on, for example by shuffling with a seed",
                argument="tasks",
            )
        if self._options.run_dir is not None:
            ids = session_ids(_group_name(task, number, MAX_ATTEMPT), self._runner.n)
            session_paths(self._options.run_dir, number, task, ids[-1:])

    def _warn_of_recorded_steps(self, run_dir: Path) -> None:
        start, last = self._options.start_step, max(self._log.steps, default=-1)
        if start <= last:
            logger.warning(
                "the steps %d to %d are recorded in run_dir %s, and are yielded again with the same samples. If the "
                "trainer has already completed them, pass start_step=%d. If this is another run, pass another run_dir",
                start,
                last,
                run_dir,
                last + 1,
            )


def _group_name(task: Task, number: int, attempt: int) -> str:
    """The beginning of the session ids of a group's samples. Each start of a group has another name."""
    return f"{task.id}-{number}" + f".{attempt}" * (attempt > 0)


async def _write_step(journal: StepJournal, delivery: Delivery) -> None:
    """Write a step without blocking the event loop. The journal may be closed when this function has ended."""
    loop = asyncio.get_running_loop()
    writing = loop.run_in_executor(flush_pool(), journal.write_step, delivery.step, delivery.numbers)
    cancelled = await wait_despite_cancellation(writing)
    failure = writing.exception()  # read in any case, so that asyncio does not log it
    if error := cancelled or failure:
        raise error
