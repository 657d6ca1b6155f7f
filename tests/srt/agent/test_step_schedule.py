"""The schedule of steps and its journal, without samples: random runs, crashes and damaged files."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_server.agent.steps.journal import FILE_NAME, StepJournal, StepLog
from verl_server.agent.steps.schedule import Delivery, StepSchedule
from verl_server.errors import BadInputError, ServerBusyError


class Run:
    """A process that runs a schedule. Its log is what a journal would contain."""

    def __init__(self, log: StepLog, num_tasks: int, first_step: int, **options: int) -> None:
        self.log, self.num_tasks, self.options = log, num_tasks, options
        self.schedule = StepSchedule(first_step=first_step, log=log, **options)
        self.running: list[int] = []
        self.deliveries: list[Delivery] = []
        self.has_opened = False
        self.dropped: set[int] = set()

    def start_all(self) -> None:
        while (number := self.schedule.next_number()) is not None:
            if number >= self.num_tasks:
                self.schedule.end_tasks(number)
                continue
            started = self.schedule.start(number)
            if started.is_new:
                self.log.apply({"started": [number, started.step, f"t{number}"]})
            assert self.log.started[number].attempt == started.attempt
            self.running.append(number)

    def act(self, choice: int) -> bool:
        """Do one of the possible things. Returns whether the run has ended."""
        if not self.has_opened:
            self.schedule.open_step()
            self.has_opened = True
        self.start_all()
        if self.running and (choice % 4 or not self.schedule.is_ready):
            number = self.running.pop(choice // 4 % len(self.running))
            if choice % 5 == 0 and not self.schedule.is_step_recorded:
                self.schedule.drop(number)
                self.log.apply({"dropped": number})
                self.dropped.add(number)
            else:
                self.schedule.finish(number)
            return False
        if self.schedule.is_done:
            return True
        assert self.schedule.is_ready, "nothing runs, and the step cannot be delivered"
        delivery = self.schedule.deliver()
        self.running = [number for number in self.running if number not in delivery.abandoned]
        self.log.apply({"step": delivery.step, "groups": delivery.numbers})
        self.deliveries.append(delivery)
        self.has_opened = False
        self.start_all()
        return False


@settings(max_examples=300, deadline=None)
@given(
    choices=st.lists(st.integers(0, 10**6), min_size=5, max_size=200),
    num_groups=st.integers(1, 4),
    extra=st.sampled_from([0, 0, 2]),
    max_staleness=st.integers(0, 4),
    num_tasks=st.sampled_from([0, 3, 17, 10**9]),
    crash_at=st.integers(0, 150),
    steps_lost=st.integers(0, 3),
)
def test_any_order_of_events_and_a_crash(
    choices: list[int],
    num_groups: int,
    extra: int,
    max_staleness: int,
    num_tasks: int,
    crash_at: int,
    steps_lost: int,
) -> None:
    """Each task is delivered once or dropped once, no group is too old, and no group is lost by a crash."""
    options = {"num_groups": num_groups, "num_extra_groups": extra, "max_staleness": max_staleness}
    log = StepLog()
    run = Run(log, num_tasks, 0, **options)
    before: list[Delivery] = []
    dropped: set[int] = set()
    has_ended = False
    for position, choice in enumerate(choices):
        if position == crash_at:  # the trainer goes back to an earlier checkpoint
            before, dropped = run.deliveries, run.dropped
            first = max(len(before) - steps_lost, 0)
            run = Run(log, num_tasks, first, **options)
            has_ended = False
        has_ended = run.act(choice)
        if has_ended:
            break
    dropped |= run.dropped
    for position, delivery in enumerate(run.deliveries):
        replayed = before[delivery.step] if delivery.step < len(before) else None
        if replayed is not None:
            assert delivery.numbers == replayed.numbers
        assert max(delivery.ages, default=0) <= max_staleness
        assert min(delivery.ages, default=0) >= 0
        assert bool(delivery.abandoned) <= bool(extra), "a slow group was dropped"
        is_last = num_tasks < 100 and position == len(run.deliveries) - 1
        assert len(delivery.numbers) == num_groups or (is_last and 0 < len(delivery.numbers) <= num_groups)
    delivered = Counter(number for numbers in log.steps.values() for number in numbers)
    assert set(delivered.values()) <= {1}
    assert not dropped & delivered.keys()
    if has_ended:
        assert dropped | delivered.keys() == set(range(num_tasks))
    assert len(log.unfinished()) <= (max_staleness + 1) * num_groups + extra


OPTIONS = st.fixed_dictionaries(
    {"num_groups": st.integers(1, 4), "num_extra_groups": st.integers(0, 2), "max_staleness": st.integers(0, 4)}
)


@settings(max_examples=300, deadline=None)
@given(runs=st.lists(st.tuples(OPTIONS, st.lists(st.integers(0, 10**6), max_size=40)), min_size=2, max_size=4))
def test_a_run_continues_with_other_options(runs: list[tuple[dict[str, int], list[int]]]) -> None:
    """`Run.act` asserts that a step can be delivered when nothing runs. No group is delivered twice."""
    log, first = StepLog(), 0
    for options, choices in runs:
        run = Run(log, 10**9, first, **options)
        for choice in choices:
            run.act(choice)
        first += len(run.deliveries)
    while len(run.deliveries) < 5:  # the last run goes on
        run.act(1)
    delivered = Counter(number for numbers in log.steps.values() for number in numbers)
    assert set(delivered.values()) <= {1}


def test_the_oldest_groups_are_delivered_first_and_a_slow_group_is_waited_for() -> None:
    schedule = StepSchedule(2, 0, 1, 0, StepLog())
    schedule.open_step()
    started = []
    while (number := schedule.next_number()) is not None:
        started.append((number, schedule.start(number).step))
    assert started == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for number in (3, 1):
        schedule.finish(number)
    assert schedule.deliver().numbers == [1, 3]
    assert schedule.next_number() is None, "two groups wait, which is all that may be generated ahead"
    schedule.open_step()
    for number in (4, 5):
        assert schedule.next_number() == number
        schedule.start(number)
        schedule.finish(number)
    assert not schedule.is_ready, "groups 0 and 2 would be two steps old in the next step"
    schedule.finish(0)
    assert not schedule.is_ready
    schedule.finish(2)
    delivery = schedule.deliver()
    assert (delivery.numbers, delivery.ages, delivery.abandoned) == ([0, 2], [1, 1], [])


def test_a_young_group_is_not_delivered_if_old_groups_would_be_too_many_later() -> None:
    """Groups 1 and 2 both have to be delivered until step 2, so step 1 must have one of them."""
    schedule = StepSchedule(1, 0, 2, 0, StepLog())
    schedule.open_step()
    while (number := schedule.next_number()) is not None:
        schedule.start(number)
    schedule.finish(0)
    assert schedule.deliver().numbers == [0]
    schedule.open_step()
    assert schedule.next_number() == 3
    schedule.start(3)
    schedule.finish(3)
    assert not schedule.is_ready
    schedule.finish(2)
    assert schedule.deliver().numbers == [2]
    schedule.open_step()
    assert not schedule.is_ready
    schedule.finish(1)
    assert schedule.deliver().numbers == [1]


def test_extra_groups_are_abandoned_and_started_again() -> None:
    schedule = StepSchedule(2, 1, 0, 5, StepLog())
    schedule.open_step()
    for number in range(3):
        assert schedule.next_number() == number
        assert schedule.start(number).step == 5
    schedule.finish(2)
    schedule.finish(0)
    delivery = schedule.deliver()
    assert (delivery.step, delivery.numbers, delivery.abandoned) == (5, [0, 2], [1])
    assert schedule.next_number() is None, "the weights are not updated yet"
    schedule.open_step()
    assert schedule.next_number() == 1
    started = schedule.start(1)
    assert (started.step, started.attempt, started.is_new) == (6, 1, True)


def test_fewer_tasks_than_recorded_are_refused() -> None:
    log = StepLog()
    for number in range(4):
        log.apply({"started": [number, 0, "t"]})
    schedule = StepSchedule(2, 0, 1, 0, log)
    with pytest.raises(BadInputError, match=r"there are 2 tasks, but the run that is recorded .* had at least 4"):
        schedule.end_tasks(2)


def test_a_journal_is_read_again(tmp_path: Path) -> None:
    """Also when its last line is torn, and when a line could not be written."""
    journal = StepJournal(tmp_path, 0, 8)
    with pytest.raises(ServerBusyError, match="another iterator of steps uses the run_dir"):
        StepJournal(tmp_path, 0, 8)
    journal.write_started(0, 0, "a")
    journal.write_started(1, 0, "b")
    journal.write_started(0, 0, "a")
    journal.write_dropped(1, "failed")
    journal.write_step(0, [0])
    journal.write_started(2, 1, "c\u2028d")
    journal.close()
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    for torn in (b"", b'{"start', b"\x00" * 7):
        path.write_bytes(content + torn)
        journal = StepJournal(tmp_path, 0, 8)
        log = journal.log
        journal.close()
        assert (log.started[0].attempt, log.started[2].task_id) == (1, "c\u2028d")
        assert (log.steps, log.unfinished(), log.num_started) == ({0: [0]}, [2], 3)
        assert path.read_bytes() == content
        assert [log.is_needed(number) for number in range(4)] == [True, False, True, True]
    with pytest.raises(BadInputError, match="is of a run with n=8, so it cannot continue with n=4"):
        StepJournal(tmp_path, 0, 4)
    for first_step, expected in ((1, [False, False, True, True]), (2, None)):
        with contextlib.ExitStack() as stack:
            if expected is None:
                stack.enter_context(pytest.raises(BadInputError, match="must be a number from 0 to 1, got 2"))
            journal = StepJournal(tmp_path, first_step, 8)
            assert [journal.log.is_needed(number) for number in range(4)] == expected
            journal.close()


def test_the_log_of_a_long_run_is_short() -> None:
    """Only the groups of the steps that may be delivered again are kept."""
    log = StepLog(first_step=20_000)
    for step in range(20_000):
        for number in range(3):
            log.apply({"started": [3 * step + number, step, "t"]})
        log.apply({"dropped": 3 * step})
        log.apply({"step": step, "groups": [3 * step + 1, 3 * step + 2]})
    assert len(log.started) <= 2
    assert len(log.settled) <= 2
    assert (log.num_started, log.unfinished()) == (60_000, [])


def test_nothing_is_written_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, and the torn line cannot be removed either."""
    journal = StepJournal(tmp_path, 0, 8)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:5])) if len(data) > 20 else full())
    monkeypatch.setattr(os, "ftruncate", lambda fd, length: full())

    def full() -> int:
        raise OSError(errno.ENOSPC, "full")

    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            journal.write_started(0, 0, "a" * 10)
    monkeypatch.undo()
    with pytest.raises(OSError, match="full"):
        journal.write_started(1, 0, "b")
    journal.close()
    again = StepJournal(tmp_path, 0, 8)
    assert again.log.num_started == 0
    again.close()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"format":99}\n', "is of format 99; this version of verl_server reads format 1"),
        (b'{"format":1,"n":8}\n{"started":[1]}\n', "is damaged at byte 19"),
        (b'{"format":1,"n":8}\nnull\n', "is damaged at byte 19"),
        (b"[]\n", "is damaged at byte 0"),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(BadInputError, match=expected):
        StepJournal(tmp_path, 0, 8)
    assert (tmp_path / FILE_NAME).read_bytes() == content
