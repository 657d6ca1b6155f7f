"""`StepStream`: yields the groups of each training step, and generates for later steps in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from verl_server.agent.limits import Phase
from verl_server.agent.sample_runner import flush_pool
from verl_server.agent.samples import Sample, SampleGroup, Segment, Task
from verl_server.agent.steps.groups import (
    FinishedGroup,
    GroupFilter,
    GroupRequest,
    GroupRunner,
    RunningGroups,
    Tasks,
    TaskSource,
    is_kept,
    session_ids,
    session_paths,
)
from verl_server.agent.steps.journal import StepJournal, StepLog
from verl_server.agent.steps.schedule import Delivery, StepSchedule
from verl_server.agent.user_code import wait_despite_cancellation
from verl_server.errors import BadInputError
from verl_server.trajectory.batches import to_batch
from verl_server.trajectory.graph import Node
from verl_server.trajectory.rendering.vision import VisionInputs
from verl_server.trajectory.routed_experts import ExpertLayout

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)


# -- Step watch -------------------------------------------------------------------------------------
# `StepWatch`: counts what happens to groups between two steps, and says when something is wrong with all of them.

MAX_FAILED_GROUPS, MAX_FAILED_SAMPLES = 8, 64
"""Number of groups, and of their samples, that must all fail before the iterator raises the exception."""
REJECTED_PER_WARNING = 8
"""Number of rejected groups between two warnings, in units of the groups of a step."""
BLOCKED_S = 1.0
"""Seconds for which a body must block the event loop before a warning."""


class StepWatch:
    """Counts groups. `n`: number of samples of a group."""

    def __init__(self, num_groups: int, n: int) -> None:
        self._num_groups, self._n = num_groups, n
        self._failed: list[FinishedGroup] = []
        """Groups whose samples have all failed, since a group has succeeded."""
        self._has_success = self._has_kept = self._has_warned_of_blocking = self._has_checked_rewards = False
        self._num_rejected = self._num_failed = 0
        """Number of groups since the last step."""
        self._rejected_rewards: list[float] = []
        """Mean rewards of groups that were rejected one after the other."""
        self._last_failure: Exception | None = None

    # -- failures -----------------------------------------------------------------------------------

    @property
    def is_suspicious(self) -> bool:
        """Whether so many groups have failed that no other group should start until one has succeeded."""
        return len(self._failed) >= MAX_FAILED_GROUPS and len(self._failed) * self._n >= MAX_FAILED_SAMPLES

    def record_failure(self, finished: FinishedGroup) -> None:
        """Count a group whose samples have all failed."""
        self._failed.append(finished)
        self._last_failure = finished.failure
        self._num_failed += 1

    def record_success(self) -> list[int]:
        """Note that a sample has succeeded. Returns the numbers of the groups whose failure is therefore their own."""
        numbers = [failed.request.number for failed in self._failed]
        self._has_success = True
        self._failed.clear()
        return numbers

    def raise_failure(self, step: int) -> None:
        """Raise the exception of the last group that has failed. `step`: the step that would be next."""
        error = self._failed[-1].failure
        assert error is not None
        error.add_note(
            f"all samples of {len(self._failed)} groups have failed, the last with this exception, and no group has "
            f"succeeded meanwhile; with a run_dir, a run with start_step={step} tries them again"
        )
        raise error

    def end_run(self, step: int) -> None:
        """There are no more tasks. Raises the exception of the last group if all groups have failed."""
        if self._failed and not self._has_success:
            self.raise_failure(step)
        if self._rejected_rewards and not self._has_kept:
            self._warn_of_rejected_groups("ends without a step")

    # -- the filter ---------------------------------------------------------------------------------

    def record_kept(self) -> None:
        self._has_kept = True
        self._rejected_rewards.clear()

    def record_rejected(self, group: SampleGroup) -> None:
        """Count a group that the filter has rejected."""
        self._num_rejected += 1
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        self._rejected_rewards.append(fmean(rewards) if rewards else float("nan"))
        if len(self._rejected_rewards) % (REJECTED_PER_WARNING * self._num_groups) == 0:
            self._warn_of_rejected_groups("goes on")

    def _warn_of_rejected_groups(self, remark: str) -> None:
        logger.warning(
            "group_filter has rejected %d groups one after the other, whose mean reward is %.3g; the run %s",
            len(self._rejected_rewards),
            fmean(self._rejected_rewards),
            remark,
        )

    # -- steps --------------------------------------------------------------------------------------

    def check_rewards(self, groups: Collection[SampleGroup]) -> None:
        """Warn, for the first step only, if no sample has a reward, so that all scores in the batch are 0."""
        samples = [sample for group in groups for sample in group.samples if sample.error is None]
        if not samples or self._has_checked_rewards:
            return
        self._has_checked_rewards = True
        if any(sample.reward is not None or sample.graph.rewards for sample in samples):
            return
        metrics = sorted({name for sample in samples for name in sample.rewards})
        logger.warning(
            "no sample of the first step has a reward%s, so rm_scores in step.batch() are 0. Unless the trainer "
            "computes the rewards, pass reward= to the runner, write a method with the decorator @reward in the "
            "Environment, or call sample.graph.set_rewards in the agent loop",
            f" ({metrics} have the weight 0)" if metrics else "",
        )

    def end_step(self, abandoned: Collection[int]) -> dict[str, float]:
        """The figures since the last step. Logs failures, which would otherwise be a figure only."""
        if self._last_failure is not None:
            logger.warning(
                "all samples of %d groups have failed and are not in the step; the last exception: %r",
                self._num_failed,
                self._last_failure,
            )
        figures: dict[str, float] = {
            "groups/rejected": self._num_rejected,
            "groups/failed": self._num_failed,
            "groups/abandoned": len(abandoned),
        }
        self._num_rejected = self._num_failed = 0
        self._last_failure = None
        return figures

    @contextlib.contextmanager
    def body(self, *, is_asynchronous: bool) -> Iterator[None]:
        """Around the body of the user's loop. Warns if the body blocks the event loop, so that nothing is generated."""
        has_run = False

        def note() -> None:
            nonlocal has_run
            has_run = True

        asyncio.get_running_loop().call_soon(note)
        started = time.monotonic()
        yield
        is_blocked = not has_run and time.monotonic() - started > BLOCKED_S
        if is_asynchronous and is_blocked and not self._has_warned_of_blocking:
            self._has_warned_of_blocking = True
            logger.warning(
                "the body of the loop over the steps has blocked the event loop for %.1f s, so that no sample of the "
                "next step was generated; write await asyncio.to_thread(lambda: train(step.batch()))",
                time.monotonic() - started,
            )


# -- Step -------------------------------------------------------------------------------------------
# `RolloutStep`: the groups of samples for one training step, as objects, as a batch and as metrics.


@dataclass(frozen=True)
class RolloutStep:
    """The groups of samples for one training step."""

    index: int
    """Number of the step."""
    groups: Sequence[SampleGroup]
    """Groups of the step. The oldest group is first."""
    metrics: Mapping[str, float]
    """Figures of the step by names such as `reward/mean`, for a dashboard."""
    pad_token_id: int
    """Token with which `batch` fills rows by default."""
    expert_layout: ExpertLayout | None = None
    """Layout of the routed experts. None if they are not recorded, and if the engine of the runner does not tell it."""

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, one group after the other."""
        return [sample for group in self.groups for sample in group.samples]

    def batch(
        self,
        pad_token_id: int | None = None,
        *,
        vision: VisionInputs | None = None,
        expert_layout: ExpertLayout | None = None,
        prompt_length: int | None = None,
        response_length: int | None = None,
    ) -> TensorDict:
        """Convert the samples to padded tensors: the fields of `to_batch`, and which sample each row is of.

        Each row is a trained path (`Sample.segments`). Failed samples and samples without a turn are left out. Beside
        the fields of `to_batch` there are `group_index` [B], the position of the row's group in `groups`;
        `sample_index` [B], the index of the sample in its group; `reward` [B], the reward of the row's sample, NaN for
        a sample without a reward; and `uid`, a list with one text for each row, equal in all rows of a group.
        `expert_layout`: by default that of the step. `prompt_length`, `response_length`: fixed P and R, see `to_batch`.
        Raises BadInputError if no sample can be trained, and the errors of `to_batch`.
        """
        import torch
        from tensordict import NonTensorStack

        rows: list[tuple[int, Sample, Segment]] = [
            (position, sample, segment)
            for position, group in enumerate(self.groups)
            for sample in group.samples
            if sample.error is None
            for segment in sample.segments
        ]
        if not rows:
            raise BadInputError(
                f"step {self.index} has no sample that can be trained: all of its {len(self.samples)} samples have "
                "failed or have no turn; see sample.error"
            )
        pad = self.pad_token_id if pad_token_id is None else pad_token_id
        layout = self.expert_layout if expert_layout is None else expert_layout
        paths = [(sample.graph, segment.leaf) for _, sample, segment in rows]
        batch = to_batch(
            paths,
            pad,
            vision=vision,
            expert_layout=layout,
            prompt_length=prompt_length,
            response_length=response_length,
        )
        batch["group_index"] = torch.tensor([position for position, _, _ in rows])
        batch["sample_index"] = torch.tensor([sample.index for _, sample, _ in rows])
        rewards = [sample.reward for _, sample, _ in rows]
        batch["reward"] = torch.tensor([math.nan if reward is None else reward for reward in rewards])
        uids = [f"{self.index}-{position}-{sample.task.id}" for position, sample, _ in rows]
        batch.set("uid", NonTensorStack(*uids))
        return batch


def step_metrics(groups: Sequence[SampleGroup], ages: Sequence[int]) -> dict[str, float]:
    """Figures of the samples of a step. `ages`: number of steps between the start and the delivery of each group."""
    samples = [sample for group in groups for sample in group.samples]
    succeeded = [sample for sample in samples if sample.error is None]
    metrics: dict[str, float] = {
        "groups/num": len(groups),
        "samples/num": len(samples),
        "samples/failed": len(samples) - len(succeeded),
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": max(ages, default=0),
    }
    rewards = [sample.reward for sample in succeeded if sample.reward is not None]
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        metrics |= {"reward/min": min(rewards), "reward/max": max(rewards)}
        values = [{sample.reward for sample in group.samples if sample.reward is not None} for group in groups]
        metrics["groups/equal_rewards"] = fmean(len(found) < 2 for found in values)
    for name in {name for sample in succeeded for name in sample.rewards}:
        metrics[f"rewards/{name}"] = fmean(s.rewards[name] for s in succeeded if name in s.rewards)
    if succeeded:
        nodes = [_sampled_nodes(sample) for sample in succeeded]
        turns = [len(found) for found in nodes]
        tokens = [sum(len(node.token_ids) for node in found) for found in nodes]
        metrics |= {"turns/mean": fmean(turns), "turns/max": max(turns)}
        versions = [span.version for found in nodes for node in found for span in node.spans]
        if versions:
            metrics |= {"weight_version/min": min(versions), "weight_version/max": max(versions)}
        metrics |= {"sampled_tokens/mean": fmean(tokens), "sampled_tokens/max": max(tokens)}
    for phase in Phase:
        metrics[f"time/{phase}_s"] = fmean(sample.times.get(phase, 0.0) for sample in samples) if samples else 0.0
    calls = sum((Counter(sample.tool_counts) for sample in samples), Counter[str]())
    metrics |= {f"tools/{name}": number for name, number in calls.items()}
    for reason, count in Counter(sample.stop_reason for sample in samples).items():
        metrics[f"stop_reason/{reason}"] = count / len(samples)
    return metrics


def _sampled_nodes(sample: Sample) -> list[Node]:
    """The turns in all trained paths of a sample."""
    nodes = {node.id: node for graph, leaf in sample.paths for node in graph.path(leaf) if node.sampled}
    return list(nodes.values())


# -- Step stream ------------------------------------------------------------------------------------

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
