"""Options that most commands have."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

#: Exit code of a command that failed, and of a check that found a problem.
EXIT_FAILED = 1


def _log_to_stderr(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Write this library's log to standard error.", callback=_log_to_stderr)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
