"""vLLM's `/inference/v1/generate`: the request of a router for its body, and the body of its reply. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.router.rl_wire.logprobs import finish_of, output_logprobs, prompt_logprobs, usage_of, weight_spans
from verl_server.router.rl_wire.sampling import Sampling
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_list

RETURNED_ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of the request in its reply."""
#: Fields with a meaning here. The last three are those of routers of this library.
_FIELDS = frozenset({
    "request_id", "token_ids", "sampling_params", "model", "return_token_ids", "output_mode", "cache_salt", "stream",
    "priority", "weight_version", "min_weight_version", "timeout_s",
})  # fmt: skip
#: vLLM's fields that change no token of a reply.
_WITHOUT_EFFECT = frozenset({"token_offsets", "stream_options"})
_MEDIA = frozenset({"features", "content_parts"})
#: vLLM's fields without a counterpart. None and other empty values are accepted.
_UNSUPPORTED = frozenset({
    "kv_transfer_params", "ec_transfer_params", "reasoning_ended", "reasoning_parser_kwargs",
})  # fmt: skip


@dataclass(frozen=True)
class TokenRequest:
    """A request for samples of one prompt of token ids, with the names of this library."""

    prompt: list[int]
    sampling: Sampling
    lora_path: str | None
    """Name of the LoRA adapter. None: the base model."""
    cache_salt: str | None
    router_fields: Json
    """`session_id`, `weight_version`, `min_weight_version` and `timeout_s` of the request, without those of None."""

    def of_sample(self, index: int) -> Json:
        """The request for one sample, as `Dispatcher.generate_request` takes it, without a request id."""
        fields = {"lora_path": self.lora_path, "extra_key": self.cache_salt}
        return {
            "input_ids": self.prompt,
            "sampling_params": self.sampling.of_sample(index),
            **self.sampling.logprob_fields(),
            **{name: value for name, value in fields.items() if value is not None},
            **self.router_fields,
        }


def check_generate_body(body: Json) -> None:
    """Raise BadInputError for a body with fields that this route does not support, or without a prompt."""
    require_prompt(body.get("token_ids"), "token_ids")
    if media := sorted(name for name in _MEDIA if body.get(name)):
        raise BadInputError(f"{media[0]} is not supported by this router: send images to /generate, as `image_data`")
    if unsupported := sorted(name for name in _UNSUPPORTED if body.get(name)):
        raise BadInputError(f"{unsupported[0]} is not supported by this router; leave it out")
    if unknown := body.keys() - _FIELDS - _WITHOUT_EFFECT - _MEDIA - _UNSUPPORTED:
        name = min(unknown)
        raise BadInputError(f"/inference/v1/generate has no field {name!r}{did_you_mean(name, _FIELDS)}")
    if body.get("stream"):
        raise BadInputError("this route returns whole generations: leave stream out")
    if body.get("output_mode") not in (None, "tokens"):
        raise BadInputError(f"output_mode must be 'tokens', got {body['output_mode']!r}: decode token_ids yourself")
    require_no_priority(body)


def require_no_priority(body: Json) -> None:
    """Raise BadInputError for a priority other than 0, which is that of vLLM's other requests."""
    if body.get("priority"):
        raise BadInputError(
            "priority is not supported: low numbers come first in vLLM, and high numbers in SGLang; leave it out"
        )


def require_prompt(value: Any, name: str) -> None:
    """Raise BadInputError unless `value` is one list of token ids. The adapter of a server checks the ids."""
    if not is_list(value) or not value or is_list(value[0]):
        raise BadInputError(f"{name} must be one list of token ids, not empty; send one request for each prompt")


def router_fields_of(body: Json, session_id: str | None) -> Json:
    """The fields of a body that the router reads, without those of None."""
    fields = {name: body.get(name) for name in ("weight_version", "min_weight_version", "timeout_s")}
    return {name: value for name, value in {**fields, "session_id": session_id}.items() if value is not None}


def generate_reply(body: Json, request_id: str, request: TokenRequest, replies: Sequence[Json], model: str) -> Json:
    """The reply to a request with this body. Every field of vLLM's reply is there; those without a value are None."""
    sampling = request.sampling
    stop_token_ids: Collection[int] = sampling.params.get("stop_token_ids") or ()
    choices = list[Json]()
    for index, reply in enumerate(replies):
        finish_reason, stop_reason = finish_of(reply, stop_token_ids)
        content = None if sampling.logprobs is None else output_logprobs(reply, sampling.logprobs)
        choices.append({
            "index": index,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": reply["output_ids"],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": weight_spans(reply),
            "logprobs": None if content is None else {"content": content},
        })  # fmt: skip
    count = sampling.prompt_logprobs
    return {
        "request_id": RETURNED_ID_PREFIX + request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage_of(replies),
        "prompt_logprobs": None if count is None else prompt_logprobs(replies[0], count),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": request.prompt if body.get("return_token_ids") else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": choices,
    }
