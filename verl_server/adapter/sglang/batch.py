"""Requests with several prompts: which fields have one value for each prompt, and one request for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import is_list

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
