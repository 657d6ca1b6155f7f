"""SGLang's replies: results, errors and what a server says of itself."""

from __future__ import annotations

from typing import Any

from verl_server.adapter.sglang.requests import Limits
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    UnsupportedError,
    VerlServerError,
)

Json = dict[str, Any]


def words_of(body: Any) -> str:
    """The server's own words from an error body, whatever its shape."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner.get("detail") or inner)
        return str(inner)
    return str(body).strip() or "(no words)"


def error_of(status: int, url: str, body: Any) -> VerlServerError:
    """The typed error for a reply that is not a success."""
    words = words_of(body)[:2000]
    details: Json = {"status": status, "url": url, "body": words}
    if isinstance(body, dict) and body.get("success") is False:
        return ServerError(f"{url} reports failure: {words}", **details)
    if status in (400, 413, 422):
        return BadInputError(f"{url} refused the request ({status}): {words}", **details)
    if status == 404:
        return UnsupportedError(f"{url} does not exist in this version of the server", **details)
    if status == 409:
        return ServerBusyError(f"{url} refused for now ({status}): {words}", **details)
    if status == 503:
        return NotReadyError(f"{url} is not ready (503): {words}", **details)
    return ServerError(f"{url} failed ({status}): {words}", **details)


def require_success(reply: Any, url: str) -> Json:
    """Replies that carry `success: false` with status 200 are failures, too."""
    if isinstance(reply, dict) and reply.get("success") is False:
        raise ServerError(f"{url} reports failure: {words_of(reply)}", url=url, body=words_of(reply))
    return reply if isinstance(reply, dict) else {"message": reply}


def limits_of(server_info: Json, model_config: Json) -> Limits:
    """Longest prompt from `/server_info`, vocabulary from the model's `config.json`."""
    states = server_info.get("internal_states") or [{}]
    text_config = model_config.get("text_config") or model_config
    return Limits(
        vocab_size=text_config.get("vocab_size"),
        max_prompt=server_info.get("max_req_input_len") or states[0].get("max_req_input_len"),
    )


def requests_in(loads: Json) -> int:
    """Running and waiting requests over all DP ranks of `/v1/loads`."""
    return sum(
        int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0)) for load in loads.get("loads", [])
    )


def without_keys(server_info: Json) -> Json:
    """`/server_info` names the server's own keys; they stay out of what callers print."""
    states = [without_keys(state) for state in server_info.get("internal_states") or [] if isinstance(state, dict)]
    kept = {name: value for name, value in server_info.items() if name not in ("api_key", "admin_api_key")}
    return {**kept, "internal_states": states} if "internal_states" in kept else kept
