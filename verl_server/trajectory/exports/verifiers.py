"""verifiers' saved traces: export of sessions, and import as token graphs. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, FiniteFloat, model_validator

from verl_server.errors import BadInputError
from verl_server.trajectory.exports.common import (
    DETAILS_KEY,
    Count,
    ExportedPaths,
    ImportedNode,
    Logprobs,
    NodeDetails,
    Scores,
    SessionDetails,
    TokenIds,
    as_tool_call,
    derive_node_message,
    details_to_json,
    explain_refused_export,
    find_exported_paths,
    find_links,
    node_details,
    node_messages,
    parse_document,
    restore_graph,
    session_details,
    text_of,
    tool_calls,
)
from verl_server.trajectory.graph import ForkReason, Node, Span, TrajectoryGraph
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.types import Json
from verl_server.validation import check_arguments

# -- Verifiers schema -------------------------------------------------------------------------------
# The fields of verifiers' saved traces that exports and imports use.
#
# The format is that of `traces.jsonl` of verifiers 0.4.0 (trace version 1): one episode per line, with the traces of
# its agents. A trace is a graph of messages, and each of its leaves ends a path that is trained. As in verifiers,
# unknown fields are ignored.

TRACE_VERSION = 1
SUB_AGENT_LINK, COMPACTION_LINK = "subagent_call", "compaction"
"""Types of semantic parents that verifiers' own harnesses use."""
FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})


class ImageUrl(BaseModel):
    """URL, path or base64 text of an image."""

    url: str


class ContentPart(BaseModel):
    """A text or an image of a message."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Self:
        if (self.text if self.type == "text" else self.image_url) is None:
            raise ValueError(f"a part of the type {self.type!r} needs the field {self.type!r}")
        return self


class ToolCall(BaseModel):
    """A tool call of a turn."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them: JSON text."""


class VerifiersMessage(BaseModel):
    """A chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Texts and images. Turns have a text or None."""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """Id of the call that a tool message answers."""
    name: str | None = None
    """Name of the tool of a tool message."""

    @model_validator(mode="after")
    def _has_its_fields(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("a message of the role 'tool' needs tool_call_id")
        return self


class ParentLink(BaseModel):
    """A link from an earlier turn, for example from the turn that called a sub-agent."""

    node: Count
    type: str


class TraceTool(BaseModel):
    """A tool that the agent may call."""

    name: str
    description: str = ""
    parameters: Json = {}


class MessageNode(BaseModel):
    """A message, and the tokens that it adds to its path."""

    parent: Count | None = None
    tools: list[TraceTool] | None = None
    """Tools in the prompt. Only of a root."""
    semantic_parents: list[ParentLink] = []
    message: VerifiersMessage
    sampled: bool = False
    """Whether a model call produced the message."""
    timestamp: float = 0.0
    """Seconds since 1970. Exports write 0: sessions have no times."""
    token_ids: TokenIds = []
    mask: list[bool] = []
    """Whether the policy sampled each token."""
    logprobs: Logprobs = []
    """Log probability of each sampled token."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.mask) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token_ids need as many mask values, got {len(self.mask)}")
        if self.logprobs and len(self.logprobs) != sum(self.mask):
            raise ValueError(f"{sum(self.mask)} sampled tokens need as many logprobs, got {len(self.logprobs)}")
        return self


class ModelCall(BaseModel):
    """A model call."""

    node: Count | None = None
    """Index of the node with the reply."""
    model: str | None = None
    finish_reason: str | None = None
    """One of the `FINISH_REASONS`."""
    usage: Json | None = None
    """`prompt_tokens`, `completion_tokens`, and what newer versions of verifiers add."""


class AgentInfo(BaseModel):
    """The agent that produced a trace."""

    config: Json = {}
    name: str = "agent"
    trainable: bool = True
    """Whether the tokens of the trace train the policy."""


class Reward(BaseModel):
    """A reward. The reward of the trace is the sum of score times weight."""

    score: FiniteFloat
    weight: FiniteFloat = 1.0


class TraceError(BaseModel):
    """An exception."""

    type: str
    message: str


def _require_version(version: int) -> int:
    if version != TRACE_VERSION:
        raise ValueError(f"trace version {version} is not supported; supported is version {TRACE_VERSION}")
    return version


class Trace(BaseModel):
    """The rollout of one agent."""

    version: Annotated[int, AfterValidator(_require_version)]
    """Version of the trace format. verifiers has no rule for other versions, so they are refused."""
    id: str
    verifiers: dict[str, Any]
    """`version` of the program that wrote the trace."""
    task: Json
    """`type` and `data` of the task."""
    agent: AgentInfo
    tools: list[TraceTool] = []
    nodes: list[MessageNode] = []
    calls: list[ModelCall] = []
    rewards: dict[str, Reward | None] = {}
    metrics: dict[str, FiniteFloat | None] = {}
    info: dict[str, Any] = {}
    is_completed: bool = False
    ok: bool = False
    """Whether the rollout completed without an error."""
    stop_condition: str | None = None
    is_timeout: bool = False
    errors: list[TraceError] = []
    timing: dict[str, Any] = {"start": 0.0}
    """Times in seconds since 1970. Exports write 0: sessions have no times."""

    @model_validator(mode="after")
    def _links_lead_back(self) -> Self:
        for index, node in enumerate(self.nodes):
            if node.parent is not None and node.parent >= index:
                raise ValueError(f"nodes[{index}].parent is {node.parent}; a parent comes before its children")
        _require_nodes("calls", [call.node for call in self.calls], len(self.nodes))
        links = [link.node for node in self.nodes for link in node.semantic_parents]
        _require_nodes("semantic_parents", links, len(self.nodes))
        return self


class Episode(BaseModel):
    """One line of `traces.jsonl`."""

    id: str
    env: Json = {}
    """`id` of the environment that ran the episode."""
    task: Json
    ok: bool = False
    is_timeout: bool = False
    errors: list[TraceError] = []
    traces: list[Trace] = []


def _require_nodes(field: str, indexes: Sequence[int | None], num_nodes: int) -> None:
    for index in indexes:
        if index is not None and index >= num_nodes:
            raise ValueError(f"{field} names node {index}, but there are {num_nodes} nodes")


# -- Verifiers messages -----------------------------------------------------------------------------
# Chat messages of verifiers' traces as the messages of recorded nodes. Pure.


def from_verifiers_message(message: VerifiersMessage) -> Json:
    """A message of a trace as chat templates take it."""
    content: Any = message.content
    if isinstance(content, list):
        content = [_from_part(part) for part in content]
    fields: Json = {"role": message.role, "content": content}
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [as_tool_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _from_part(part: ContentPart) -> Json:
    if part.image_url is not None:
        return {"type": "image_url", "image_url": {"url": part.image_url.url}}
    return {"type": "text", "text": part.text}


# -- Verifiers export -------------------------------------------------------------------------------

TOTAL_REWARD = "reward"
"""Name of the reward of a trace that is the weighted sum of all rewards of the sample."""
STOP_CONDITIONS = {"max_response_tokens": "max_output_tokens", "max_context_tokens": "max_total_tokens"}
"""Stop reasons that verifiers has another name for."""
TIMEOUT = "timeout_s"
ENVIRONMENT = "verl_server"


@check_arguments(skip=("tools",))
def to_verifiers(graph: TrajectoryGraph, *, model: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> Json:
    """One line of verifiers' `traces.jsonl`: an episode with a trace of all trained paths of the session.

    `model`: name of the model. `tools`: schemas of the tools, as OpenAI's API takes them. Sessions record neither. The
    trace is a graph, so tokens that several paths share occur once. A session without a node is an episode without a
    trace. Raises BadInputError if `graph` is no `TrajectoryGraph`, and for values that the format refuses, for example
    a reward that is NaN.
    """
    paths = find_exported_paths(graph)
    task: Json = {"type": "Task", "data": {"name": graph.session_id}}
    with explain_refused_export(graph.session_id):
        traces = [_Trace(graph, paths, model, tools).build(task)] if graph.nodes else []
        episode = Episode(
            id=graph.session_id,
            env={"id": ENVIRONMENT},
            task=task,
            ok=bool(traces) and traces[0].ok,
            traces=traces,
        )
    line: Json = episode.model_dump(mode="json", exclude_none=True)
    return line


class _Trace:
    """The trace of one session while it is built."""

    def __init__(
        self, graph: TrajectoryGraph, paths: ExportedPaths, model: str | None, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self.graph, self.paths, self.model, self.tools = graph, paths, model, [_as_tool(tool) for tool in tools]
        self.node_ids = sorted({node.id for leaf, _ in paths.ends for node in graph.path(leaf)})
        self.nodes: list[MessageNode] = []
        self.calls: list[ModelCall] = []
        self.details: list[NodeDetails] = []
        self.indexes: dict[int, int] = {}
        """Index of the last message of each node, by the node's id."""

    def build(self, task: Json) -> Trace:
        """The trace."""
        from verl_server import __version__

        for node_id in self.node_ids:
            self._add_node(self.graph.node(node_id))
        self._add_links()
        if self.tools and self.nodes:
            self.nodes[0].tools = self.tools
        termination = self.paths.termination
        error = None if termination is None else termination.error
        reason = None if termination is None else termination.stop_reason
        details = session_details(self.graph, self.paths, self.details)
        return Trace(
            version=TRACE_VERSION,
            id=self.graph.session_id,
            verifiers={"version": f"verl_server {__version__}"},
            task=task,
            agent=AgentInfo(
                config={} if self.model is None else {"model": self.model}, trainable=self.paths.are_trained
            ),
            tools=self.tools,
            nodes=self.nodes,
            calls=self.calls,
            **self._scores(),
            info={DETAILS_KEY: details_to_json(details)},
            is_completed=termination is not None,
            ok=termination is not None and error is None and reason != "error",
            stop_condition=None if reason is None else STOP_CONDITIONS.get(reason, reason),
            is_timeout=reason == TIMEOUT,
            errors=[]
            if error is None
            else [TraceError(type=str(error.get("type", "")), message=str(error.get("message", "")))],
        )

    def _scores(self) -> Json:
        termination = self.paths.termination
        if termination is None:
            return {}
        total = {} if termination.reward is None else {TOTAL_REWARD: Reward(score=termination.reward)}
        return {"rewards": total, "metrics": dict(termination.rewards)}

    def _add_node(self, node: Node) -> None:
        messages = [_as_message(message) for message in node_messages(node)]
        parent = None if node.parent is None else self.indexes[node.parent]
        for message in messages:
            is_last = message is messages[-1]
            self.nodes.append(
                MessageNode(
                    parent=parent,
                    message=message,
                    sampled=node.sampled,
                    token_ids=list(node.token_ids) if is_last else [],
                    mask=[node.sampled] * len(node.token_ids) if is_last else [],
                    logprobs=list(node.logprobs) if is_last else [],
                )
            )
            parent = len(self.nodes) - 1
        self.indexes[node.id] = len(self.nodes) - 1
        self.details.append(node_details(self.graph, node, list(map(from_verifiers_message, messages))))
        if node.sampled:
            self._add_call(node)

    def _add_call(self, node: Node) -> None:
        num_tokens = len(node.token_ids)
        self.calls.append(
            ModelCall(
                node=self.indexes[node.id],
                model=self.model,
                finish_reason=node.finish_reason if node.finish_reason in FINISH_REASONS else None,
                usage={
                    "prompt_tokens": self.graph.num_tokens(node.id) - num_tokens,
                    "completion_tokens": num_tokens,
                },
            )
        )

    def _add_links(self) -> None:
        """Link the first turn after a compaction, or of a sub-agent, to the turn that caused it."""
        for link in find_links(self.graph, set(self.node_ids)):
            kind = COMPACTION_LINK if link.reason is ForkReason.COMPACTED else SUB_AGENT_LINK
            target = self._first_turn(link.target)
            if target is not None:
                parent = ParentLink(node=self.indexes[link.source], type=kind)
                self.nodes[self.indexes[target]].semantic_parents.append(parent)

    def _first_turn(self, start: int) -> int | None:
        """The first exported turn at or below a node."""
        below = {start}
        for node in (self.graph.node(node_id) for node_id in self.node_ids if node_id >= start):
            if node.id in below or node.parent in below:
                below.add(node.id)
                if node.sampled:
                    return node.id
        return None


def _as_message(message: Message) -> VerifiersMessage:
    role, content = message["role"], message.get("content")
    calls = [ToolCall(**call) for call in tool_calls(message)]
    reasoning = message.get("reasoning_content")
    if role == "assistant":
        return VerifiersMessage(
            role=role,
            content=None if content is None else text_of(content),
            reasoning_content=reasoning if isinstance(reasoning, str) else None,
            tool_calls=calls or None,
        )
    parts = [part for item in content for part in _as_parts(item)] if isinstance(content, list) else text_of(content)
    if role == "tool":
        name, call_id = message.get("name"), text_of(message.get("tool_call_id"))
        return VerifiersMessage(
            role=role, content=parts, tool_call_id=call_id, name=name if isinstance(name, str) else None
        )
    return VerifiersMessage(role="user" if role == "user" else "system", content=parts)


def _as_parts(part: Any) -> list[ContentPart]:
    """The content part in verifiers' form. Empty for a part that is neither a text nor an image."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return [ContentPart(type="text", text=part["text"])]
    sources = image_sources({"content": [part]})
    return [ContentPart(type="image_url", image_url=ImageUrl(url=source)) for source in sources]


def _as_tool(tool: Mapping[str, Any]) -> TraceTool:
    function = tool["function"]
    return TraceTool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {},
    )


# -- Verifiers import -------------------------------------------------------------------------------
# Import of verifiers' saved traces as token graphs, for inspection. Pure.

UNKNOWN_VERSION = 0
"""Weight version of the sampled tokens of a trace that another program wrote. Traces have no weight versions."""
LINK_REASONS = {SUB_AGENT_LINK: ForkReason.SUB_AGENT, COMPACTION_LINK: ForkReason.COMPACTED}


def from_verifiers(episode: Mapping[str, object]) -> list[TrajectoryGraph]:
    """The graphs of the traces of one line of verifiers' `traces.jsonl`, for inspection.

    A trace that `to_verifiers` wrote gives back the exported part of the recorded graph. In a trace of another program,
    sampled tokens have the weight version 0, tokens without log probabilities count as not sampled, and each path with
    a turn is a trained path of weight 1. Do not train on such a graph: the weight versions are unknown.

    Raises BadInputError with the place of the first problem if the line is not valid or has another trace version.
    """
    parsed = parse_document(Episode, episode, "the episode of verifiers")
    graphs = []
    for index, trace in enumerate(parsed.traces):
        try:
            graphs.append(_restore(trace) if DETAILS_KEY in trace.info else _Importer(trace).build())
        except BadInputError as error:
            raise BadInputError(f"traces[{index}] of episode {parsed.id!r}: {error.message}") from None
    return graphs


def _restore(trace: Trace) -> TrajectoryGraph:
    """The graph of a trace that `to_verifiers` wrote."""
    details = parse_document(SessionDetails, trace.info[DETAILS_KEY], f"info.{DETAILS_KEY}")
    num_messages = sum(node.count for node in details.nodes)
    if num_messages != len(trace.nodes) or not all(node.count for node in details.nodes):
        raise BadInputError(
            f"info.{DETAILS_KEY} describes {num_messages} messages, and the trace has {len(trace.nodes)}; import the "
            "trace as exported"
        )
    total = trace.rewards.get(TOTAL_REWARD)
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = Scores(reward=None if total is None else total.score, rewards=metrics)
    return restore_graph(details, _iterate_nodes(trace, details), scores)


def _iterate_nodes(trace: Trace, details: SessionDetails) -> Iterator[ImportedNode]:
    """The recorded nodes of a trace. Each was exported as one or more messages, one after the other."""
    ids: dict[int, int] = {}
    """Ids of the nodes by the index of their last message."""
    start = 0
    for node in details.nodes:
        group = trace.nodes[start : start + node.count]
        last = start + node.count - 1
        if [item.parent for item in group[1:]] != list(range(start, last)):
            raise BadInputError(f"nodes[{start}] to nodes[{last}] do not follow each other; they were one node")
        parent = group[0].parent
        if parent is not None and parent not in ids:
            raise BadInputError(f"nodes[{start}].parent is {parent}, within the messages of another node")
        sampled = group[-1].sampled
        if any(value is not sampled for item in group for value in item.mask):
            raise BadInputError(f"the masks of nodes[{start}] to nodes[{last}] differ from `sampled`")
        yield ImportedNode(
            details=node,
            parent=None if parent is None else ids[parent],
            token_ids=[token for item in group for token in item.token_ids],
            sampled=sampled,
            logprobs=[value for item in group for value in item.logprobs],
            messages=[from_verifiers_message(item.message) for item in group],
        )
        ids[last] = node.id
        start = last + 1


class _Importer:
    """The graph of a trace of another program while it is built."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.graph = trace, TrajectoryGraph(trace.id)
        self.ends: list[int] = []
        """Last node of each message."""
        self.finish_reasons = {call.node: call.finish_reason for call in trace.calls}
        self.fork_reasons = _find_fork_reasons(trace.nodes)

    def build(self) -> TrajectoryGraph:
        """The graph."""
        for index, message_node in enumerate(self.trace.nodes):
            self._add_message(index, message_node)
        if self.trace.is_completed and self.graph.nodes:
            self._terminate()
        return self.graph

    def _add_message(self, index: int, node: MessageNode) -> None:
        message = from_verifiers_message(node.message)
        mask = node.mask if node.logprobs else [False] * len(node.mask)
        runs = [(sampled, len(list(run))) for sampled, run in itertools.groupby(mask)]
        if not runs or (node.sampled and not runs[-1][0]):  # a turn without tokens, or without log probabilities
            runs.append((node.sampled, 0))
        start = num_logprobs = 0
        end = None if node.parent is None else self.ends[node.parent]
        for number, (sampled, count) in enumerate(runs):
            is_last = number == len(runs) - 1
            logprobs = node.logprobs[num_logprobs : num_logprobs + count] if sampled else []
            end = self.graph.add_node(
                end,
                node.token_ids[start : start + count],
                sampled=sampled,
                logprobs=logprobs,
                spans=[Span(UNKNOWN_VERSION, 0, count)] if sampled and count else [],
                message=derive_node_message(sampled, [message]) if is_last else None,
                fork_reason=self.fork_reasons.get(index, ForkReason.SAMPLE) if self.graph.children(end) else None,
                finish_reason=self.finish_reasons.get(index) if is_last else None,
            ).id
            start, num_logprobs = start + count, num_logprobs + len(logprobs)
        assert end is not None
        self.ends.append(end)

    def _terminate(self) -> None:
        trace, graph = self.trace, self.graph
        scores = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        leaves = [leaf for leaf in graph.leaves if graph.num_turns(leaf)] if trace.agent.trainable else []
        error: Json | None = None
        if trace.errors:
            error = {"type": trace.errors[-1].type, "message": trace.errors[-1].message, "details": {}}
        graph.terminate(
            graph.leaves[-1],
            trace.stop_condition or "",
            error,
            sum(reward.score * reward.weight for reward in scores.values()) if scores else None,
            [(leaf, 1.0) for leaf in leaves],
            {**metrics, **{name: reward.score for name, reward in scores.items()}},
        )


def _find_fork_reasons(nodes: list[MessageNode]) -> dict[int, ForkReason]:
    """The reason of each fork that a link of a later turn explains, by the index of the first message of the fork."""
    first_children: dict[int | None, int] = {}
    for index, node in enumerate(nodes):
        first_children.setdefault(node.parent, index)
    reasons = {}
    for index, node in enumerate(nodes):
        reason = next((LINK_REASONS[link.type] for link in node.semantic_parents if link.type in LINK_REASONS), None)
        start: int | None = index
        while reason is not None and start is not None:
            parent = nodes[start].parent
            if first_children[parent] != start:
                reasons[start] = reason
                break
            start = parent
    return reasons
