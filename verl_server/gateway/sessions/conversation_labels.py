"""Labels the conversations of a recorded session by their kinds, and finds the paths that are trained. Pure."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterator, Sequence

from verl_server.gateway.sessions.conversation_kinds import (
    TRAINED_KINDS,
    ConversationKind,
    Opening,
    find_main,
    kind_of,
)
from verl_server.gateway.turn_text.returning_texts import WrittenTexts
from verl_server.gateway.turn_text.turn_parsing import THOUGHT_END, split_thought
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import ForkReason, Node
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

MAX_COMPARED = 8
"""Number of conversations, and of the last nodes, that a new conversation is compared with."""
MAX_COMPARED_TURNS = 32
"""Number of the last turns before a conversation whose texts are looked for in the conversation."""
FORK_REASONS = {
    ConversationKind.COMPACTED: ForkReason.COMPACTED,
    ConversationKind.EDITED: ForkReason.EDITED,
    ConversationKind.OTHER_TOOLS: ForkReason.EDITED,
}
"""Reason of the fork at the root of a conversation. Other kinds have the reason `SUB_AGENT`."""


def label_conversations(graph: TrajectoryGraph) -> dict[int, ConversationKind]:
    """The kind of each conversation and of each branch, by the id of its first node.

    A node without a kind of its own belongs to the conversation of its parent. A kind can change while the session goes
    on: a title may be asked for before the main conversation begins.
    """
    roots = graph.children(None)
    if not roots:
        return {}
    openings = [_opening(graph, root) for root in roots]
    main = find_main(openings)
    last_turns = [node for node in graph.nodes if node.sampled and not graph.children(node.id)]
    written = WrittenTexts(len(last_turns), lambda index: _text_of_turn(last_turns[index]))
    kinds = dict[int, ConversationKind]()
    summaries = list[int]()
    for index, (root, opening) in enumerate(zip(roots, openings, strict=True)):
        kinds[root] = ConversationKind.MAIN if index == main else kind_of(opening, openings[main], has_summary=True)
        if kinds[root] is ConversationKind.COMPACTED:  # only this kind depends on a summary
            num_before = bisect.bisect(last_turns, root, key=lambda node: node.id)
            summary = written.last_in("\n".join(opening.users), num_before, MAX_COMPARED_TURNS)
            if summary is None:
                kinds[root] = kind_of(opening, openings[main], has_summary=False)
            else:
                summaries.append(last_turns[summary].id)
    requests = {graph.node(turn).parent for turn in summaries}
    kinds |= dict(_forks(graph, requests, frozenset(summaries)))
    for request in requests:
        if request is not None and kinds.get(request) not in (ConversationKind.MAIN, ConversationKind.COMPACTED):
            kinds[request] = ConversationKind.SUMMARY
    return kinds


def _forks(
    graph: TrajectoryGraph, summary_requests: Collection[int | None], summaries: Collection[int]
) -> Iterator[tuple[int, ConversationKind]]:
    """The branches within conversations. The branch that went on keeps the kind of its parent.

    `summaries`: turns with which compacted conversations begin. The agent went on with them.

    Of several turns after a prompt, this is the turn after which the last node was recorded: an attempt that died comes
    before the attempt that went on. If no node follows any of them, it is the last turn. The same holds for several
    prompts after a turn, except for requests for a summary: the conversation goes on elsewhere after them.
    """
    last_nodes = list(range(len(graph.nodes)))
    for node in reversed(graph.nodes):
        if node.parent is not None:
            last_nodes[node.parent] = max(last_nodes[node.parent], last_nodes[node.id])
    for node in graph.nodes:
        children = graph.children(node.id)
        for is_turn, kind in ((True, ConversationKind.SAMPLE), (False, ConversationKind.EDITED)):
            branches = [child for child in children if graph.node(child).sampled is is_turn]
            continued = [branch for branch in branches if graph.children(branch) or branch in summaries]
            going_on = [branch for branch in continued if branch not in summary_requests]
            kept = max(going_on or continued or branches, key=lambda branch: last_nodes[branch], default=None)
            yield from ((branch, kind) for branch in branches if branch != kept)


def trained_ends(
    graph: TrajectoryGraph, kinds: dict[int, ConversationKind], trained: Collection[str] = TRAINED_KINDS
) -> list[int]:
    """The last turn of each path that is trained, in the order of the turns.

    `kinds`: of `label_conversations`. A turn is trained if all conversations and branches on its path have a kind in
    `trained`.
    """
    ends = dict[int, None]()
    for leaf in graph.leaves:
        end = None
        for node in graph.path(leaf):
            if node.id in kinds and kinds[node.id] not in trained:
                break
            if node.sampled and node.token_ids:
                end = node.id
        if end is not None:
            ends[end] = None
    return sorted(ends)


class RootForkReasons:
    """Why the conversations of a session that goes on begin with prompts of their own, as far as it is known by now."""

    def __init__(self, graph: TrajectoryGraph) -> None:
        self._graph = graph
        self._openings = dict[int, Opening]()
        """The first `MAX_COMPARED` conversations, by their roots."""
        self._main: Opening | None = None
        """The opening of the main conversation. None without a conversation."""
        self._num_seen_nodes = 0

    @property
    def num_compared_tokens(self) -> int:
        """Number of tokens of the turns that the messages of a new conversation are compared with."""
        return sum(len(node.token_ids) for node in self._graph.nodes[-MAX_COMPARED:] if node.sampled)

    def reason_of(self, messages: Sequence[Message], tools: str | None) -> ForkReason:
        """The reason of a conversation with these first messages. The work does not grow with the session.

        `tools`: digest of its tools, None without tools.
        """
        self._look_at_new_nodes()
        if self._main is None:
            return ForkReason.SUB_AGENT
        graph, opening = self._graph, _opening_of(messages, tools)
        last_turns = [node for node in graph.nodes[-MAX_COMPARED:] if node.sampled and not graph.children(node.id)]
        written = WrittenTexts(len(last_turns), lambda index: _text_of_turn(last_turns[index]))
        has_summary = written.last_in("\n".join(opening.users)) is not None
        return FORK_REASONS.get(kind_of(opening, self._main, has_summary), ForkReason.SUB_AGENT)

    def _look_at_new_nodes(self) -> None:
        """An opening depends on its root, on the turns after the root, and on whether a turn was continued."""
        nodes, has_changed = self._graph.nodes, False
        for node in nodes[self._num_seen_nodes :]:
            root = node
            for _ in range(2):
                root = root if root.parent is None else nodes[root.parent]
            if root.parent is None and (root.id in self._openings or len(self._openings) < MAX_COMPARED):
                self._openings[root.id] = _opening(self._graph, root.id, self._openings.get(root.id))
                has_changed = True
        self._num_seen_nodes = len(nodes)
        if has_changed:
            openings = list(self._openings.values())
            self._main = openings[find_main(openings)]


def _opening(graph: TrajectoryGraph, root: int, known: Opening | None = None) -> Opening:
    """The opening of a conversation. `known`: the opening at an earlier time, whose texts are the same."""
    node = graph.node(root)
    message = node.message or {}
    if "messages" not in message:
        return Opening(is_raw=True)
    opening = known or _opening_of(message["messages"], node.tools_digest if message.get("tools") else None)
    turns = [graph.node(child) for child in graph.children(root) if graph.node(child).sampled]
    num_turns = 1 + any(graph.children(turn.id) for turn in turns)
    asked = ((turns[0].message or {}).get("request") or {}).get("max_new_tokens") if turns else None
    if (num_turns, asked) == (opening.num_turns, opening.max_new_tokens):
        return opening
    return dataclasses.replace(opening, num_turns=num_turns, max_new_tokens=asked)


def _opening_of(messages: Sequence[Message], tools: str | None) -> Opening:
    texts = [(message["role"], _text_of(message)) for message in messages]
    return Opening(
        system="\n".join(text for role, text in texts if role == "system"),
        users=[text for role, text in texts if role == "user"],
        tools=tools,
        has_foreign_turns=any(role == "assistant" for role, _ in texts),
    )


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: list[Json] = [part for part in content if part.get("type") == "text"]
    return "".join(str(part.get("text")) for part in parts)


def _text_of_turn(node: Node) -> str:
    text = str((node.message or {}).get("content") or "")
    return split_thought(text, is_open=THOUGHT_END in text)[1]
