"""Export of a session to LiteLLM's log of calls: one `StandardLoggingPayload` for each turn. Pure.

The fields are those of LiteLLM 1.x (`litellm/types/utils.py`). `prompt_token_ids`, `completion_token_ids` and
`completion_logprobs` are added.
"""

from __future__ import annotations

from typing import Any

from verl_server.trajectory.exports.chat import APPENDED_TEXT, node_messages
from verl_server.trajectory.graph import TrajectoryGraph, require_graph
from verl_server.trajectory.nodes import Node
from verl_server.types import Json

CHAT_CALL, TEXT_CALL = "acompletion", "atext_completion"
"""LiteLLM's names of the calls: a chat, and a raw prompt."""
PROVIDER = "verl_server"


def to_litellm(graph: TrajectoryGraph, *, model: str | None = None) -> list[Json]:
    """One line for each turn of the session, in the order of the turns, also for turns that are not trained.

    `model`: name of the model, which sessions do not record. Sessions record no times: they are 0. Each line has the
    whole conversation before the turn, so that the size grows with the square of the number of turns. Raises
    BadInputError if `graph` is no `TrajectoryGraph`.
    """
    require_graph(graph)
    return [_payload(graph, node, model or "") for node in graph.nodes if node.sampled]


def _payload(graph: TrajectoryGraph, node: Node, model: str) -> Json:
    path = [] if node.parent is None else graph.path(node.parent)
    prompt_ids = [token for earlier in path for token in earlier.token_ids]
    is_raw = bool(path) and APPENDED_TEXT in (path[0].message or {})
    usage = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(node.token_ids),
        "total_tokens": len(prompt_ids) + len(node.token_ids),
    }
    call_id = f"{graph.session_id}-{node.id}"
    return {
        **_EMPTY,
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
        "metadata": {"usage_object": usage, "requester_metadata": _details(graph, node)},
        "messages": [dict(message) for earlier in path for message in node_messages(earlier)],
        "response": _response(node, call_id, model, usage),
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": list(node.token_ids),
        "completion_logprobs": list(node.logprobs),
    }


def _response(node: Node, call_id: str, model: str, usage: Json) -> Json:
    """The turn as OpenAI's chat completion, which LiteLLM logs for all providers."""
    (message,) = node_messages(node)
    choice = {"index": 0, "message": dict(message), "finish_reason": node.finish_reason}
    return {
        "id": call_id,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def _details(graph: TrajectoryGraph, node: Node) -> Json:
    """What LiteLLM has no field for."""
    termination = graph.last_termination
    return {
        "node": node.id,
        "parent": node.parent,
        "fork_reason": node.fork_reason,
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
    "startTime": 0.0,
    "endTime": 0.0,
    "completionStartTime": 0.0,
    "response_time": 0.0,
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
