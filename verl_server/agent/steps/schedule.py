"""`StepSchedule`: decides which groups of samples are started, and which groups a step has. Pure, without I/O.

Time is counted in steps. A group is started in a step and delivered in the same step, or up to `max_staleness` steps
later. Two rules make sure of that and never drop a slow group:

- At most (max_staleness + 1) * num_groups groups are started and not delivered. After a delivery, while the weights are
  not yet updated, the maximum is max_staleness * num_groups.
- The oldest groups are delivered first. A step waits for old groups until the remaining groups fit into the steps in
  which they must be delivered: at most `num_groups` groups have to be in the next step, at most 2 * num_groups in the
  next two steps, and so on.

With `num_extra_groups` more groups are started, so more groups can be too old in the next step. Those that a step
leaves behind are abandoned, and their tasks are started again.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_server.agent.steps.journal import StepLog
from verl_server.errors import BadInputError


class GroupState(enum.Enum):
    """State of a group that was not delivered."""

    WAITING = "waiting"
    """To be started."""
    RUNNING = "running"
    FINISHED = "finished"
    """Finished and accepted."""


@dataclass
class _Group:
    step: int | None
    """Step in which the group was started. None if its samples have to begin anew."""
    attempt: int
    """Number of earlier starts."""
    state: GroupState = GroupState.WAITING


@dataclass(frozen=True)
class Start:
    """A group that is started."""

    step: int
    """Step in which the group counts as started."""
    attempt: int
    """Number of earlier starts."""
    is_new: bool
    """Whether new samples begin. If not, samples that an earlier process has recorded continue."""


@dataclass(frozen=True)
class Delivery:
    """The groups of a step."""

    step: int
    numbers: list[int]
    """The groups of the step, the oldest first."""
    ages: list[int]
    """Number of steps between the start and the delivery of each group."""
    abandoned: list[int] = field(default_factory=list)
    """Groups that have to be started again, because they would be too old in the next step."""


class StepSchedule:
    """Groups of one iterator of steps. See the module. The number of a group is that of its task.

    `first_step`: number of the first step. `log`: what an earlier process has recorded. Its steps from `first_step` on
    are delivered again with the same groups. After that, the groups that it had started continue.
    """

    def __init__(
        self, num_groups: int, num_extra_groups: int, max_staleness: int, first_step: int, log: StepLog
    ) -> None:
        self._num_groups, self._num_extra, self._max_staleness = num_groups, num_extra_groups, max_staleness
        self.step = first_step
        """The step that is delivered next."""
        self._weights_step = first_step
        """Step whose weights generate now. One less than `step` between a delivery and the next call of `open_step`."""
        self._recorded = {step: list(numbers) for step, numbers in log.steps.items() if step >= first_step}
        self._log_started, self._unfinished = log.started, log.unfinished()
        self._next_number = log.num_started
        self._groups: dict[int, _Group] = {}
        """Groups that were not delivered."""
        self._waiting: set[int] = set()
        """Groups that are to be started."""
        self._waiting_in_order: list[tuple[int, int]] = []
        """Heap of the step in which a waiting group began, and its number. Started groups are removed later."""
        self._waiting_without_step: list[int] = []
        """Heap of the numbers of waiting groups that have not begun. Started groups are removed later."""
        self._num_started: Counter[int] = Counter()
        """Number of undelivered groups by the step in which they were started, also by an earlier process."""
        self._num_finished: Counter[int] = Counter()
        """Number of these groups that have finished."""
        self._are_tasks_exhausted = False
        self._begin_step()

    # -- starting -----------------------------------------------------------------------------------

    def open_step(self) -> None:
        """Note that the weights were updated after the last delivery."""
        self._weights_step = self.step

    def next_number(self) -> int | None:
        """Number of the group to be started next. None if no group may start now."""
        is_full = len(self._groups) - len(self._waiting) >= self._max_undelivered
        begun, new = self._waiting_in_order, self._waiting_without_step
        while begun and not self._is_waiting(*begun[0]):
            heapq.heappop(begun)
        while new and not self._is_waiting(None, new[0]):
            heapq.heappop(new)
        if self.is_step_recorded or not is_full:
            # Groups that have begun come first: the step that must deliver them waits until they have finished.
            if begun and begun[0][0] <= self._weights_step:
                return begun[0][1]
            if new and self._can_be_delivered:
                return new[0]
        if self.is_step_recorded or self._waiting or self._are_tasks_exhausted or is_full:
            return None
        return self._next_number

    def _is_waiting(self, step: int | None, number: int) -> bool:
        """Whether a group still waits to be started, and has begun in `step`. None: it has not begun."""
        return number in self._waiting and self._groups[number].step == step

    def start(self, number: int) -> Start:
        """Note that the group is started."""
        group = self._groups.setdefault(number, _Group(None, 0))
        is_new = group.step is None
        step = self._weights_step if group.step is None else group.step
        group.step, group.state = step, GroupState.RUNNING
        self._waiting.discard(number)
        self._num_started[step] += is_new
        self._next_number = max(self._next_number, number + 1)
        return Start(step, group.attempt, is_new)

    def end_tasks(self, number: int) -> None:
        """There is no task with this number, nor with a higher number.

        Raises BadInputError if an earlier process has started a group with such a number.
        """
        recorded = itertools.chain.from_iterable(self._recorded.values())
        missing = [other for other in (*self._groups, *self._unfinished, *recorded) if other >= number]
        if missing:
            raise BadInputError(
                f"there are {number} tasks, but the run that is recorded in run_dir had at least {max(missing) + 1}; "
                "pass the same tasks, from the first task on",
                argument="tasks",
            )
        self._are_tasks_exhausted = True

    # -- finishing ----------------------------------------------------------------------------------

    def finish(self, number: int) -> None:
        """Note that the group has finished and can be delivered."""
        self._groups[number].state = GroupState.FINISHED
        self._num_finished[self._started_step(number)] += 1

    def drop(self, number: int) -> None:
        """Remove a group from the schedule."""
        group = self._groups.pop(number)
        self._waiting.discard(number)
        if group.step is not None:
            self._num_started[group.step] -= 1
            self._num_finished[group.step] -= group.state is GroupState.FINISHED
            if not self._num_started[group.step]:
                del self._num_started[group.step], self._num_finished[group.step]

    def restart(self, numbers: Iterable[int]) -> None:
        """Start these groups again, with new samples."""
        for number in list(numbers):
            attempt = self._groups[number].attempt + 1
            self.drop(number)
            self._wait(number, _Group(None, attempt))

    # -- delivery -----------------------------------------------------------------------------------

    @property
    def is_step_recorded(self) -> bool:
        """Whether an earlier process has delivered the step that is delivered next."""
        return self.step in self._recorded

    @property
    def finished(self) -> list[int]:
        """The groups that have finished and were not delivered."""
        return [number for number, group in self._groups.items() if group.state is GroupState.FINISHED]

    @property
    def is_ready(self) -> bool:
        """Whether the step can be delivered."""
        num_finished = self._num_finished.total()
        if self.is_step_recorded:
            return num_finished == len(self._recorded[self.step])
        if self._are_tasks_exhausted and num_finished == len(self._groups) > 0:
            return True  # the last step may have fewer groups
        return num_finished >= self._num_groups and all(
            map(self._has_enough_old_groups, range(self._max_staleness + 1))
        )

    def _has_enough_old_groups(self, num_later_steps: int) -> bool:
        """Whether the groups that must be delivered within so many steps after this step fit into these steps.

        This step takes `num_groups` of the finished groups, the oldest first.
        """
        last_step = self.step + num_later_steps - self._max_staleness
        num_due = sum(count for step, count in self._num_started.items() if step <= last_step)
        num_due_finished = sum(count for step, count in self._num_finished.items() if step <= last_step)
        return num_due_finished >= min(self._num_groups, num_due - num_later_steps * self._num_groups)

    @property
    def is_done(self) -> bool:
        """Whether all tasks were delivered or dropped."""
        return self._are_tasks_exhausted and not self._groups and not self._recorded

    def deliver(self) -> Delivery:
        """The groups of the step, which must be ready. They leave the schedule."""
        if self.is_step_recorded:
            chosen = self._recorded.pop(self.step)
        else:
            oldest_first = sorted(self.finished, key=lambda number: (self._started_step(number), number))
            chosen = oldest_first[: self._num_groups]
        ages = [self.step - self._started_step(number) for number in chosen]
        for number in chosen:
            self.drop(number)
        abandoned = [number for number, group in self._groups.items() if self._is_too_old(group.step, self.step + 1)]
        self.restart(abandoned)
        delivery = Delivery(self.step, chosen, ages, abandoned)
        self.step += 1
        self._begin_step()
        return delivery

    def _begin_step(self) -> None:
        """Take over the groups that an earlier process has recorded for this step."""
        numbers: list[int] = []
        if self.is_step_recorded:
            numbers = self._recorded[self.step]
        elif not self._recorded:
            numbers, self._unfinished = self._unfinished, []
        for number in numbers:
            started = self._log_started[number]
            is_too_old = not self.is_step_recorded and self._is_too_old(started.step, self.step)
            self._wait(number, _Group(None if is_too_old else started.step, started.attempt + is_too_old))

    def _wait(self, number: int, group: _Group) -> None:
        self._groups[number] = group
        self._waiting.add(number)
        if group.step is None:
            heapq.heappush(self._waiting_without_step, number)
        else:
            heapq.heappush(self._waiting_in_order, (group.step, number))
            self._num_started[group.step] += 1

    # -- age ----------------------------------------------------------------------------------------

    @property
    def _can_be_delivered(self) -> bool:
        """Whether samples that begin with the present weights are young enough for the next delivery."""
        return self._weights_step + self._max_staleness >= self.step

    @property
    def _max_undelivered(self) -> int:
        """Maximum number of groups that are started and not delivered."""
        age = self.step - self._weights_step
        extra = self._num_extra if self._can_be_delivered else 0
        return (self._max_staleness + 1 - age) * self._num_groups + extra

    def _started_step(self, number: int) -> int:
        step = self._groups[number].step
        assert step is not None, f"group {number} was not started"
        return step

    def _is_too_old(self, started_step: int | None, step: int) -> bool:
        """Whether a group that was started in `started_step` is too old for the delivery of `step`."""
        return started_step is not None and started_step + self._max_staleness < step
