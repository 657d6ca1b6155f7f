"""What the `verl-server` command prints: progress, the URL and keys of a server, the replicas of a router."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from verl_server.cli.arguments import ADMIN_API_KEY, API_KEY
from verl_server.errors import BadInputError

if TYPE_CHECKING:
    from verl_server.adapter import HttpServerEngineAdapter


# -- Common options ---------------------------------------------------------------------------------
# Options that most commands have.

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


# -- Signals ----------------------------------------------------------------------------------------
# Signals that end the `verl-server` command: they are raised as an exception, so that all processes are ended.


class StopRequested(BaseException):
    """A signal asked this command to end. Not an `Exception`, so that no handler of errors catches it."""

    def __init__(self, number: int) -> None:
        self.number = number


class StopSignals:
    """Raises `StopRequested` on the first signal and ignores later signals, so that the cleanup can finish."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.is_server_ready = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        # A signal that was ignored before, as by nohup, stays ignored: the command outlives its terminal.
        numbers = [number for number in self.NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._stop) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> NoReturn:
        for other in self.NUMBERS:
            signal.signal(other, signal.SIG_IGN)
        raise StopRequested(number)


@contextlib.contextmanager
def exit_after_cleanup() -> Iterator[None]:
    """After a signal, end the command when the body has cleaned up. The exit code is 128 and the signal's number."""
    try:
        with StopSignals():
            yield
    except StopRequested as stop:
        raise typer.Exit(128 + stop.number) from None


# -- Output -----------------------------------------------------------------------------------------

PIPE_WIDTH = 10_000


def print_server(adapter: HttpServerEngineAdapter, server_args: Mapping[str, Any], generated_keys: list[str]) -> None:
    """Print the URL of a ready server, the generated keys, and an example request."""
    print_line(f"Ready: {adapter.base_url}")
    keys = {API_KEY: server_args["api_key"], ADMIN_API_KEY: server_args["admin_api_key"]}
    for name in generated_keys:
        print_line(f"export {name}={keys[name]}")
    prompt = '"input_ids": [1, 2, 3]' if server_args.get("skip_tokenizer_init") else '"text": "Once upon a time"'
    print_line(
        f'curl {adapter.base_url}/generate -H "Authorization: Bearer ${API_KEY}" '
        f"-H 'Content-Type: application/json' "
        f'-d \'{{{prompt}, "sampling_params": {{"max_new_tokens": 16}}}}\''
    )
    print_line("Press Ctrl-C to end the server.")


def print_replicas(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of a router's replicas, from the rows of its `/replicas`. URLs are never cut off."""
    table = Table(
        Column("replica", overflow="fold"), "accepts requests", "weight version", "running requests", "tokens in flight"
    )
    for row in rows:
        accepts = "suspect" if row["suspect"] else "yes" if row["admitted"] else "no"
        counts = (str(row[key]) for key in ("weight_version", "running_requests", "tokens_in_flight"))
        table.add_row(row["name"], accepts, *counts)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH  # the table uses only the width that it needs
    console.print(table)


@contextlib.contextmanager
def show_progress(description: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on a terminal, otherwise one line. Both go to standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{description} ...", file=sys.stderr, flush=True)
        yield
        return
    # A column with a ratio gets only the width that the other columns leave: a long path does not hide the time.
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    with Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=console, transient=True, expand=True) as progress:
        progress.add_task(description, total=None)
        yield


def print_line(line: str) -> None:
    """Print one line without wrapping and without delay, so that it can be copied or read through a pipe."""
    print(line, flush=True)


# -- Tokenizer --------------------------------------------------------------------------------------
# Tokenizers for commands. A folder without a tokenizer and an unreachable Hub are found within seconds.

HUB_TIMEOUT_S = 10.0
"""Maximum seconds of the question whether the Hub has a model. transformers repeats failed requests for a minute."""


def load_tokenizer(name: str, hint: str) -> Any:
    """The tokenizer of a folder or of a name on the Hugging Face Hub. Raises BadInputError, which ends with `hint`."""
    from transformers import AutoTokenizer

    folder = Path(os.path.expanduser(name))
    try:
        if folder.exists():
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not _is_on_hub(name))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise BadInputError(f"the tokenizer {name!r} cannot be loaded: {reason}; {hint}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one without files for some models
        raise BadInputError(f"the tokenizer {name!r} cannot be loaded: it has no files of a tokenizer; {hint}")
    return tokenizer


def _is_on_hub(name: str) -> bool:
    """Whether the Hub can be asked for the files of a model. If not, they can still be in the cache of this machine.

    Raises FileNotFoundError for the path of a folder, and if the Hub answers that it has no such model.
    """
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError("there is no such folder")

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise FileNotFoundError("there is no such folder, and the Hub has no such model that you may read") from None
    except HfHubHTTPError:  # a mirror may lack this question
        return True
    except Exception:  # noqa: BLE001 - offline or unreachable; versions of the Hub's client have errors of other HTTP libraries
        return False
    return True
