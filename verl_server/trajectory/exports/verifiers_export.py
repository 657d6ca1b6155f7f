"""Export of a session to verifiers' saved traces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.trajectory.exports import verifiers_schema as schema
from verl_server.trajectory.exports.chat import (
    derive_node_message,
    node_messages,
    require_tool_schemas,
    text_of,
    tool_calls,
)
from verl_server.trajectory.exports.details import (
    DETAILS_KEY,
    NodeDetails,
    details_to_json,
    node_details,
    session_details,
)
from verl_server.trajectory.exports.documents import explain_refused_export
from verl_server.trajectory.exports.paths import ExportedPaths, find_exported_paths, find_links
from verl_server.trajectory.exports.verifiers_messages import from_verifiers_message
from verl_server.trajectory.graph import TrajectoryGraph, require_graph
from verl_server.trajectory.nodes import ForkReason, Node
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.types import Json

TOTAL_REWARD = "reward"
"""Name of the reward of a trace that is the weighted sum of all rewards of the sample."""
STOP_CONDITIONS = {"max_response_tokens": "max_output_tokens", "max_context_tokens": "max_total_tokens"}
"""Stop reasons that verifiers has another name for."""
TIMEOUT = "timeout_s"
ENVIRONMENT = "verl_server"


def to_verifiers(graph: TrajectoryGraph, *, model: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> Json:
    """One line of verifiers' `traces.jsonl`: an episode with a trace of all trained paths of the session.

    `model`: name of the model. `tools`: schemas of the tools, as OpenAI's API takes them. Sessions record neither. The
    trace is a graph, so tokens that several paths share occur once. A session without a node is an episode without a
    trace. Raises BadInputError if `graph` is no `TrajectoryGraph`, for tools of another form, and for values that the
    format refuses, for example a reward that is NaN.
    """
    require_graph(graph)
    require_tool_schemas(tools)
    paths = find_exported_paths(graph)
    task = schema.TraceTask(type="Task", data={"name": graph.session_id})
    with explain_refused_export(graph.session_id):
        traces = [_Trace(graph, paths, model, tools).build(task)] if graph.nodes else []
        episode = schema.Episode(
            id=graph.session_id,
            env=schema.EnvInfo(id=ENVIRONMENT),
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
        self.nodes: list[schema.MessageNode] = []
        self.calls: list[schema.ModelCall] = []
        self.details: list[NodeDetails] = []
        self.indexes: dict[int, int] = {}
        """Index of the last message of each node, by the node's id."""

    def build(self, task: schema.TraceTask) -> schema.Trace:
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
        return schema.Trace(
            version=schema.TRACE_VERSION,
            id=self.graph.session_id,
            verifiers=schema.VersionInfo(version=f"verl_server {__version__}"),
            task=task,
            agent=schema.AgentInfo(
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
            else [schema.TraceError(type=str(error.get("type", "")), message=str(error.get("message", "")))],
        )

    def _scores(self) -> Json:
        termination = self.paths.termination
        if termination is None:
            return {}
        total = {} if termination.reward is None else {TOTAL_REWARD: schema.Reward(score=termination.reward)}
        return {"rewards": total, "metrics": dict(termination.rewards)}

    def _add_node(self, node: Node) -> None:
        messages = [_as_message(message) for message in node_messages(node)]
        parent = None if node.parent is None else self.indexes[node.parent]
        for message in messages:
            is_last = message is messages[-1]
            self.nodes.append(
                schema.MessageNode(
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
        derived = derive_node_message(node.sampled, [from_verifiers_message(message) for message in messages])
        self.details.append(node_details(self.graph, node, len(messages), derived))
        if node.sampled:
            self._add_call(node)

    def _add_call(self, node: Node) -> None:
        num_tokens = len(node.token_ids)
        self.calls.append(
            schema.ModelCall(
                node=self.indexes[node.id],
                model=self.model,
                finish_reason=node.finish_reason if node.finish_reason in schema.FINISH_REASONS else None,
                usage=schema.Usage(
                    prompt_tokens=self.graph.num_tokens(node.id) - num_tokens, completion_tokens=num_tokens
                ),
            )
        )

    def _add_links(self) -> None:
        """Link the first turn after a compaction, or of a sub-agent, to the turn that caused it."""
        for link in find_links(self.graph, set(self.node_ids)):
            kind = schema.COMPACTION_LINK if link.reason is ForkReason.COMPACTED else schema.SUB_AGENT_LINK
            target = self._first_turn(link.target)
            if target is not None:
                parent = schema.ParentLink(node=self.indexes[link.source], type=kind)
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


def _as_message(message: Message) -> schema.VerifiersMessage:
    role, content = message["role"], message.get("content")
    calls = [schema.ToolCall(**call) for call in tool_calls(message)]
    reasoning = message.get("reasoning_content")
    if role == "assistant":
        return schema.VerifiersMessage(
            role=role,
            content=None if content is None else text_of(content),
            reasoning_content=reasoning if isinstance(reasoning, str) else None,
            tool_calls=calls or None,
        )
    parts = [part for item in content for part in _as_parts(item)] if isinstance(content, list) else text_of(content)
    if role == "tool":
        name, call_id = message.get("name"), text_of(message.get("tool_call_id"))
        return schema.VerifiersMessage(
            role=role, content=parts, tool_call_id=call_id, name=name if isinstance(name, str) else None
        )
    return schema.VerifiersMessage(role="user" if role == "user" else "system", content=parts)


def _as_parts(part: Any) -> list[schema.ContentPart]:
    """The content part in verifiers' form. Empty for a part that is neither a text nor an image."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return [schema.ContentPart(type="text", text=part["text"])]
    sources = image_sources({"content": [part]})
    return [schema.ContentPart(type="image_url", image_url=schema.ImageUrl(url=source)) for source in sources]


def _as_tool(tool: Mapping[str, Any]) -> schema.TraceTool:
    function = tool["function"]
    return schema.TraceTool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {},
    )
