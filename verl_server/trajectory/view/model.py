"""What a view of a session shows, as plain values. The terminal and the HTML page show the same model.

Texts from outside (messages, errors, ids, texts of tokens) contain no control characters, see `visible`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

LOGPROB_EDGES = (6.9, 4.6, 2.3, 0.7, 0.1)
"""Edges of the log prob levels, as negative log probs in nats: probabilities of 0.1 %, 1 %, 10 %, 50 % and 90 %."""


@dataclass(frozen=True, slots=True)
class LogprobLevel:
    """A range of log probs that is shown in one colour."""

    number: int
    """From 0, the most probable tokens, to 5, the least probable tokens."""
    label: str
    """The range in nats and as probabilities."""


LOGPROB_LEVELS = (
    LogprobLevel(0, "-0.1 to 0 (90 % and more)"),
    LogprobLevel(1, "-0.7 to -0.1 (50 to 90 %)"),
    LogprobLevel(2, "-2.3 to -0.7 (10 to 50 %)"),
    LogprobLevel(3, "-4.6 to -2.3 (1 to 10 %)"),
    LogprobLevel(4, "-6.9 to -4.6 (0.1 to 1 %)"),
    LogprobLevel(5, "below -6.9 (less than 0.1 %)"),
)


def logprob_level(logprob: float) -> int:
    """Number of the `LogprobLevel` of a log prob in nats."""
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
class DivergenceView:
    """Where a path differs from an earlier path."""

    path: int
    node: int
    original_path: int
    original_node: int
    text: str
    """The whole report as one sentence."""


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
    divergence: DivergenceView | None
    """None for the first path."""


@dataclass(frozen=True)
class ErrorView:
    """Exception of a failed episode."""

    type: str
    message: str
    details: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TerminationView:
    """The end of an episode. Only the last recorded termination of a session counts."""

    path: int
    node: int
    stop_reason: str
    is_last: bool
    reward: str | None
    rewards: tuple[tuple[str, str], ...]
    """Result of each reward function and metric by its name."""
    error: ErrorView | None


@dataclass(frozen=True)
class SegmentView:
    """A path, or its beginning, that is trained."""

    path: int
    node: int
    """Last node of the segment."""
    weight: str
    num_tokens: int
    num_sampled_tokens: int


@dataclass(frozen=True)
class NoteView:
    """A recorded fact that is no token, for example a prompt that was refused."""

    node: int | None
    """Node that the note is about. None for the session."""
    text: str


@dataclass(frozen=True)
class SessionView:
    """A recorded session."""

    session_id: str
    facts: tuple[str, ...]
    """Numbers of paths, nodes, turns and tokens, weight versions, log probs."""
    versions: tuple[int, ...]
    """Weight versions, sorted."""
    paths: tuple[PathView, ...]
    terminations: tuple[TerminationView, ...]
    """In the order in which they were recorded. Empty if the session has not finished."""
    segments: tuple[SegmentView, ...]
    """Segments of the last termination."""
    divergences: tuple[DivergenceView, ...]
    notes: tuple[NoteView, ...]
    """In the order in which they were recorded, without the kinds of conversations."""
    has_texts: bool
    """Whether tokens have texts, because there was a tokenizer."""
