"""Bodies of generation requests. They are checked first: SGLang answers some mistakes with a 500 or not at all."""

from __future__ import annotations

import array
import base64
import json
import os
import pickle
import pickletools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_server.adapter.json_body import tolist_hint
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, VerlServerError
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_finite_number, is_list, is_whole_number, to_plain

if TYPE_CHECKING:
    import torch


# -- Batch ------------------------------------------------------------------------------------------
# Requests with several prompts: which fields have one value for each prompt, and one request for each prompt.

#: Fields whose list has one value for each prompt.
_SINGLE_VALUES = frozenset({
    "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "cache_salt", "custom_logit_processor",
    "decode_tp_size", "extra_key", "kv_hints", "logprob_start_len", "lora_id", "lora_path", "return_hidden_states",
    "return_logprob", "return_sampling_mask", "rid", "sampling_logprobs_mode", "sampling_params", "top_logprobs_num",
    "watermark",
})  # fmt: skip
#: Field whose value is a list. A list of lists has one value for each prompt.
_LIST_VALUE = "token_ids_logprob"
#: Fields with the media of a prompt, or a list with the media of each prompt.
_MEDIA_DATA = frozenset({"audio_data", "image_data", "video_data"})
#: Fields with one string for each image of a prompt, or a list with those of each prompt.
_IMAGE_HASHES = frozenset({"mm_content_hashes", "mm_hashes"})
#: Fields whose list belongs to a single prompt, but has one value for each prompt when there are several prompts.
_MEDIA = _MEDIA_DATA | _IMAGE_HASHES | {"modalities"}


def is_batch(prompt: Any, input_ids: Any) -> bool:
    """Whether the caller gave a list of prompts. The reply is then a list too."""
    if input_ids is not None:
        return is_list(input_ids) and len(input_ids) > 0 and is_list(input_ids[0])
    return is_list(prompt)


def has_value_per_prompt(name: str, value: Any, *, batch: bool) -> bool:
    """Whether the value of a field is a list with one value for each prompt. `batch`: there is a list of prompts."""
    if not is_list(value):
        return False
    if name == _LIST_VALUE:
        return any(is_list(item) for item in value)
    return name in _SINGLE_VALUES or (name in _MEDIA and batch)


def batch_fields(fields: Mapping[str, Any]) -> Json:
    """The fields of a request with several prompts as SGLang understands them.

    SGLang ignores `modalities` beside images: it derives them from the number of images of each prompt. Empty lists
    mean that no prompt has such media. A list of media must hold lists only, or single media only: all of them become
    lists, so that a prompt may have no media and another one several.
    """
    kept = dict(fields)
    for name in _MEDIA_DATA & kept.keys():
        if is_list(kept[name]):
            kept[name] = [_as_list(media) for media in kept[name]] or None
    if kept.get("image_data") is not None or kept.get("modalities") in ([], ()):
        kept.pop("modalities", None)
    return kept


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if is_list(value) else [value]


def check_lengths(fields: Mapping[str, Any], num_prompts: int, *, batch: bool) -> None:
    """Raise BadInputError for a list with one value for each prompt that does not fit the prompts.

    SGLang does not check most of these lengths: it answers 500, or its scheduler ends.
    """
    for name, value in fields.items():
        if not has_value_per_prompt(name, value, batch=batch):
            continue
        if not batch:
            raise BadInputError(
                f"{name} is a list with one value for each prompt, but the request has one prompt, which is not in a "
                "list: give one value, or a list of prompts"
            )
        if len(value) != num_prompts:
            raise BadInputError(
                f"{len(value)} {name} for {num_prompts} prompts: give one value for all prompts, or a list with one "
                "value for each prompt"
            )


def plain_prompts(request: Mapping[str, Any]) -> Json:
    """A copy of the request whose prompts are strings or new lists. Tuples and other sequences become lists."""
    plain = dict(request)
    prompt, input_ids = plain.get("prompt"), plain.get("input_ids")
    if is_list(prompt):
        plain["prompt"] = list(prompt)
    if input_ids is not None and is_batch(None, input_ids):
        plain["input_ids"] = [_plain_list(token_ids) for token_ids in input_ids]
    elif input_ids is not None:
        plain["input_ids"] = _plain_list(input_ids)
    return plain


def _plain_list(value: Any) -> Any:
    return list(value) if is_list(value) else value


def split_batch(request: Mapping[str, Any]) -> list[Json] | None:
    """One request for each prompt of a request with several prompts. None for a request with one prompt.

    A field with one value for each prompt is divided; each request gets all other fields. Raises BadInputError when a
    list has another length than the list of prompts.
    """
    batch = is_batch(request.get("prompt"), request.get("input_ids"))
    plain = batch_fields(plain_prompts(request)) if batch else plain_prompts(request)
    field = "input_ids" if plain.get("input_ids") is not None else "prompt"
    prompts = plain[field] if batch else []
    check_lengths(plain, len(prompts), batch=batch)
    if not batch:
        return None
    if not prompts:
        raise BadInputError("prompt is empty: a list of prompts needs at least one prompt")
    divided = [name for name, value in plain.items() if has_value_per_prompt(name, value, batch=True)]
    return [
        _with_image_lists({**plain, field: prompt, **{name: plain[name][index] for name in divided}})
        for index, prompt in enumerate(prompts)
    ]


def _with_image_lists(request: Json) -> Json:
    """One prompt's request with the lists of a single request, where a batch has one string for each prompt.

    The modalities of its images are those that SGLang sets in a batch.
    """
    if num_images := len(_as_list(request.get("image_data"))):
        request["modalities"] = ["multi-images" if num_images > 1 else "image"]
    for name in ("modalities", *_IMAGE_HASHES):
        if request.get(name) is not None:
            request[name] = _as_list(request[name])
    return request


# -- Request fields ---------------------------------------------------------------------------------
# Names and types of the fields of SGLang's `/generate` and of its `sampling_params`.
#
# SGLang ignores a request field that it does not know, so a misspelled field would have no effect. It refuses an
# unknown sampling parameter, but does not always say which field has a value of a wrong type.

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
    """Names of the fields that not every server has, without those of None and without `stream=False`."""
    given = [name for name, value in fields.items() if value is not None and (name, value) != ("stream", False)]
    return [name for name in given if name not in REQUEST_FIELDS and name not in _PARSED_FIELDS]


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


# -- Requests ---------------------------------------------------------------------------------------

#: Fields of a request that `generate_payload` reads itself.
_PARSED_FIELDS = ("prompt", "input_ids", "sampling_params", "rid")
#: Number of tokens below which the built-in `max` is faster than numpy.
_SHORT_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class PromptLimits:
    """Prompts that one server accepts. A limit of None is unknown and is not checked."""

    vocab_size: int | None = None
    """Number of token ids."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens in one prompt."""
    end_tokens: frozenset[int] = frozenset()
    """Token ids with which the model ends a generation, as far as its configuration files name them."""


def require(condition: bool, message: str) -> None:
    """Raise BadInputError with `message` when `condition` is false."""
    if not condition:
        raise BadInputError(message)


def require_token_ids(name: str, value: Any) -> None:
    """Raise BadInputError unless the token ids `value` are a list or another sequence."""
    if not is_list(value):
        raise BadInputError(f"{name} must be a list of token ids, got {type(value).__name__}{tolist_hint(value)}")


def generate_payload(limits: PromptLimits, request: Mapping[str, Any], *, stream: bool = False) -> Json:
    """The body of `/generate`. `request`: fields of SGLang's `GenerateReqInput`, and `prompt` for its `text`.

    Fields of None are left out. Raises BadInputError before anything is sent.
    """
    prompt, input_ids, sampling_params, rid = (request.get(name) for name in _PARSED_FIELDS)
    require((prompt is None) != (input_ids is None), "give either `prompt` or `input_ids`, not both or none")
    batch = is_batch(prompt, input_ids)
    require(not (stream and batch), "a stream takes one prompt, got a list: make one call per prompt")
    num_prompts = _check_input_ids(input_ids, limits) if input_ids is not None else _check_prompts(prompt)
    if rid is not None:
        rids = rid if is_list(rid) else [rid]
        require(all(isinstance(r, str) and r for r in rids), f"rid must be a non-empty string, got {rid!r}")
    request = batch_fields(request) if batch else request
    check_lengths(request, num_prompts, batch=batch)
    all_params = _parse_all_sampling_params(sampling_params)
    plain = plain_prompts({"prompt": prompt, "input_ids": input_ids})
    body: Json = {"text": plain["prompt"], "input_ids": plain["input_ids"], "sampling_params": all_params, "rid": rid}
    fields = {name: value for name, value in request.items() if name not in _PARSED_FIELDS}
    body.update(parse_fields(fields, batch=batch))
    if limits.vocab_size is not None:
        _check_vocabulary(body, limits.vocab_size)
    if stream:
        body["stream"] = True
    return {name: value for name, value in body.items() if value is not None}


def _check_input_ids(input_ids: Any, limits: PromptLimits) -> int:
    """Check one prompt or a list of prompts, given as token ids. Returns the number of prompts."""
    require_token_ids("input_ids", input_ids)
    require(len(input_ids) > 0, "input_ids is empty: a prompt needs at least one token")
    if not is_batch(None, input_ids):
        check_token_ids(input_ids, "input_ids", limits)
        return 1
    for index, token_ids in enumerate(input_ids):
        check_token_ids(token_ids, f"input_ids[{index}]", limits)
    return len(input_ids)


def check_token_ids(token_ids: Any, name: str, limits: PromptLimits) -> None:
    """Check one prompt. On the hot path: takes about 1 microsecond for a short prompt and 0.3 ms for 32k tokens."""
    require_token_ids(name, token_ids)
    if not token_ids:
        raise BadInputError(f"{name} is empty: a prompt needs at least one token")
    try:
        unsigned = array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise _token_id_error(token_ids, name, error) from error
    is_short = len(token_ids) < _SHORT_PROMPT_TOKENS
    largest = max(token_ids) if is_short else int(np.frombuffer(unsigned, dtype=np.uint32).max())
    if limits.vocab_size is not None and largest >= limits.vocab_size:
        raise BadInputError(
            f"{name} holds token id {largest}, but the model's vocabulary ends at {limits.vocab_size - 1}"
        )
    if limits.max_prompt_tokens is not None and len(token_ids) > limits.max_prompt_tokens:
        raise BadInputError(
            f"{name} has {len(token_ids)} tokens; the server accepts at most {limits.max_prompt_tokens} tokens"
        )


def _token_id_error(token_ids: Sequence[Any], name: str, error: Exception) -> BadInputError:
    """The error that names the invalid token id. The search runs only after the fast check has failed."""
    for value in token_ids:
        if not isinstance(value, int):
            return BadInputError(f"{name} must hold whole numbers only, got {value!r:.200}{tolist_hint(value)}")
        if value < 0:
            return BadInputError(f"{name} holds the negative token id {value}")
    return BadInputError(f"{name} holds a token id beyond any vocabulary: {error}")


def _check_prompts(prompt: Any) -> int:
    """Check one prompt or a list of prompts, given as text. Returns the number of prompts."""
    prompts = prompt if is_list(prompt) else [prompt]
    require(len(prompts) > 0, "prompt is empty: a list of prompts needs at least one prompt")
    for index, text in enumerate(prompts):
        if not isinstance(text, str) or text == "":
            hint = "" if isinstance(text, str) or text is None else "; pass token ids as `input_ids=`"
            raise BadInputError(f"prompt[{index}] must be a non-empty string, got {text!r:.200}{hint}")
    return len(prompts)


def _parse_all_sampling_params(sampling_params: Any) -> Json | list[Json] | None:
    """The sampling parameters of all prompts, or a list with those of each prompt, as they are sent."""
    if is_list(sampling_params):
        return [
            {} if params is None else parse_sampling_params(params, f"sampling_params[{index}]")
            for index, params in enumerate(sampling_params)
        ]
    return None if sampling_params is None else parse_sampling_params(sampling_params)


def _check_vocabulary(body: Json, vocab_size: int) -> None:
    """Raise BadInputError for values beyond the vocabulary that would end SGLang's scheduler."""
    counts, params = body.get("top_logprobs_num"), body["sampling_params"]
    largest = max((count or 0 for count in (counts if is_list(counts) else [counts])), default=0)
    require(
        largest <= vocab_size, f"top_logprobs_num is {largest}, but the model's vocabulary has {vocab_size} token ids"
    )
    for one in params if is_list(params) else [params or {}]:
        token_id = max(one.get("stop_token_ids") or (), default=0)
        require(
            token_id < vocab_size,
            f"stop_token_ids holds token id {token_id}, but the model's vocabulary ends at {vocab_size - 1}",
        )


# -- Payloads ---------------------------------------------------------------------------------------
# Bodies of control and weight requests. Values that would end the server are refused here, before they are sent.

CHECKER_ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")


def abort_payload(rid: str | None, abort_all: bool) -> Json:
    """SGLang aborts the request `rid` and those whose id starts with `rid`. An empty `rid` would abort all requests."""
    require(abort_all or bool(rid), "abort_request needs a non-empty rid, or abort_all=True")
    return {"rid": rid or "", "abort_all": abort_all}


def pause_payload(mode: str) -> Json:
    modes = [each.value for each in PauseMode if each is not PauseMode.WAIT]
    if mode == PauseMode.WAIT:
        raise BadInputError(
            f"one server cannot wait for its requests, because new requests keep arriving: use one of {modes}"
        )
    require(mode in modes, f"pause mode must be one of {modes}, got {mode!r}")
    return {"mode": str(mode)}


def check_tensor_payloads(
    serialized_named_tensors: Any, tp_size: int, load_format: str | None, weight_loaders: Sequence[str]
) -> None:
    """Refuse payloads that would end the server: a wrong number of payloads, undecodable data, unknown load formats.

    `weight_loaders` are the server's custom weight loaders, which are load formats as well.
    """
    require(
        isinstance(serialized_named_tensors, (list, tuple))
        and all(isinstance(item, str) for item in serialized_named_tensors),
        "serialized_named_tensors must be a list of base64 strings, one per TP rank",
    )
    require(
        len(serialized_named_tensors) == tp_size,
        f"{len(serialized_named_tensors)} payloads for {tp_size} TP ranks; SGLang needs one payload for each TP rank",
    )
    formats = (None, "flattened_bucket", *weight_loaders)
    require(
        load_format in formats, f"load_format {load_format!r} would end this server; it accepts one of {list(formats)}"
    )
    for rank, item in enumerate(serialized_named_tensors):
        try:
            for _ in pickletools.genops(base64.b64decode(item, validate=True)):
                pass
        except ValueError as error:
            raise BadInputError(f"payload {rank} is not the base64 text of a pickle of tensors: {error}") from error


def update_from_tensor_payload(
    serialized_named_tensors: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: int | None
) -> Json:
    """`serialized_named_tensors` holds one base64 payload per TP rank."""
    body = {"serialized_named_tensors": list(serialized_named_tensors)}
    return _update_payload(body, load_format, flush_cache, weight_version)


def update_from_distributed_payload(
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None,
    flush_cache: bool,
    weight_version: int | None,
) -> Json:
    require(
        len(names) == len(dtypes) == len(shapes) > 0,
        f"names, dtypes and shapes must be equally many, and not none: got {len(names)} names, {len(dtypes)} dtypes "
        f"and {len(shapes)} shapes",
    )
    body = {
        "names": list(names),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
    }
    return _update_payload(body, load_format, flush_cache, weight_version)


def update_from_disk_payload(
    model_path: str | os.PathLike[str], *, load_format: str | None, flush_cache: bool, weight_version: int | None
) -> Json:
    path = to_plain(model_path)
    require(isinstance(path, str) and path != "", f"model_path must be a path, got {model_path!r}")
    return _update_payload({"model_path": path}, load_format, flush_cache, weight_version)


def _update_payload(body: Json, load_format: str | None, flush_cache: bool, weight_version: int | None) -> Json:
    """Add the fields that all weight updates share. SGLang labels weights with strings."""
    body["flush_cache"] = flush_cache
    if load_format is not None:
        body["load_format"] = load_format
    if weight_version is not None:
        body["weight_version"] = weight_version_label(weight_version)
    return body


def weight_version_label(weight_version: int) -> str:
    """The server's label of a weight version. No client could read the replies of a server with another label."""
    require(
        is_whole_number(weight_version) and weight_version >= 0,
        f"weight_version must be a whole number of at least 0, got {weight_version!r}",
    )
    return str(int(weight_version))


def checker_payload(action: str) -> Json:
    require(action in CHECKER_ACTIONS, f"weights_checker knows the actions {CHECKER_ACTIONS}, got {action!r}")
    return {"action": action}


def load_lora_payload(name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], tp_size: int) -> Json:
    """The whole LoRA adapter for each TP rank, with SHA-256 sums that every TP rank compares."""
    cpu_tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    serialized = base64.b64encode(pickle.dumps(cpu_tensors)).decode()
    return {
        "lora_name": name,
        "config_dict": dict(config),
        "serialized_named_tensors": [serialized] * tp_size,
        "expected_checksums": {name: _sha256(tensor) for name, tensor in cpu_tensors.items()},
    }


def _sha256(tensor: torch.Tensor) -> str:
    import torch

    return sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
