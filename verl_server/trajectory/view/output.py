"""Prints the view of a session on a terminal, or as plain text into a pipe.

Sampled and other tokens differ by a word and by the sign at the beginning of each line, not only by their colour.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from rich.console import Console
from rich.text import Text

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import list_sessions, load_session
from verl_server.trajectory.view.model import (
    LOGPROB_LEVELS,
    NodeView,
    NoteView,
    PathView,
    SegmentView,
    SessionView,
    TerminationView,
    TextPart,
    TokenView,
    as_text,
    logprob_level,
    visible,
)

SAMPLED_SIGN, CONTEXT_SIGN = "\u2588 ", "\u2502 "
"""Signs at the beginning of the lines of sampled tokens (a full block) and of other tokens (a thin line)."""
MIN_TEXT_WIDTH = 20
FACT_SEPARATOR = " \u00b7 "
SAMPLED_STYLE, CONTEXT_STYLE = "green", "bright_black"
LEVEL_STYLES = ("green", "cyan", "yellow", "dark_orange", "red", "bold red reverse")
"""Style of each log prob level, from probable to improbable tokens."""


def print_session(view: SessionView, console: Console, *, with_tokens: bool = False) -> None:
    """Print a session. `with_tokens`: also print the id of each token, and its text and log prob if they are known."""
    _print_line(console, Text(f"Session {view.session_id}", style="bold"))
    for fact in view.facts:
        _print_line(console, f"  {fact}")
    _print_line(console, f"  {SAMPLED_SIGN}sampled tokens (loss mask 1)   {CONTEXT_SIGN}other tokens (loss mask 0)")
    _print_section(console, "Terminations", [line for item in view.terminations for line in _termination_lines(item)])
    _print_section(console, "Trained segments", map(_segment_line, view.segments))
    _print_section(console, "Divergences", (divergence.text for divergence in view.divergences))
    _print_section(console, "Notes", map(_note_line, view.notes))
    for path in view.paths:
        _print_path(console, path, with_tokens=with_tokens)


def _print_section(console: Console, title: str, lines: Iterable[str]) -> None:
    for index, line in enumerate(lines):
        if index == 0:
            _print_line(console, Text(f"\n{title}", style="bold"))
        _print_line(console, Text(f"  {line}", style="red" if line.startswith("!") else ""))


def _termination_lines(item: TerminationView) -> Iterator[str]:
    failed = "! " if item.error is not None else ""
    reward = "no reward" if item.reward is None else f"reward {item.reward}"
    earlier = "" if item.is_last else "earlier attempt: "
    yield f"{failed}{earlier}stop reason {item.stop_reason} at node {item.node} of path {item.path}, {reward}"
    if item.rewards:
        yield "  " + ", ".join(f"{name} {value}" for name, value in item.rewards)
    if item.error is not None:
        yield from _indented(f"! {item.error.type}: {item.error.message}")
        for name, value in item.error.details:
            yield from _indented(f"! {name}: {value}")


def _segment_line(item: SegmentView) -> str:
    tokens = f"{item.num_tokens:,} tokens, of which {item.num_sampled_tokens:,} are sampled"
    return f"path {item.path} up to node {item.node}: weight {item.weight}, {tokens}"


def _note_line(item: NoteView) -> str:
    return item.text if item.node is None else f"{item.text} (after node {item.node})"


def _indented(text: str) -> Iterator[str]:
    """The lines of an error, each with the sign of an error."""
    for index, line in enumerate(text.split("\n")):
        yield line if index == 0 else f"!   {line}"


def _print_path(console: Console, path: PathView, *, with_tokens: bool) -> None:
    kind = "" if path.kind is None else f" ({path.kind})"
    _print_line(console, Text.assemble("\n", (f"Path {path.number}", "bold"), kind, f" {path.origin}"))
    if path.divergence is not None:
        _print_line(console, f"  {path.divergence.text}")
    for node in path.nodes:
        _print_node(console, node, with_tokens=with_tokens)


def _print_node(console: Console, node: NodeView, *, with_tokens: bool) -> None:
    sign, kind = (SAMPLED_SIGN, "sampled") if node.sampled else (CONTEXT_SIGN, "context")
    style = SAMPLED_STYLE if node.sampled else CONTEXT_STYLE
    gutter = (sign, style)
    title = (f"node {node.id} {kind}", f"bold {style}" if node.sampled else "bold")
    _print_line(console, Text.assemble("\n", gutter, title, f"  {FACT_SEPARATOR.join(node.facts)}"))
    for part in node.parts:
        _print_text(console, gutter, _part_text(part))
    if with_tokens:
        for run in node.runs:
            version = "" if run.version is None else f" with weights {run.version}"
            _print_text(console, gutter, Text.assemble((f"tokens{version}: ", "bold"), *_token_texts(run.tokens)))
    if node.forks:
        paths = ", ".join(f"path {number}" for number in node.forks)
        _print_text(console, gutter, Text(f"forks here: {paths}", "italic"))


def _part_text(part: TextPart) -> Text:
    return Text.assemble((f"{part.label}: ", "bold"), part.text)


def _token_texts(tokens: Iterable[TokenView]) -> Iterator[tuple[str, str]]:
    """Id, text and log prob of each token, with the style of the log prob."""
    for index, token in enumerate(tokens):
        words = [str(token.id)] if token.text is None else [str(token.id), repr(token.text)]
        if token.logprob is not None:
            words.append(f"{token.logprob:.3f}")
        if token.reward is not None:
            words.append(f"reward {token.reward:g}")
        style = "" if token.logprob is None else LEVEL_STYLES[logprob_level(token.logprob)]
        separator = "  " if len(words) > 1 else " "
        yield separator if index else "", ""
        yield " ".join(words), style


def _print_text(console: Console, gutter: tuple[str, str], text: Text) -> None:
    """Print a text with the gutter before each line. On a terminal, long lines are wrapped behind the gutter."""
    text.expand_tabs(8)
    if console.is_terminal:
        lines = text.wrap(console, max(console.width - len(gutter[0]), MIN_TEXT_WIDTH))
    else:
        lines = text.split("\n", allow_blank=True)
    for line in lines:
        _print_line(console, Text.assemble(gutter, line))


def _print_line(console: Console, line: str | Text) -> None:
    """Print one line unchanged: without wrapping, and without markup."""
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


# -- Page -------------------------------------------------------------------------------------------
# Renders the view of a session as one HTML page: without scripts, and without anything from a network.

TEMPLATE = "page.html.jinja"
NEWLINE_SIGN, EMPTY_SIGN = "\u21b5", "\u00b7"
"""Signs of a line feed in a token, and of a token without a text of its own."""


def render_page(view: SessionView, *, opens_ids: bool = False) -> str:
    """The HTML of a session's page. `opens_ids`: whether the token ids are shown from the start.

    All texts of the session are escaped, and the page forbids scripts and requests by its content security policy.
    """
    return _template().render(
        view=view,
        starts={path.number: path.nodes[0].id for path in view.paths},
        levels=LOGPROB_LEVELS,
        level=logprob_level,
        tooltip=_tooltip,
        shown=_shown_text,
        opens_ids=opens_ids,
    )


@functools.cache
def _template() -> Template:
    # Autoescape is on for all values, whatever the name of the template: messages can contain HTML.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(TEMPLATE)


def _tooltip(token: TokenView, version: int) -> str:
    logprob = "" if token.logprob is None else f", log prob {token.logprob:.3f}"
    reward = "" if token.reward is None else f", reward {token.reward:g}"
    return f"id {token.id}{logprob}, weights {version}{reward}"


def _shown_text(token: TokenView) -> str:
    """The text of a token, in which line feeds are visible. A token without a text has a sign."""
    return (token.text or EMPTY_SIGN).replace("\n", f"{NEWLINE_SIGN}\n")


# -- Folder -----------------------------------------------------------------------------------------
# Summaries of the sessions of a run: one row for each recorded session of a folder.


@dataclass(frozen=True)
class SessionSummary:
    """A recorded session of a folder."""

    file: Path
    name: str
    """Path of the file in the folder."""
    num_turns: int
    num_tokens: int
    num_sampled_tokens: int
    stop_reason: str
    """Stop reason of the last termination. Empty if the session has not finished."""
    reward: str
    """Reward of the last termination. Empty without a reward."""


@dataclass(frozen=True)
class UnreadableSession:
    """A file of a folder that cannot be read as a session."""

    name: str
    reason: str


def summarize_folder(folder: Path) -> Iterator[SessionSummary | UnreadableSession]:
    """A row for each session file in a folder and in its folders, in the order of their names."""
    for file in list_sessions(folder):
        name = visible(file.relative_to(folder))
        try:
            yield _summarize(file, name, load_session(file))
        except (BadInputError, OSError) as error:
            yield UnreadableSession(name, visible(error))


def _summarize(file: Path, name: str, graph: TrajectoryGraph) -> SessionSummary:
    last = graph.last_termination
    return SessionSummary(
        file=file,
        name=name,
        num_turns=sum(node.sampled for node in graph.nodes),
        num_tokens=sum(len(node.token_ids) for node in graph.nodes),
        num_sampled_tokens=sum(len(node.token_ids) for node in graph.nodes if node.sampled),
        stop_reason="" if last is None else as_text(last.stop_reason),
        reward="" if last is None or last.reward is None else as_text(last.reward),
    )
