"""What a session records of a turn besides the tokens: what a later process needs to return the turn again."""

from __future__ import annotations

from verl_server.gateway.conversation import TurnRequest
from verl_server.types import Json

REFUSED = "refused"
"""Name of the notes in a record about prompts that do not fit."""


def turn_details(request: TurnRequest, fingerprint: bytes, reply: Json) -> Json:
    """Keys for the recorded message of a turn.

    `stop_sequence`: the stop sequence at which the turn ended, if there is one. `request`: the digest of the request,
    by which a repeated request is recognised, and what labels of conversations depend on (`conversation_kinds.py`).
    """
    matched = (reply["meta_info"].get("finish_reason") or {}).get("matched")
    asked: Json = {"digest": fingerprint.hex(), "model": request.model}
    if (max_new_tokens := request.sampling_params.get("max_new_tokens")) is not None:
        asked["max_new_tokens"] = max_new_tokens
    return {"request": asked, **({"stop_sequence": matched} if isinstance(matched, str) else {})}
