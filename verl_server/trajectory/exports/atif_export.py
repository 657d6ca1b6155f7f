"""Export of a session to ATIF: one document for each exported path. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.trajectory.conversations import kind_at, recorded_kinds
from verl_server.trajectory.exports import atif_schema as schema
from verl_server.trajectory.exports.atif_messages import from_result, from_step, to_result, to_step
from verl_server.trajectory.exports.chat import APPENDED_TEXT, derive_node_message, node_messages, require_tool_schemas
from verl_server.trajectory.exports.details import (
    DETAILS_KEY,
    NodeDetails,
    Scores,
    details_to_json,
    node_details,
    session_details,
)
from verl_server.trajectory.exports.documents import explain_refused_export
from verl_server.trajectory.exports.paths import ExportedPaths, PathLink, find_exported_paths, find_links
from verl_server.trajectory.graph import TrajectoryGraph, require_graph
from verl_server.trajectory.nodes import ForkReason, Node
from verl_server.types import Json

AGENT = "verl_server"


def to_atif(graph: TrajectoryGraph, *, model: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> list[Json]:
    """One ATIF document for each trained path of the session. Empty for a session without a node.

    `model`: name of the model. `tools`: schemas of the tools, as OpenAI's API takes them. Sessions record neither. Each
    turn has all tokens of its prompt, as the format defines it, so that the size of a document grows with the square of
    the number of turns. Raises BadInputError if `graph` is no `TrajectoryGraph`, for tools of another form, and for
    values that the format refuses, for example a reward that is NaN.
    """
    require_graph(graph)
    require_tool_schemas(tools)
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
        self.steps: list[schema.Step] = []
        self.turns: dict[int, schema.Step] = {}
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
                last.observation = schema.Observation(results=[*_results(last), result])
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
        details = node_details(self.graph, node, len(messages), derive_node_message(node.sampled, derived))
        details.num_tokens = len(node.token_ids)
        self._details.append(details)

    def build(self, agent: schema.Agent, paths: ExportedPaths) -> schema.Trajectory:
        """The document."""
        termination = paths.termination
        extra = schema.PathExtra(
            conversation_kind=kind_at(self.graph, recorded_kinds(self.graph), self._details[-1].id),
            token_ids_after_last_turn=self._token_ids[self._num_turn_tokens :] or None,
        )
        scores: Json = {"weight": self.weight}
        if termination is not None:
            extra.stop_reason, extra.error = termination.stop_reason, termination.error
            scores |= Scores(reward=termination.reward, rewards=dict(termination.rewards)).model_dump(exclude_none=True)
        details = details_to_json(session_details(self.graph, paths, self._details))
        metrics = [step.metrics for step in self.steps if step.metrics is not None]
        return schema.Trajectory(
            schema_version=schema.ATIF_VERSION,
            session_id=self.graph.session_id,
            trajectory_id=self.trajectory_id,
            agent=agent,
            steps=self.steps,
            final_metrics=schema.FinalMetrics(
                total_prompt_tokens=sum(item.prompt_tokens or 0 for item in metrics),
                total_completion_tokens=sum(item.completion_tokens or 0 for item in metrics),
                total_steps=len(self.steps),
                extra=scores,
            ),
            continued_trajectory_ref=self.continued_ref,
            extra={**extra.model_dump(exclude_none=True), DETAILS_KEY: details},
        )


def _metrics(node: Node, prompt_ids: list[int]) -> schema.Metrics:
    return schema.Metrics(
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
            ref = schema.SubagentRef(
                trajectory_id=target.trajectory_id, session_id=target.graph.session_id, trajectory_path=file_name
            )
            step = source.turns[link.source]
            result = schema.ObservationResult(subagent_trajectory_ref=[ref])
            step.observation = schema.Observation(results=[*_results(step), result])


def _results(step: schema.Step) -> list[schema.ObservationResult]:
    return [] if step.observation is None else step.observation.results


def _describe_agent(model: str | None, tools: Sequence[Mapping[str, Any]]) -> schema.Agent:
    from verl_server import __version__

    definitions = [dict(tool) for tool in tools] or None
    return schema.Agent(name=AGENT, version=__version__, model_name=model, tool_definitions=definitions)
