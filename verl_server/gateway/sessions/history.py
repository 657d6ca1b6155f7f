"""`History`: finds the recorded path that a conversation continues, by the meaning of its messages.

An agent sends the whole conversation with each request, and writes the turns of the policy in its own way: without the
thoughts, and with the arguments of tool calls as other JSON text. Two conversations are equal here if their messages
mean the same. The key of a conversation is a hash over its tools and messages; the key of a longer conversation is
computed from the key of the shorter conversation.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from verl_server.gateway.conversation import LITELLM_EMPTY_TEXT, AssistantTurn, TurnRequest, normalize_messages
from verl_server.gateway.turn_text.splitting import THOUGHT_END, split_thought
from verl_server.trajectory.graph import ForkReason, Node, TrajectoryGraph
from verl_server.trajectory.rendering.messages import Message, as_json
from verl_server.types import Json

logger = logging.getLogger(__name__)

Key = bytes
ReadTurn = Callable[[Node, TurnRequest, int, Json], AssistantTurn]
"""Reads a recorded turn for a request, see `read_turn`."""
TEMPLATE_ARGUMENTS = "template_arguments"
"""Key of the variables of the chat template in the recorded message of a first prompt, if there are any."""


def tools_digest(tools: Sequence[Json]) -> str:
    """Digest of the schemas of tools."""
    return hashlib.blake2b(as_json(list(tools)), digest_size=16).hexdigest()


def prompt_digest(tools: Sequence[Json], template_arguments: Json) -> str:
    """What the keys of a conversation begin with: all that its first prompt depends on besides the messages."""
    digest = tools_digest(tools)
    return f"{digest} {as_json(template_arguments).decode()}" if template_arguments else digest


def conversation_keys(
    digest: str, messages: Sequence[Message], start: Key | None = None, before: Sequence[Message] = ()
) -> list[Key]:
    """The keys of the conversations that end with each of the messages, which are normalized (`normalize_messages`).

    `digest`: that of the prompt (`prompt_digest`). `start`: key of the conversation that the messages continue.
    `before`: the messages of this conversation, of which the last turn may have calls whose results follow.
    """
    keys = list[Key]()
    key = digest.encode() if start is None else start
    places = _places_of_calls(last_turn(before))
    for message in messages:
        key = hashlib.blake2b(key + as_json(meaning(message, places)), digest_size=16).digest()
        keys.append(key)
        if message["role"] == "assistant":
            places = _places_of_calls([message])
    return keys


def last_turn(messages: Sequence[Message]) -> list[Message]:
    """The last assistant message, if there is one."""
    return next(([message] for message in reversed(messages) if message["role"] == "assistant"), [])


def closing_text(messages: Sequence[Message]) -> list[Json]:
    """The assistant message without calls at the end of a prompt, if there is one: one message with the next turn."""
    return [dict(last) for last in messages[-1:] if last["role"] == "assistant" and not last.get("tool_calls")]


def _places_of_calls(turn: Sequence[Message]) -> dict[str, int]:
    """The places of the calls of a turn by their ids."""
    return {call["id"]: place for message in turn for place, call in enumerate(message.get("tool_calls") or ())}


def raw_prompt_key(token_ids: Sequence[int]) -> Key:
    """The key of a raw prompt in `History`. No chat has this key."""
    return hashlib.blake2b(b"raw prompt" + orjson.dumps(list(token_ids)), digest_size=16).digest()


def next_branch(graph: TrajectoryGraph) -> int:
    """The first number that is larger than the names of all branches."""
    return 1 + max((int(node.branch) for node in graph.nodes if node.branch.isdecimal()), default=-1)


def meaning(message: Message, places: Mapping[str, int] = MappingProxyType({})) -> list[Any]:
    """What a message says: without thoughts, and with the arguments of tool calls as values.

    Calls have no ids, which clients rewrite: a result has the place of its call in the turn before. `places`: these
    places, by the ids of the calls.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if role == "assistant":
        text, calls = _text_of(content).strip(), message.get("tool_calls") or ()
        return [role, "" if text == LITELLM_EMPTY_TEXT else text, [_meaning_of_call(call) for call in calls]]
    if role == "tool":
        call_id = str(message.get("tool_call_id"))
        return [role, places.get(call_id, call_id), _parts_of(content)]
    return [role, _parts_of(content)]


def _parts_of(content: Any) -> list[Any]:
    """The content as text and other parts, in which neighbouring texts are joined."""
    values = (
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in ([content] if isinstance(content, str) else content or ())
    )
    parts = list[Any]()
    for is_text, group in itertools.groupby(values, lambda value: isinstance(value, str)):
        found: list[Any] = list(group)
        parts += ["".join(found)] if is_text else found
    return parts


def _text_of(content: Any) -> str:
    return "".join(part for part in _parts_of(content) if isinstance(part, str))


def _meaning_of_call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):  # other text means itself
            arguments = orjson.loads(arguments or "{}")
    with contextlib.suppress(RecursionError):
        arguments = _with_floats(arguments)
    return [function.get("name"), arguments]


def _with_floats(value: Any) -> Any:
    """The value with floats in place of integers: agents in JavaScript write 1.0 as 1, and -0.0 as 0."""
    if isinstance(value, Mapping):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value + 0.0 if is_number else value


class History:
    """The recorded conversations of a session by their keys."""

    def __init__(self) -> None:
        self._nodes: dict[Key, list[int]] = {}

    def add(self, key: Key, node: int) -> None:
        """Record that a conversation ends with `node`."""
        nodes = self._nodes.setdefault(key, [])
        if node not in nodes:
            nodes.append(node)

    def find_path(
        self, graph: TrajectoryGraph, request: TurnRequest, keys: Sequence[Key], as_turn: ReadTurn
    ) -> tuple[int | None, Sequence[Message]]:
        """The end of the recorded path that a conversation continues, and the messages that the path lacks.

        `keys`: those of the messages. None and all messages if the conversation continues no recorded path.
        """
        messages = request.messages
        turns = [count for count, message in enumerate(messages, 1) if message["role"] == "assistant"]
        same = self._turns_with_thought(graph, keys[max(turns, default=1) - 1], request, as_turn)
        # A longer rest has turns that the session does not have. A turn at the end may be text of the client.
        shortest = max((count for count in turns if count < len(messages)), default=1)
        for count in range(len(keys), shortest - 1, -1):
            nodes = self._nodes.get(keys[count - 1], [])
            if count < len(messages):
                nodes = [node for node in nodes if graph.node(node).sampled]
            if same:
                nodes = [node for node in nodes if node in same or graph.node(node).parent in same]
            if nodes:
                # Of turns that say the same, the agent has probably received one that no conversation continues.
                return next((node for node in nodes if not graph.children(node)), nodes[-1]), messages[count:]
        return None, messages

    def _turns_with_thought(
        self, graph: TrajectoryGraph, key: Key, request: TurnRequest, as_turn: ReadTurn
    ) -> set[int]:
        """The turns with the thought of a request, of several turns that say the same. Empty if there are none.

        The turns whose text has the thought are split first, and of equal turns only one: there may be thousands. The
        text of a turn may lack a part of its thought, such as a special token.
        """
        nodes, thought = [graph.node(node) for node in self._nodes.get(key, ())], request.last_thought.strip()
        if not thought or len(nodes) < 2:
            return set()
        turns = [node for node in nodes if node.sampled]
        has_thought = [thought in str((node.message or {}).get("content")) for node in turns]
        for is_likely in (True, False):
            found = [node for node, has in zip(turns, has_thought, strict=True) if has is is_likely]
            different = {node.token_ids: node for node in found}
            thoughts = {ids: as_turn(node, request, 0, {}).reasoning.strip() for ids, node in different.items()}
            if same := {node.id for node in found if thoughts[node.token_ids] == thought}:
                return same
        return set()

    def restore(self, graph: TrajectoryGraph, turn_message: Callable[[Node, Sequence[Json]], Message]) -> None:
        """Record the conversations of an earlier process.

        `turn_message`: the message of a turn as agents repeat it, for the turn's node and the tools of its prompt.
        """
        keys, tools, turns = dict[int, Key](), dict[int, Sequence[Json]](), dict[int, Sequence[Message]]()
        arguments, ends = dict[int, Json](), dict[int, tuple[Key | None, list[Json]]]()
        """What turns after each node continue: the key before the closing text, and this text."""
        for node in graph.nodes:
            message, start, said = node.message or {}, None, list[Json]()
            if node.parent is None:
                tools[node.id], before = message.get("tools", ()), list[Message]()
                arguments[node.id] = message.get(TEMPLATE_ARGUMENTS, {})
            else:
                tools[node.id], before, start = tools[node.parent], list(turns[node.parent]), keys[node.parent]
                arguments[node.id] = arguments[node.parent]
            try:
                if node.sampled:
                    start, said = (None, []) if node.parent is None else ends[node.parent]
                    messages = normalize_messages([*said, dict(turn_message(node, tools[node.id]))])
                else:  # an earlier version may have given other ids to the calls
                    messages = normalize_messages([*map(dict, before), *message.get("messages", ())])[len(before) :]
            except Exception:
                logger.exception("the turn %d of the session %s cannot be read", node.id, graph.session_id)
                messages = []  # no client has received the turn
            turns[node.id] = last_turn(messages) or before
            if messages:
                digest = prompt_digest(tools[node.id], arguments[node.id])
                found = conversation_keys(digest, messages, start, before)
                said = closing_text(messages if node.parent is not None else messages[1:])
                keys[node.id], ends[node.id] = found[-1], ([start, *found][-1 - len(said)], said)
            elif node.parent is not None and message.get("messages") == []:  # the prompt of a new turn
                keys[node.id], ends[node.id] = keys[node.parent], ends[node.parent]
            else:
                keys[node.id] = raw_prompt_key(graph.token_ids(node.id))
                ends[node.id] = keys[node.id], []
            self.add(keys[node.id], node.id)


# -- Conversation kinds -----------------------------------------------------------------------------
# The kinds of the conversations of a session: the main conversation, and the side calls of an agent program.
#
# An agent program asks for more than its main conversation: for a title, for a summary before it shortens its history,
# and for the turns of sub-agents. The rules look at the structure of a conversation: its tools, its system prompt, its
# first message, its number of turns, and texts of the policy that come back in it. They are pure;
# `conversation_labels` applies them to a token graph.

MAX_TITLE_TOKENS = 128
"""Largest `max_tokens` of a request for a title by an agent that has no tools: its other calls look the same."""
PROBE_TOKENS = 1
"""The `max_tokens` of a request that only asks whether the API works."""


class ConversationKind(enum.StrEnum):
    """What a conversation, or a branch of a conversation, is for."""

    MAIN = "main"
    """The task of the agent. Also another conversation of the same agent, after a command such as `/clear`."""
    SUB_AGENT = "sub_agent"
    """Another agent, with a system prompt of its own, whose result goes to the main conversation."""
    SUMMARY = "summary"
    """The request for a summary of a conversation, with which the conversation goes on (`COMPACTED`)."""
    COMPACTED = "compacted"
    """The conversation after its history was replaced by a summary that the policy has written."""
    EDITED = "edited"
    """The conversation after its history was edited."""
    OTHER_TOOLS = "other_tools"
    """The conversation after the list of its tools has changed."""
    SAMPLE = "sample"
    """Another turn after the same prompt. The agent went on with a different one, or with none of them."""
    TITLE = "title"
    """One question without tools about the first message: the title or the topic of the conversation."""
    SIDE_CALL = "side_call"
    """Any other single question without tools: whether the API works, what a web page says."""


TRAINED_KINDS = frozenset(ConversationKind) - {ConversationKind.TITLE, ConversationKind.SIDE_CALL}
"""The kinds that are trained by default."""


@dataclass(frozen=True)
class Opening:
    """The first prompt of a conversation, and how the conversation went on."""

    system: str = ""
    """Text of the system prompt."""
    users: Sequence[str] = ()
    """Text of each message of the user in the first prompt."""
    tools: str | None = None
    """Digest of the tools. None without tools."""
    num_turns: int = 1
    """Number of turns of the policy in the conversation."""
    has_foreign_turns: bool = False
    """Whether the first prompt has turns of the assistant: a conversation that the session knows in another form."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of the first turn, as the agent asked for it."""
    is_raw: bool = False
    """Whether the prompt is no chat."""

    @property
    def first_user(self) -> str:
        """Text of the first message of the user."""
        return self.users[0] if self.users else ""

    @property
    def is_question(self) -> bool:
        """Whether this is one question without tools."""
        return self.tools is None and self.num_turns <= 1 and not self.has_foreign_turns

    @property
    def is_probe(self) -> bool:
        """Whether the reply is too short for an answer."""
        return self.max_new_tokens == PROBE_TOKENS


def find_main(openings: Sequence[Opening]) -> int:
    """Index of the main conversation. A title can be asked for before the main conversation begins.

    The first conversation with tools. Without tools: the first conversation of several turns, or else the first.
    """
    groups = (
        [index for index, opening in enumerate(openings) if opening.tools is not None],
        [index for index, opening in enumerate(openings) if opening.num_turns > 1],
        [index for index, opening in enumerate(openings) if not opening.is_probe],
        range(len(openings)),
    )
    return next(group[0] for group in groups if group)


def kind_of(opening: Opening, main: Opening, has_summary: bool) -> ConversationKind:
    """The kind of a conversation that begins with a prompt of its own, beside the main conversation.

    `has_summary`: whether its first prompt contains a text that the policy wrote at the end of another conversation.
    """
    is_same_system, is_same_tools = opening.system == main.system, opening.tools == main.tools
    is_same_agent = is_same_system or (is_same_tools and main.tools is not None)
    if opening.is_raw or main.is_raw:
        return ConversationKind.MAIN
    is_title = opening.is_question and _share_text("\n".join(opening.users), main.first_user)
    is_short_title = is_title and PROBE_TOKENS < (opening.max_new_tokens or math.inf) <= MAX_TITLE_TOKENS
    is_side_question = opening.is_question and main.tools is not None
    has_same_start = opening.first_user == main.first_user
    if is_short_title and not has_same_start and opening.max_new_tokens != main.max_new_tokens:
        return ConversationKind.TITLE
    if has_summary and is_same_agent and not is_side_question:
        return ConversationKind.COMPACTED
    if has_same_start and (is_same_agent or opening.has_foreign_turns):
        return ConversationKind.EDITED if is_same_tools else ConversationKind.OTHER_TOOLS
    if is_same_system and is_same_tools and not opening.is_probe:
        return ConversationKind.EDITED if opening.has_foreign_turns else ConversationKind.MAIN
    if is_same_system and opening.has_foreign_turns:
        return ConversationKind.OTHER_TOOLS
    if opening.is_probe and opening.is_question:
        return ConversationKind.SIDE_CALL
    if is_side_question:
        return ConversationKind.TITLE if is_title else ConversationKind.SIDE_CALL
    if is_short_title:
        return ConversationKind.TITLE
    return ConversationKind.SUB_AGENT


def _share_text(first: str, second: str) -> bool:
    """Whether one of two texts contains the other."""
    return bool(first.strip() and second.strip()) and (first in second or second in first)


# -- Returning texts --------------------------------------------------------------------------------
# Finds the texts of the policy that come back in later messages of the user. Pure.
#
# To search a long message for each line of each text takes seconds. So a line is searched for only if the message may
# have its first and its last piece, by the hashes of all pieces of the message.

MIN_SUMMARY_CHARS = 40
"""Minimum number of characters of a text that is recognised when it comes back. Shorter texts come back by chance."""
MAX_PIECE_CHARS = 64
"""Length of the longest pieces that are hashed. The lengths are the powers of 2 up to this length."""
SLOTS_PER_CHAR = 4
"""Minimum number of slots for the hashes, per character of a message. More slots rule out more lines."""
FACTOR = 0x01000193
"""Odd factor of the hashes: the prime of FNV-1a."""

Hashes = npt.NDArray[np.uint32]


class WrittenText:
    """A text of the policy, as the stripped lines that a message is searched for."""

    def __init__(self, text: str) -> None:
        self.lines = [line for part in text.splitlines() if (line := part.strip())]
        lengths = np.fromiter(map(len, self.lines), np.intp, len(self.lines))
        self.lengths: npt.NDArray[np.intp] = lengths
        self.pieces = dict[int, tuple[npt.NDArray[np.intp], Hashes]]()
        """By the length of pieces: lines whose longest pieces have it, and the hashes of their first and last piece."""
        starts = np.cumsum(lengths + 1) - lengths - 1
        for size, hashes in _piece_hashes("\n".join(self.lines)):
            is_longest = (lengths >= size) & ((lengths < 2 * size) | (size == MAX_PIECE_CHARS))
            found = np.flatnonzero(is_longest)
            if len(found):
                self.pieces[size] = found, hashes[np.stack([starts[found], starts[found] + lengths[found] - size])]

    def is_most(self, num_chars: int) -> bool:
        """Whether a number of characters is at least half of the text, if the text is not too short."""
        total = int(self.lengths.sum())
        return total >= MIN_SUMMARY_CHARS and 2 * num_chars >= total


def last_in(message: str, texts: Sequence[WrittenText]) -> int | None:
    """Index of the last of the texts that comes back in a message of the user. None if no text does.

    A text comes back if lines with at least half of its characters are in the message: agents change the lines around a
    summary, for example the tags that they asked for.
    """
    if not any(text.is_most(int(text.lengths.sum())) for text in texts):
        return None
    may_have = [np.zeros(len(text.lines), np.bool_) for text in texts]
    num_slots = 1 << (SLOTS_PER_CHAR * len(message)).bit_length()
    for size, hashes in _piece_hashes(message):
        compared = [
            (mask, *text.pieces[size]) for mask, text in zip(may_have, texts, strict=True) if size in text.pieces
        ]
        if compared:
            has_slot = np.zeros(num_slots, np.bool_)
            has_slot[hashes & np.uint32(num_slots - 1)] = True
            for mask, lines, ends in compared:
                has_first, has_last = has_slot.take(ends & np.uint32(num_slots - 1))
                mask[lines] = has_first & has_last
    for index in reversed(range(len(texts))):
        text, mask = texts[index], may_have[index]
        if text.is_most(int(text.lengths @ mask)):
            possible = (text.lines[line] for line in np.flatnonzero(mask))
            if text.is_most(sum(len(line) for line in possible if line in message)):
                return index
    return None


def _piece_hashes(text: str) -> Iterator[tuple[int, Hashes]]:
    """Each length of pieces, and the hashes of the pieces that begin at each character."""
    hashes: Hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    size = 1
    while len(hashes) and size <= MAX_PIECE_CHARS:
        yield size, hashes
        longer = hashes[:-size] * np.uint32(pow(FACTOR, size, 1 << 32))
        longer += hashes[size:]
        hashes, size = longer, 2 * size


# -- Conversation labels ----------------------------------------------------------------------------
# Labels the conversations of a recorded session by their kinds, and finds the paths that are trained. Pure.

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
    kinds = dict[int, ConversationKind]()
    summaries = list[int]()
    written = functools.cache(lambda index: WrittenText(_text_of_turn(last_turns[index])))
    for index, (root, opening) in enumerate(zip(roots, openings, strict=True)):
        kinds[root] = ConversationKind.MAIN if index == main else kind_of(opening, openings[main], has_summary=True)
        if kinds[root] is ConversationKind.COMPACTED:  # only this kind depends on a summary
            num_before = bisect.bisect(last_turns, root, key=lambda node: node.id)
            first = max(num_before - MAX_COMPARED_TURNS, 0)
            summary = last_in("\n".join(opening.users), [written(index) for index in range(first, num_before)])
            if summary is None:
                kinds[root] = kind_of(opening, openings[main], has_summary=False)
            else:
                summaries.append(last_turns[first + summary].id)
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


def root_fork_reason(graph: TrajectoryGraph, messages: Sequence[Message], tools: str | None) -> ForkReason:
    """Why a further conversation of a session begins with a prompt of its own, as far as it is known by now.

    `messages`: its first messages. `tools`: digest of its tools, None without tools. The work does not grow with the
    session: `MAX_COMPARED` conversations and turns are compared.
    """
    openings = [_opening(graph, root) for root in graph.children(None)[:MAX_COMPARED]]
    opening = _opening_of(messages, tools)
    last_turns = [node for node in graph.nodes[-MAX_COMPARED:] if node.sampled and not graph.children(node.id)]
    texts = [WrittenText(_text_of_turn(turn)) for turn in last_turns]
    has_summary = last_in("\n".join(opening.users), texts) is not None
    return FORK_REASONS.get(kind_of(opening, openings[find_main(openings)], has_summary), ForkReason.SUB_AGENT)


def _opening(graph: TrajectoryGraph, root: int) -> Opening:
    """The opening of a recorded conversation."""
    node = graph.node(root)
    message = node.message or {}
    if "messages" not in message:
        return Opening(is_raw=True)
    turns = [graph.node(child) for child in graph.children(root) if graph.node(child).sampled]
    return dataclasses.replace(
        _opening_of(message["messages"], node.tools_digest if message.get("tools") else None),
        num_turns=1 + any(graph.children(turn.id) for turn in turns),
        max_new_tokens=((turns[0].message or {}).get("request") or {}).get("max_new_tokens") if turns else None,
    )


def _opening_of(messages: Sequence[Message], tools: str | None) -> Opening:
    texts = [(message["role"], _text_of_message(message)) for message in messages]
    return Opening(
        system="\n".join(text for role, text in texts if role == "system"),
        users=[text for role, text in texts if role == "user"],
        tools=tools,
        has_foreign_turns=any(role == "assistant" for role, _ in texts),
    )


def _text_of_message(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: list[Json] = [part for part in content if part.get("type") == "text"]
    return "".join(str(part.get("text")) for part in parts)


def _text_of_turn(node: Node) -> str:
    text = str((node.message or {}).get("content") or "")
    return split_thought(text, is_open=THOUGHT_END in text)[1]
