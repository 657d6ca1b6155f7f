"""Fields of generation requests: SGLang's names, which users of this library know, and vLLM's names.

vLLM ignores fields that it does not know, also in `sampling_params`: a misspelled field would have no effect. Therefore
every field that is not in these tables is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_finite_number, is_list, is_whole_number, to_plain

#: `max_new_tokens` of SGLang for a request without it. vLLM would generate to the end of the context.
DEFAULT_MAX_NEW_TOKENS = 128
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
_SAMPLING_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "n": "n", "logit_bias": "logit_bias",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty", "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens", "stream_interval": "stream_interval",
}  # fmt: skip
#: Constraints of SGLang's output grammar, and vLLM's names in `structured_outputs`.
_GRAMMARS: Mapping[str, str] = {
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip
#: vLLM's own names, which a user of vLLM may try.
_VLLM_NAMES = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed",
    "logprobs": "return_logprob=True (with top_logprobs_num=...) of the request",
    "structured_outputs": "json_schema, regex or ebnf", "guided_json": "json_schema",
}  # fmt: skip


def to_sampling_params(params: Any) -> Json:
    """vLLM's `sampling_params` for SGLang's. Parameters of None are left out. Raises BadInputError.

    `max_new_tokens` of None means no limit, as in SGLang; without the parameter the limit is SGLang's default.
    """
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise BadInputError(f"sampling_params must be a dict, got {type(params).__name__}")
    sent: Json = {"max_tokens": DEFAULT_MAX_NEW_TOKENS}
    grammars: Json = {}
    for name, value in params.items():
        if name == "max_new_tokens" and value is None:
            del sent["max_tokens"]
        if name not in _SAMPLING_NAMES and name not in _GRAMMARS:
            raise _unknown_parameter(name)
        if value is None:
            continue
        if name in _GRAMMARS:
            grammars[_GRAMMARS[name]] = value
        else:
            sent[_SAMPLING_NAMES[name]] = _checked(name, value)
    if len(grammars) > 1:
        raise BadInputError(f"sampling_params has several grammars, {sorted(grammars)}; pass one")
    if grammars:
        sent["structured_outputs"] = grammars
    return sent


def _checked(name: str, value: Any) -> Any:
    """The value as JSON has it. Raises BadInputError for a wrong type; vLLM checks the ranges."""
    for names, expected, accepts in _KINDS:
        if name in names and not accepts(value):
            raise BadInputError(f"sampling_params[{name!r}] must be {expected}, got {value!r:.200}")
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:
        raise BadInputError(
            f"sampling_params['temperature'] must be 0 or at least {MIN_TEMPERATURE} with vLLM, which would replace "
            f"{value!r} by {MIN_TEMPERATURE}"
        )
    if name == "stop_token_ids":
        return sorted({int(token_id) for token_id in value})
    if name == "logit_bias":
        return {str(token_id): float(bias) for token_id, bias in value.items()}
    return to_plain(value)


def _are_token_ids(value: Any) -> bool:
    is_collection = is_list(value) or isinstance(value, (set, frozenset))
    return is_collection and all(is_whole_number(item) and item >= 0 for item in value)


def _is_logit_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(is_finite_number(bias) for bias in value.values())


#: Parameters, the description of their values, and the function that accepts these values.
_KINDS: Sequence[tuple[frozenset[str], str, Callable[[Any], bool]]] = (
    (
        frozenset({"max_new_tokens", "min_new_tokens", "n", "top_k", "sampling_seed", "stream_interval"}),
        "a whole number",
        is_whole_number,
    ),
    (
        frozenset({
            "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        }),
        "a finite number",
        is_finite_number,
    ),
    (frozenset({"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"}), "True or False", is_bool),
    (frozenset({"stop_token_ids"}), "a list of token ids", _are_token_ids),
    (frozenset({"logit_bias"}), "a dict of finite numbers by token id", _is_logit_bias),
)  # fmt: skip


def _unknown_parameter(name: Any) -> BadInputError:
    if name in _VLLM_NAMES:
        return BadInputError(f"sampling parameter {name!r} is called {_VLLM_NAMES[name]} here")
    if name in REQUEST_FIELDS:
        return BadInputError(f"{name!r} is no sampling parameter but a field of the request")
    similar = did_you_mean(str(name), [*_SAMPLING_NAMES, *_GRAMMARS])
    return BadInputError(f"there is no sampling parameter {name!r} for vLLM{similar}; vLLM would ignore it silently")


def require_known_fields(names: Any) -> None:
    """Raise BadInputError for a request field that vLLM does not have."""
    for name in names:
        if name in REQUEST_FIELDS:
            continue
        if name in _SAMPLING_NAMES or name in _GRAMMARS:
            raise BadInputError(f"{name!r} is a sampling parameter: pass it as sampling_params={{{name!r}: ...}}")
        similar = did_you_mean(str(name), REQUEST_FIELDS)
        raise BadInputError(f"there is no request field {name!r} for vLLM{similar}; vLLM would ignore it silently")
