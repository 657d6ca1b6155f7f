"""`StepWatch`: counts what happens to groups between two steps, and says when something is wrong with all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from statistics import fmean

from verl_server.agent.groups.group_runner import FinishedGroup
from verl_server.agent.samples import SampleGroup

logger = logging.getLogger(__name__)

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
