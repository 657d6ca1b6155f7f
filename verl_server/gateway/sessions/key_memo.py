"""`KeyMemo`: the keys of conversations, of which each message is hashed once.

An agent sends its whole conversation with each request. To compare a message with that of the request before takes a
tenth of the time of its hash.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from verl_server.gateway.sessions.history import Key, conversation_keys, prompt_digest
from verl_server.trajectory.rendering.messages import Message, as_json
from verl_server.types import Json

MAX_CONVERSATIONS = 4
"""Number of conversations that are remembered: the agents of a session take turns."""


@dataclass(frozen=True)
class _Conversation:
    tools: Sequence[Json]
    template_arguments: bytes
    """Variables of the chat template as JSON."""
    digest: str
    """Digest of both."""
    messages: Sequence[Message]
    calls: Sequence[bytes]
    """Tool calls of each message as JSON: for Python, 1 and True are equal."""
    keys: Sequence[Key]

    def is_for(self, tools: Sequence[Json], template_arguments: bytes) -> bool:
        """Whether these are the same tools, as objects: `KnownItems` gives them to each request that repeats them."""
        if template_arguments != self.template_arguments:
            return False
        return len(tools) == len(self.tools) and all(map(operator.is_, tools, self.tools))

    def num_common(self, digest: str, messages: Sequence[Message]) -> int:
        """Number of messages at the beginning that are those of this conversation."""
        if digest != self.digest:
            return 0
        count = 0
        for message, own, own_call in zip(messages, self.messages, self.calls, strict=False):
            if message is not own and (message != own or _encoded_calls(message) != own_call):
                break
            count += 1
        return count


class KeyMemo:
    """The keys of the latest conversations of a session. May be used in several threads."""

    def __init__(self) -> None:
        self._latest: tuple[_Conversation, ...] = ()
        """The latest first."""

    def keys_of(
        self, tools: Sequence[Json], messages: Sequence[Message], template_arguments: Json | None = None
    ) -> list[Key]:
        """`conversation_keys` of a conversation with these tools and variables of the chat template."""
        latest, arguments = self._latest, as_json(template_arguments or {})
        known_digest = next((known.digest for known in latest if known.is_for(tools, arguments)), None)
        digest = known_digest or prompt_digest(tools, template_arguments or {})
        counts = [known.num_common(digest, messages) for known in latest]
        count = max(counts, default=0)
        keys, calls = list[Key](), list[bytes]()
        if count:
            known = latest[counts.index(count)]
            keys, calls = list(known.keys[:count]), list(known.calls[:count])
        new = messages[count:]
        keys += conversation_keys(digest, new, keys[-1] if keys else None, messages[:count])
        conversation = _Conversation(tools, arguments, digest, messages, [*calls, *map(_encoded_calls, new)], keys)
        others = [known for known, common in zip(latest, counts, strict=True) if common < len(known.messages)]
        self._latest = (conversation, *others[: MAX_CONVERSATIONS - 1])
        return keys


def _encoded_calls(message: Message) -> bytes:
    return orjson.dumps(found) if (found := message.get("tool_calls")) else b""
