"""Options that most commands have."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

#: Exit code of a command that failed, and of a check that found a problem.
EXIT_FAILED = 1


_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _log_to_stderr(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT)


def log_also_info_of(name: str) -> None:
    """Write warnings to standard error, and also the information that the logger `name` logs."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=_LOG_FORMAT)  # no effect after --verbose
    logging.getLogger(name).setLevel(logging.INFO)


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Write this library's log to standard error.", callback=_log_to_stderr)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
