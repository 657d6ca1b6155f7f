"""Bodies of generation requests. They are checked first: SGLang answers some mistakes with a 500 or not at all."""

from __future__ import annotations

import array
import base64
import json
import pickle
import pickletools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from verl_server.config import Finite, NotNegativeInt, PauseMode, PositiveInt
from verl_server.errors import BadInputError, VerlServerError
from verl_server.types import Json, tolist_hint
from verl_server.validation import did_you_mean, is_list, is_whole_number, to_plain

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
    return is_list(prompt) if input_ids is None else is_nested(input_ids)


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
    for name in ("prompt", "input_ids"):
        value = plain.get(name)
        if is_list(value):
            plain[name] = [list(item) if is_list(item) else item for item in value] if is_nested(value) else list(value)
    return plain


def is_nested(value: Any) -> bool:
    """Whether `value` is a list of lists."""
    return is_list(value) and len(value) > 0 and is_list(value[0])


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
# unknown sampling parameter.

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


def _to_token_ids(value: Any) -> Any:
    """Token ids as a list; sets are sorted. SGLang ignores None, for example of a tokenizer without a padding token."""
    if not isinstance(value, (list, set, frozenset)):
        return value
    token_ids = [to_plain(item) for item in value if item is not None]
    return token_ids if isinstance(value, list) else sorted(token_ids)


def _to_logit_bias(value: Any) -> Any:
    """SGLang, like JSON, has strings as keys."""
    return {str(key): bias for key, bias in value.items()} if isinstance(value, Mapping) else value


def _readable_regex(value: str) -> str:
    """SGLang reads it with Python's `re`, whose errors it answers as failures of its own."""
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"be a regular expression of Python ({error})") from None
    return value


def _pickled_processor(value: str) -> str:
    """A JSON object with a pickled class in hexadecimal digits. Another text ends SGLang's scheduler."""
    try:
        if not value or bytes.fromhex(json.loads(value)["callable"])[:1] == b"\x80":
            return value
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError("be the text that SGLang's `CustomLogitProcessor.to_str` returns")


T = TypeVar("T")
PerPrompt: TypeAlias = T | list[T | None] | None
"""A value for the whole request, or a list with one value for each prompt."""
Position = Annotated[int, Field(ge=-1)]
#: A negative token id ends SGLang's scheduler when a request of the same batch has `min_new_tokens`.
TokenIds = Annotated[list[NotNegativeInt], BeforeValidator(_to_token_ids)]
#: A value that is no number would end SGLang's scheduler. JSON has no infinity.
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d+$")], Finite],
    BeforeValidator(_to_logit_bias),
]
Regex = Annotated[str, Field(max_length=256), AfterValidator(_readable_regex)]
Processor = Annotated[str, AfterValidator(_pickled_processor)]


_STRICT = ConfigDict(strict=True, extra="allow")


@with_config(_STRICT)
class SamplingParams(TypedDict, total=False):
    """Fields of SGLang's `SamplingParams` (`sglang/srt/sampling/sampling_params.py`) in 0.5.15 or 0.5.23.

    SGLang does not always say which field has a value of a wrong type. The server checks the ranges, and parameters
    that are not listed here.
    """

    max_new_tokens: NotNegativeInt | None
    min_new_tokens: NotNegativeInt | None
    n: PositiveInt | None
    temperature: Finite | None
    top_p: Finite | None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None
    min_p: Finite | None
    frequency_penalty: Finite | None
    presence_penalty: Finite | None
    repetition_penalty: Finite | None
    stop: str | list[str] | None
    stop_regex: Regex | Annotated[list[Regex], Field(max_length=32)] | None
    stop_token_ids: TokenIds | None
    ignore_eos: bool | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    json_schema: str | None
    structural_tag: str | None
    regex: str | None
    ebnf: str | None
    logit_bias: LogitBias | None
    sampling_seed: int | None
    stream_interval: int | None
    beam_width: int | None
    custom_params: Any
    watermark: Any


@with_config(_STRICT)
class CheckedFields(TypedDict, total=False):
    """Request fields whose value is checked. SGLang does not check them, and some other values end its scheduler."""

    return_logprob: PerPrompt[bool]
    logprob_start_len: PerPrompt[Position]
    top_logprobs_num: PerPrompt[NotNegativeInt]
    token_ids_logprob: PerPrompt[TokenIds]
    lora_path: PerPrompt[str]
    custom_logit_processor: PerPrompt[Processor]
    cache_salt: PerPrompt[str]
    extra_key: PerPrompt[str]
    priority: int | None
    session_id: str | None


# Dicts, not models: the router parses each request, and a model with its dump takes eight times as long.
_SAMPLING_PARAMS, _CHECKED_FIELDS = TypeAdapter(SamplingParams), TypeAdapter(CheckedFields)

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
            hint = (
                f"; {name!r} is a field of routers: use a fleet (VerlEngine(fleet=RolloutManager(...)) without "
                "stream=True), RolloutManager.router or RouterClient"
            )
        elif name in SamplingParams.__annotations__:
            hint = f"; pass it as sampling_params={{{name!r}: ...}}"
        else:
            similar = did_you_mean(name, {*server_fields, *ROUTER_FIELDS, *SamplingParams.__annotations__})
            hint = similar or "; those of SGLang are the fields of its class GenerateReqInput"
        raise BadInputError(f"the server has no request field {name!r}{hint}")


def parse_fields(fields: Mapping[str, Any], *, batch: bool) -> Json:
    """The request fields that are not None, with the types that JSON has. `batch`: there is a list of prompts.

    Raises BadInputError for a wrong value. In a list with one value for each prompt, None means SGLang's default.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    parsed = _parse(_CHECKED_FIELDS, given, "{}")
    for name, value in parsed.items():
        if has_value_per_prompt(name, value, batch=batch):
            parsed[name] = [_DEFAULTS.get(name) if item is None else item for item in value]
    return parsed


def parse_sampling_params(params: Any, name: str = "sampling_params") -> Json:
    """A copy of the sampling parameters with the types that JSON has.

    Raises BadInputError for a wrong type, and for an argument of `generate`: an engine only says that it is unknown.
    """
    if not (isinstance(params, Mapping) and all(isinstance(key, str) for key in params)):
        raise BadInputError(f"{name} must be a dict with strings as keys, got {params!r:.200}")
    for key in params.keys() & _ARGUMENTS:
        raise BadInputError(
            f"{key!r} is no sampling parameter but an argument of generate: pass it as generate(..., {key}=...)"
        )
    return _parse(_SAMPLING_PARAMS, params, name + "[{!r}]")


def _parse(adapter: TypeAdapter[Any], given: Mapping[str, Any], place: str) -> Json:
    """The given values with the types that JSON has. `place` makes the name of a field, for the error."""
    try:
        return dict(adapter.validate_python(to_plain(given)))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        field = first["loc"][0]
        same = [first, *(each for each in others if each["loc"][0] == field)]
        wanted = dict.fromkeys(
            re.sub(r"^(Value error, |\w+ should (?=be|have|match))", "", each["msg"]) for each in same
        )
        value = given[str(field)]
        hint = tolist_hint(value)
        raise BadInputError(f"{place.format(field)} must {' or '.join(wanted)}, got {value!r:.200}{hint}") from None


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
    """The error for a request that a server did not answer: names its misspelled sampling parameters, if it has any.

    SGLang 0.5.23 names an unknown parameter in its answer 400. SGLang 0.5.15 answers 500, as for failures of its own,
    which would count against the replica: there, names that are similar to a known one are taken for misspelled.
    """
    is_failure = error.details.get("status") == 500
    if not is_failure and not isinstance(error, BadInputError):
        return error
    known = SamplingParams.__annotations__
    all_params = sampling_params if is_list(sampling_params) else [sampling_params or {}]
    unlisted = sorted({name for params in all_params for name in params or {} if name not in known})
    hints = {name: did_you_mean(name, known) for name in unlisted}
    named = [f"{name!r}{hint}" for name, hint in hints.items() if (hint if is_failure else name in error.message)]
    if not named:
        return error
    return BadInputError(f"the server has no sampling parameter {', '.join(named)} ({error.message})", **error.details)


# -- Requests ---------------------------------------------------------------------------------------

#: Fields of a request that `generate_payload` reads itself.
_PARSED_FIELDS = ("prompt", "input_ids", "sampling_params", "rid")
#: Arguments of `generate`, which are no sampling parameters.
_ARGUMENTS = frozenset({*REQUEST_FIELDS, *ROUTER_FIELDS, *_PARSED_FIELDS, "stream"})


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
    num_prompts = _check_prompts(prompt) if input_ids is None else _check_input_ids(input_ids, limits)
    rids = [] if rid is None else rid if is_list(rid) else [rid]
    require(all(isinstance(each, str) and each for each in rids), f"rid must be a non-empty string, got {rid!r}")
    request = batch_fields(request) if batch else request
    check_lengths(request, num_prompts, batch=batch)
    plain = plain_prompts({"prompt": prompt, "input_ids": input_ids})
    body: Json = {
        "text": plain["prompt"],
        "input_ids": plain["input_ids"],
        "sampling_params": _parse_all_sampling_params(sampling_params),
        "rid": rid,
        **parse_fields({name: each for name, each in request.items() if name not in _PARSED_FIELDS}, batch=batch),
        "stream": True if stream else None,
    }
    if limits.vocab_size is not None:
        _check_vocabulary(body, limits.vocab_size)
    return {name: value for name, value in body.items() if value is not None}


def _check_input_ids(input_ids: Any, limits: PromptLimits) -> int:
    """Check one prompt or a list of prompts, given as token ids. Returns the number of prompts."""
    if not is_nested(input_ids):
        check_token_ids(input_ids, "input_ids", limits)
        return 1
    for index, token_ids in enumerate(input_ids):
        check_token_ids(token_ids, f"input_ids[{index}]", limits)
    return len(input_ids)


def check_token_ids(token_ids: Any, name: str, limits: PromptLimits) -> None:
    """Check one prompt. On the hot path: takes about 3 microseconds for a short prompt and 0.3 ms for 32k tokens."""
    require_token_ids(name, token_ids)
    require(len(token_ids) > 0, f"{name} is empty: a prompt needs at least one token")
    try:
        largest = int(np.frombuffer(array.array("I", token_ids), dtype=np.uint32).max())
    except (TypeError, OverflowError) as error:
        raise BadInputError(f"{name} must hold token ids, whole numbers from 0 to 2**32 - 1: {error}") from error
    if limits.vocab_size is not None and largest >= limits.vocab_size:
        raise BadInputError(
            f"{name} holds token id {largest}, but the model's vocabulary ends at {limits.vocab_size - 1}"
        )
    if limits.max_prompt_tokens is not None and len(token_ids) > limits.max_prompt_tokens:
        raise BadInputError(
            f"{name} has {len(token_ids)} tokens; the server accepts at most {limits.max_prompt_tokens} tokens"
        )


def _check_prompts(prompt: Any) -> int:
    """Check one prompt or a list of prompts, given as text. Returns the number of prompts."""
    prompts = prompt if is_list(prompt) else [prompt]
    require(len(prompts) > 0, "prompt is empty: a list of prompts needs at least one prompt")
    for index, text in enumerate(prompts):
        if not (isinstance(text, str) and text):
            raise BadInputError(
                f"prompt[{index}] must be a non-empty string, got {text!r:.200}; pass token ids as `input_ids=`"
            )
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


def pause_payload(mode: str) -> Json:
    modes = [each.value for each in PauseMode if each is not PauseMode.WAIT]
    if mode == PauseMode.WAIT:
        raise BadInputError(
            f"one server cannot wait for its requests, because new requests keep arriving: use one of {modes}"
        )
    require(mode in modes, f"pause mode must be one of {modes}, got {mode!r}")
    return {"mode": str(mode)}


def check_tensor_payloads(
    payloads: Sequence[str], tp_size: int, load_format: str | None, weight_loaders: Sequence[str]
) -> None:
    """Refuse payloads that would end the server: a wrong number of payloads, undecodable data, unknown load formats.

    `weight_loaders` are the server's custom weight loaders, which are load formats as well.
    """
    require(
        len(payloads) == tp_size,
        f"{len(payloads)} payloads for {tp_size} TP ranks; SGLang needs one payload for each TP rank",
    )
    formats = (None, "flattened_bucket", *weight_loaders)
    require(
        load_format in formats, f"load_format {load_format!r} would end this server; it accepts one of {list(formats)}"
    )
    for rank, item in enumerate(payloads):
        try:
            for _ in pickletools.genops(base64.b64decode(item, validate=True)):
                pass
        except (TypeError, ValueError) as error:
            raise BadInputError(f"payload {rank} is not the base64 text of a pickle of tensors: {error}") from error


def update_payload(body: Json, load_format: str | None, flush_cache: bool, weight_version: int | None) -> Json:
    """The body of a weight update with the fields that all of them share. SGLang labels weights with strings."""
    version = None if weight_version is None else weight_version_label(weight_version)
    body |= {"load_format": load_format, "flush_cache": flush_cache, "weight_version": version}
    return {name: value for name, value in body.items() if value is not None}


def weight_version_label(weight_version: int) -> str:
    """The server's label of a weight version. No client could read the replies of a server with another label."""
    require(
        is_whole_number(weight_version) and weight_version >= 0,
        f"weight_version must be a whole number of at least 0, got {weight_version!r}",
    )
    return str(int(weight_version))


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
