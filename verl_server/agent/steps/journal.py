"""`StepJournal`: the file `steps.journal`, by which the steps of a training run continue after a crash.

Each line is the JSON of one event: a group was started or dropped, or a step was delivered. A process that is killed
while it writes leaves a torn last line, which is removed when the file is opened again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from verl_server.errors import BadInputError
from verl_server.trajectory.recorder import close_locked, duplicate_locked, open_locked
from verl_server.types import Json

FILE_NAME = "steps.journal"
FILE_FORMAT = 1


@dataclass(frozen=True)
class StartedGroup:
    """The last start of a group."""

    step: int
    """Step in which the group was started."""
    task_id: str
    attempt: int
    """Number of earlier starts of the group."""


@dataclass
class StepLog:
    """What a journal says of the steps from `first_step` on. The number of a group is that of its task.

    Groups of earlier steps and dropped groups are forgotten, except for the first and the last group: a run may have
    millions of groups.
    """

    first_step: int = 0
    started: dict[int, StartedGroup] = field(default_factory=dict)
    """The last start of each group."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    """The groups of each delivered step. Empty for steps before `first_step`."""
    num_started: int = 0
    """Number of tasks whose groups were started."""
    settled: set[int] = field(default_factory=set)
    """Groups of `started` that are not needed."""

    def apply(self, event: Json) -> None:
        """Apply one line of the journal. Raises KeyError, TypeError or ValueError for a line of another form."""
        if "started" in event:
            number, step, task_id = event["started"]
            earlier = self.started.get(int(number))
            self.started[int(number)] = StartedGroup(int(step), str(task_id), earlier.attempt + 1 if earlier else 0)
            self.num_started = max(self.num_started, int(number) + 1)
        elif "dropped" in event:
            self._settle([int(event["dropped"])])
        else:
            step, numbers = int(event["step"]), [int(number) for number in event["groups"]]
            self.steps[step] = numbers if step >= self.first_step else []
            self._settle([] if step >= self.first_step else numbers)

    def _settle(self, numbers: Sequence[int]) -> None:
        """Forget groups that are not needed any more."""
        self.settled.update(numbers)
        for number in [number for number in self.settled if number not in (0, self.num_started - 1)]:
            self.started.pop(number, None)
            self.settled.discard(number)

    def is_needed(self, number: int) -> bool:
        """Whether the task of this number is needed: it was not started yet, or its group is not settled."""
        return number >= self.num_started or (number in self.started and number not in self.settled)

    def unfinished(self) -> list[int]:
        """The groups that were started and that neither a step has nor were dropped, in the order of their numbers."""
        not_needed = self.settled.union(*self.steps.values())
        return sorted(number for number in self.started if number not in not_needed)


class StepJournal:
    """Writes the journal of a `run_dir`. One process at a time may have it open."""

    def __init__(self, run_dir: Path, first_step: int, n: int) -> None:
        """Open the journal, or create it. `log` has what it says of the steps from `first_step` on.

        `n`: number of samples of a group. Raises ServerBusyError if the journal is open elsewhere, BadInputError for a
        damaged file, one of another format, of groups of another size or of steps that do not fit to `first_step`, and
        OSError if the file cannot be opened.
        """
        path = run_dir / FILE_NAME
        self._lock = threading.Lock()
        """`write_step` runs in a thread."""
        self._failure: OSError | None = None
        """The failure of an earlier line, which the file may lack or have in part."""
        self._fd = open_locked(
            path,
            f"another iterator of steps uses the run_dir {run_dir}; wait for the other process, or close the earlier "
            "iterator of this process: async with contextlib.aclosing(runner.steps(...)) as steps",
        )
        try:
            self.log, num_bytes = parse_journal(path, path.read_bytes(), first_step, n)
            require_connected_steps(path, self.log)
            os.ftruncate(self._fd, num_bytes)
            os.lseek(self._fd, num_bytes, os.SEEK_SET)
            if num_bytes == 0:
                self._write({"format": FILE_FORMAT, "n": n})
        except BaseException:
            close_locked(self._fd)
            raise

    def write_started(self, number: int, step: int, task_id: str) -> None:
        self._write({"started": [number, step, task_id]})

    def write_dropped(self, number: int, reason: str) -> None:
        self._write({"dropped": number, "reason": reason})

    def write_step(self, step: int, numbers: Sequence[int]) -> None:
        """Write a delivered step. When the method returns, the line is on disk."""
        with duplicate_locked(self._fd) as fd:
            self._write({"step": step, "groups": list(numbers)})
            os.fdatasync(fd)  # `_lock` is not held meanwhile, because the event loop writes other lines

    def _write(self, event: Json) -> None:
        """Append a line. Raises OSError. After that the file ends with its last complete line, and all calls fail."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            remaining = memoryview(orjson.dumps(event) + b"\n")
            try:
                while remaining:
                    remaining = remaining[os.write(self._fd, remaining) :]
            except OSError as failure:
                self._failure = failure
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, end)
                raise

    def close(self) -> None:
        """Close the file. Calling this a second time has no effect."""
        with self._lock:
            if self._fd >= 0:
                close_locked(self._fd)
                self._fd = -1


def parse_journal(path: Path, content: bytes, first_step: int, n: int) -> tuple[StepLog, int]:
    """Parse the complete lines of a journal. Returns what they say, and their number of bytes.

    Raises BadInputError for a damaged line, for another format, and for groups of another size than `n`.
    """
    log, start = StepLog(first_step), 0
    while (end := content.find(b"\n", start)) >= 0:
        try:
            event = orjson.loads(content[start:end])
            if start == 0:
                _check_header(path, event, n)
            else:
                log.apply(event)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            if start == 0 and isinstance(error, BadInputError):
                raise
            raise BadInputError(f"{path} is damaged at byte {start}: {error!r}. Use another run_dir") from error
        start = end + 1
    return log, start


def _check_header(path: Path, header: Json, n: int) -> None:
    if header["format"] != FILE_FORMAT:
        raise BadInputError(
            f"{path} is of format {header['format']}; this version of verl_server reads format {FILE_FORMAT} only. Use "
            "another run_dir"
        )
    if header["n"] != n:
        raise BadInputError(
            f"{path} is of a run with n={header['n']}, so it cannot continue with n={n}; pass another run_dir",
            argument="n",
        )


def require_connected_steps(path: Path, log: StepLog) -> None:
    """Raise BadInputError if there would be a gap between the recorded steps and `first_step`."""
    steps = log.steps or {started.step: [] for started in log.started.values()}
    if not steps:
        return
    first, last = min(steps), max(log.steps, default=min(steps) - 1)
    if not first <= log.first_step <= last + 1:
        raise BadInputError(
            f"{path} begins with step {first} and has {last + 1 - first} steps, so start_step must be a number from "
            f"{first} to {last + 1}, got {log.first_step}; pass another run_dir for another run",
            argument="start_step",
        )
