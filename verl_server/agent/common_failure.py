"""Recognition of a failure that all samples of a run have in common, for example a mistake in the reward function.

A failure belongs to its sample, and the other samples go on. If all samples fail in the same way, the run would end
without a usable sample and without an error.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from types import TracebackType

from verl_server.agent.samples import Task

logger = logging.getLogger(__name__)

NUM_COMPARED_SAMPLES = 8
"""Number of samples that must fail in the same way. All samples of a run with fewer samples."""


class CommonFailure:
    """Logs the exception of the compared samples of a run if all of them failed with it and no sample succeeded.

    The run goes on: an untrained policy, or tasks that are sorted by length, can fail in the same way at the beginning.

    The compared samples are chosen when the run starts: the first sample of each of the first tasks, then the second
    sample of each task if there are fewer than `NUM_COMPARED_SAMPLES` tasks. The samples that finish first are not
    compared, because failures finish first: a few prompts that are too long fail before any other sample succeeds.
    """

    def __init__(self, tasks: Sequence[Task], n: int) -> None:
        samples = ((task.id, index) for index in range(n) for task in tasks)
        self._pending = set(itertools.islice(samples, NUM_COMPARED_SAMPLES))
        """Task ids and indices of the compared samples that have not finished."""
        self._num_compared = len(self._pending)
        self._origins: set[tuple[type[Exception], str, int]] = set()
        """Type, file and line of the exceptions of compared samples."""
        self._has_success = False
        """Whether any sample of the run succeeded."""

    def record(self, task: Task, index: int, exception: Exception | None) -> None:
        """Record a finished sample. `exception`: exception of a failed sample, None for any other sample."""
        if exception is None:
            self._has_success = True
        if self._has_success or exception is None or (task.id, index) not in self._pending:
            return
        self._pending.remove((task.id, index))
        self._origins.add((type(exception), *_place(exception.__traceback__)))
        if not self._pending and len(self._origins) == 1:
            logger.error(
                "the first %d samples that were compared failed with the same exception at the same place, and no "
                "other sample has succeeded yet; if the cause is a mistake in the reward, a tool or the chat template, "
                "stop the run, correct the mistake and run again",
                self._num_compared,
                exc_info=exception,
            )


def _place(trace: TracebackType | None) -> tuple[str, int]:
    """File and line that raised an exception."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
