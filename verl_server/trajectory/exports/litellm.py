"""Export of a session to LiteLLM's log of calls: one `StandardLoggingPayload` for each turn. Pure.

The fields are those of LiteLLM 1.x (`litellm/types/utils.py`). `prompt_token_ids`, `completion_token_ids` and
`completion_logprobs` are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.trajectory.exports.common import APPENDED_TEXT, node_messages
from verl_server.trajectory.graph import Node, TrajectoryGraph, kind_at, recorded_kinds
from verl_server.types import Json
from verl_server.validation import check_arguments, is_finite_number

CHAT_CALL, TEXT_CALL = "acompletion", "atext_completion"
"""LiteLLM's names of the calls: a chat, and a raw prompt."""
PROVIDER = "verl_server"
TURN_DETAILS = ("request", "stop_sequence")
"""Keys of the recorded message of a turn that a gateway adds, and that are no part of the chat."""


@check_arguments()
def to_litellm(graph: TrajectoryGraph, *, model: str | None = None) -> list[Json]:
    """One line for each turn of the session, in the order of the turns, also for turns that are not trained.

    `model`: name of the model, which sessions do not record. Only turns of a gateway have times: those of other turns
    are 0. Each line has the whole conversation before the turn, so that the size grows with the square of the number of
    turns. Raises BadInputError if `graph` is no `TrajectoryGraph`.
    """
    kinds = recorded_kinds(graph)
    return [_payload(graph, node, model or "", kinds) for node in graph.nodes if node.sampled]


def _payload(graph: TrajectoryGraph, node: Node, model: str, kinds: Mapping[int, str]) -> Json:
    path = [] if node.parent is None else graph.path(node.parent)
    prompt_ids = [token for earlier in path for token in earlier.token_ids]
    is_raw = bool(path) and APPENDED_TEXT in (path[0].message or {})
    usage = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(node.token_ids),
        "total_tokens": len(prompt_ids) + len(node.token_ids),
    }
    call_id = f"{graph.session_id}-{node.id}"
    started_at, duration_s = _times(node)
    return {
        **_EMPTY,
        "startTime": started_at,
        "endTime": started_at + duration_s,
        "completionStartTime": started_at + duration_s,
        "response_time": duration_s,
        "id": call_id,
        "trace_id": graph.session_id,
        "session_id": graph.session_id,
        "litellm_call_id": call_id,
        "call_type": TEXT_CALL if is_raw else CHAT_CALL,
        "model": model,
        "model_group": model,
        "model_map_information": {"model_map_key": model, "model_map_value": None},
        "hidden_params": {"usage_object": usage},
        **usage,
        "metadata": {"usage_object": usage, "requester_metadata": _details(graph, node, kinds)},
        "messages": [message for earlier in path for message in _messages(earlier)],
        "response": _response(node, call_id, model, usage, int(started_at)),
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": list(node.token_ids),
        "completion_logprobs": list(node.logprobs),
    }


def _times(node: Node) -> tuple[float, float]:
    """When a turn of a gateway began, in seconds since 1970, and its duration in seconds. Zeros if they are unknown."""
    asked = (node.message or {}).get("request")
    started_at, duration_s = (
        (asked.get("started_at"), asked.get("duration_s")) if isinstance(asked, dict) else (None, None)
    )
    if not is_finite_number(started_at) or not is_finite_number(duration_s):
        return 0.0, 0.0
    return started_at, duration_s


def _messages(node: Node) -> list[Json]:
    """The chat messages of a node, without what a gateway records of a turn beside its text."""
    hidden = TURN_DETAILS if node.sampled else ()
    return [{name: value for name, value in message.items() if name not in hidden} for message in node_messages(node)]


def _response(node: Node, call_id: str, model: str, usage: Json, created: int) -> Json:
    """The turn as OpenAI's chat completion, which LiteLLM logs for all providers. `created`: seconds since 1970."""
    (message,) = _messages(node)
    choice = {"index": 0, "message": message, "finish_reason": node.finish_reason}
    return {
        "id": call_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def _details(graph: TrajectoryGraph, node: Node, kinds: Mapping[int, str]) -> Json:
    """What LiteLLM has no field for."""
    termination = graph.last_termination
    return {
        "node": node.id,
        "parent": node.parent,
        "fork_reason": node.fork_reason,
        "conversation_kind": kind_at(graph, kinds, node.id),
        "weight_versions": [[span.version, span.start, span.end] for span in node.spans],
        "stop_reason": None if termination is None else termination.stop_reason,
        "reward": None if termination is None else termination.reward,
    }


_EMPTY: dict[str, Any] = {
    "stream": None,
    "response_cost": 0.0,
    "cost_breakdown": None,
    "response_cost_failure_debug_info": None,
    "status": "success",
    "status_fields": {"llm_api_status": "success"},
    "custom_llm_provider": PROVIDER,
    "model_id": None,
    "api_base": "",
    "cache_hit": None,
    "cache_key": None,
    "saved_cache_cost": 0.0,
    "request_tags": [],
    "end_user": None,
    "requester_ip_address": None,
    "user_agent": None,
    "error_str": None,
    "error_information": None,
    "model_parameters": {},
    "guardrail_information": None,
    "standard_built_in_tools_params": None,
}
"""Fields of a line that a session does not record."""
