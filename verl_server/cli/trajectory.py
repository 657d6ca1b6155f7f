"""The command `verl-server trajectory`: shows recorded sessions on the terminal or as an HTML page.

The module imports neither torch nor transformers; a tokenizer is loaded when it is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from verl_server.cli.common import PIPE_WIDTH, exit_after_cleanup, load_tokenizer, print_line, show_progress
from verl_server.errors import BadInputError
from verl_server.trajectory.exports import ExportFormat

if TYPE_CHECKING:
    from verl_server.trajectory.graph import TrajectoryGraph
    from verl_server.trajectory.view import DecodeFn

PAGE_BEGINNING = b"<!doctype html>"

trajectory_app = typer.Typer(
    name="trajectory", no_args_is_help=True, help="Show and export recorded sessions of agents."
)

RecordedFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of a recorded session, or a run_dir to list its sessions.")
]
HtmlOutput = Annotated[
    Path | None, typer.Option("--html", metavar="OUT", help="Write one HTML page instead of printing the session.")
]
WithTokens = Annotated[bool, typer.Option("--tokens", help="Also show the token ids.")]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="MODEL", help="Folder or Hub name of the tokenizer with which token texts are shown."
    ),
]


@trajectory_app.callback()
def _root() -> None:
    """Show and export recorded sessions of agents."""


@trajectory_app.command()
def show(
    file: RecordedFile, html: HtmlOutput = None, tokens: WithTokens = False, tokenizer: TokenizerName = None
) -> None:
    """Show a recorded session: its turns and forks, log probs, weight versions, rewards and how it ended.

    With --html, the session is written as one page for a browser, in which each sampled token has the colour
    of its log prob. With a folder, all sessions in it are listed.

    Exit code 2 when a file cannot be read as a session.

    Examples:
      verl-server trajectory show run-a
      verl-server trajectory show run-a/sum-0-0.jsonl
      verl-server trajectory show run-a/sum-0-0.jsonl --html sum.html --tokenizer Qwen/Qwen3-0.6B
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text of the session may have characters that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    path = Path(os.path.expanduser(file))
    if not os.path.isdir(path):
        _show_session(path, html, tokens, tokenizer)
    elif html is None and not tokens and tokenizer is None:
        _list_sessions(path)
    else:
        raise BadInputError(
            f"{path} is a folder; --html, --tokens and --tokenizer need the file of one session. To list the sessions "
            "of the folder, leave out the options"
        )


def _show_session(file: Path, html: Path | None, with_tokens: bool, tokenizer: str | None) -> None:
    """Print a session, or write its page to `html`."""
    if tokenizer is not None and not with_tokens and html is None:
        raise BadInputError("--tokenizer shows the texts of tokens; add --tokens, or --html OUT")
    graph = _load(file)
    output = None if html is None else _require_output(Path(os.path.expanduser(html)))
    decode = None if tokenizer is None else _load_decoder(tokenizer)

    from verl_server.trajectory.view import make_session_view, print_session, render_page

    view = make_session_view(graph, decode)
    if output is None:
        print_session(view, _console(), with_tokens=with_tokens)
    else:
        with exit_after_cleanup():
            _write_page(output, render_page(view, opens_ids=with_tokens))


def _load(path: Path) -> TrajectoryGraph:
    from verl_server.trajectory.recorder import load_session

    try:
        return load_session(path)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error.message}") from error
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be read: {error.strerror or error}; pass the file of a recorded session "
            "(RUN_DIR/NAME.jsonl), or a run_dir"
        ) from error


def _load_decoder(name: str) -> DecodeFn:
    """The decoder of a tokenizer. Raises BadInputError if the tokenizer cannot be loaded."""
    with show_progress("Loading the tokenizer"):
        tokenizer = load_tokenizer(name, "pass --tokenizer the folder or the Hub name of the policy's model")

    from verl_server.trajectory.view import decoder_of

    return decoder_of(tokenizer)


def _require_output(path: Path) -> Path:
    """`path`. Raises BadInputError if a page there would replace something that is no page, for example a session."""
    try:
        if path.exists() and not path.is_file():
            raise BadInputError(f"--html {path} is a folder or a device; pass the name of a file")
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(PAGE_BEGINNING)).lower() != PAGE_BEGINNING:
                    raise BadInputError(f"--html {path} exists and is no HTML page; pass the name of another file")
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def _write_page(path: Path, page: str) -> None:
    """Write a page, which appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # the folder may be missing, or be a file
            temporary.unlink()
    print_line(f"Wrote {path}")


def _cannot_write(path: Path, error: OSError) -> BadInputError:
    return BadInputError(f"--html {path} cannot be written: {error.strerror or error}; pass the name of another file")


def _list_sessions(folder: Path) -> None:
    """Print a table of the sessions of a folder. Raises BadInputError if there are none, or one cannot be read."""
    from verl_server.trajectory.recorder import list_sessions, load_session
    from verl_server.trajectory.view import as_text, visible

    if not (files := list_sessions(folder)):
        raise BadInputError(f"{folder} has no recorded sessions (files NAME.jsonl); pass the run_dir of a run")
    table = Table(
        Column("session", overflow="fold"),
        *(Column(name, justify="right") for name in ("turns", "tokens", "sampled tokens")),
        "stop reason",
        Column("reward", justify="right"),
    )
    unreadable, readable = "", []
    for file in files:
        name = visible(file.relative_to(folder))
        try:
            graph = load_session(file)
        except (BadInputError, OSError) as error:
            unreadable += f"\n  {name}: {visible(error)}"
            continue
        readable.append(file)
        sampled, last = [node for node in graph.nodes if node.sampled], graph.last_termination
        table.add_row(
            name,
            f"{len(sampled)}",
            *(f"{sum(len(node.token_ids) for node in nodes)}" for nodes in (graph.nodes, sampled)),
            "not finished" if last is None else as_text(last.stop_reason),
            "-" if last is None or last.reward is None else as_text(last.reward),
        )
    console = _console()
    if readable:
        console.print(table, markup=False)
        print_line(f"Show a session: verl-server trajectory show {shlex.quote(str(readable[0]))}")
    if unreadable:
        num_unreadable = len(files) - len(readable)
        raise BadInputError(
            f"{num_unreadable} of {len(files)} files of {folder} cannot be read as sessions:{unreadable}"
        )


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH  # the table uses only the width that it needs
    return console


# -- Trajectory export ------------------------------------------------------------------------------
# The command `verl-server trajectory export`.


def export(
    source: Annotated[
        Path, typer.Argument(metavar="FILE_OR_RUN_DIR", help="File of a recorded session, or the run_dir of a run.")
    ],
    kind: Annotated[ExportFormat, typer.Option("--format", help="Format of the output.")],
    output: Annotated[
        Path,
        typer.Option(metavar="PATH", help="File, or folder (atif), to write. It must not exist."),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model. Sessions do not record it.")
    ] = None,
) -> None:
    """Export recorded sessions to the format of another program.

    verifiers: the traces.jsonl of PrimeIntellect's verifiers, one line for each session.
    atif: Harbor's Agent Trajectory Interchange Format 1.8, one JSON file for each trained path.
    litellm: LiteLLM's log of calls with token ids, one line for each turn.

    Examples:
      verl-server trajectory export sessions --format verifiers --output traces.jsonl
      verl-server trajectory export sessions/sum-0-0.jsonl --format atif --output trajectories
      verl-server trajectory export sessions --format litellm --output litellm-trajectory.jsonl
    """
    from verl_server.trajectory.exports import export_sessions

    with exit_after_cleanup():
        done = export_sessions(source, output, kind, model)
    noun = "files" if kind is ExportFormat.ATIF else "lines"
    print_line(f"Wrote {output} (sessions: {done.num_sessions}, {noun}: {done.num_documents})")
