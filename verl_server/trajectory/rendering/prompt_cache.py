"""First prompts that were rendered a moment ago: all samples of a group begin with the same prompt."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence

from verl_server.trajectory.rendering.messages import Message, as_json
from verl_server.types import Json

LIFETIME_S = 60.0
"""Seconds for which a prompt is used again. A template may write the present date or time."""
MAX_PROMPTS = 64


class PromptCache:
    """Token ids of first prompts, for `LIFETIME_S` seconds after they were rendered."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, tuple[float, list[int]]] = {}
        """Time of the rendering and token ids, the oldest first."""
        self._lock = threading.Lock()

    def get(self, key: bytes) -> list[int] | None:
        """A copy of the token ids of a prompt. None if the prompt was not rendered in the last `LIFETIME_S` seconds."""
        rendered_at, token_ids = self._prompts.get(key, (-LIFETIME_S, None))
        is_fresh = time.monotonic() - rendered_at < LIFETIME_S
        return token_ids.copy() if token_ids is not None and is_fresh else None

    def put(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Keep the token ids of a prompt."""
        with self._lock:
            self._prompts.pop(key, None)
            if len(self._prompts) >= MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = time.monotonic(), list(token_ids)


def key_of(messages: Sequence[Message], tools: Sequence[Json] | None) -> bytes:
    """The key of a prompt. Messages and tools are JSON values, and a message may contain an image."""
    return hashlib.sha256(as_json([[dict(message) for message in messages], tools])).digest()
