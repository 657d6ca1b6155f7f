"""What an export writes beside the fields of a format, so that an import gives back the recorded graph.

Both formats have a place for data of the program that wrote the file. The key `verl_server` there has the fields of
nodes and of the termination that the format does not have: spans of weight versions, reasons of forks, rewards of
nodes, notes, and messages that the format cannot express. Tokens and log probabilities are in the fields of the format
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat

from verl_server.errors import BadInputError
from verl_server.trajectory.exports.documents import Count
from verl_server.trajectory.exports.paths import ExportedPaths
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import ForkReason, Node, Span
from verl_server.types import Json

DETAILS_KEY = "verl_server"


class NodeDetails(BaseModel):
    """Fields of a recorded node that a format has no place for."""

    model_config = ConfigDict(extra="forbid")
    id: Count
    """Id of the node in the recorded session."""
    count: Count
    """Number of entries of the format with the messages of the node."""
    num_tokens: Count | None = None
    """Number of tokens of the node, in formats whose entries have the tokens of several nodes."""
    spans: list[tuple[Count, Count, Count]] = []
    """Weight version, start and end of each span."""
    fork_reason: ForkReason | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None
    branch: str = ""
    tools_digest: str | None = None
    rewards: list[FiniteFloat] | None = None
    """Rewards of the node: one value, or one value per token."""
    message: Json | None = None
    """Recorded message, if `has_message`."""
    has_message: bool = False
    """Whether the format cannot express the recorded message. False: the message is made from the format's fields."""


class TerminationDetails(BaseModel):
    """Fields of a termination that a format has no place for. Node ids are those of the recorded session."""

    model_config = ConfigDict(extra="forbid")
    node: Count
    stop_reason: str
    error: Json | None = None
    segments: list[tuple[Count, FiniteFloat]] | None = None


class NoteDetails(BaseModel):
    """A note: the kind of a conversation, for example, or a prompt that was refused."""

    model_config = ConfigDict(extra="forbid")
    node: Count | None = None
    """Id of the node in the recorded session. None for a note about the session."""
    name: str
    value: Any = None
    """The fact, as a JSON value."""


class SessionDetails(BaseModel):
    """Fields of a session that a format has no place for."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    """Version of these fields."""
    session_id: str
    inputs: dict[str, str] = {}
    """Digests of the inputs of the session."""
    nodes: list[NodeDetails] = []
    termination: TerminationDetails | None = None
    notes: list[NoteDetails] = []
    """Notes about the session and about exported nodes."""
    num_nodes_left_out: Count = 0
    """Number of recorded nodes that the export does not contain, for example those of turns that were sampled again."""


@dataclass(frozen=True)
class ImportedNode:
    """A node that an import has read."""

    details: NodeDetails
    parent: int | None
    """Id of the parent in the recorded session."""
    token_ids: Sequence[int]
    sampled: bool
    logprobs: Sequence[float]
    message: Json | None


class Scores(BaseModel):
    """Rewards of a session that an import has read."""

    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] = {}


def node_details(graph: TrajectoryGraph, node: Node, count: int, derived_message: Json) -> NodeDetails:
    """The details of a node. `derived_message`: the message that an import makes from the format's fields."""
    has_message = node.message != derived_message
    return NodeDetails(
        id=node.id,
        count=count,
        spans=[(span.version, span.start, span.end) for span in node.spans],
        fork_reason=node.fork_reason,
        finish_reason=node.finish_reason,
        routed_experts=node.routed_experts,
        branch=node.branch,
        tools_digest=node.tools_digest,
        rewards=graph.rewards.get(node.id),
        message=node.message if has_message else None,
        has_message=has_message,
    )


def session_details(graph: TrajectoryGraph, paths: ExportedPaths, nodes: list[NodeDetails]) -> SessionDetails:
    """The details of a session, of which the paths `paths` are exported."""
    exported = {node.id for leaf, _ in paths.ends for node in graph.path(leaf)}
    termination = paths.termination
    return SessionDetails(
        session_id=graph.session_id,
        inputs=dict(graph.inputs),
        nodes=nodes,
        termination=None
        if termination is None
        else TerminationDetails(
            node=termination.node,
            stop_reason=termination.stop_reason,
            error=termination.error,
            segments=None if termination.segments is None else list(termination.segments),
        ),
        notes=[
            NoteDetails(node=note.node, name=note.name, value=note.value)
            for note in graph.notes
            if note.node is None or note.node in exported
        ],
        num_nodes_left_out=len(graph.nodes) - len(exported),
    )


def details_to_json(details: SessionDetails) -> Json:
    """The details as JSON, without fields that have their default."""
    fields: Json = details.model_dump(mode="json", exclude_defaults=True)
    return {"version": details.version, **fields}


def restore_graph(details: SessionDetails, nodes: Iterable[ImportedNode], scores: Scores) -> TrajectoryGraph:
    """The graph of the nodes of one session. A node that occurs several times is added once.

    Nodes keep their order and get new ids. Raises BadInputError for nodes that contradict each other, and for a
    termination of a node that is missing.
    """
    by_id: dict[int, ImportedNode] = {}
    for node in nodes:
        known = by_id.setdefault(node.details.id, node)
        if known != node:
            raise BadInputError(
                f"node {node.details.id} of session {details.session_id!r} is different in two documents; import "
                "documents of one export only"
            )
    graph = TrajectoryGraph(details.session_id, inputs=dict(details.inputs))
    new_ids: dict[int, int] = {}
    for node_id in sorted(by_id):
        new_ids[node_id] = _add_node(graph, by_id[node_id], new_ids)
    for note in details.notes:
        if note.node is None or note.node in new_ids:
            graph.add_note(None if note.node is None else new_ids[note.node], note.name, note.value)
    termination = details.termination
    # The path of a sample may be no trained path, for example with the weight 0. Then the export does not contain it.
    if termination is not None and new_ids:
        end = new_ids.get(termination.node, max(new_ids.values()))
        segments = termination.segments
        if segments is not None:
            segments = [(new_ids[leaf], weight) for leaf, weight in segments if leaf in new_ids]
        graph.terminate(end, termination.stop_reason, termination.error, scores.reward, segments, scores.rewards)
    return graph


def _add_node(graph: TrajectoryGraph, node: ImportedNode, new_ids: Mapping[int, int]) -> int:
    details = node.details
    if node.parent is not None and node.parent not in new_ids:
        raise BadInputError(
            f"node {details.id} of session {graph.session_id!r} follows node {node.parent}, which is missing"
        )
    try:
        added = graph.add_node(
            None if node.parent is None else new_ids[node.parent],
            node.token_ids,
            sampled=node.sampled,
            logprobs=node.logprobs,
            spans=[Span(*span) for span in details.spans],
            message=node.message,
            fork_reason=details.fork_reason,
            finish_reason=details.finish_reason,
            routed_experts=details.routed_experts,
            branch=details.branch,
            tools_digest=details.tools_digest,
        )
        if details.rewards is not None:
            graph.set_rewards(added.id, details.rewards)
    except BadInputError as error:
        raise BadInputError(f"node {details.id} of session {graph.session_id!r}: {error.message}") from None
    return added.id
