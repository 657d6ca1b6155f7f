"""Records the end of a session: the kinds of its conversations, the trained paths, and the reward."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.agent.episodes.segments import find_segments
from verl_server.errors import BadInputError
from verl_server.gateway.sessions.conversation_kinds import TRAINED_KINDS, ConversationKind
from verl_server.gateway.sessions.conversation_labels import label_conversations, trained_ends
from verl_server.gateway.sessions.session_info import SessionInfo, as_json, as_kinds, as_rewards
from verl_server.trajectory.conversations import KIND_NOTE, recorded_kinds
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import Recorder


def with_result(
    info: SessionInfo,
    stop_reason: str = "done",
    *,
    reward: float | None = None,
    rewards: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    train: Sequence[str] | None = None,
) -> SessionInfo:
    """The session with its end and its result. Raises BadInputError for values that are not allowed.

    `train`: kinds of the conversations that are trained (`ConversationKind`); by default all but titles and other side
    calls. A session that has ended keeps its end and gets the new result.
    """
    if not isinstance(stop_reason, str):
        raise BadInputError(f"stop_reason must be a string, got {type(stop_reason).__name__}")
    given = as_json("the result", {"stop_reason": stop_reason, "rewards": as_rewards(rewards or {})})
    info = dataclasses.replace(
        info,
        ended_at=info.ended_at or time.time(),
        stop_reason=info.stop_reason or given["stop_reason"],
        metadata=info.metadata | as_json("metadata", metadata),
        train=info.train if train is None else as_kinds(train),
    )
    if reward is not None:
        info.reward = as_rewards({"reward": reward})["reward"]
    if rewards:
        info.rewards = given["rewards"]
    return info


def record_end(recorder: Recorder, info: SessionInfo) -> None:
    """Record the end of a session with one write. The end of each trained path has the reward."""
    graph = recorder.graph
    if not graph.nodes:
        return
    kinds = label_conversations(graph)
    ends = trained_ends(graph, kinds, TRAINED_KINDS if info.train is None else info.train)
    segments = find_segments(graph, [(end, 1.0) for end in ends])
    graph.clear_rewards()  # of an earlier end, which may have trained other paths, or could not be written
    if info.reward is not None:
        for segment in segments:
            graph.set_rewards(segment.leaf, [info.reward])
    last = segments[-1].leaf if segments else graph.nodes[-1].id
    trained = [(segment.leaf, segment.loss_weight) for segment in segments]
    notes = _new_notes(graph, kinds)
    recorder.terminate(last, info.stop_reason or "done", None, info.reward, trained, info.rewards, notes)


def record_kinds(record: Recorder | TrajectoryGraph, kinds: Mapping[int, ConversationKind] | None = None) -> None:
    """Add the kind of each conversation and branch to the record, as a note of its first node.

    `kinds`: of `label_conversations`, if they are known.
    """
    graph = record if isinstance(record, TrajectoryGraph) else record.graph
    for note in _new_notes(graph, label_conversations(graph) if kinds is None else kinds):
        record.add_note(*note)


def _new_notes(graph: TrajectoryGraph, kinds: Mapping[int, ConversationKind]) -> list[tuple[int, str, str]]:
    """The notes for the kinds that the graph does not have."""
    known = recorded_kinds(graph)
    return [(node, KIND_NOTE, kind.value) for node, kind in kinds.items() if known.get(node) != kind]
