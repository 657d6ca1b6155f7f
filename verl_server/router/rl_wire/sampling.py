"""vLLM's sampling parameters, and the request with the names of this library. Pure functions.

vLLM ignores parameters that it does not know. Here they are refused: a misspelled parameter would have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_whole_number

MAX_SAMPLES = 1024
"""Maximum of `n`. Each sample is a generation of its own."""
#: vLLM's sampling parameters, and the names of the same parameters in this library (SGLang's names).
_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "min_p": "min_p", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty", "stop": "stop", "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos", "logit_bias": "logit_bias", "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
}  # fmt: skip
#: Keys of vLLM's `structured_outputs`, and the names of the same grammars in this library.
_GRAMMARS: Mapping[str, str] = {
    "json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag",
}  # fmt: skip
#: vLLM's names of parameters that have another name in this library.
_GIVEN_NAMES: Mapping[str, str] = {ours: given for given, ours in _NAMES.items() if ours != given}
#: Parameters that change no token of a reply. Trainers send the last three, which vLLM does not know, either.
_WITHOUT_EFFECT = frozenset({
    "output_kind", "stream_interval", "skip_clone", "flat_logprobs", "detokenize", "routed_experts_prompt_start",
    "routed_experts_start_len", "reasoning_effort", "return_token_ids",
})  # fmt: skip
#: vLLM's parameters without a counterpart. Their default values are accepted.
_UNSUPPORTED = frozenset({
    "allowed_token_ids", "bad_words", "extra_args", "logprob_token_ids", "prompt_logprob_start",
    "prompt_logprob_token_ids", "repetition_detection", "thinking_token_budget", "watermarking",
})  # fmt: skip
MAX_LOGPROBS = 20
"""Maximum number of most probable tokens for each token, as in vLLM (`max_logprobs`)."""
_COUNTS = frozenset({"n", "logprobs", "prompt_logprobs", "structured_outputs"})
"""Parameters that become fields of `Sampling`."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one request."""

    params: Json
    """Sampling parameters with the names of this library."""
    n: int
    """Number of samples."""
    logprobs: int | None
    """Number of most probable tokens for each output token. None: no log probabilities."""
    prompt_logprobs: int | None
    """Number of most probable tokens for each token of the prompt. None: no log probabilities of the prompt."""

    def of_sample(self, index: int) -> Json:
        """The parameters of one sample. With a seed, each sample has a seed of its own, as in vLLM."""
        seed = self.params.get("sampling_seed")
        return self.params if seed is None else {**self.params, "sampling_seed": seed + index}

    def logprob_fields(self) -> Json:
        """The request fields that ask for the log probabilities."""
        if self.logprobs is None and self.prompt_logprobs is None:
            return {}
        # 0 and 1 ask for the sampled token: vLLM returns as many tokens as asked for, and that one comes first.
        logprobs = self.logprobs or 0
        count = max(logprobs if logprobs > 1 else 0, self.prompt_logprobs or 0)
        fields: Json = {"return_logprob": True, **({"top_logprobs_num": count} if count else {})}
        return fields if self.prompt_logprobs is None else {**fields, "logprob_start_len": 0}


def parse_sampling(given: Any, num_prompt_tokens: int, max_model_len: int | None) -> Sampling:
    """The sampling parameters of a request. Raises BadInputError.

    Without `max_tokens`, and with more than the context has room for, the output may fill the context, as in vLLM.
    `max_model_len`: length of the context in tokens, None if it is not known.
    """
    if not isinstance(given, Mapping):
        raise BadInputError(f"sampling_params must be an object, got {type(given).__name__}")
    params: Json = {"max_new_tokens": None}
    for name, value in given.items():
        if value is None or name in _COUNTS or name in _WITHOUT_EFFECT:
            continue
        if name in _UNSUPPORTED:
            _require_no_effect(name, value)
        elif name in _NAMES:
            if (name, value) != ("include_stop_str_in_output", False):
                params[_NAMES[name]] = value
        else:
            raise BadInputError(f"there is no sampling parameter {name!r}{did_you_mean(name, [*_NAMES, *_COUNTS])}")
    if (seed := params.get("sampling_seed")) is not None and not is_whole_number(seed):
        raise BadInputError(f"seed must be a whole number, got {seed!r:.100}")
    if seed == -1:
        del params["sampling_seed"]  # in vLLM, this value means no seed
    if params.get("top_k") == 0:
        params["top_k"] = -1  # both mean all tokens, but SGLang knows only this value
    params |= _grammar(given.get("structured_outputs"))
    params["max_new_tokens"] = _limit(params["max_new_tokens"], num_prompt_tokens, max_model_len)
    n = given.get("n")
    if n is not None and not (is_whole_number(n) and 1 <= n <= MAX_SAMPLES):
        raise BadInputError(f"n must be a whole number from 1 to {MAX_SAMPLES}, got {n!r}")
    return Sampling(params, n or 1, _count(given, "logprobs"), _count(given, "prompt_logprobs"))


def _limit(max_tokens: Any, num_prompt_tokens: int, max_model_len: int | None) -> Any:
    """The maximum number of output tokens. SGLang refuses more than the context has room for; vLLM does not."""
    if max_model_len is None or not is_whole_number(max_tokens):
        return max_tokens
    room = max_model_len - num_prompt_tokens
    return min(max_tokens, room) if room > 0 else max_tokens


def _count(given: Mapping[str, Any], name: str) -> int | None:
    """A number of most probable tokens. True stands for 1, as in vLLM, and False for none."""
    value = given.get(name)
    if value is None or value is False:
        return None
    if is_bool(value):
        return 1
    if not (is_whole_number(value) and 0 <= value <= MAX_LOGPROBS):
        raise BadInputError(
            f"{name} must be a whole number from 0 to {MAX_LOGPROBS}, got {value!r:.100}; -1 (all tokens) is refused"
        )
    return int(value)


def _grammar(given: Any) -> Json:
    """The grammar in vLLM's `structured_outputs`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise BadInputError(f"structured_outputs must be an object, got {type(given).__name__}")
    named = {name: value for name, value in given.items() if value not in (None, False)}
    if unknown := named.keys() - _GRAMMARS.keys():
        raise BadInputError(f"structured_outputs must have one of {sorted(_GRAMMARS)}, got {sorted(unknown)}")
    if len(named) > 1:
        raise BadInputError(f"structured_outputs has several grammars, {sorted(named)}; pass one")
    return {
        _GRAMMARS[name]: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in named.items()
    }


def _require_no_effect(name: str, value: Any) -> None:
    if value not in (False, 0, [], {}):
        raise BadInputError(f"the sampling parameter {name!r} is not supported by this router; leave it out")


def with_given_names(error: BadInputError, prompt: str, params: str) -> BadInputError:
    """The same error with the names that the caller has sent.

    `prompt`: name of the field with the token ids. `params`: name of the object with the sampling parameters, empty if
    they are fields of the body.
    """

    def rename(match: re.Match[str]) -> str:
        name = match["name"]
        if (grammar := next((given for given, ours in _GRAMMARS.items() if ours == name), None)) is not None:
            params_of_name, given = "structured_outputs", grammar
        else:
            params_of_name, given = params, _GIVEN_NAMES.get(name, name)
        return f"{params_of_name}[{given!r}]" if params_of_name else given

    message = re.sub(r"sampling_params\['(?P<name>\w+)'\]", rename, error.message)
    message = re.sub(r"\binput_ids\b", prompt, message)
    for ours, given in _GIVEN_NAMES.items():  # the engine's own messages
        message = re.sub(rf"\b{ours}\b", given, message)
    return type(error)(message, **error.details)
