"""The log of exceptions that tools do not raise on purpose. The policy reads them as results of its calls."""

from __future__ import annotations

import linecache
import logging
import traceback

logger = logging.getLogger(__name__)

_LOGGED: set[tuple[str, str, str | None, int]] = set()
"""Tool, type of the exception, file and line of each failure that was logged."""


def log_failure(name: str, error: Exception, source_file: str | None) -> None:
    """Log the exception of the tool `name` with its traceback, once for each line of the source file of the tool.

    An exception that the tool raises by itself with `raise` is not logged: it is an answer to the policy. Other
    exceptions can be a mistake in the tool, for example a missing key or attribute.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == source_file]
    if own and own[-1] is frames[-1] and is_raise(own[-1]):
        return
    line = (own or frames)[-1].lineno if frames else None
    failure = (name, type(error).__name__, source_file, line or 0)
    if failure not in _LOGGED:
        _LOGGED.add(failure)
        logger.warning(
            "the tool %r has raised an exception, which the policy reads as the result of its call. If this is a "
            "mistake in the tool, correct it. Later exceptions of this type at the same line are not logged; the "
            "metric tools/%s/errors/raised counts them",
            name,
            name,
            exc_info=error,
        )


def is_raise(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is at a statement `raise`, also at one behind `if ...:` on the same line."""
    line = linecache.getline(frame.filename, frame.lineno or 0).encode()
    return line[frame.colno or 0 :].split(b"#")[0].split(maxsplit=1)[:1] == [b"raise"]
