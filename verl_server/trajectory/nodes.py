"""Nodes of a token graph, and their tokens as a sequence. Pure data, no I/O."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Required, TypedDict

from verl_server.errors import BadInputError
from verl_server.types import Json

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

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled token. The number of all tokens if none is sampled."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)


def concatenate_nodes(nodes: Sequence[Node]) -> TokenSequence:
    """The tokens of several nodes, one node after the other."""
    sequence = TokenSequence([], [], [], [], [])
    for node in nodes:
        count = len(node.token_ids)
        sequence.token_ids.extend(node.token_ids)
        sequence.loss_mask.extend([int(node.sampled)] * count)
        sequence.logprobs.extend(node.logprobs if node.sampled else [0.0] * count)
        sequence.weight_versions.extend(_weight_versions(node))
        sequence.node_ids.extend([node.id] * count)
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
