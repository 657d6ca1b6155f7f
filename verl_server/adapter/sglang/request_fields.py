"""Names and types of the fields of SGLang's `/generate` and of its `sampling_params`.

SGLang ignores a request field that it does not know, so a misspelled field would have no effect. It refuses an unknown
sampling parameter, but does not always say which field has a value of a wrong type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.adapter.json_body import tolist_hint
from verl_server.adapter.sglang.batch import has_value_per_prompt, plain_prompts
from verl_server.errors import BadInputError, VerlServerError
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_finite_number, is_list, is_whole_number, to_plain

#: Fields of SGLang's `GenerateReqInput` (`sglang/srt/managers/io_struct.py`) in both 0.5.15 and 0.5.23, without those
#: that are arguments of `generate_payload` and those that are refused. A server is asked for its other fields.
REQUEST_FIELDS = frozenset({
    "audio_data", "background", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room",
    "conversation_id", "custom_labels", "custom_logit_processor", "decode_tp_size", "disagg_prefill_dp_rank",
    "encoder_urls", "external_trace_header", "extra_key", "http_worker_ipc", "image_data", "image_max_dynamic_patch",
    "images_config", "log_metrics", "logprob_start_len", "lora_path", "max_dynamic_patch", "min_dynamic_patch",
    "mm_hashes", "modalities", "need_wait_for_mm_inputs", "no_logs", "num_items_assigned", "priority",
    "received_time", "require_reasoning", "return_bytes", "return_entropy", "return_hidden_states",
    "return_indexer_topk", "return_logprob", "return_prompt_token_ids", "return_routed_experts",
    "return_text_in_logprobs", "routed_dp_rank", "routed_experts_start_len", "routing_key", "session_id",
    "token_ids_logprob", "top_logprobs_num", "use_audio_in_video", "video_data", "video_max_dynamic_patch",
})  # fmt: skip
#: Fields of a generation request that a router reads and does not send to a server. (SGLang has a `session_id` too.)
ROUTER_FIELDS = ("session_id", "weight_version", "min_weight_version", "timeout_s")
#: SGLang's limits of `stop_regex`.
MAX_REGEX_BYTES, MAX_REGEXES = 256, 32
#: Arguments of `generate`, which are no sampling parameters.
_ARGUMENTS = frozenset({*REQUEST_FIELDS, *ROUTER_FIELDS, "prompt", "input_ids", "rid", "sampling_params", "stream"})
_SCORING = "SGLang's scoring requests set it, and a wrong position ends its scheduler"
#: Fields of SGLang's JSON that are no arguments here.
_REFUSED_FIELDS = {
    "text": "the argument is called `prompt`",
    "stream": "an adapter streams with `generate_stream`, and a router returns whole generations only",
    "input_embeds": "this library supports prompts as text (`prompt`) and as token ids (`input_ids`) only",
    "lora_id": "the argument is called `lora_path`, which is the name of a loaded LoRA adapter",
    "session_params": "a session of SGLang continues on the KV cache of earlier weights; send the whole prompt of each "
    "turn, and `session_id` to keep the turns of a conversation on one replica",
    "multi_item_delimiter_indices": _SCORING, "token_indices_to_pool": _SCORING,
    "positional_embed_overrides": "it takes Python objects, which cannot be sent to a server",
}  # fmt: skip


@dataclass(frozen=True)
class ValueKind:
    """The values that one field accepts. Every field accepts None, which means SGLang's default."""

    description: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = to_plain
    """Returns the value as it is sent to the server."""


def _at_least(minimum: int) -> ValueKind:
    return ValueKind(f"a whole number of at least {minimum}", lambda value: is_whole_number(value) and value >= minimum)


def _is_text_or_texts(value: Any) -> bool:
    return isinstance(value, str) or (is_list(value) and all(isinstance(item, str) for item in value))


def _is_regex_or_regexes(value: Any) -> bool:
    """Whether SGLang takes the regular expressions: few and short ones that Python's `re` can read."""
    regexes = [value] if isinstance(value, str) else value
    if not _is_text_or_texts(value) or len(regexes) > MAX_REGEXES:
        return False
    try:
        return all(len(regex.encode()) <= MAX_REGEX_BYTES and re.compile(regex) for regex in regexes)
    except (re.error, RecursionError, OverflowError, UnicodeError):
        return False


def _is_token_ids(value: Any) -> bool:
    """A negative token id ends SGLang's scheduler when a request of the same batch has `min_new_tokens`."""
    is_collection = is_list(value) or isinstance(value, (set, frozenset))
    return is_collection and all(item is None or (is_whole_number(item) and item >= 0) for item in value)


def _to_token_ids(value: Any) -> list[int]:
    """Token ids as a list; sets are sorted. SGLang ignores None, for example of a tokenizer without a padding token."""
    token_ids = [int(item) for item in value if item is not None]
    return sorted(token_ids) if isinstance(value, (set, frozenset)) else token_ids


def _is_logit_bias(value: Any) -> bool:
    """A value that is no number would end SGLang's scheduler. JSON has no infinity."""
    return isinstance(value, Mapping) and all(
        (is_whole_number(key) or (isinstance(key, str) and key.isdecimal())) and is_finite_number(bias)
        for key, bias in value.items()
    )


def _to_logit_bias(value: Any) -> Json:
    """SGLang, like JSON, has strings as keys."""
    return {str(to_plain(key)): to_plain(bias) for key, bias in value.items()}


def _is_processor(value: Any) -> bool:
    """Whether `value` is a JSON object with a pickled class in hexadecimal digits. Another text ends the scheduler."""
    try:
        return isinstance(value, str) and bytes.fromhex(json.loads(value)["callable"])[:1] == b"\x80"
    except (ValueError, TypeError, KeyError):
        return False


_WHOLE_NUMBER = ValueKind("a whole number", is_whole_number)
_NUMBER = ValueKind("a finite number", is_finite_number)
_FLAG = ValueKind("True or False", is_bool)
_TEXT = ValueKind("a string", lambda value: isinstance(value, str))
_JSON_TEXT = ValueKind("a string with JSON, see json.dumps", lambda value: isinstance(value, str))
_LOGIT_PROCESSOR = ValueKind(
    "the text that SGLang's `CustomLogitProcessor.to_str` returns", lambda value: value == "" or _is_processor(value)
)
_TEXTS = ValueKind("a string or a list of strings", _is_text_or_texts)
_REGEXES = ValueKind(
    f"a regular expression of at most {MAX_REGEX_BYTES} bytes, or a list of at most {MAX_REGEXES} of them",
    _is_regex_or_regexes,
)
_TOKEN_IDS = ValueKind("a list of token ids", _is_token_ids, _to_token_ids)
_TOP_K = ValueKind("a whole number from -1 to 2**31 - 1", lambda value: is_whole_number(value) and -1 <= value < 2**31)
_LOGIT_BIAS = ValueKind(
    "a dict of finite numbers by token id; write -1e9 instead of minus infinity", _is_logit_bias, _to_logit_bias
)
_ANY = ValueKind("any value", lambda value: True)

#: Fields of SGLang's `SamplingParams` (`sglang/srt/sampling/sampling_params.py`) in 0.5.15 or 0.5.23. The server checks
#: the ranges, and parameters that are not listed here.
SAMPLING_PARAMS: Mapping[str, ValueKind] = {
    "max_new_tokens": _at_least(0), "min_new_tokens": _at_least(0), "n": _at_least(1), "temperature": _NUMBER,
    "top_p": _NUMBER, "top_k": _TOP_K, "min_p": _NUMBER, "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER, "repetition_penalty": _NUMBER, "stop": _TEXTS, "stop_regex": _REGEXES,
    "stop_token_ids": _TOKEN_IDS, "ignore_eos": _FLAG, "no_stop_trim": _FLAG, "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG, "json_schema": _JSON_TEXT, "structural_tag": _JSON_TEXT, "regex": _TEXT,
    "ebnf": _TEXT, "logit_bias": _LOGIT_BIAS, "sampling_seed": _WHOLE_NUMBER, "stream_interval": _WHOLE_NUMBER,
    "beam_width": _WHOLE_NUMBER, "custom_params": _ANY, "watermark": _ANY,
}  # fmt: skip
#: Request fields whose value is checked. SGLang does not check them, and some other values end its scheduler.
_FIELD_KINDS: Mapping[str, ValueKind] = {
    "return_logprob": _FLAG, "logprob_start_len": _at_least(-1), "top_logprobs_num": _at_least(0),
    "token_ids_logprob": _TOKEN_IDS, "lora_path": _TEXT, "custom_logit_processor": _LOGIT_PROCESSOR,
    "session_id": _TEXT,
}  # fmt: skip
#: SGLang's defaults of the fields that do not accept None as one of several values.
_DEFAULTS: Mapping[str, Any] = {
    "cache_salt": "", "extra_key": "", "logprob_start_len": -1, "modalities": "image", "return_hidden_states": False,
    "return_logprob": False, "return_sampling_mask": False, "token_ids_logprob": [], "top_logprobs_num": 0,
}  # fmt: skip


def unlisted_fields(fields: Mapping[str, Any]) -> list[str]:
    """Names of the fields that are not in `REQUEST_FIELDS`, without those of None and without `stream=False`."""
    given = [name for name, value in fields.items() if value is not None and (name, value) != ("stream", False)]
    return [name for name in given if name not in REQUEST_FIELDS]


def require_known_fields(names: Collection[str], server_fields: Collection[str]) -> None:
    """Raise BadInputError for a name that is no field of the server, with the reason or the similar field."""
    for name in names:
        if name in _REFUSED_FIELDS:
            raise BadInputError(f"there is no argument {name!r}: {_REFUSED_FIELDS[name]}")
        if name in server_fields:
            continue
        if name in ROUTER_FIELDS:
            raise BadInputError(
                f"{name!r} is a field of routers, but this request goes to a server without a router. Leave it out, or "
                "use a fleet: VerlEngine(fleet=RolloutManager(...)) without stream=True, RolloutManager.router, or "
                "RouterClient"
            )
        if name in SAMPLING_PARAMS:
            raise BadInputError(f"{name!r} is a sampling parameter: pass it as sampling_params={{{name!r}: ...}}")
        similar = did_you_mean(name, {*server_fields, *ROUTER_FIELDS, *SAMPLING_PARAMS})
        raise BadInputError(
            f"the server has no request field {name!r}"
            f"{similar or '; those of SGLang are the fields of its class GenerateReqInput'}"
        )


def parse_fields(fields: Mapping[str, Any], *, batch: bool) -> Json:
    """The request fields that are not None, with the types that JSON has. `batch`: there is a list of prompts.

    Raises BadInputError for a wrong value. In a list with one value for each prompt, None means SGLang's default.
    """
    parsed: Json = {}
    for name, value in fields.items():
        kind = _FIELD_KINDS.get(name, _ANY)
        if value is None:
            continue
        if not has_value_per_prompt(name, value, batch=batch):
            parsed[name] = _parse_field(name, value, kind)
            continue
        default = _DEFAULTS.get(name)
        parsed[name] = [default if item is None else _parse_field(name, item, kind) for item in value]
    return parsed


def _parse_field(name: str, value: Any, kind: ValueKind) -> Any:
    if not kind.accepts(value):
        hint = tolist_hint(value) if not is_whole_number(value) else ""
        has_lists = has_value_per_prompt(name, [[]], batch=True)
        place = ", or a list with one such value for each prompt" if has_lists else " for the whole request"
        raise BadInputError(f"{name} must be {kind.description}{place}, got {value!r:.200}{hint}")
    return kind.convert(value)


def parse_sampling_params(params: Any, name: str = "sampling_params") -> Json:
    """A copy of the sampling parameters with the types that JSON has.

    Raises BadInputError unless `params` is a dict or another mapping, its keys are no arguments of `generate`, and its
    known parameters have values of the right type.
    """
    if not isinstance(params, Mapping):
        raise BadInputError(f"{name} must be a dict, got {type(params).__name__}")
    parsed: Json = {}
    for key, value in params.items():
        if not isinstance(key, str):
            raise BadInputError(f"{name} has the key {key!r}; keys are strings")
        if key in _ARGUMENTS:
            raise BadInputError(
                f"{key!r} is no sampling parameter but an argument of generate: pass it as generate(..., {key}=...)"
            )
        kind = SAMPLING_PARAMS.get(key, _ANY)
        if value is not None and not kind.accepts(value):
            got = f"{value!r:.200}{tolist_hint(value)}"
            raise BadInputError(f"{name}[{key!r}] must be {kind.description}, got {got}")
        parsed[key] = None if value is None else kind.convert(value)
    return parsed


def plain_request(request: Mapping[str, Any]) -> Json:
    """A copy of the request with the types that JSON has.

    Later changes of the caller's lists and dicts do not reach the copy. Token ids are copied without conversion: a
    prompt may have 100,000 of them. Raises BadInputError for wrong sampling parameters.
    """
    plain = {
        name: value if name in ("prompt", "input_ids", "sampling_params") else to_plain(value)
        for name, value in plain_prompts(request).items()
    }
    if plain.get("sampling_params") is not None:
        plain["sampling_params"] = parse_sampling_params(plain["sampling_params"])
    return plain


def explain_refusal(error: VerlServerError, sampling_params: Any) -> VerlServerError:
    """The error for a request that the server refused: names the misspelled sampling parameters, if there are any.

    SGLang 0.5.23 names an unknown parameter in its answer 400. SGLang 0.5.15 answers 500, as for failures of its own:
    then only parameters that are similar to a known parameter are taken for misspelled.
    """
    is_failure = error.details.get("status") == 500
    if not is_failure and not isinstance(error, BadInputError):
        return error
    all_params = sampling_params if is_list(sampling_params) else [sampling_params]
    unlisted = {key for params in all_params for key in params or {} if key not in SAMPLING_PARAMS}
    unknown = sorted(
        key for key in unlisted if (did_you_mean(key, SAMPLING_PARAMS) if is_failure else key in error.message)
    )
    if not unknown:
        return error
    hints = ", ".join(f"{key!r}{did_you_mean(key, SAMPLING_PARAMS)}" for key in unknown)
    return BadInputError(f"the server has no sampling parameter {hints} ({error.message})", **error.details)
