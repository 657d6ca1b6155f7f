"""Bodies of requests to vLLM. Wrong values are refused here, before they are sent."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_server.adapter.vllm.request_fields import require_known_fields, to_sampling_params
from verl_server.config import MemoryTag, PauseMode
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.types import Json
from verl_server.validation import is_bool, is_list, is_whole_number

RETURNED_ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a generation, and aborts generations by this longer id only."""
MAX_LOGPROBS = 20
"""Maximum of `top_logprobs_num`. Servers of this library accept one more (`vllm_server/command_line.py`)."""
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
    require_known_fields(name for name, value in fields.items() if value is not None)
    _require_prompt(input_ids)
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
        if not (isinstance(lora, str) and lora):
            raise BadInputError(f"lora_path must be the name of a loaded LoRA adapter, got {lora!r}")
        body["model"] = lora
    if (salt := _salt(fields)) is not None:
        body["cache_salt"] = salt
    if fields.get("priority") is not None:
        if not is_whole_number(fields["priority"]):
            raise BadInputError(f"priority must be a whole number, got {fields['priority']!r}")
        body["priority"] = int(fields["priority"])
    return body


def _require_prompt(input_ids: Any) -> None:
    if not is_list(input_ids):
        raise BadInputError(f"input_ids must be a list of token ids, got {type(input_ids).__name__}")
    if not input_ids:
        raise BadInputError("input_ids is empty: a prompt needs at least one token")
    for value in input_ids:
        if is_list(value):
            raise BadInputError("a request to vLLM has one prompt: make one request for each prompt")
        if not is_whole_number(value) or value < 0:
            raise BadInputError(f"input_ids must hold token ids, which are whole numbers from 0, got {value!r}")


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
    wanted, top = fields.get("return_logprob"), fields.get("top_logprobs_num")
    if wanted is not None and not is_bool(wanted):
        raise BadInputError(f"return_logprob must be True or False, got {wanted!r}")
    if top is not None and not (is_whole_number(top) and 0 <= top <= MAX_LOGPROBS):
        raise BadInputError(f"top_logprobs_num must be a whole number from 0 to {MAX_LOGPROBS}, got {top!r}")
    if not wanted:
        if top:
            raise BadInputError("top_logprobs_num needs return_logprob=True")
        return None
    return int(top) + 1 if top else 0


def _salt(fields: Mapping[str, Any]) -> str | None:
    """The text that separates prefixes in the cache. SGLang also calls it `extra_key`."""
    salts = [value for name in ("cache_salt", "extra_key") if (value := fields.get(name)) not in (None, "")]
    if not all(isinstance(salt, str) for salt in salts):
        raise BadInputError(f"cache_salt and extra_key must be strings, got {salts!r}")
    return "\n".join(salts) or None


def abort_payload(rids: Collection[str]) -> Json:
    """The body that aborts these generations, by the ids of their requests."""
    if not rids or not all(isinstance(rid, str) and rid for rid in rids):
        raise BadInputError("abort needs non-empty ids: vLLM would abort all requests for an empty list")
    return {"request_ids": [RETURNED_ID_PREFIX + rid for rid in rids]}


def pause_query(mode: str) -> str:
    """The query of `/pause`. vLLM takes it from the URL, and its default would abort all requests."""
    try:
        return _PAUSE_QUERIES[PauseMode(mode)]
    except (ValueError, KeyError):
        raise BadInputError(
            f"pause mode must be one of {[each.value for each in _PAUSE_QUERIES]} for one server, got {mode!r}"
        ) from None


def update_payload(message: Json) -> Json:
    """The body of `/update_weights` for the message of a weight transport (`Sender.loader_message`)."""
    missing = {"transport", "update_id", "verify"} - message.keys()
    if missing:
        raise BadInputError(f"the message of an update needs {sorted(missing)}")
    return {"update_info": {"message": message}}


def weight_version_payload(weight_version: int) -> Json:
    """The body of `/update_weight_version`. The label is set after the reports were verified.

    `/finish_weight_update` could set it too, but it does so although workers have refused the update.
    """
    if not is_whole_number(weight_version) or weight_version < 0:
        raise BadInputError(f"weight_version must be a whole number of at least 0, got {weight_version!r}")
    return {"new_version": str(weight_version)}


def memory_payload(method: str, tags: Collection[str]) -> Json:
    """The body of `/collective_rpc` that releases or resumes memory of a server on a CPU. `method`: see
    `MEMORY_METHODS`."""
    if method not in MEMORY_METHODS:
        raise BadInputError(f"method must be one of {sorted(MEMORY_METHODS)}, got {method!r}")
    supported = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
    if unsupported := sorted(set(tags) - set(supported)):
        raise UnsupportedError(f"vLLM has no memory {', '.join(unsupported)}; its memory is {', '.join(supported)}")
    return {"method": MEMORY_METHODS[method], "args": [json.dumps(sorted(tags))]}


#: Methods of `vllm_server/worker_extension.py`.
MEMORY_METHODS = {"release": "verl_server_release_memory", "resume": "verl_server_resume_memory"}
