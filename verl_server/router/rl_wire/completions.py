"""`/v1/completions` with a prompt of token ids and `return_token_ids`: the body, and the body of the reply. Pure.

vLLM's request has all sampling parameters beside the prompt. Its reply has text, which a router cannot decode: `text`
is that of the replica, and None where a replica returned none (vLLM's, and after the loss of a replica).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.router.rl_wire.generate import TokenRequest, require_no_priority
from verl_server.router.rl_wire.logprobs import finish_of, output_logprobs, prompt_logprobs, usage_of, weight_spans
from verl_server.types import Json
from verl_server.validation import is_list

DEFAULT_MAX_TOKENS = 16
"""Maximum number of tokens of a completion without `max_tokens`, as OpenAI documents it."""
#: Fields that are no sampling parameters. The last three are those of routers of this library.
_OWN_FIELDS = frozenset({
    "model", "prompt", "stream", "stream_options", "user", "return_token_ids", "return_tokens_as_token_ids",
    "request_id", "session_id", "cache_salt", "priority", "add_special_tokens", "service_tier", "metadata",
    "weight_version", "min_weight_version", "timeout_s",
})  # fmt: skip
#: Fields without a counterpart here, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (None, False), "suffix": (None, ""), "best_of": (None, 1), "use_beam_search": (None, False),
    "truncate_prompt_tokens": (None,), "truncation_side": (None,), "prompt_embeds": (None,),
    "length_penalty": (None, 1), "response_format": (None, {"type": "text"}),
    "kv_transfer_params": (None,), "ec_transfer_params": (None,), "vllm_xargs": (None, {}),
}  # fmt: skip


def is_token_completion(body: Json) -> bool:
    """Whether a request has one prompt of token ids, asks for token ids, and is not streamed."""
    prompt = body.get("prompt")
    is_one_prompt = is_list(prompt) and len(prompt) > 0 and not isinstance(prompt[0], str) and not is_list(prompt[0])
    return is_one_prompt and bool(body.get("return_token_ids")) and not body.get("stream")


def sampling_of_completion(body: Json) -> Json:
    """vLLM's sampling parameters in a body. Raises BadInputError for fields that are not supported."""
    for name, accepted in _UNSUPPORTED.items():
        if body.get(name) not in accepted:
            raise BadInputError(f"{name} is not supported beside a prompt of token ids; leave it out")
    require_no_priority(body)
    params = {
        name: value
        for name, value in body.items()
        if name not in _OWN_FIELDS and name not in _UNSUPPORTED and value is not None
    }
    return {"max_tokens": DEFAULT_MAX_TOKENS, **params}


def completion_reply(request_id: str, request: TokenRequest, replies: Sequence[Json], model: str) -> Json:
    """The reply to a request. Every choice has `token_ids`, and the log probabilities of the prompt if asked for."""
    sampling = request.sampling
    stop_token_ids: Collection[int] = sampling.params.get("stop_token_ids") or ()
    choices = list[Json]()
    for index, reply in enumerate(replies):
        finish_reason, stop_reason = finish_of(reply, stop_token_ids)
        count = sampling.prompt_logprobs
        choices.append({
            "index": index,
            "text": reply.get("text"),
            "logprobs": None if sampling.logprobs is None else _logprobs(reply, sampling.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": reply["output_ids"],
            "prompt_token_ids": request.prompt,
            "prompt_logprobs": None if count is None else prompt_logprobs(reply, count),
            "routed_experts": None,
            "weight_versions": weight_spans(reply),
        })  # fmt: skip
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage_of(replies)}


def _logprobs(reply: Json, count: int) -> Json:
    """Log probabilities as completions have them. Tokens are written `token_id:N`. Offsets in the text are unknown."""
    entries = output_logprobs(reply, count)
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": [],
    }
