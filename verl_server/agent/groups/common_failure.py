"""Recognition of a failure that all samples of a run have in common, for example a mistake in the reward function.

A failure belongs to its sample, and the other samples go on. If all samples fail in the same way, the run would end
without a usable sample and without an error.
"""

from __future__ import annotations

import itertools
import logging
from types import TracebackType

logger = logging.getLogger(__name__)

NUM_COMPARED_SAMPLES = 8
"""Number of samples that must fail in the same way. All samples of a run with fewer samples."""


class CommonFailure:
    """Logs the exception of the compared samples of a run if all of them failed with it and no sample succeeded.

    The run goes on: an untrained policy, or tasks that are sorted by length, can fail in the same way at the beginning.

    The compared samples are the first sample of each of the first tasks, and the second sample of each task if the run
    has fewer than `NUM_COMPARED_SAMPLES` tasks, and so on. The samples that finish first are not compared, because
    failures finish first: a few prompts that are too long fail before any other sample succeeds.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._numbers: list[int] = []
        """Numbers of the first tasks."""
        self._are_all_tasks_known = False
        self._failures: dict[tuple[int, int], Exception] = {}
        """Exceptions of failed samples of the first tasks, by the number of the task and the index of the sample."""
        self._is_decided = False
        """Whether a sample has succeeded, or the comparison is done."""

    def start(self, number: int) -> None:
        """Note that the samples of the task with this number are started."""
        if len(self._numbers) < NUM_COMPARED_SAMPLES and number not in self._numbers:
            self._numbers.append(number)

    def end_tasks(self) -> None:
        """Note that there are no more tasks than those that were started."""
        self._are_all_tasks_known = True
        self._compare()

    def record(self, number: int, index: int, exception: Exception | None) -> None:
        """Record a finished sample. `exception`: exception of a failed sample, None for any other sample."""
        if exception is None:
            self._is_decided = True
        if self._is_decided:
            self._failures.clear()
        elif number in self._numbers and index < NUM_COMPARED_SAMPLES and exception is not None:
            self._failures[number, index] = exception
            self._compare()

    def _compare(self) -> None:
        """Log the exception if all compared samples have failed with it."""
        if not (self._are_all_tasks_known or len(self._numbers) == NUM_COMPARED_SAMPLES):
            return
        samples = ((number, index) for index in range(self._n) for number in self._numbers)
        compared = list(itertools.islice(samples, NUM_COMPARED_SAMPLES))
        if self._is_decided or not compared or not all(sample in self._failures for sample in compared):
            return
        self._is_decided = True
        exceptions = [self._failures[sample] for sample in compared]
        self._failures.clear()
        if len({(type(exception), *_place(exception.__traceback__)) for exception in exceptions}) == 1:
            logger.error(
                "the first %d samples that were compared failed with the same exception at the same place, and no "
                "other sample has succeeded yet; if the cause is a mistake in the reward, a tool or the chat template, "
                "stop the run, correct the mistake and run again",
                len(compared),
                exc_info=exceptions[-1],
            )


def _place(trace: TracebackType | None) -> tuple[str, int]:
    """File and line that raised an exception."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
