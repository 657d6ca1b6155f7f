"""A session as a graph of turns. Pure.

A node holds only the tokens that it adds. The path from the root to a node *is* the sequence that the engine saw and
produced, because prompts are taken from it (`Session.ids`) and replies are added to it; nothing is ever rendered again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from verl_server.errors import BadInputError

Json = dict[str, Any]


class ForkReason(enum.StrEnum):
    """Why a node has more than one child."""

    SAMPLE = "sample"
    """One more sample of the same prompt."""
    EDITED = "edited"
    """The history was changed."""
    COMPACTED = "compacted"
    """The history was replaced by something shorter."""
    SUB_AGENT = "sub_agent"
    """Another agent began from here."""
    RETRY = "retry"
    """The turn was taken again, after a failure."""


@dataclass(frozen=True)
class Span:
    """Which weights made which tokens: offsets within the node, `end` exclusive."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Node:
    """Tokens that follow their parent's: sampled by the policy, or put there by the world."""

    id: int
    parent: int | None
    tokens: tuple[int, ...]
    sampled: bool
    """The loss mask of all its tokens."""
    logprobs: tuple[float, ...] = ()
    """Of each sampled token, in nats, under the weights that made it."""
    spans: tuple[Span, ...] = ()
    message: Json | None = None
    """What it says, for people and for tools; never used to make tokens again."""
    fork: ForkReason | None = None
    finish: str | None = None
    """Why sampling ended: SGLang's `finish_reason`."""
    experts: str | None = None
    """Routed experts, as the engine sent them (base64)."""


@dataclass(frozen=True)
class Trajectory:
    """One path as a trainer takes it: the fields have one entry for each token."""

    ids: list[int]
    mask: list[int]
    """1: sampled by the policy."""
    logprobs: list[float]
    """0 where nothing was sampled."""
    versions: list[str | None]
    """Of the weights; None where nothing was sampled."""
    nodes: list[int]
    """The node that each token belongs to."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


@dataclass(frozen=True)
class Ending:
    """How a path ended."""

    node: int
    reason: str
    error: Json | None = None
    """The exception of a failed one, as it travels (`verl_server.errors.to_wire`)."""


@dataclass
class Session:
    """Grows by `add`; what is in it never changes."""

    id: str
    nodes: list[Node] = field(default_factory=list)
    rewards: dict[int, list[float]] = field(default_factory=dict)
    """By node: one for the turn, or one for each of its tokens."""
    endings: dict[int, Ending] = field(default_factory=dict)
    """By node."""
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)
    _turns: list[int] = field(default_factory=list)
    _latest: tuple[int | None, list[int]] = field(default=(None, []), compare=False)
    """The node whose `ids` were asked for last, and these: a conversation that grows does not walk its path again."""

    def add(
        self,
        parent: int | None,
        tokens: Sequence[int],
        *,
        sampled: bool,
        logprobs: Sequence[float] = (),
        spans: Sequence[Span] = (),
        message: Mapping[str, Any] | None = None,
        fork: ForkReason | None = None,
        finish: str | None = None,
        experts: str | None = None,
    ) -> Node:
        """A node below `parent` (None: a root). Raises BadInputError for what cannot be true.

        A second child needs a `fork` reason; sampled tokens need a log prob each, and spans that cover them.
        """
        if parent is not None:
            self.node(parent)
        node = Node(
            id=len(self.nodes),
            parent=parent,
            tokens=tuple(tokens),
            sampled=sampled,
            logprobs=tuple(logprobs),
            spans=tuple(spans),
            message=None if message is None else dict(message),
            fork=fork,
            finish=finish,
            experts=experts,
        )
        _require_sound(node)
        if self._children.get(parent) and fork is None:
            raise BadInputError(f"node {parent} has a child already: a second one needs the reason of the fork")
        self._put(node)
        return node

    def _put(self, node: Node) -> None:
        before, spoken = (0, 0) if node.parent is None else (self._lengths[node.parent], self._turns[node.parent])
        self.nodes.append(node)
        self._lengths.append(before + len(node.tokens))
        self._turns.append(spoken + node.sampled)
        self._children.setdefault(node.parent, []).append(node.id)

    def reward(self, node: int, values: Sequence[float]) -> None:
        """One value for the turn, or one for each of its tokens."""
        count = len(self.node(node).tokens)
        if len(values) not in (1, count):
            raise BadInputError(f"node {node} has {count} tokens; rewards are 1 or {count} values, got {len(values)}")
        given = [float(value) for value in values]
        if not all(map(math.isfinite, given)):
            raise BadInputError(f"rewards must be finite numbers, got {given[:8]}")
        self.rewards[node] = given

    def end(self, node: int, reason: str, error: Json | None = None) -> Ending:
        self.node(node)
        ending = self.endings[node] = Ending(node, reason, error)
        return ending

    # -- reading --------------------------------------------------------------------------------------

    def node(self, number: int) -> Node:
        if not 0 <= number < len(self.nodes):
            raise BadInputError(f"the session {self.id!r} has no node {number}; it has {len(self.nodes)}")
        return self.nodes[number]

    def children(self, node: int | None) -> list[int]:
        return list(self._children.get(node, ()))

    @property
    def leaves(self) -> list[int]:
        return [node.id for node in self.nodes if node.id not in self._children]

    def length(self, node: int) -> int:
        """Tokens from the root to the end of the node."""
        self.node(node)
        return self._lengths[node]

    def path(self, node: int) -> list[Node]:
        """From the root to the node."""
        found = [self.node(node)]
        while (parent := found[-1].parent) is not None:
            found.append(self.nodes[parent])
        return found[::-1]

    def ids(self, node: int) -> list[int]:
        """All tokens up to the end of the node: the prompt of whatever follows it."""
        known, tokens = self._latest
        behind: list[int] = []
        here: int | None = self.node(node).id
        while here is not None and here != known:
            behind.append(here)
            here = self.nodes[here].parent
        whole = [] if here is None else tokens  # ours alone: callers have copies
        for one in reversed(behind):
            whole.extend(self.nodes[one].tokens)
        self._latest = (node, whole)
        return whole.copy()

    def turns(self, node: int) -> int:
        """How often the policy has spoken up to the end of the node."""
        self.node(node)
        return self._turns[node]

    def sampled_tokens(self, node: int) -> int:
        return sum(len(one.tokens) for one in self.path(node) if one.sampled)

    def trajectory(self, node: int) -> Trajectory:
        """The path to the node, token by token."""
        whole = Trajectory([], [], [], [], [])
        for one in self.path(node):
            count = len(one.tokens)
            whole.ids.extend(one.tokens)
            whole.mask.extend([int(one.sampled)] * count)
            whole.logprobs.extend(one.logprobs if one.sampled else [0.0] * count)
            whole.versions.extend(_versions(one))
            whole.nodes.extend([one.id] * count)
        return whole

    def locate(self, ids: Sequence[int]) -> tuple[int | None, int]:
        """The deepest node whose path begins `ids`, and the length of that path (None, 0: no root does)."""
        best: tuple[int | None, int] = (None, 0)
        ahead = [best]
        while ahead:
            parent, at = ahead.pop()
            for child in self.children(parent):
                if self._continues(child, ids, at):
                    ahead.append((child, self._lengths[child]))
                    best = max(best, ahead[-1], key=lambda found: found[1])
        return best

    def _continues(self, child: int, ids: Sequence[int], at: int) -> bool:
        tokens = self.nodes[child].tokens
        return tuple(ids[at : at + len(tokens)]) == tokens


def _versions(node: Node) -> Iterator[str | None]:
    if not node.sampled:
        yield from [None] * len(node.tokens)
    for span in node.spans:
        yield from [span.version] * (span.end - span.start)


def _require_sound(node: Node) -> None:
    count = len(node.tokens)
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in node.tokens):
        raise BadInputError("tokens are numbers, 0 or more")
    if not node.sampled:
        if node.logprobs or node.spans:
            raise BadInputError("log probs and weight versions belong to sampled tokens only")
        return
    if len(node.logprobs) != count:
        raise BadInputError(f"{count} sampled tokens need {count} log probs, got {len(node.logprobs)}")
    edges = [0, *(span.end for span in node.spans)]
    starts = [span.start for span in node.spans]
    if starts != edges[:-1] or edges[-1] != count or any(a >= b for a, b in pairwise(edges)):
        raise BadInputError(f"weight versions must cover {count} sampled tokens without gaps, got {list(node.spans)}")
