"""Bodies of requests to vLLM. Wrong values are refused here, before they are sent."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_server.adapter.sglang.replies import DEFAULT_MAX_NEW_TOKENS, Endpoint
from verl_server.adapter.sglang.requests import (
    PromptLimits,
    check_lengths,
    check_token_ids,
    parse_fields,
    parse_sampling_params,
    weight_version_label,
)
from verl_server.config import PauseMode
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import did_you_mean

if TYPE_CHECKING:
    import torch


# -- Request fields ---------------------------------------------------------------------------------
# Fields of generation requests: SGLang's names, which users of this library know, and vLLM's names.
#
# vLLM ignores fields that it does not know, also in `sampling_params`: a misspelled field would have no effect.
# Therefore every field that is not in these tables is refused.

#: vLLM raises lower temperatures above 0 to this value (`vllm/sampling_params.py`).
MIN_TEMPERATURE = 0.01
#: Request fields that have no meaning for vLLM and change no token: SGLang uses them for caches and logs.
IGNORED_FIELDS = ("session_id", "conversation_id", "routing_key", "log_metrics", "no_logs", "return_text_in_logprobs")
#: Request fields beside prompt, id and sampling parameters.
REQUEST_FIELDS = frozenset({
    "return_logprob", "top_logprobs_num", "logprob_start_len", "cache_salt", "priority", "extra_key", "lora_path",
    *IGNORED_FIELDS,
})  # fmt: skip
#: SGLang's sampling parameters and vLLM's names of the same parameters.
SAMPLING_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "n": "n", "logit_bias": "logit_bias",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty", "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens", "stream_interval": "stream_interval",
}  # fmt: skip
#: Constraints of SGLang's output grammar, and vLLM's names in `structured_outputs`.
GRAMMARS: Mapping[str, str] = {
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip


def to_sampling_params(params: Any) -> Json:
    """vLLM's `sampling_params` for SGLang's. Parameters of None are left out. Raises BadInputError.

    `max_new_tokens` of None means no limit, as in SGLang. Without the parameter the limit is SGLang's default, where
    vLLM would generate to the end of the context.
    """
    sent: Json = {"max_tokens": DEFAULT_MAX_NEW_TOKENS}
    grammars: Json = {}
    for name, value in parse_sampling_params({} if params is None else params).items():
        if name == "max_new_tokens" and value is None:
            del sent["max_tokens"]
        if name not in SAMPLING_NAMES and name not in GRAMMARS:
            similar = did_you_mean(name, {*SAMPLING_NAMES, *GRAMMARS})
            raise BadInputError(
                f"there is no sampling parameter {name!r} for vLLM, which would ignore it silently{similar}"
            )
        if value is None:
            continue
        if name in GRAMMARS:
            grammars[GRAMMARS[name]] = value
        else:
            sent[SAMPLING_NAMES[name]] = value
    if 0 < sent.get("temperature", 0) < MIN_TEMPERATURE:
        raise BadInputError(
            f"sampling_params['temperature'] must be 0 or at least {MIN_TEMPERATURE} with vLLM, which would replace "
            f"{sent['temperature']!r} by {MIN_TEMPERATURE}"
        )
    if len(grammars) > 1:
        raise BadInputError(f"sampling_params has several grammars, {sorted(grammars)}; pass one")
    if grammars:
        sent["structured_outputs"] = grammars
    return sent


# -- Payloads ---------------------------------------------------------------------------------------

RETURNED_ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a generation in its reply, and aborts generations by this longer id only."""
MAX_LOGPROBS = 20
"""vLLM's own maximum of most probable tokens. Servers of this library accept one more (`vllm_plugin/start.py`)."""
#: Pause modes of this library (SGLang's) and vLLM's: requests are held and computed again, held with their KV cache, or
#: ended.
_PAUSE_QUERIES = {
    PauseMode.RETRACT: "mode=keep&clear_cache=true",
    PauseMode.IN_PLACE: "mode=keep&clear_cache=false",
    PauseMode.ABORT: "mode=abort&clear_cache=true",
}


def generate_payload(
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any] | None = None,
    *,
    rid: str | None = None,
    **fields: Any,
) -> Json:
    """The body of `/inference/v1/generate` for a request with SGLang's field names. One prompt in each request.

    Without a `rid` the request gets a random id: vLLM runs two requests with the same id, and an abort ends both.
    Raises BadInputError, also for fields that vLLM would ignore.
    """
    check_lengths(fields, 1, batch=False)
    fields = parse_fields(fields, batch=False)
    if unknown := fields.keys() - REQUEST_FIELDS:
        raise BadInputError(f"there is no request field {min(unknown)!r} for vLLM, which would ignore it silently")
    check_token_ids(input_ids, "input_ids", PromptLimits())  # vLLM knows its limits
    if rid is not None and not (isinstance(rid, str) and rid):
        raise BadInputError(f"rid must be a non-empty string, got {rid!r}")
    params = to_sampling_params(sampling_params)
    if (count := _num_logprobs(fields)) is not None:
        _require_no_truncation(params)
        params["logprobs"] = count
    body: Json = {
        "token_ids": [int(token_id) for token_id in input_ids],
        "request_id": rid or uuid.uuid4().hex,
        "sampling_params": params,
    }
    if fields.get("logprob_start_len") not in (None, -1):
        raise BadInputError("logprob_start_len must be -1: log probabilities of prompts are not supported with vLLM")
    if (lora := fields.get("lora_path")) is not None:
        if not lora:
            raise BadInputError("lora_path must be the name of a loaded LoRA adapter, got an empty one")
        body["model"] = lora
    if salt := "\n".join(fields[name] for name in ("cache_salt", "extra_key") if fields.get(name)):
        body["cache_salt"] = salt  # the text that separates prefixes in the cache; SGLang also calls it `extra_key`
    if "priority" in fields:
        body["priority"] = fields["priority"]
    return body


def _require_no_truncation(params: Mapping[str, Any]) -> None:
    """Raise BadInputError for log probabilities of truncated sampling.

    SGLang returns those of the whole distribution behind temperature. vLLM can return them before temperature, or
    behind all of temperature, `top_p`, `top_k` and `min_p`: a trainer would compute wrong importance ratios from both.
    """
    if params.get("temperature", 1.0) == 0:
        return  # greedy: nothing is truncated
    is_truncating = {
        "top_p": params.get("top_p", 1.0) < 1, "top_k": params.get("top_k", -1) > 0, "min_p": params.get("min_p", 0) > 0
    }  # fmt: skip
    if names := [name for name, truncates in is_truncating.items() if truncates]:
        raise BadInputError(
            f"vLLM's log probabilities with {' and '.join(names)} are those of the truncated distribution, and not "
            "those of the policy that a trainer computes: leave out the parameters or return_logprob"
        )


def _num_logprobs(fields: Mapping[str, Any]) -> int | None:
    """vLLM's `logprobs`: None without log probabilities, 0 for those of the sampled tokens only.

    vLLM counts a sampled token that is not among the most probable tokens as one of them. With one more, all of the
    most probable tokens are in the reply.
    """
    top = fields.get("top_logprobs_num") or 0
    if top > MAX_LOGPROBS:
        raise BadInputError(f"top_logprobs_num must be a whole number from 0 to {MAX_LOGPROBS}, got {top!r}")
    if not fields.get("return_logprob"):
        if top:
            raise BadInputError("top_logprobs_num needs return_logprob=True")
        return None
    return top + 1 if top else 0


def abort_payload(rids: Collection[str]) -> Json:
    """The body that aborts these generations, by the ids of their requests. vLLM aborts all of them for no ids."""
    return {"request_ids": [RETURNED_ID_PREFIX + rid for rid in rids]}


def pause_query(mode: str) -> str:
    """The query of `/pause`. vLLM takes it from the URL, and its default would abort all requests."""
    return _PAUSE_QUERIES[PauseMode(mode)]


def update_payload(message: Json) -> Json:
    """The body of `/update_weights` for the message of a weight transport (`Sender.loader_message`)."""
    return {"update_info": {"message": message}}


def weight_version_payload(weight_version: int) -> Json:
    """The body of `/update_weight_version`. The label is set after the reports were verified.

    `/finish_weight_update` could set it too, but it does so although workers have refused the update.
    """
    return {"new_version": weight_version_label(weight_version)}


def memory_payload(method: str, tags: Collection[str]) -> Json:
    """The body of `/collective_rpc` that releases or resumes memory. `method` ("release" or "resume") is one of
    `vllm_plugin/weights.py`."""
    return {"method": f"verl_server_{method}_memory", "args": [json.dumps(sorted(tags))]}


# -- Endpoints --------------------------------------------------------------------------------------
# vLLM's HTTP routes that this library uses, and the key that each of them needs.
#
# The keys are checked by our own `vllm_plugin/start.py`: vLLM's key would protect a few of the routes only.


_admin = partial(Endpoint, needs_admin_key=True)

GENERATE = Endpoint("/inference/v1/generate")
ABORT = Endpoint("/inference/v1/abort_requests")
#: Development route: an empty body aborts the requests of all routes.
ABORT_ALL = _admin("/abort_requests")
TOKENIZE = _admin("/tokenize")
MODELS = Endpoint("/v1/models", method="GET")
LOAD_LORA = _admin("/v1/load_lora_adapter")
UNLOAD_LORA = _admin("/v1/unload_lora_adapter")
PAUSE = _admin("/pause")
RESUME = _admin("/resume")
IS_PAUSED = _admin("/is_paused", method="GET")
START_UPDATE = _admin("/start_weight_update")
UPDATE_WEIGHTS = _admin("/update_weights")
FINISH_UPDATE = _admin("/finish_weight_update")
SET_WEIGHT_VERSION = _admin("/update_weight_version")
WEIGHT_INFO = _admin("/weight_info", method="GET")
RESET_PREFIX_CACHE = _admin("/reset_prefix_cache")
RESET_ENCODER_CACHE = _admin("/reset_encoder_cache")
SERVER_INFO = _admin("/server_info", method="GET")
SLEEP = _admin("/sleep")
WAKE_UP = _admin("/wake_up")
WORKER_CALL = _admin("/collective_rpc")
VERSION = _admin("/version", method="GET")
OPENAPI = _admin("/openapi.json", method="GET")
#: Open routes. `/health` answers 200 as soon as the engine has loaded, and also while generation is paused.
HEALTH = Endpoint("/health", method="GET")
METRICS = Endpoint("/metrics", method="GET")


# -- Lora -------------------------------------------------------------------------------------------
# LoRA adapters of vLLM servers: the body of the request that loads one, and the sizes that vLLM knows.

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's option `--max-lora-rank`."""


def vllm_lora_payload(name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Json:
    """The body of our route: the tensors as a safetensors file, which the server can read without pickle."""
    from safetensors.torch import save

    content = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    return {
        "lora_name": name,
        "config_dict": dict(config),
        "safetensors": base64.b64encode(content).decode(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def round_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM for adapters of `rank`. Raises BadInputError above its maximum."""
    fitting = next((each for each in RANKS if each >= rank), None)
    if fitting is None:
        raise BadInputError(f"max_lora_rank={rank} is above vLLM's maximum of {RANKS[-1]}", argument="max_lora_rank")
    return fitting
