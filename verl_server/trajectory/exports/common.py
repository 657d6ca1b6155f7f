"""What an export writes beside the fields of a format, so that an import gives back the recorded graph.

Both formats have a place for data of the program that wrote the file. The key `verl_server` there has the fields of
nodes and of the termination that the format does not have: spans of weight versions, reasons of forks, rewards of
nodes, notes, and messages that the format cannot express. Tokens and log probabilities are in the fields of the format
only.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import (
    DETAIL_FIELDS,
    MAIN_KINDS,
    SUMMARY_KIND,
    ForkReason,
    Node,
    Span,
    Termination,
    TrajectoryGraph,
    recorded_kinds,
)
from verl_server.trajectory.rendering.messages import ROLES, Message
from verl_server.types import Json

# -- Chat -------------------------------------------------------------------------------------------
# Chat messages of recorded nodes in one form, from which both formats are made. Pure.

APPENDED_TEXT = "appended_text"
"""Key of a node's message whose tokens an agent loop appended to a turn (`Episode.append_text`)."""


def node_messages(node: Node) -> list[Message]:
    """The chat messages of a node, at least one.

    A turn has one message. Text that was appended to a turn is a message of the assistant. A node without chat messages
    gets an empty message.
    """
    message = node.message or {}
    messages = message.get("messages")
    if not node.sampled and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    if node.sampled and _is_message(message) and message["role"] == "assistant":
        return [message]
    role = "assistant" if node.sampled or APPENDED_TEXT in message else "user"
    return [{"role": role, "content": str(message.get(APPENDED_TEXT, ""))}]


def derive_node_message(sampled: bool, messages: Sequence[Message]) -> Json:
    """The message that the recorder writes for a node with these chat messages."""
    return dict(messages[0]) if sampled else {"messages": [dict(message) for message in messages]}


def tool_calls(message: Message) -> list[Json]:
    """The tool calls of a message as `id`, `name` and `arguments` (JSON text). Calls of another form are left out."""
    calls = []
    entries = message.get("tool_calls")
    for entry in entries if isinstance(entries, list) else ():
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({"id": text_of(entry.get("id")), "name": function["name"], "arguments": text})
    return calls


def as_tool_call(call_id: str, name: str, arguments: str) -> Json:
    """A tool call as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(value: Any) -> str:
    """The text of a message's content: the text itself, or the texts of its parts, one per line."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else "" if value is None else str(value)


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and message["role"] in ROLES


# -- Documents --------------------------------------------------------------------------------------
# Checks of documents: errors of pydantic become `BadInputError` with the place of the first problem.

TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]
Logprobs = list[Annotated[FiniteFloat, Field(strict=True)]]
Count = Annotated[int, Field(strict=True, ge=0)]

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_document(model: type[ModelT], document: object, name: str) -> ModelT:
    """The document as an instance of `model`.

    `name`: what the document is, for errors. Raises BadInputError with the place of the first problem.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise BadInputError(f"{name} is not valid at {_describe(error)}") from None


@contextlib.contextmanager
def explain_refused_export(session_id: str) -> Iterator[None]:
    """Raise BadInputError with the place of a recorded value that the fields of a format refuse."""
    try:
        yield
    except ValidationError as error:
        raise BadInputError(f"session {session_id!r} cannot be exported: {error.title}.{_describe(error)}") from None


def _describe(error: ValidationError) -> str:
    """Place, problem and value of the first problem, and the number of further problems."""
    problems = error.errors(include_url=False, include_context=False)
    first, value = problems[0], problems[0]["input"]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    got = "" if isinstance(value, (dict, BaseModel)) else f", got {reprlib.repr(value)}"
    more = f" ({len(problems) - 1} more problems follow)" if len(problems) > 1 else ""
    return f"{place or 'its top level'}: {first['msg'].removeprefix('Value error, ')}{got}{more}"


# -- Paths ------------------------------------------------------------------------------------------
# The paths of a session that an export contains, and the links between these paths. Pure.

LINKING_REASONS = (ForkReason.COMPACTED, ForkReason.SUB_AGENT)
"""Fork reasons that exports write as links between paths."""


@dataclass(frozen=True)
class ExportedPaths:
    """The paths of a session that an export contains."""

    ends: list[tuple[int, float]]
    """Last node and weight in the loss of each path."""
    are_trained: bool
    """Whether the paths are trained. False for unfinished sessions and for samples without a turn."""
    termination: Termination | None
    """Last termination of the session. None if the session is unfinished."""


@dataclass(frozen=True)
class PathLink:
    """A path that continues another path with a compacted history, or that a sub-agent of another path made."""

    source: int
    """Last turn of the other path before the link. A node id."""
    target: int
    """First node of the new path. A node id."""
    reason: ForkReason


def find_exported_paths(graph: TrajectoryGraph) -> ExportedPaths:
    """The trained paths of the last termination.

    Without trained paths: the path of the termination. Without a termination: the paths to all leaves.
    """
    termination = graph.last_termination
    if termination is None:
        return ExportedPaths([(leaf, 0.0) for leaf in graph.leaves], False, None)
    ends = list(dict(graph.trained_segments or ()).items())
    return ExportedPaths(ends or [(termination.node, 0.0)], bool(ends), termination)


def find_links(graph: TrajectoryGraph, node_ids: set[int]) -> list[PathLink]:
    """The links between the exported nodes `node_ids`, in the order of their targets.

    The record of a gateway has the kinds of the conversations. Other records have the branches of an episode.
    """
    kinds = recorded_kinds(graph)
    links = _links_of_conversations(graph, kinds, node_ids) if kinds else _links_of_branches(graph, node_ids)
    return list(links)


def _links_of_conversations(graph: TrajectoryGraph, kinds: Mapping[int, str], node_ids: set[int]) -> Iterator[PathLink]:
    """A compacted conversation continues the last summary, unless an earlier conversation has continued the summary.

    Without such a summary, and for a sub-agent: the source is the last turn of the main agent before the conversation.
    """
    main_nodes = set[int]()
    last_turn: int | None = None
    last_summary: int | None = None
    for node in graph.nodes:
        kind = kinds.get(node.id)
        if node.parent is None and kind in LINKING_REASONS:
            source = last_turn
            if kind == ForkReason.COMPACTED and last_summary is not None:
                source, last_summary = last_summary, None
            if source is not None and node.id in node_ids:
                yield PathLink(source, node.id, ForkReason(kind))
        is_first_of_main = node.parent is None and kind is not None
        if (is_first_of_main or node.parent in main_nodes) and (kind is None or kind in MAIN_KINDS):
            main_nodes.add(node.id)
        if node.sampled and node.parent is not None and node.id in node_ids:
            last_turn = node.id if node.id in main_nodes else last_turn
            is_summary = kinds.get(node.parent) == SUMMARY_KIND and node.id not in kinds  # no sample beside the summary
            last_summary = node.id if is_summary else last_summary


def _links_of_branches(graph: TrajectoryGraph, node_ids: set[int]) -> Iterator[PathLink]:
    """The source of a link can be on the branch of its target: a branch that adopts a compacted path keeps its name."""
    for node_id in sorted(node_ids):
        node = graph.node(node_id)
        if node.fork_reason in LINKING_REASONS:
            source = _find_source(graph, node_id, node_ids)
            if source is not None:
                yield PathLink(source, node_id, node.fork_reason)


def _find_source(graph: TrajectoryGraph, target: int, node_ids: set[int]) -> int | None:
    """The last turn before `target` on its branch, which has adopted the new path, or on the branch that made it."""
    branch = graph.node(target).branch
    for name in (branch, branch.rpartition(".")[0]):
        for node in reversed(graph.nodes[:target]):
            if node.sampled and node.branch == name and node.id in node_ids:
                return node.id
    return None


# -- Details ----------------------------------------------------------------------------------------

DETAILS_KEY = "verl_server"
PLAIN_FIELDS = tuple(name for name in DETAIL_FIELDS if name != "message")
"""Fields of a recorded node that its details have unchanged."""


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
    temperature: FiniteFloat | None = None
    rewards: list[FiniteFloat] | None = None
    """Rewards of the node: one value, or one value per token."""
    message: Json | None = None
    """Recorded message, if `has_message`."""
    has_message: bool = False
    """Whether the format cannot express the recorded message. False: the message is made from the format's fields."""


class TerminationDetails(BaseModel):
    """Fields of a termination that a format has no place for. Node ids are those of the recorded session."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)
    node: Count
    stop_reason: str
    error: Json | None = None
    segments: list[tuple[Count, FiniteFloat]] | None = None


class NoteDetails(BaseModel):
    """A note: the kind of a conversation, for example, or a prompt that was refused."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)
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
    messages: Sequence[Message]
    """What the format has of the recorded message."""


class Scores(BaseModel):
    """Rewards of a session that an import has read."""

    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] = {}


def node_details(graph: TrajectoryGraph, node: Node, messages: Sequence[Message]) -> NodeDetails:
    """The details of a node. `messages`: those that an import makes from the format's fields."""
    has_message = node.message != derive_node_message(node.sampled, messages)
    return NodeDetails(
        id=node.id,
        count=len(messages),
        spans=[(span.version, span.start, span.end) for span in node.spans],
        rewards=graph.rewards.get(node.id),
        message=node.message if has_message else None,
        has_message=has_message,
        **{name: getattr(node, name) for name in PLAIN_FIELDS},
    )


def session_details(graph: TrajectoryGraph, paths: ExportedPaths, nodes: list[NodeDetails]) -> SessionDetails:
    """The details of a session, of which the paths `paths` are exported."""
    exported = {node.id for leaf, _ in paths.ends for node in graph.path(leaf)}
    notes = [note for note in graph.notes if note.node is None or note.node in exported]
    return SessionDetails(
        session_id=graph.session_id,
        inputs=dict(graph.inputs),
        nodes=nodes,
        termination=None if paths.termination is None else TerminationDetails.model_validate(paths.termination),
        notes=[NoteDetails.model_validate(note) for note in notes],
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
            message=details.message if details.has_message else derive_node_message(node.sampled, node.messages),
            **{name: getattr(details, name) for name in PLAIN_FIELDS},
        )
        if details.rewards is not None:
            graph.set_rewards(added.id, details.rewards)
    except BadInputError as error:
        raise BadInputError(f"node {details.id} of session {graph.session_id!r}: {error.message}") from None
    return added.id
