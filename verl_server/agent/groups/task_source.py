"""`TaskSource`: reads tasks one at a time. The number of a task is its position in the data, from 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence

from verl_server.agent.samples import Task
from verl_server.agent.user_failures import NotedFailures
from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.vision_renderer import have_images
from verl_server.validation import is_list

Tasks = Iterable[Task] | AsyncIterable[Task]
"""Tasks of a run. They may be endless, and are read when a sample can start."""
FROM_ROWS = '(Task(str(number), row["messages"], row) for number, row in enumerate(rows))'
"""Tasks from the rows of a data set, for errors."""


NUM_READ_PER_PAUSE = 1000
"""Number of tasks that are read before other tasks of the event loop run."""


def require_tasks(tasks: object, renderer: ChatRenderer) -> None:
    """Raise BadInputError for a list with an entry that is no task.

    Also for a list with a task that has images, unless the renderer renders images.
    """
    if isinstance(tasks, Sequence):  # an iterator is checked while it is read
        for number, task in enumerate(tasks):
            require_task(task, number)
            try:
                have_images(task.messages, renderer)
            except BadInputError as error:
                raise BadInputError(f"tasks[{number}], {task.id!r}: {error.message}") from None


def require_task(task: object, number: int) -> Task:
    """`task`. Raises BadInputError if it is no task."""
    if not isinstance(task, Task):
        hint = (
            "tasks are read one at a time, so pass no batches" if is_list(task) else f"for a data set, pass {FROM_ROWS}"
        )
        raise BadInputError(f"tasks[{number}] must be a Task, got {type(task).__name__}; {hint}")
    return task


class TaskSource:
    """Reads tasks in their order, and keeps those that were read and not yet released.

    `is_needed`: whether the task of a number is kept. `check`: called with every task that is read.
    """

    def __init__(
        self,
        tasks: Tasks,
        is_needed: Callable[[int], bool] = lambda number: True,
        check: Callable[[int, Task], None] = lambda number, task: None,
    ) -> None:
        self._iterator: Iterator[Task] | AsyncIterator[Task]
        self._iterator = aiter(tasks) if isinstance(tasks, AsyncIterable) else iter(tasks)
        self._is_needed, self._check = is_needed, check
        self._num_read, self._is_exhausted = 0, False
        self._kept: dict[int, Task] = {}

    @property
    def is_asynchronous(self) -> bool:
        """Whether other code runs while a task is being read."""
        return isinstance(self._iterator, AsyncIterator)

    async def get(self, number: int) -> Task | None:
        """The task of a number. None if there are fewer tasks.

        Raises BadInputError for an entry that is no task, and the exceptions of the iterator and of `check`.
        """
        while number >= self._num_read and not self._is_exhausted:
            with NotedFailures(f"raised by the iterator of the tasks when it was asked for task {self._num_read}"):
                try:
                    if isinstance(self._iterator, AsyncIterator):
                        task = await anext(self._iterator)
                    else:
                        task = next(self._iterator)
                except (StopIteration, StopAsyncIteration):
                    self._is_exhausted = True
                    break
            self._check(self._num_read, require_task(task, self._num_read))
            if self._is_needed(self._num_read):
                self._kept[self._num_read] = task
            self._num_read += 1
            if self._num_read % NUM_READ_PER_PAUSE == 0:  # a run that is continued skips the tasks of earlier steps
                await asyncio.sleep(0)
        return self._kept.get(number)

    def kept(self, number: int) -> Task | None:
        """The task of a number, if it was read and not released."""
        return self._kept.get(number)

    def release(self, number: int) -> None:
        """The task is not needed any more."""
        self._kept.pop(number, None)
