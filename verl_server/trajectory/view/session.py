"""Makes the view of a session from its token graph. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.trajectory.conversations import KIND_NOTE, kind_at, recorded_kinds
from verl_server.trajectory.divergence import Divergence, find_divergences
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import ForkReason, Node, Note
from verl_server.trajectory.termination import Termination
from verl_server.trajectory.view.model import (
    DivergenceView,
    ErrorView,
    NoteView,
    PathView,
    SegmentView,
    SessionView,
    TerminationView,
)
from verl_server.trajectory.view.nodes import NodeViews, logprob_fact
from verl_server.trajectory.view.texts import as_label, as_text, count, join, visible
from verl_server.trajectory.view.token_texts import DecodeFn, TokenTexts

ROOT_REASONS = {
    None: "begins with the first prompt",
    ForkReason.COMPACTED: "begins with a compacted history: compacted",
    ForkReason.SUB_AGENT: "begins with the prompt of a sub-agent: sub_agent",
}


@dataclass(frozen=True)
class _Path:
    """The nodes of a path that are in no earlier path."""

    number: int
    nodes: list[Node]


def make_session_view(graph: TrajectoryGraph, decode: DecodeFn | None = None) -> SessionView:
    """The view of a session. `decode`: decodes token ids with special tokens. None: the tokens have no texts."""
    paths = _find_paths(graph)
    path_of = {node.id: path.number for path in paths for node in path.nodes}
    segments = graph.trained_segments
    trained = None if segments is None else {node.id for leaf, _ in segments for node in graph.path(leaf)}
    texts = None if decode is None else TokenTexts(decode)
    kinds = recorded_kinds(graph)
    views = NodeViews(graph, texts, trained, {path.nodes[0].id: path.number for path in paths}, kinds)
    divergences = {path_of[found.node]: _divergence_view(found, path_of, texts) for found in find_divergences(graph)}
    return SessionView(
        session_id=visible(graph.session_id),
        facts=_session_facts(graph, len(paths)),
        versions=tuple(sorted({span.version for node in graph.nodes for span in node.spans})),
        paths=tuple(
            PathView(
                path.number,
                as_label(kind) if (kind := kind_at(graph, kinds, path.nodes[0].id)) is not None else None,
                _origin(path.nodes[0], path_of, kind),
                tuple(views.view(node) for node in path.nodes),
                divergences.get(path.number),
            )
            for path in paths
        ),
        terminations=tuple(
            _termination_view(termination, path_of, is_last=termination is graph.last_termination)
            for termination in graph.terminations.values()
        ),
        segments=tuple(_segment_view(graph, path_of, leaf, weight) for leaf, weight in segments or ()),
        divergences=tuple(divergences.values()),
        notes=tuple(_note_view(note) for note in graph.notes if note.name != KIND_NOTE),
        has_texts=texts is not None,
    )


def _find_paths(graph: TrajectoryGraph) -> list[_Path]:
    """The paths of all leaves. A path follows the first child of each node. Each fork begins another path."""
    paths: list[_Path] = []
    for start in graph.nodes:
        if start.id == graph.children(start.parent)[0] and start.parent is not None:
            continue
        nodes = [start]
        while children := graph.children(nodes[-1].id):
            nodes.append(graph.node(children[0]))
        paths.append(_Path(len(paths) + 1, nodes))
    return paths


def _origin(start: Node, path_of: dict[int, int], kind: str | None) -> str:
    """`kind`: of the conversation. It is known better later: a title may be asked for before the main conversation."""
    if start.parent is not None:
        return f"forks after node {start.parent} of path {path_of[start.parent]}: {start.fork_reason}"
    if start.fork_reason is ForkReason.SUB_AGENT and kind not in (None, ForkReason.SUB_AGENT):
        return "begins with a prompt of its own"
    return ROOT_REASONS.get(start.fork_reason, f"begins with a prompt of its own: {start.fork_reason}")


def _session_facts(graph: TrajectoryGraph, num_paths: int) -> tuple[str, ...]:
    sampled = [node for node in graph.nodes if node.sampled]
    num_tokens, num_sampled = (sum(len(node.token_ids) for node in nodes) for nodes in (graph.nodes, sampled))
    facts = [
        count(num_paths, "path"),
        count(len(graph.nodes), "node"),
        count(len(sampled), "turn"),
        f"{count(num_tokens, 'token')}, of which {num_sampled:,} are sampled (loss mask 1)",
    ]
    counts: dict[int, int] = {}
    for node in sampled:
        for span in node.spans:
            counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    if counts:
        versions = (f"{version} ({count(counts[version], 'token')})" for version in sorted(counts))
        facts.append(f"weight versions {join(versions)}")
    facts += logprob_fact([logprob for node in sampled for logprob in node.logprobs])
    if graph.last_termination is None:
        facts.append("the session has not finished")
    return tuple(facts)


# -- terminations and segments -----------------------------------------------------------------------


def _segment_view(graph: TrajectoryGraph, path_of: dict[int, int], leaf: int, weight: float) -> SegmentView:
    return SegmentView(
        path_of[leaf], leaf, as_text(float(weight)), graph.num_tokens(leaf), graph.num_sampled_tokens(leaf)
    )


def _termination_view(termination: Termination, path_of: dict[int, int], *, is_last: bool) -> TerminationView:
    reward = termination.reward
    return TerminationView(
        path=path_of[termination.node],
        node=termination.node,
        stop_reason=as_label(termination.stop_reason),
        is_last=is_last,
        reward=None if reward is None else as_text(reward),
        rewards=tuple((as_label(name), as_text(value)) for name, value in termination.rewards.items()),
        error=None if termination.error is None else _error_view(termination.error),
    )


def _error_view(error: object) -> ErrorView:
    """The error as `verl_server.errors.to_wire` writes it, or any other JSON value."""
    if not isinstance(error, dict):
        return ErrorView("error", as_text(error), ())
    details = error.get("details")
    others = [(name, value) for name, value in error.items() if name not in ("type", "message", "details")]
    others += details.items() if isinstance(details, dict) else [("details", details)] if details else []
    return ErrorView(
        as_label(error.get("type", "error")),
        as_text(error.get("message", "")),
        tuple((as_label(name), as_text(value)) for name, value in others),
    )


# -- notes -------------------------------------------------------------------------------------------


def _note_view(note: Note) -> NoteView:
    if isinstance(note.value, dict):
        facts = [f"{name} {as_text(value)}" for name, value in note.value.items() if value is not None]
        return NoteView(note.node, as_label(f"{note.name}: {', '.join(facts)}"))
    return NoteView(note.node, as_label(f"{note.name}: {as_text(note.value)}"))


# -- divergences -------------------------------------------------------------------------------------


def _divergence_view(found: Divergence, path_of: dict[int, int], texts: TokenTexts | None) -> DivergenceView:
    path, original = path_of[found.node], path_of[found.original_node]
    new_token = _token_name(found.new_token, f"node {found.node} ends before it", texts)
    original_token = _token_name(found.original_token, f"path {original} ends before it", texts)
    text = (
        f"path {path} (node {found.node}) differs from path {original} (node {found.original_node}) after "
        f"{count(found.num_turns, 'turn')}, at token {found.position}: {new_token} instead of {original_token} "
        f"({found.fork_reason})"
    )
    return DivergenceView(path, found.node, original, found.original_node, text)


def _token_name(token: int | None, absent: str, texts: TokenTexts | None) -> str:
    if token is None:
        return f"no token ({absent})"
    return f"{token}" if texts is None else f"{token} {visible(texts([token])[0])!r}"
