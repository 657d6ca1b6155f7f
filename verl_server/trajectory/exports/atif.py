"""ATIF documents: export of sessions, and import as token graphs. Pure."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl_server.errors import BadInputError
from verl_server.trajectory.exports.common import (
    APPENDED_TEXT,
    DETAILS_KEY,
    Count,
    ExportedPaths,
    ImportedNode,
    Logprobs,
    NodeDetails,
    PathLink,
    Scores,
    SessionDetails,
    TokenIds,
    as_tool_call,
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
from verl_server.trajectory.exports.verifiers import UNKNOWN_VERSION
from verl_server.trajectory.graph import ForkReason, Node, Span, TrajectoryGraph, kind_at, recorded_kinds
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.types import Json
from verl_server.validation import check_arguments, require_list

# -- Atif schema ------------------------------------------------------------------------------------
# The Agent Trajectory Interchange Format (ATIF) of Harbor, version 1.8. Exports write it, and imports read 1.0 to 1.8.
#
# The fields are those of the models in Harbor 0.25.0. As in Harbor, unknown fields and unknown versions are refused.
# The comments say what `to_atif` writes into a field.

ATIF_VERSION: Literal["ATIF-v1.8"] = "ATIF-v1.8"
AtifVersion = Literal[
    "ATIF-v1.0",
    "ATIF-v1.1",
    "ATIF-v1.2",
    "ATIF-v1.3",
    "ATIF-v1.4",
    "ATIF-v1.5",
    "ATIF-v1.6",
    "ATIF-v1.7",
    "ATIF-v1.8",
]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MediaSource(_Closed):
    """The file or URL of an image or of a sound."""

    media_type: str
    path: str
    duration_sec: float | None = None


class ContentPart(_Closed):
    """A text, an image or a sound of a message."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: MediaSource | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Self:
        has_text, has_source = self.text is not None, self.source is not None
        if (has_text, has_source) != (self.type == "text", self.type != "text"):
            raise ValueError("a part of the type 'text' has the field 'text' only, other parts have 'source' only")
        return self


Content = str | list[ContentPart]


class ToolCall(_Closed):
    """A tool call of a turn."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Json | None = None
    """`arguments` has the text of arguments that are no JSON object."""


class SubagentRef(_Closed):
    """The trajectory of a sub-agent: in this document by its id, or in another file."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Json | None = None


class ObservationResult(_Closed):
    """What the environment returned after a turn."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentRef] | None = None
    extra: Json | None = None
    """`tool_call_id` of a result whose call is no call of the turn, and `name` of the tool."""


class Observation(_Closed):
    """All results after a turn."""

    results: list[ObservationResult]


class Metrics(_Closed):
    """Tokens of a turn."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: TokenIds | None = None
    """All tokens of the path before the turn."""
    completion_token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    extra: Json | None = None
    """`finish_reason`, and `weight_versions`: `version`, `start` and `end` of each span."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        num_logprobs, num_tokens = len(self.logprobs or ()), len(self.completion_token_ids or ())
        if self.logprobs and self.completion_token_ids and num_logprobs != num_tokens:
            raise ValueError(f"{num_tokens} completion_token_ids need as many logprobs, got {num_logprobs}")
        return self


class FinalMetrics(_Closed):
    """Sums over a trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: Count | None = None
    extra: Json | None = None
    """`reward`, `rewards` by name, and `weight` of the path in the loss."""


class Agent(_Closed):
    """The agent."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class Step(_Closed):
    """A message or a turn, with the results that follow it."""

    step_id: int
    """Number of the step, from 1."""
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    """True for turns that an earlier path of the session contains, too. They are trained there."""
    llm_call_count: Count | None = None
    """1 for turns of the policy, 0 for messages of the assistant that were given."""
    extra: Json | None = None
    """`role` of a message whose role is not that of the source."""


class Trajectory(_Closed):
    """One document: one path of a session."""

    schema_version: AtifVersion
    session_id: str | None = None
    trajectory_id: str | None = None
    """Session id and id of the last node."""
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    """File name of the path that continues this path with a compacted history."""
    extra: Json | None = None
    """The fields of `PathExtra`."""
    subagent_trajectories: list[Trajectory] | None = None

    @model_validator(mode="after")
    def _steps_are_numbered(self) -> Self:
        for index, step in enumerate(self.steps):
            if step.step_id != index + 1:
                raise ValueError(f"steps[{index}].step_id is {step.step_id}; steps are numbered from 1")
            calls = {call.tool_call_id for call in step.tool_calls or ()}
            for result in step.observation.results if step.observation else ():
                if result.source_call_id is not None and result.source_call_id not in calls:
                    raise ValueError(f"steps[{index}] has a result of the unknown tool call {result.source_call_id!r}")
        return self


class PathExtra(BaseModel):
    """What `to_atif` writes into `Trajectory.extra` for other programs."""

    stop_reason: str | None = None
    conversation_kind: str | None = None
    """Kind of the conversation that the path ends in, for example `main` or `sub_agent`."""
    error: Json | None = None
    """Exception of a failed session."""
    token_ids_after_last_turn: TokenIds | None = None
    """Tokens of the path that no turn follows. No field of ATIF has them."""


def is_link(result: ObservationResult) -> bool:
    """Whether a result is only a reference to the trajectory of a sub-agent."""
    return result.content is None and bool(result.subagent_trajectory_ref)


# -- Atif messages ----------------------------------------------------------------------------------
# Chat messages as steps and results of ATIF, and back. Pure.

IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
DOCUMENT_DEPTH = 20
"""Number of levels of a document around the arguments of a call, at most."""
UNKNOWN_IMAGE = "[image]"
"""Text in place of an image that ATIF cannot refer to: base64 text, a relative path, or an image of another type."""
Source = Literal["system", "user", "agent"]
SOURCES: dict[str, Source] = {"system": "system", "developer": "system", "assistant": "agent"}
ROLES: dict[Source, str] = {"system": "system", "user": "user", "agent": "assistant"}


def to_step(step_id: int, message: Message, *, is_turn: bool, is_copied: bool) -> Step:
    """The step of a message. `is_turn`: whether the policy generated it. `is_copied`: see `Step.is_copied_context`."""
    role = str(message["role"])
    source = SOURCES.get(role, "user")
    is_agent = source == "agent"
    reasoning = message.get("reasoning_content")
    return Step(
        step_id=step_id,
        source=source,
        message=_to_content(message.get("content")),
        reasoning_content=reasoning if is_turn and isinstance(reasoning, str) else None,
        tool_calls=([_to_call(call) for call in tool_calls(message)] or None) if is_agent else None,
        is_copied_context=True if is_copied else None,
        llm_call_count=int(is_turn) if is_agent else None,
        extra=None if role == ROLES[source] else {"role": role},
    )


def to_result(message: Message, step: Step) -> ObservationResult:
    """The result after a step, of a message of a tool or of text that was appended to the turn."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    is_known = isinstance(call_id, str) and call_id in {call.tool_call_id for call in step.tool_calls or ()}
    extra: Json = {} if is_known or not isinstance(call_id, str) else {"tool_call_id": call_id}
    if isinstance(name, str):
        extra["name"] = name
    return ObservationResult(
        source_call_id=call_id if is_known else None,
        content=_to_content(message.get("content")),
        extra=extra or None,
    )


def from_step(step: Step) -> Json:
    """The message of a step, as chat templates take it."""
    fields: Json = {"role": ROLES[step.source], "content": _from_content(step.message)}
    if step.reasoning_content is not None:
        fields["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        fields["tool_calls"] = [_from_call(call) for call in step.tool_calls]
    return fields


def from_result(result: ObservationResult) -> Json:
    """The message of a tool that is the result after a step."""
    fields: Json = {"role": "tool", "content": _from_content(result.content)}
    extra = result.extra or {}
    call_id = extra.get("tool_call_id") if result.source_call_id is None else result.source_call_id
    if isinstance(call_id, str):
        fields["tool_call_id"] = call_id
    if isinstance(extra.get("name"), str):
        fields["name"] = extra["name"]
    return fields


def _to_call(call: Json) -> ToolCall:
    arguments = _parse_arguments(call["arguments"])
    return ToolCall(
        tool_call_id=call["id"],
        function_name=call["name"],
        arguments={} if arguments is None else arguments,
        extra={"arguments": call["arguments"]} if arguments is None else None,
    )


def _parse_arguments(text: str) -> Json | None:
    """The arguments of a call. None if they are no object, or if the JSON of a document would change or refuse them."""
    nested: object
    try:
        nested = arguments = json.loads(text)
        for _ in range(DOCUMENT_DEPTH):
            nested = [nested]
        is_unchanged = orjson.loads(orjson.dumps(nested)) == nested
    except (ValueError, TypeError, RecursionError):  # too deep, an integer of more than 64 bits, a lone surrogate
        return None
    return arguments if is_unchanged and isinstance(arguments, dict) else None


def _from_call(call: ToolCall) -> Json:
    text = (call.extra or {}).get("arguments")
    arguments = text if isinstance(text, str) else json.dumps(call.arguments, ensure_ascii=False)
    return as_tool_call(call.tool_call_id, call.function_name, arguments)


def _to_content(content: Any) -> Content:
    if not isinstance(content, list):
        return text_of(content)
    return [part for item in content for part in _to_parts(item)]


def _to_parts(part: Any) -> list[ContentPart]:
    """The content part in ATIF's form. Empty for a part that is neither a text nor an image."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return [ContentPart(type="text", text=part["text"])]
    parts = []
    for source in image_sources({"content": [part]}):
        media_type = mimetypes.guess_type(source)[0]
        # Harbor resolves a relative path against the folder of the document, not against that of the run.
        if media_type in IMAGE_TYPES and ("://" in source or Path(source).is_absolute()):
            media = MediaSource(media_type=media_type, path=source)
            parts.append(ContentPart(type="image", source=media))
        else:
            parts.append(ContentPart(type="text", text=UNKNOWN_IMAGE))
    return parts


def _from_content(content: Content | None) -> Any:
    return [_from_part(part) for part in content] if isinstance(content, list) else content or ""


def _from_part(part: ContentPart) -> Json:
    if part.source is None:
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.source.path}}
    return {"type": part.type, part.type: part.source.path}


# -- Atif export ------------------------------------------------------------------------------------
# Export of a session to ATIF: one document for each exported path. Pure.

AGENT = "verl_server"


@check_arguments(skip=("tools",))
def to_atif(graph: TrajectoryGraph, *, model: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> list[Json]:
    """One ATIF document for each trained path of the session. Empty for a session without a node.

    `model`: name of the model. `tools`: schemas of the tools, as OpenAI's API takes them. Sessions record neither. Each
    turn has all tokens of its prompt, as the format defines it, so that the size of a document grows with the square of
    the number of turns. Raises BadInputError if `graph` is no `TrajectoryGraph`, and for
    values that the format refuses, for example a reward that is NaN.
    """
    paths = find_exported_paths(graph)
    agent = _describe_agent(model, tools)
    written: set[int] = set()
    with explain_refused_export(graph.session_id):
        writers = []
        for leaf, weight in paths.ends:
            writers.append(_PathWriter(graph, leaf, weight, written))
            written |= writers[-1].node_ids
        _add_links(writers, find_links(graph, written))
        trajectories = [writer.build(agent, paths) for writer in writers]
    return [trajectory.model_dump(mode="json", exclude_none=True) for trajectory in trajectories]


def atif_file_name(trajectory_id: str) -> str:
    """Name of the file of a document. The links between documents are these names."""
    return f"{trajectory_id}.json"


class _PathWriter:
    """The document of one path while it is built."""

    def __init__(self, graph: TrajectoryGraph, leaf: int, weight: float, written: set[int]) -> None:
        """`written`: ids of the nodes that earlier documents of the session contain."""
        self.graph, self.weight = graph, weight
        self.trajectory_id = f"{graph.session_id}-{leaf}"
        self.steps: list[Step] = []
        self.turns: dict[int, Step] = {}
        """Step of each turn by the id of its node."""
        self.continued_ref: str | None = None
        self._token_ids: list[int] = []
        self._num_turn_tokens = 0
        """Number of tokens up to the end of the last turn."""
        self._details: list[NodeDetails] = []
        for node in graph.path(leaf):
            self._add_node(node, is_copied=node.id in written)
        self.node_ids = {details.id for details in self._details}

    def _add_node(self, node: Node, *, is_copied: bool) -> None:
        messages = node_messages(node)
        derived = []
        for message in messages:
            last = self.steps[-1] if self.steps else None
            is_result = message["role"] == "tool" or APPENDED_TEXT in (node.message or {})
            if is_result and not node.sampled and last is not None and last.source == "agent":
                result = to_result(message, last)
                last.observation = Observation(results=[*_results(last), result])
                derived.append(from_result(result))
            else:
                step = to_step(len(self.steps) + 1, message, is_turn=node.sampled, is_copied=is_copied)
                self.steps.append(step)
                derived.append(from_step(step))
        if node.sampled:
            self.turns[node.id] = self.steps[-1]
            self.steps[-1].metrics = _metrics(node, self._token_ids)
        self._token_ids.extend(node.token_ids)
        if node.sampled:
            self._num_turn_tokens = len(self._token_ids)
        details = node_details(self.graph, node, derived)
        details.num_tokens = len(node.token_ids)
        self._details.append(details)

    def build(self, agent: Agent, paths: ExportedPaths) -> Trajectory:
        """The document."""
        termination = paths.termination
        extra = PathExtra(
            conversation_kind=kind_at(self.graph, recorded_kinds(self.graph), self._details[-1].id),
            token_ids_after_last_turn=self._token_ids[self._num_turn_tokens :] or None,
        )
        scores: Json = {"weight": self.weight}
        if termination is not None:
            extra.stop_reason, extra.error = termination.stop_reason, termination.error
            scores |= Scores(reward=termination.reward, rewards=dict(termination.rewards)).model_dump(exclude_none=True)
        details = details_to_json(session_details(self.graph, paths, self._details))
        metrics = [step.metrics for step in self.steps if step.metrics is not None]
        return Trajectory(
            schema_version=ATIF_VERSION,
            session_id=self.graph.session_id,
            trajectory_id=self.trajectory_id,
            agent=agent,
            steps=self.steps,
            final_metrics=FinalMetrics(
                total_prompt_tokens=sum(item.prompt_tokens or 0 for item in metrics),
                total_completion_tokens=sum(item.completion_tokens or 0 for item in metrics),
                total_steps=len(self.steps),
                extra=scores,
            ),
            continued_trajectory_ref=self.continued_ref,
            extra={**extra.model_dump(exclude_none=True), DETAILS_KEY: details},
        )


def _metrics(node: Node, prompt_ids: list[int]) -> Metrics:
    return Metrics(
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(node.token_ids),
        prompt_token_ids=prompt_ids,
        completion_token_ids=list(node.token_ids),
        logprobs=list(node.logprobs),
        extra={
            **({} if node.finish_reason is None else {"finish_reason": node.finish_reason}),
            "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in node.spans],
        },
    )


def _add_links(writers: list[_PathWriter], links: list[PathLink]) -> None:
    """Refer from each path to the paths that continue it and to those of its sub-agents."""
    for link in links:
        target = next((writer for writer in writers if link.target in writer.node_ids), None)
        sources = [writer for writer in writers if link.source in writer.turns and link.target not in writer.node_ids]
        if target is None or not sources:
            continue
        source, file_name = sources[0], atif_file_name(target.trajectory_id)
        if link.reason is ForkReason.COMPACTED:
            source.continued_ref = source.continued_ref or file_name
        else:
            ref = SubagentRef(
                trajectory_id=target.trajectory_id, session_id=target.graph.session_id, trajectory_path=file_name
            )
            step = source.turns[link.source]
            result = ObservationResult(subagent_trajectory_ref=[ref])
            step.observation = Observation(results=[*_results(step), result])


def _results(step: Step) -> list[ObservationResult]:
    return [] if step.observation is None else step.observation.results


def _describe_agent(model: str | None, tools: Sequence[Mapping[str, Any]]) -> Agent:
    from verl_server import __version__

    definitions = [dict(tool) for tool in tools] or None
    return Agent(name=AGENT, version=__version__, model_name=model, tool_definitions=definitions)


# -- Atif import ------------------------------------------------------------------------------------

NO_METRICS = Metrics()


def from_atif(documents: Sequence[Mapping[str, object]]) -> TrajectoryGraph:
    """The graph of the ATIF documents of one session, for inspection.

    Documents that `to_atif` wrote give back the recorded graph as far as it was exported; any of the documents of a
    session may be left out. A document of another program becomes a path, and so does each sub-agent's trajectory in
    it. There, a turn whose prompt does not continue the tokens before it begins a path of its own, sampled tokens have
    the weight version 0, and tokens without log probabilities count as not sampled. Do not train on such a graph: the
    weight versions are unknown.

    Raises BadInputError with the place of the first problem if a document is not valid or has another version than
    ATIF 1.0 to 1.8, and for documents of several sessions.
    """
    require_list("documents", documents, "a list of the documents of one session, for example [json.load(file)]")
    if not documents:
        raise BadInputError("there are no documents: pass at least one")
    parsed = [
        parse_document(Trajectory, document, f"ATIF document {index}") for index, document in enumerate(documents)
    ]
    sessions = {trajectory.session_id for trajectory in parsed if trajectory.session_id is not None}
    if len(sessions) > 1:
        raise BadInputError(f"the documents are of several sessions: {sorted(sessions)[:4]}; import each on its own")
    own = [DETAILS_KEY in (trajectory.extra or {}) for trajectory in parsed]
    if all(own):
        return _restore(parsed)
    if any(own):
        raise BadInputError(
            f"only some documents of session {next(iter(sessions), None)!r} have extra.{DETAILS_KEY}; import the "
            "documents of one export only"
        )
    importer = _Importer(next(iter(sessions), parsed[0].trajectory_id or "imported"), has_others=len(parsed) > 1)
    for trajectory in parsed:
        importer.add_trajectory(trajectory)
    return importer.graph


def _restore(trajectories: Sequence[Trajectory]) -> TrajectoryGraph:
    """The graph of documents that `to_atif` wrote."""
    nodes: list[ImportedNode] = []
    facts: list[tuple[SessionDetails, Scores]] = []
    for index, trajectory in enumerate(trajectories):
        place = f"ATIF document {index}"
        extra = trajectory.extra or {}
        details = parse_document(SessionDetails, extra[DETAILS_KEY], f"extra.{DETAILS_KEY} of {place}")
        try:
            nodes.extend(_iterate_nodes(trajectory, details))
        except BadInputError as error:
            raise BadInputError(f"{place}: {error.message}") from None
        final = trajectory.final_metrics
        scores = {} if final is None else final.extra or {}
        facts.append(
            (
                details.model_copy(update={"nodes": []}),
                parse_document(Scores, scores, f"final_metrics.extra of {place}"),
            )
        )
    if any(fact != facts[0] for fact in facts):
        raise BadInputError(
            f"the documents are of several recordings of session {facts[0][0].session_id!r}; import each on its own"
        )
    return restore_graph(facts[0][0], nodes, facts[0][1])


def _iterate_nodes(trajectory: Trajectory, details: SessionDetails) -> Iterator[ImportedNode]:
    """The recorded nodes of a path."""
    entries = list(_iterate_entries(trajectory))
    token_ids = _path_tokens(trajectory)
    parent, start, num_entries = None, 0, 0
    for node in details.nodes:
        group = entries[num_entries : num_entries + node.count]
        num_entries += node.count
        if len(group) != node.count or not group:
            raise BadInputError(
                f"extra.{DETAILS_KEY} describes more messages than the steps have; import the document as exported"
            )
        end = start + (node.num_tokens or 0)
        step = group[0][0]
        metrics = step.metrics if step is not None else None
        if metrics is not None and (
            metrics.prompt_token_ids != token_ids[:start] or metrics.completion_token_ids != token_ids[start:end]
        ):
            raise BadInputError(f"the tokens of step {step.step_id if step else 0} do not continue those before it")
        yield ImportedNode(
            details=node,
            parent=parent,
            token_ids=token_ids[start:end],
            sampled=metrics is not None,
            logprobs=[] if metrics is None else metrics.logprobs or [],
            messages=[message for _, message in group],
        )
        parent, start = node.id, end
    if num_entries != len(entries) or start != len(token_ids):
        raise BadInputError(
            f"extra.{DETAILS_KEY} describes {num_entries} messages and {start} tokens, and the document has "
            f"{len(entries)} and {len(token_ids)}; import the document as exported"
        )


def _iterate_entries(trajectory: Trajectory) -> Iterator[tuple[Step | None, Json]]:
    """The messages of a document in their order, each with its step, or None for a result after a step."""
    for step in trajectory.steps:
        yield step, from_step(step)
        for result in step.observation.results if step.observation else ():
            if not is_link(result):
                yield None, from_result(result)


def _path_tokens(trajectory: Trajectory) -> list[int]:
    """All tokens of a path: those of its last turn with its prompt, and those after it."""
    extra = parse_document(PathExtra, trajectory.extra or {}, "extra")
    turns = [step.metrics for step in trajectory.steps if step.metrics is not None]
    last = turns[-1] if turns else NO_METRICS
    return [
        *(last.prompt_token_ids or ()),
        *(last.completion_token_ids or ()),
        *(extra.token_ids_after_last_turn or ()),
    ]


class _Importer:
    """The graph of documents of other programs while it is built."""

    def __init__(self, session_id: str, *, has_others: bool) -> None:
        """`has_others`: whether other documents have the turns that a document has copied."""
        self._has_others = has_others
        self.graph = TrajectoryGraph(session_id)
        self._end: int | None = None
        self._pending: list[Json] = []
        """Messages after the last turn."""
        self._fork_reason = ForkReason.SAMPLE

    def add_trajectory(self, trajectory: Trajectory, fork_reason: ForkReason = ForkReason.SAMPLE) -> None:
        """Add a path from a new root, and the paths of the embedded sub-agents."""
        self._end, self._fork_reason = None, fork_reason
        for step in trajectory.steps:
            if step.source == "agent" and step.llm_call_count != 0:
                self._add_turn(step)
            else:
                self._pending.append(from_step(step))
            results = step.observation.results if step.observation else ()
            self._pending.extend(from_result(result) for result in results if not is_link(result))
        self._add_context([])
        for sub_agent in trajectory.subagent_trajectories or ():
            self.add_trajectory(sub_agent, ForkReason.SUB_AGENT)

    def _add_turn(self, step: Step) -> None:
        metrics = step.metrics or NO_METRICS
        self._add_context(self._new_prompt_tokens(metrics.prompt_token_ids))
        if step.is_copied_context and self._has_others:
            self._add_node(metrics.completion_token_ids or [], {"messages": [from_step(step)]})
            return
        token_ids, logprobs = metrics.completion_token_ids or [], metrics.logprobs or []
        if len(token_ids) != len(logprobs):
            self._add_node(token_ids, None)
            token_ids, logprobs = [], []
        finish_reason = (metrics.extra or {}).get("finish_reason")
        self._end = self.graph.add_node(
            self._end,
            token_ids,
            sampled=True,
            logprobs=logprobs,
            spans=[Span(UNKNOWN_VERSION, 0, len(token_ids))] if token_ids else [],
            message=from_step(step),
            fork_reason=self._reason(),
            finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        ).id

    def _new_prompt_tokens(self, prompt_ids: list[int] | None) -> list[int]:
        """The tokens of a prompt after the path so far. A prompt that does not continue it begins another path."""
        if prompt_ids is None:
            return []
        known = [] if self._end is None else self.graph.token_ids(self._end)
        if prompt_ids[: len(known)] == known:
            return prompt_ids[len(known) :]
        self._end, self._fork_reason = None, ForkReason.EDITED
        return prompt_ids

    def _add_context(self, token_ids: Sequence[int]) -> None:
        if token_ids or self._pending:
            self._add_node(token_ids, {"messages": self._pending} if self._pending else None)
        self._pending = []

    def _add_node(self, token_ids: Sequence[int], message: Json | None) -> None:
        node = self.graph.add_node(self._end, token_ids, sampled=False, message=message, fork_reason=self._reason())
        self._end = node.id

    def _reason(self) -> ForkReason | None:
        return self._fork_reason if self.graph.children(self._end) else None
