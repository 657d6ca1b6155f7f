"""The token graph of a session: a tree whose nodes are assistant turns and messages. Pure data, no I/O.

A node stores only the tokens that it adds. The path from a root to a node is exactly the token sequence that the
engine received and generated: prompts are read from the graph with `TrajectoryGraph.token_ids`, and replies are added
to it. Recorded tokens are never decoded and tokenized again.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple, Required, TypedDict

from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.messages import image_sources
from verl_server.types import Json
from verl_server.validation import check_arguments, require_whole_number

# -- Nodes ------------------------------------------------------------------------------------------
# Nodes of a token graph, and their tokens as a sequence.

NO_VERSION = -1
"""Weight version of tokens that no policy sampled."""


class ForkReason(enum.StrEnum):
    """Why a node is an alternative to an earlier child of the same parent.

    An agent loop passes the reason to `Episode.fork`. Episodes use `RETRY` themselves. The other reasons are for agent
    loops: recorded sessions and `find_divergences` show them.
    """

    SAMPLE = "sample"
    """Another sample of the same prompt."""
    EDITED = "edited"
    """The history was edited."""
    COMPACTED = "compacted"
    """The history was replaced by a shorter history."""
    SUB_AGENT = "sub_agent"
    """The path of another agent, for example one with a first prompt of its own."""
    RETRY = "retry"
    """The turn was sampled again after a failure."""


@dataclass(frozen=True)
class Span:
    """A range of tokens in a node that were generated with one version of the weights."""

    version: int
    """Weight version, 0 or more."""
    start: int
    """Offset of the first token in the node."""
    end: int
    """Offset after the last token in the node."""


#: What every node has: its place and its tokens.
_TOKEN_FIELDS = ("id", "parent", "token_ids", "sampled", "logprobs", "spans")


@dataclass(frozen=True)
class Node:
    """A run of tokens that follows the tokens of the parent node. The policy sampled all of them or none of them."""

    id: int
    parent: int | None
    """Id of the parent node. None for a root."""
    token_ids: tuple[int, ...]
    sampled: bool
    """Whether the policy sampled the tokens. This is the loss mask of all tokens of the node."""
    logprobs: tuple[float, ...] = ()
    """Log probability of each sampled token in nats, under the weights that generated it."""
    spans: tuple[Span, ...] = ()
    """Weight versions of the sampled tokens, without gaps."""
    message: Json | None = None
    """What the tokens contain: `{"messages": [...]}` of a prompt, `{"role": "assistant", "content": ...}` of a turn, or
    `{"appended_text": ...}`. `TrajectoryGraph.images` and the search for recorded prompts read it. Its text is never
    tokenized again."""
    fork_reason: ForkReason | None = None
    """Why this node is an alternative to an earlier child of the same parent."""
    finish_reason: str | None = None
    """Why sampling ended: the type of SGLang's `finish_reason` (`stop`, `length`, ...)."""
    routed_experts: str | None = None
    """Routed experts that SGLang sent with the turn, see `pack_experts`: base64 of [tokens, layers, experts per token].
    The array ends with the last but one token of the turn. It begins with the first token of the path whose experts no
    earlier turn of the path has, or with the first token of the path."""
    branch: str = ""
    """Branch of the episode that added the node: empty for the first branch, "0" for the first branch that it made
    (`fork`, `new_root`), "0.1" for the second branch that the branch "0" made, and so on."""
    tools_digest: str | None = None
    """Digest of the schemas of the tools in a first prompt of an episode. None for other nodes, and in recordings of
    earlier versions."""
    temperature: float | None = None
    """Temperature with which the tokens were sampled, and which their log probabilities contain. None is 1.0."""


#: Fields of a node that say more about it. Files and exports have those that are set, under these names.
DETAIL_FIELDS = tuple(each.name for each in fields(Node) if each.name not in _TOKEN_FIELDS)


class NodeFields(TypedDict, total=False):
    """The fields of a node that `TrajectoryGraph.add_node` takes as keywords. See `Node`."""

    sampled: Required[bool]
    logprobs: Sequence[float]
    spans: Sequence[Span]
    message: Mapping[str, Any] | None
    fork_reason: ForkReason | None
    finish_reason: str | None
    routed_experts: str | None
    branch: str
    tools_digest: str | None
    temperature: float | None


@dataclass(frozen=True)
class Note:
    """A fact about a session that is no token, for example the label of a conversation."""

    node: int | None
    """Id of the node that the note is about. None for the session."""
    name: str
    """Kind of the fact."""
    value: Any
    """The fact, as a JSON value."""


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of a path as lists with one entry per token. Trainers take this form."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 for tokens that the policy sampled, 0 for all others."""
    logprobs: list[float]
    """Log probabilities in nats. 0.0 for tokens that the policy did not sample."""
    weight_versions: list[int]
    """Weight version of each token. `NO_VERSION` for tokens that the policy did not sample."""
    node_ids: list[int]
    """Id of the node that contains the token."""
    temperatures: list[float]
    """Temperature that the log probability of the token contains. 1.0 for tokens that the policy did not sample."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled token. The number of all tokens if none is sampled."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)


def concatenate_nodes(nodes: Sequence[Node]) -> TokenSequence:
    """The tokens of several nodes, one node after the other."""
    sequence = TokenSequence([], [], [], [], [], [])
    for node in nodes:
        count = len(node.token_ids)
        sequence.token_ids.extend(node.token_ids)
        sequence.loss_mask.extend([int(node.sampled)] * count)
        sequence.logprobs.extend(node.logprobs if node.sampled else [0.0] * count)
        sequence.weight_versions.extend(_weight_versions(node))
        sequence.node_ids.extend([node.id] * count)
        sequence.temperatures.extend([node.temperature or 1.0] * count)
    return sequence


def _weight_versions(node: Node) -> Iterator[int]:
    """The weight version of each token of a node."""
    if not node.sampled:
        yield from [NO_VERSION] * len(node.token_ids)
    for span in node.spans:
        yield from [span.version] * (span.end - span.start)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_finite(values: Sequence[float]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except TypeError:  # None, for example
        return False


def validate_node(node: Node) -> None:
    """Raise BadInputError if the fields of a node contradict each other."""
    count = len(node.token_ids)
    if set(map(type, node.token_ids)) - {int} or min(node.token_ids, default=0) < 0:
        raise BadInputError("token ids must be integers, 0 or more")
    if node.temperature is not None and not (_are_finite([node.temperature]) and node.temperature > 0):
        raise BadInputError(f"the temperature of sampled tokens must be above 0, got {node.temperature!r}")
    if not node.sampled:
        if node.logprobs or node.spans:
            raise BadInputError("log probabilities and weight versions are valid for sampled tokens only")
        return
    if len(node.logprobs) != count:
        raise BadInputError(f"{count} sampled tokens need {count} log probabilities, got {len(node.logprobs)}")
    if not _are_finite(node.logprobs):  # NaN and infinity would be null in a file
        raise BadInputError(f"log probabilities of sampled tokens must be finite numbers, got {node.logprobs!r:.80}")
    if not all(_is_count(span.version) for span in node.spans):
        raise BadInputError(f"weight versions must be integers, 0 or more, got {list(node.spans)}")
    edges = [0, *(span.end for span in node.spans)]
    starts = [span.start for span in node.spans]
    if starts != edges[:-1] or edges[-1] != count or any(a >= b for a, b in pairwise(edges)):
        raise BadInputError(f"weight versions must cover {count} sampled tokens without gaps, got {list(node.spans)}")


# -- Prefix index -----------------------------------------------------------------------------------
# `PrefixIndex`: finds the nodes of a token graph whose paths are a prefix of a token sequence. Pure data, no I/O.

ROOT = 0
"""Place of the empty sequence."""


class _Edge(NamedTuple):
    """The tokens between two places: a part of the tokens of a node."""

    token_ids: tuple[int, ...]
    """Tokens of the node."""
    start: int
    end: int
    place: int
    """Place at the end of the edge."""


class PrefixIndex:
    """A radix tree of the paths of a graph, in which paths share the tokens with which they begin.

    Each edge begins with another token, so the work of `find` grows with the number of tokens in the sequence, and not
    with the number of nodes. Places have numbers, and edges refer to the tokens of the nodes.
    """

    def __init__(self) -> None:
        self._edges: list[dict[int, _Edge]] = [{}]
        """Edges after each place, by their first token."""
        self._nodes_at: list[list[int]] = [[]]
        """Ids of the nodes whose paths end at each place."""
        self._places: list[int] = []
        """Place at the end of each node."""

    def add(self, nodes: Sequence[Node]) -> None:
        """Add the nodes of a graph that are not in the index. `nodes`: all nodes of the graph."""
        for node in nodes[len(self._places) :]:
            place = self._place_after(ROOT if node.parent is None else self._places[node.parent], node.token_ids)
            self._nodes_at[place].append(node.id)
            self._places.append(place)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Ids of all nodes whose paths are a prefix of the tokens, the shortest paths first."""
        tokens, position, place, found = tuple(token_ids), 0, ROOT, list(self._nodes_at[ROOT])
        while position < len(tokens) and (edge := self._edges[place].get(tokens[position])) is not None:
            length = edge.end - edge.start
            if tokens[position : position + length] != edge.token_ids[edge.start : edge.end]:
                break
            position, place = position + length, edge.place
            found += self._nodes_at[place]
        return found

    def _place_after(self, place: int, token_ids: tuple[int, ...]) -> int:
        """The place of tokens after a place, which is made if there is none."""
        position = 0
        while position < len(token_ids):
            edge = self._edges[place].get(token_ids[position])
            if edge is None:
                return self._add_edge(place, token_ids, position, len(token_ids))
            known, new = edge.token_ids[edge.start : edge.end], token_ids[position : position + edge.end - edge.start]
            length = len(new) if known == new else _num_equal(known, new)
            place = edge.place if length == len(known) else self._split(place, edge, length)
            position += length
        return place

    def _add_edge(self, place: int, token_ids: tuple[int, ...], start: int, end: int) -> int:
        """Add an edge to a new place, which is returned."""
        self._edges.append({})
        self._nodes_at.append([])
        self._edges[place][token_ids[start]] = _Edge(token_ids, start, end, len(self._edges) - 1)
        return len(self._edges) - 1

    def _split(self, place: int, edge: _Edge, length: int) -> int:
        """Divide an edge after a number of its tokens. Returns the new place between its parts."""
        middle = self._add_edge(place, edge.token_ids, edge.start, edge.start + length)
        rest = edge._replace(start=edge.start + length)
        self._edges[middle][rest.token_ids[rest.start]] = rest
        return middle


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    length = min(len(first), len(second))
    return next(itertools.compress(itertools.count(), map(operator.ne, first, second)), length)


# -- Termination ------------------------------------------------------------------------------------
# `Termination`: the end of a path in a token graph. Pure data, no I/O.


@dataclass(frozen=True)
class Termination:
    """The end of a path: why the episode stopped at a node."""

    node: int
    stop_reason: str
    error: Json | None = None
    """Exception of a failed episode as JSON (`verl_server.errors.to_wire`)."""
    reward: float | None = None
    """Weighted sum of the rewards of the sample. None if the sample has no reward or failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Result of each reward function and metric by its name."""
    segments: Sequence[tuple[int, float]] | None = None
    """Last node and weight of each path that is trained. None in files of earlier versions: only this path is."""


# -- Graph ------------------------------------------------------------------------------------------


@dataclass
class TrajectoryGraph:
    """The token graph of one session. It only grows: nodes are added and never changed."""

    session_id: str
    nodes: list[Node] = field(default_factory=list)
    rewards: dict[int, list[float]] = field(default_factory=dict)
    """Rewards by node id: one value for the node, or one value per token."""
    terminations: dict[int, Termination] = field(default_factory=dict)
    """Terminations by node id, in the order in which they were recorded. A later termination replaces an earlier one
    of the same node."""
    notes: list[Note] = field(default_factory=list)
    """Notes in the order in which they were added. A later note about the same fact replaces an earlier note."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digest of each input that the session was recorded with, by the name of the input. Empty if it is unknown."""
    _children: dict[int | None, list[int]] = field(default_factory=dict, init=False)
    _num_tokens: list[int] = field(default_factory=list, init=False)
    """Number of tokens from the root to the end of each node."""
    _num_turns: list[int] = field(default_factory=list, init=False)
    """Number of sampled nodes from the root to each node."""
    _num_terminated_nodes: int = field(default=0, compare=False, init=False)
    """Number of nodes at the last termination."""
    _last_token_ids: tuple[int | None, list[int]] = field(default_factory=lambda: (None, []), compare=False, init=False)
    """Last node that `token_ids` was called for, and the result. A growing conversation extends this list instead of
    walking its whole path in each turn."""
    _prefixes: PrefixIndex = field(default_factory=PrefixIndex, repr=False, compare=False, init=False)
    """Index for `longest_prefix`. A call adds the nodes that were recorded since the call before."""

    def add_node(
        self,
        parent: int | None,
        token_ids: Sequence[int],
        *,
        sampled: bool,
        logprobs: Sequence[float] = (),
        spans: Sequence[Span] = (),
        message: Mapping[str, Any] | None = None,
        fork_reason: ForkReason | None = None,
        finish_reason: str | None = None,
        routed_experts: str | None = None,
        branch: str = "",
        tools_digest: str | None = None,
        temperature: float | None = None,
    ) -> Node:
        """Add a node below `parent` (None: a root) and return it.

        Sampled tokens need one log probability each, and spans that cover all of them. The second and later children
        of a node need a `fork_reason`. Raises BadInputError for inconsistent arguments.
        """
        if parent is not None:
            self.node(parent)
        node = Node(
            id=len(self.nodes),
            parent=parent,
            token_ids=tuple(token_ids),
            sampled=sampled,
            logprobs=tuple(logprobs),
            spans=tuple(spans),
            message=None if message is None else dict(message),
            fork_reason=fork_reason,
            finish_reason=finish_reason,
            routed_experts=routed_experts,
            branch=branch,
            tools_digest=tools_digest,
            temperature=temperature,
        )
        validate_node(node)
        if self._children.get(parent) and fork_reason is None:
            raise BadInputError(f"node {parent} already has a child: another child needs a fork_reason")
        self._append(node)
        return node

    def _append(self, node: Node) -> None:
        num_tokens, num_turns = (
            (0, 0) if node.parent is None else (self._num_tokens[node.parent], self._num_turns[node.parent])
        )
        self.nodes.append(node)
        self._num_tokens.append(num_tokens + len(node.token_ids))
        self._num_turns.append(num_turns + node.sampled)
        self._children.setdefault(node.parent, []).append(node.id)

    def add_note(self, node: int | None, name: str, value: Any) -> Note:
        """Add a fact about a node, or about the session, as a JSON value. Raises BadInputError for an unknown node."""
        if node is not None:
            self.node(node)
        self.notes.append(Note(node, name, value))
        return self.notes[-1]

    def set_rewards(self, node: int, values: Sequence[float]) -> None:
        """Set the rewards of a node: one value for the node, or one value per token.

        Raises BadInputError for an unknown node, for another number of values, and for values that are not finite.
        """
        self.rewards[node] = self._validate_rewards(node, values)

    def _validate_rewards(self, node: int, values: Sequence[float]) -> list[float]:
        num_tokens = len(self.node(require_whole_number("node", node, minimum=0)).token_ids)
        if isinstance(values, (str, Mapping, Set)) or not hasattr(values, "__len__"):
            raise BadInputError(f"rewards must be a list of numbers, got {values!r:.80}; write [{values!r:.80}]")
        try:
            rewards = [float(value) for value in values]
        except Exception as error:  # an array without a dimension or with two of them, or a number that is too large
            raise BadInputError(
                f"the rewards of node {node} must be a list of numbers, got {values!r:.80}: {error}"
            ) from error
        if len(rewards) not in (1, num_tokens):
            raise BadInputError(
                f"node {node} has {num_tokens} tokens; pass 1 or {num_tokens} reward values, got {len(rewards)}"
            )
        if not all(map(math.isfinite, rewards)):
            raise BadInputError(f"the rewards of node {node} must be finite numbers, got {rewards[:8]}")
        return rewards

    def clear_rewards(self) -> None:
        """Remove the rewards of all nodes."""
        self.rewards.clear()

    def require_valid_rewards(self) -> None:
        """Make lists of floats of all `rewards`, to which code of users may have written.

        Raises BadInputError for rewards that `set_rewards` would refuse.
        """
        self.rewards.update({node: self._validate_rewards(node, values) for node, values in self.rewards.items()})

    def terminate(
        self,
        node: int,
        stop_reason: str,
        error: Json | None = None,
        reward: float | None = None,
        segments: Sequence[tuple[int, float]] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> Termination:
        """Record that an episode stopped at a node, and why. Without `segments`, only the path to the node is trained.

        Raises BadInputError for an unknown node, for a reward or a weight that is no finite number, and for values in
        `rewards` of this graph that `set_rewards` would refuse. The graph is unchanged then.
        """
        self.require_valid_rewards()
        for known in (node, *(leaf for leaf, _ in segments or ())):
            self.node(known)
        for value in (reward, *(rewards or {}).values(), *(weight for _, weight in segments or ())):
            if value is not None and not math.isfinite(value):
                raise BadInputError(f"rewards and weights must be finite numbers, got {value}")
        self.terminations.pop(node, None)  # so that the last entry is the last termination
        ends = None if segments is None else tuple((int(leaf), float(weight)) for leaf, weight in segments)
        self._num_terminated_nodes = len(self.nodes)
        termination = self.terminations[node] = Termination(node, stop_reason, error, reward, dict(rewards or {}), ends)
        return termination

    # -- reading --------------------------------------------------------------------------------------

    @property
    def last_termination(self) -> Termination | None:
        """The last termination. None if the session has not finished, or was continued after a failed attempt."""
        if not self.terminations or len(self.nodes) > self._num_terminated_nodes:
            return None
        return next(reversed(self.terminations.values()))

    @property
    def trained_segments(self) -> list[tuple[int, float]] | None:
        """Last node and weight of each trained path. None if the session has not finished."""
        if (last := self.last_termination) is None:
            return None
        return self.segments_of(last)

    def segments_of(self, termination: Termination) -> list[tuple[int, float]]:
        """Last node and weight of each path that is trained after a termination.

        For a termination of an earlier version: the path to its node, if the path has a turn.
        """
        if termination.segments is None:
            return [(termination.node, 1.0)] if self.num_turns(termination.node) else []
        return list(termination.segments)

    def node(self, node_id: int) -> Node:
        """The node with this id. Raises BadInputError for an unknown node."""
        if not 0 <= node_id < len(self.nodes):
            raise BadInputError(
                f"session {self.session_id!r} has no node {node_id}; it has {len(self.nodes)} nodes, numbered from 0"
            )
        return self.nodes[node_id]

    def children(self, node: int | None) -> list[int]:
        """Ids of the children of a node in the order in which they were added. None: ids of the roots.

        A node that is unknown has no children.
        """
        return list(self._children.get(node, ()))

    @property
    def leaves(self) -> list[int]:
        """Ids of the nodes without children."""
        return [node.id for node in self.nodes if node.id not in self._children]

    def num_tokens(self, node: int) -> int:
        """Number of tokens from the root to the end of the node. Raises BadInputError for an unknown node."""
        self.node(node)
        return self._num_tokens[node]

    def num_turns(self, node: int) -> int:
        """Number of sampled turns from the root to the end of the node. Raises BadInputError for an unknown node."""
        self.node(node)
        return self._num_turns[node]

    def num_sampled_tokens(self, node: int) -> int:
        """Number of sampled tokens from the root to the end of the node. Raises BadInputError for an unknown node."""
        return sum(len(item.token_ids) for item in self.path(node) if item.sampled)

    def path(self, node: int) -> list[Node]:
        """The nodes from the root to the node. Raises BadInputError for an unknown node."""
        nodes = [self.node(node)]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(self.nodes[parent])
        return nodes[::-1]

    def token_ids(self, node: int) -> list[int]:
        """Token ids from the root to the end of the node: the prompt of a turn that follows the node.

        Raises BadInputError for an unknown node.
        """
        cached_node, token_ids = self._last_token_ids
        missing: list[int] = []
        current: int | None = self.node(node).id
        while current is not None and current != cached_node:
            missing.append(current)
            current = self.nodes[current].parent
        if current is None:
            token_ids = []
        for node_id in reversed(missing):
            token_ids.extend(self.nodes[node_id].token_ids)  # callers have copies, so the cached list may grow
        self._last_token_ids = (node, token_ids)
        return token_ids.copy()

    def token_sequence(self, node: int) -> TokenSequence:
        """The path to the node, token by token. Raises BadInputError for an unknown node."""
        return concatenate_nodes(self.path(node))

    def images(self, node: int) -> list[str]:
        """The images in the messages from the root to the node, in their order. See `image_sources`.

        Raises BadInputError for an unknown node.
        """
        messages = [message for item in self.path(node) for message in (item.message or {}).get("messages", ())]
        return [source for message in messages for source in image_sources(message)]

    def longest_prefix(self, token_ids: Sequence[int]) -> tuple[int | None, int]:
        """The deepest node whose path is a prefix of `token_ids`, and the length of that path.

        Returns (None, 0) if no root is a prefix. For callers that get the whole prompt of each turn instead of a node,
        for example an endpoint for agents that resend their conversation.
        """
        self._prefixes.add(self.nodes)
        children: dict[int | None, list[int]] = {}
        for node in sorted(self._prefixes.find(token_ids)):
            children.setdefault(self.nodes[node].parent, []).append(node)
        best: tuple[int | None, int] = (None, 0)
        pending = [best]
        while pending:  # of several nodes with the longest path, the result is the first in this order
            for child in children.get(pending.pop()[0], ()):
                pending.append((child, self._num_tokens[child]))
                best = max(best, pending[-1], key=lambda found: found[1])
        return best


# -- Divergence -------------------------------------------------------------------------------------
# Reports where a fork of a session diverges from the path that was recorded before. Pure.
#
# Each fork has a reason. `find_divergences` adds the exact position: after how many turns, and at which token the new
# path differs from the earlier path.


@dataclass(frozen=True)
class Divergence:
    """The position at which one fork differs from the earlier path."""

    node: int
    """Id of the first node of the new path."""
    original_node: int
    """Id of the node that the parent had as its first child."""
    fork_reason: ForkReason
    num_turns: int
    """Number of sampled turns before the fork."""
    position: int
    """Offset of the first token that differs, counted from the root."""
    original_token: int | None
    """Token id of the earlier path at this position. None if the earlier path ends before it."""
    new_token: int | None
    """Token id of the new node at this position. None if the new node ends before it."""


@check_arguments()
def find_divergences(graph: TrajectoryGraph) -> list[Divergence]:
    """The divergences of all forks of a session, in the order in which the forks were recorded.

    Raises BadInputError if `graph` is no `TrajectoryGraph`.
    """
    found = []
    for node in graph.nodes:
        original = graph.children(node.parent)[0]
        if node.id == original or node.fork_reason is None:
            continue
        num_shared_tokens = 0 if node.parent is None else graph.num_tokens(node.parent)
        old, new = _first_path_below(graph, original), list(node.token_ids)
        offset = _num_equal(old, new)
        found.append(
            Divergence(
                node=node.id,
                original_node=original,
                fork_reason=node.fork_reason,
                num_turns=0 if node.parent is None else graph.num_turns(node.parent),
                position=num_shared_tokens + offset,
                original_token=old[offset] if offset < len(old) else None,
                new_token=new[offset] if offset < len(new) else None,
            )
        )
    return found


def _first_path_below(graph: TrajectoryGraph, node: int) -> list[int]:
    """Token ids of a node and of the path through the first child of each node below it."""
    token_ids: list[int] = []
    current: int | None = node
    while current is not None:
        token_ids.extend(graph.node(current).token_ids)
        children = graph.children(current)
        current = children[0] if children else None
    return token_ids


# -- Conversations ----------------------------------------------------------------------------------
# The kinds of the conversations in a recorded session. A gateway records them as notes.

KIND_NOTE = "conversation"
"""Name of the notes that have the kind of a conversation or of a branch, at its first node."""

SUMMARY_KIND = "summary"
"""Kind of a request for a summary, with which the main agent goes on."""
MAIN_KINDS = frozenset({"main", "compacted", "edited", "other_tools"})
"""Kinds of the conversations and of the branches in which the main agent works."""


def recorded_kinds(graph: TrajectoryGraph) -> dict[int, str]:
    """The recorded kind of each conversation and of each branch, by the id of its first node."""
    return {note.node: str(note.value) for note in graph.notes if note.name == KIND_NOTE and note.node is not None}


def kind_at(graph: TrajectoryGraph, kinds: Mapping[int, str], node: int) -> str | None:
    """The kind of the conversation or branch that a node belongs to. None if it is not known."""
    while (kind := kinds.get(node)) is None:
        parent = graph.node(node).parent
        if parent is None:
            return None
        node = parent
    return kind
