"""The prompt of a turn, and what a session records of the turn besides the tokens for a later process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from verl_server.agent.episodes.cursor import Cursor
from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.sessions.history import Key
from verl_server.types import Json

REFUSED = "refused"
"""Name of the notes in a record about prompts that do not fit."""


@dataclass(frozen=True)
class Prompt:
    """The end of a recorded prompt, and what the turn after it needs."""

    cursor: Cursor
    key: Key
    """Key of the conversation that the prompt ends."""
    request: TurnRequest
    fingerprint: bytes
    """Digest of the request, by which a request that is sent again is recognised."""


def turn_details(request: TurnRequest, fingerprint: bytes, reply: Json, started_at: float) -> Json:
    """Keys for the recorded message of a turn.

    `stop_sequence`: the stop sequence at which the turn ended, if there is one. `request`: the digest of the request,
    by which a repeated request is recognised, what labels of conversations depend on (`conversation_kinds.py`), and the
    times of the turn, which exports read: `started_at`, seconds since 1970, and `duration_s`. Records of earlier
    versions have no times.
    """
    matched = (reply["meta_info"].get("finish_reason") or {}).get("matched")
    asked: Json = {"digest": fingerprint.hex(), "model": request.model}
    if (max_new_tokens := request.sampling_params.get("max_new_tokens")) is not None:
        asked["max_new_tokens"] = max_new_tokens
    asked |= {"started_at": round(started_at, 6), "duration_s": round(max(time.time() - started_at, 0.0), 6)}
    return {"request": asked, **({"stop_sequence": matched} if isinstance(matched, str) else {})}
