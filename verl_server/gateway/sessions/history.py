"""`History`: finds the recorded path that a conversation continues, by the meaning of its messages.

An agent sends the whole conversation with each request, and writes the turns of the policy in its own way: without the
thoughts, and with the arguments of tool calls as other JSON text. Two conversations are equal here if their messages
mean the same. The key of a conversation is a hash over its tools and messages; the key of a longer conversation is
computed from the key of the shorter conversation.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from verl_server.gateway.conversation import LITELLM_EMPTY_TEXT, AssistantTurn, TurnRequest, normalize_messages
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node
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
