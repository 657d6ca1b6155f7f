"""`KeyMemo`: the keys of conversations, of which each message is hashed once.

An agent sends its whole conversation with each request. To compare a message with that of the request before takes a
tenth of the time of its hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from verl_server.gateway.sessions.history import Key, conversation_keys, tools_digest
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

MAX_CONVERSATIONS = 4
"""Number of conversations that are remembered: the agents of a session take turns."""


@dataclass(frozen=True)
class _Conversation:
    tools: bytes
    """The tools as JSON."""
    digest: str
    messages: Sequence[Message]
    calls: Sequence[bytes]
    """Tool calls of each message as JSON: for Python, 1 and True are equal."""
    keys: Sequence[Key]

    def num_common(self, digest: str, messages: Sequence[Message], calls: Sequence[bytes]) -> int:
        """Number of messages at the beginning that are those of this conversation."""
        if digest != self.digest:
            return 0
        count = 0
        for message, own, call, own_call in zip(messages, self.messages, calls, self.calls, strict=False):
            if call != own_call or message != own:
                break
            count += 1
        return count


class KeyMemo:
    """The keys of the latest conversations of a session. May be used in several threads."""

    def __init__(self) -> None:
        self._latest: tuple[_Conversation, ...] = ()
        """The latest first."""

    def keys_of(self, tools: Sequence[Json], messages: Sequence[Message]) -> list[Key]:
        """`conversation_keys` of a conversation with these tools."""
        latest, encoded = self._latest, orjson.dumps(list(tools))
        digest = next((known.digest for known in latest if known.tools == encoded), None) or tools_digest(tools)
        calls = [orjson.dumps(found) if (found := message.get("tool_calls")) else b"" for message in messages]
        counts = [known.num_common(digest, messages, calls) for known in latest]
        count = max(counts, default=0)
        keys: list[Key] = []
        kept: Sequence[Any] = ()
        if count:
            known = latest[counts.index(count)]
            keys, kept = list(known.keys[:count]), known.messages[:count]  # the record has their texts, too
            encoded = known.tools
        new = messages[count:]
        keys += conversation_keys(digest, new, keys[-1] if keys else None)
        conversation = _Conversation(encoded, digest, [*kept, *new], calls, keys)
        others = [known for known, common in zip(latest, counts, strict=True) if common < len(known.messages)]
        self._latest = (conversation, *others[: MAX_CONVERSATIONS - 1])
        return keys
