"""Views of recorded sessions for people: one model of plain values, shown on a terminal or as an HTML page.

Texts from outside (messages, errors, ids, texts of tokens) contain no control characters, see `visible`.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from rich.console import Console
from rich.text import Text

from verl_server.trajectory.graph import (
    KIND_NOTE,
    Divergence,
    ForkReason,
    Node,
    Note,
    Termination,
    TrajectoryGraph,
    find_divergences,
    kind_at,
    recorded_kinds,
)
from verl_server.trajectory.rendering.tokenizer import REPLACEMENT_CHARACTER

LOGPROB_EDGES = (6.9, 4.6, 2.3, 0.7, 0.1)
"""Edges of the log prob levels, as negative log probs in nats: probabilities of 0.1 %, 1 %, 10 %, 50 % and 90 %."""


LOGPROB_LABELS = (
    "-0.1 to 0 (90 % and more)",
    "-0.7 to -0.1 (50 to 90 %)",
    "-2.3 to -0.7 (10 to 50 %)",
    "-4.6 to -2.3 (1 to 10 %)",
    "-6.9 to -4.6 (0.1 to 1 %)",
    "below -6.9 (less than 0.1 %)",
)
"""Range of each log prob level in nats and as probabilities. Level 0 has the most probable tokens. Each level is shown
in one colour."""


def logprob_level(logprob: float) -> int:
    """The level of a log prob in nats: an index of `LOGPROB_LABELS`."""
    return bisect_left(LOGPROB_EDGES[::-1], -logprob)


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of a node."""

    id: int
    text: str | None
    """Text of the token. Empty if the character ends in a later token. None without a tokenizer."""
    logprob: float | None
    """Log prob in nats. None for a token that the policy did not sample."""
    reward: float | None
    """Reward of the token. None if the node has no reward for each token."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens of a node that were sampled with the same weights."""

    version: int | None
    """Weight version. None for tokens that the policy did not sample."""
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True)
class TextPart:
    """A message of a node, or another part of its recorded text."""

    label: str
    """Role of the message, with the name of a tool."""
    text: str


@dataclass(frozen=True)
class NodeView:
    """A sampled turn, or messages that the policy did not sample."""

    id: int
    depth: int
    """Number of nodes between the root and this node."""
    sampled: bool
    parts: tuple[TextPart, ...]
    """The recorded messages."""
    num_tokens: int
    runs: tuple[TokenRun, ...]
    facts: tuple[str, ...]
    """Turn, number of tokens, weight versions, finish reason, log probs, reward, branch of the episode."""
    is_left_out: bool
    """Whether the tokens are sampled, but in no trained segment of a finished session."""
    forks: tuple[int, ...]
    """Numbers of the paths that begin after this node."""


@dataclass(frozen=True)
class Line:
    """A statement about a session, without control characters."""

    text: str
    nodes: tuple[int, ...] = ()
    """Nodes that the statement is about."""
    is_error: bool = False


@dataclass(frozen=True)
class PathView:
    """The path to one leaf, without the nodes that it shares with earlier paths."""

    number: int
    """From 1, in the order in which the paths were recorded."""
    kind: str | None
    """Kind of its conversation, for example `main` or `sub_agent`. None if it is not recorded."""
    origin: str
    """Where the path begins: at a root, or after a node of another path, with the fork reason."""
    nodes: tuple[NodeView, ...]
    divergence: Line | None
    """Where it differs from an earlier path. None for the first path."""


@dataclass(frozen=True)
class SessionView:
    """A recorded session."""

    session_id: str
    facts: tuple[str, ...]
    """Numbers of paths, nodes, turns and tokens, weight versions, log probs."""
    versions: tuple[int, ...]
    """Weight versions, sorted."""
    paths: tuple[PathView, ...]
    sections: tuple[tuple[str, tuple[Line, ...]], ...]
    """Title and lines: terminations, trained segments, divergences and notes, as far as there are some. Terminations
    and notes are in the order in which they were recorded, notes without the kinds of conversations. The segments are
    those of the last termination."""
    has_texts: bool
    """Whether tokens have texts, because there was a tokenizer."""


# -- Texts ------------------------------------------------------------------------------------------
# Texts of a view: recorded messages as labelled parts, and texts from outside without control characters.

MAX_PART_CHARACTERS = 120
"""Maximum number of characters of a content part that is no text, for example of an image in base64."""
DIRECTION_MARKS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
"""Characters that change the direction of the text after them, so that a reader may see another text."""
CONTROL_CHARACTERS: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in DIRECTION_MARKS},
    **{code: f"\\u{code:04x}" for code in (0x2028, 0x2029)},
}
"""The visible replacement of each control character."""
INVISIBLE_CHARACTERS: dict[int, int | str] = {
    ord("\n"): 0x240A,
    ord("\t"): 0x2409,
    **{code: f"\\u{code:04x}" for code in (0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF)},
}
"""The visible replacement of characters that would change the lines or the apparent spelling of a name."""


def visible(value: object) -> str:
    """A text from outside, in which control characters are visible and without effect on a terminal or a page.

    Line feeds and tabs are kept.
    """
    text = str(value).translate(CONTROL_CHARACTERS)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def as_label(value: object) -> str:
    """A name from outside in one line, in which invisible characters and line feeds are visible, too."""
    return as_text(value).translate(INVISIBLE_CHARACTERS)


def as_text(value: object) -> str:
    """A JSON value as text: a string as it is, a number with ten digits, and another value as JSON."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.10g}"
    if isinstance(value, str):
        return visible(value)
    try:
        return visible(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "(a value that is nested too deeply)"


def text_parts(message: Mapping[str, Any] | None) -> tuple[TextPart, ...]:
    """The parts of a node's `message`: messages, appended text, or the text of a turn. Any JSON object is shown."""
    if message is None:
        return ()
    messages = message.get("messages")
    if isinstance(messages, list):
        return tuple(_message_part(item) for item in messages)
    if "appended_text" in message:
        return (TextPart("appended text", as_text(message["appended_text"])),)
    return (_message_part(message),)


def _message_part(message: object) -> TextPart:
    if not isinstance(message, Mapping) or "role" not in message:
        return TextPart("message", as_text(message))
    label = as_label(message["role"])
    label += "".join(f" {as_label(message[key])}" for key in ("name", "tool_call_id") if message.get(key))
    lines = [f"{as_text(key)}: {as_text(value)}" for key, value in message.items() if _is_other(key, value)]
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return TextPart(label, "\n".join([*lines, *(_content_text(part) for part in parts)]))


def _is_other(key: str, value: object) -> bool:
    return key not in ("role", "name", "tool_call_id", "content") and value is not None


def _content_text(part: object) -> str:
    """The text of a content part. A part without a text, for example an image, is shortened."""
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return visible(part["text"])
    kind = as_text(part.get("type", "part")) if isinstance(part, Mapping) else "part"
    text = as_text(part)
    if len(text) > MAX_PART_CHARACTERS:
        text = f"{text[:MAX_PART_CHARACTERS]}... ({len(text)} characters)"
    return f"[{kind}] {text}"


def count(number: int, noun: str) -> str:
    """A number with its noun, for example "1 turn" or "20,000 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join(words: Iterable[object]) -> str:
    """The words as a list in a sentence."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


# -- Token texts ------------------------------------------------------------------------------------
# Text of each token of a sequence, decoded with a tokenizer.

DecodeFn = Callable[[Sequence[int]], str]
"""Decodes token ids to text, with special tokens."""
MAX_BYTES_PER_CHARACTER = 4
CACHE_SIZE = 100_000


def decoder_of(tokenizer: Any) -> DecodeFn:
    """A function that decodes token ids to text with special tokens, as a person wants to see them."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


class TokenTexts:
    """Decodes single tokens. The texts of the tokens of a sequence, joined, are the text of the sequence.

    The bytes of one character can be several tokens: then the last of them has the character, and the others have the
    text "". A token is decoded together with the tokens before it, because some tokenizers remove the space at the
    beginning of a text.
    """

    def __init__(self, decode: DecodeFn) -> None:
        self._decode = functools.lru_cache(CACHE_SIZE)(decode)

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        texts: list[str] = []
        known: tuple[int, ...] = ()
        """The last tokens that have a text together."""
        open_ids: tuple[int, ...] = ()
        """Tokens after it, which may be the beginning of a character."""
        for token in token_ids:
            open_ids += (token,)
            text = self._decode(known + open_ids)[len(self._decode(known)) :]
            if text.endswith(REPLACEMENT_CHARACTER) and len(open_ids) < MAX_BYTES_PER_CHARACTER:
                texts.append("")
                continue
            texts.append(text)
            known, open_ids = open_ids, ()
        if open_ids:
            texts[-1] = self._decode(known + open_ids)[len(self._decode(known)) :]
        return texts


# -- Nodes ------------------------------------------------------------------------------------------
# Makes the views of single nodes: facts, recorded texts, and tokens by weight version. Pure.


def logprob_fact(logprobs: Sequence[float]) -> list[str]:
    """Mean and minimum of the log probs in nats, as a list of one text. Empty without log probs."""
    return [f"log prob mean {sum(logprobs) / len(logprobs):.3f}, min {min(logprobs):.3f}"] if logprobs else []


class NodeViews:
    """Makes the views of the nodes of a session.

    `trained`: ids of the nodes in trained segments, None if the session has not finished. `starts`: number of the
    path that begins at a node, by the id of the node. `kinds`: recorded kinds of conversations by their first nodes.
    """

    def __init__(
        self,
        graph: TrajectoryGraph,
        texts: TokenTexts | None,
        trained: AbstractSet[int] | None,
        starts: Mapping[int, int],
        kinds: Mapping[int, str],
    ) -> None:
        self._graph, self._texts, self._trained, self._starts, self._kinds = graph, texts, trained, starts, kinds
        self._depths: dict[int, int] = {}

    def view(self, node: Node) -> NodeView:
        """The view of a node. The parent of the node, if any, has been viewed before."""
        depth = self._depths[node.id] = 0 if node.parent is None else self._depths[node.parent] + 1
        is_left_out = node.sampled and self._trained is not None and node.id not in self._trained
        return NodeView(
            id=node.id,
            depth=depth,
            sampled=node.sampled,
            parts=text_parts(node.message),
            num_tokens=len(node.token_ids),
            runs=tuple(self._runs(node)),
            facts=tuple(self._facts(node, is_left_out)),
            is_left_out=is_left_out,
            forks=tuple(self._starts[child] for child in self._graph.children(node.id) if child in self._starts),
        )

    def _facts(self, node: Node, is_left_out: bool) -> Iterator[str]:
        if node.sampled:
            yield f"turn {self._graph.num_turns(node.id)}"
        yield count(len(node.token_ids), "token")
        if node.id in self._kinds and node.id not in self._starts:
            yield f"begins a conversation of the kind {as_label(self._kinds[node.id])}"
        if node.spans:
            yield f"weights {join(span.version for span in node.spans)}"
        if node.finish_reason is not None:
            yield f"finish reason {as_text(node.finish_reason)}"
        yield from logprob_fact(node.logprobs)
        rewards = self._graph.rewards.get(node.id, [])
        if len(rewards) == 1:
            yield f"reward {as_text(rewards[0])}"
        elif rewards:
            yield f"rewards of {len(rewards)} tokens, sum {as_text(sum(rewards))}"
        if node.branch:
            yield f"branch {as_text(node.branch)}"
        if node.routed_experts is not None:
            yield "routed experts recorded"
        if is_left_out:
            yield "in no trained segment"

    def _runs(self, node: Node) -> Iterator[TokenRun]:
        tokens = tuple(self._tokens(node))
        if not node.sampled and tokens:
            yield TokenRun(None, tokens)
        for span in node.spans:
            yield TokenRun(span.version, tokens[span.start : span.end])

    def _tokens(self, node: Node) -> Iterator[TokenView]:
        texts = None if self._texts is None else self._texts(node.token_ids)
        rewards = self._graph.rewards.get(node.id, [])
        has_rewards = len(rewards) == len(node.token_ids) > 1
        for index, token in enumerate(node.token_ids):
            yield TokenView(
                id=token,
                text=None if texts is None else visible(texts[index]),
                logprob=node.logprobs[index] if node.sampled else None,
                reward=rewards[index] if has_rewards else None,
            )


# -- Session ----------------------------------------------------------------------------------------
# Makes the view of a session from its token graph. Pure.

ROOT_REASONS = {
    None: "begins with the first prompt",
    ForkReason.COMPACTED: "begins with a compacted history: compacted",
    ForkReason.SUB_AGENT: "begins with the prompt of a sub-agent: sub_agent",
}


def make_session_view(graph: TrajectoryGraph, decode: DecodeFn | None = None) -> SessionView:
    """The view of a session. `decode`: decodes token ids with special tokens. None: the tokens have no texts."""
    paths = _find_paths(graph)
    path_of = {node.id: number for number, nodes in enumerate(paths, 1) for node in nodes}
    segments = graph.trained_segments
    trained = None if segments is None else {node.id for leaf, _ in segments for node in graph.path(leaf)}
    texts = None if decode is None else TokenTexts(decode)
    kinds = recorded_kinds(graph)
    views = NodeViews(graph, texts, trained, {nodes[0].id: number for number, nodes in enumerate(paths, 1)}, kinds)
    divergences = {path_of[found.node]: _divergence_line(found, path_of, texts) for found in find_divergences(graph)}
    last = graph.last_termination
    ends = graph.terminations.values()
    sections = {
        "Terminations": tuple(
            line for end in ends for line in _termination_lines(end, path_of[end.node], is_last=end is last)
        ),
        "Trained segments": tuple(_segment_line(graph, path_of, leaf, weight) for leaf, weight in segments or ()),
        "Divergences": tuple(divergences.values()),
        "Notes": tuple(_note_line(note) for note in graph.notes if note.name != KIND_NOTE),
    }
    return SessionView(
        session_id=visible(graph.session_id),
        facts=_session_facts(graph, len(paths)),
        versions=tuple(sorted({span.version for node in graph.nodes for span in node.spans})),
        paths=tuple(
            PathView(
                number,
                as_label(kind) if (kind := kind_at(graph, kinds, nodes[0].id)) is not None else None,
                _origin(nodes[0], path_of, kind),
                tuple(views.view(node) for node in nodes),
                divergences.get(number),
            )
            for number, nodes in enumerate(paths, 1)
        ),
        sections=tuple((title, lines) for title, lines in sections.items() if lines),
        has_texts=texts is not None,
    )


def _find_paths(graph: TrajectoryGraph) -> list[list[Node]]:
    """The paths of all leaves, without the nodes of earlier paths. A path follows the first child of each node. Each
    fork begins another path.
    """
    paths: list[list[Node]] = []
    for start in graph.nodes:
        if start.id == graph.children(start.parent)[0] and start.parent is not None:
            continue
        nodes = [start]
        while children := graph.children(nodes[-1].id):
            nodes.append(graph.node(children[0]))
        paths.append(nodes)
    return paths


def _origin(start: Node, path_of: dict[int, int], kind: str | None) -> str:
    """`kind`: of the conversation. It is known better later: a title may be asked for before the main conversation."""
    if start.parent is not None:
        return f"forks after node {start.parent} of path {path_of[start.parent]}: {start.fork_reason}"
    if start.fork_reason is ForkReason.SUB_AGENT and kind not in (None, ForkReason.SUB_AGENT):
        return "begins with a prompt of its own"
    return ROOT_REASONS.get(start.fork_reason, f"begins with a prompt of its own: {start.fork_reason}")


def _session_facts(graph: TrajectoryGraph, num_paths: int) -> tuple[str, ...]:
    sampled = [node for node in graph.nodes if node.sampled]
    num_tokens, num_sampled = (sum(len(node.token_ids) for node in nodes) for nodes in (graph.nodes, sampled))
    facts = [
        count(num_paths, "path"),
        count(len(graph.nodes), "node"),
        count(len(sampled), "turn"),
        f"{count(num_tokens, 'token')}, of which {num_sampled:,} are sampled (loss mask 1)",
    ]
    counts: dict[int, int] = {}
    for node in sampled:
        for span in node.spans:
            counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    if counts:
        versions = (f"{version} ({count(counts[version], 'token')})" for version in sorted(counts))
        facts.append(f"weight versions {join(versions)}")
    facts += logprob_fact([logprob for node in sampled for logprob in node.logprobs])
    if graph.last_termination is None:
        facts.append("the session has not finished")
    return tuple(facts)


def _termination_lines(termination: Termination, path: int, *, is_last: bool) -> Iterator[Line]:
    """How an episode ended, its rewards by name, and its exception."""
    node, error = termination.node, termination.error
    reward = "no reward" if termination.reward is None else f"reward {as_text(termination.reward)}"
    earlier = "" if is_last else "earlier attempt: "
    text = f"{earlier}stop reason {as_label(termination.stop_reason)} at node {node} of path {path}, {reward}"
    yield Line(text, (node,), error is not None)
    if termination.rewards:
        yield Line(", ".join(f"{as_label(name)} {as_text(value)}" for name, value in termination.rewards.items()))
    for name, value in () if error is None else _error_lines(error):
        yield Line(f"{name}: {value}", is_error=True)


def _segment_line(graph: TrajectoryGraph, path_of: Mapping[int, int], leaf: int, weight: float) -> Line:
    tokens = f"{graph.num_tokens(leaf):,} tokens, of which {graph.num_sampled_tokens(leaf):,} are sampled"
    return Line(f"path {path_of[leaf]} up to node {leaf}: weight {as_text(float(weight))}, {tokens}", (leaf,))


def _error_lines(error: object) -> tuple[tuple[str, str], ...]:
    """The error as `verl_server.errors.to_wire` writes it, or any other JSON value."""
    if not isinstance(error, dict):
        return (("error", as_text(error)),)
    details = error.get("details")
    lines = [(error.get("type", "error"), error.get("message", ""))]
    lines += [(name, value) for name, value in error.items() if name not in ("type", "message", "details")]
    lines += details.items() if isinstance(details, dict) else [("details", details)] if details else []
    return tuple((as_label(name), as_text(value)) for name, value in lines)


def _note_line(note: Note) -> Line:
    value = as_text(note.value)
    if isinstance(note.value, dict):
        value = ", ".join(f"{name} {as_text(item)}" for name, item in note.value.items() if item is not None)
    text = as_label(f"{note.name}: {value}")
    return Line(text) if note.node is None else Line(f"{text} (after node {note.node})", (note.node,))


def _divergence_line(found: Divergence, path_of: dict[int, int], texts: TokenTexts | None) -> Line:
    path, original = path_of[found.node], path_of[found.original_node]
    new_token = _token_name(found.new_token, f"node {found.node} ends before it", texts)
    original_token = _token_name(found.original_token, f"path {original} ends before it", texts)
    text = (
        f"path {path} (node {found.node}) differs from path {original} (node {found.original_node}) after "
        f"{count(found.num_turns, 'turn')}, at token {found.position}: {new_token} instead of {original_token} "
        f"({found.fork_reason})"
    )
    return Line(text, (found.original_node, found.node))


def _token_name(token: int | None, absent: str, texts: TokenTexts | None) -> str:
    if token is None:
        return f"no token ({absent})"
    return f"{token}" if texts is None else f"{token} {visible(texts([token])[0])!r}"


# -- Terminal ---------------------------------------------------------------------------------------
# Prints the view of a session on a terminal, or as plain text into a pipe. Sampled and other tokens differ by a word
# and by the sign at the beginning of each line, not only by their colour.

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
    for title, lines in view.sections:
        _print_line(console, Text(f"\n{title}", style="bold"))
        for line in lines:
            mark, style = ("! ", "red") if line.is_error else ("", "")
            for number, part in enumerate(line.text.split("\n")):
                _print_line(console, Text(f"  {mark}{'  ' if number else ''}{part}", style=style))
    for path in view.paths:
        _print_path(console, path, with_tokens=with_tokens)


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
        _print_text(console, gutter, Text.assemble((f"{part.label}: ", "bold"), part.text))
    if with_tokens:
        for run in node.runs:
            version = "" if run.version is None else f" with weights {run.version}"
            _print_text(console, gutter, Text.assemble((f"tokens{version}: ", "bold"), *_token_texts(run.tokens)))
    if node.forks:
        paths = ", ".join(f"path {number}" for number in node.forks)
        _print_text(console, gutter, Text(f"forks here: {paths}", "italic"))


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
        levels=LOGPROB_LABELS,
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
