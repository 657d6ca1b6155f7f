"""`RunChecker`: finds tasks that cannot be part of a run before their samples start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from verl_server.agent.groups.group_runner import session_ids
from verl_server.agent.samples import Task
from verl_server.errors import BadInputError
from verl_server.trajectory.recorder import has_recorded_nodes, session_file

logger = logging.getLogger(__name__)


def session_paths(run_dir: Path, number: int, task: Task, ids: Sequence[str]) -> list[Path]:
    """The files of sessions of a task. Raises BadInputError that names the task if an id is no file name."""
    try:
        return [session_file(run_dir, session_id) for session_id in ids]
    except BadInputError as error:
        raise BadInputError(f"tasks[{number}], {task.id!r:.250}: {error.message}", **error.details) from None


class RunChecker:
    """Checks the tasks of one call of `RolloutRunner.run`. `digests_of`: digests of the inputs of a task's samples."""

    def __init__(self, run_dir: Path | None, n: int, digests_of: Callable[[Task], Mapping[str, str]]) -> None:
        self._run_dir, self._n, self._digests_of = run_dir, n, digests_of
        self._numbers: dict[str, int] = {}
        """Number of each task by its id."""
        self._has_warned = False

    def check_all(self, tasks: Iterable[Task]) -> None:
        """Check a list of tasks. Raises the errors of `check`."""
        num_recorded = sum(self._check(number, task) for number, task in enumerate(tasks))
        if num_recorded:
            self._warn(str(num_recorded))

    def check(self, number: int, task: Task) -> None:
        """Check a task when it is read, unless `check_all` has checked it.

        Raises BadInputError for an id that an earlier task has or that is no file name, and for a sample that is
        recorded with other inputs.
        """
        if self._numbers.get(task.id) != number and self._check(number, task):
            self._warn("some")

    def _check(self, number: int, task: Task) -> int:
        """Number of samples of the task that are recorded."""
        if (earlier := self._numbers.setdefault(task.id, number)) != number:
            raise BadInputError(
                f"tasks {earlier} and {number} have the id {task.id!r}; task ids must be unique. For several samples "
                "of one task, pass n to the runner; `RolloutRunner.steps` also takes tasks that repeat"
            )
        if self._run_dir is None:
            return 0
        paths = session_paths(self._run_dir, number, task, session_ids(task.id, self._n))
        digests = self._digests_of(task)
        return sum(has_recorded_nodes(path, digests) for path in paths)

    def _warn(self, count: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s samples of this run are recorded in run_dir %s: finished samples are loaded, and the others "
                "continue. If this is another run, for example the next training step, pass another run_dir",
                count,
                self._run_dir,
            )
