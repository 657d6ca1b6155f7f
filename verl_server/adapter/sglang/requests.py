"""Bodies of generation requests. They are checked first: SGLang answers some mistakes with a 500 or not at all."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.adapter.json_body import tolist_hint
from verl_server.adapter.sglang.batch import batch_fields, check_lengths, is_batch, plain_prompts
from verl_server.adapter.sglang.request_fields import parse_fields, parse_sampling_params
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import is_list

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


def generate_payload(
    limits: PromptLimits,
    *,
    prompt: str | Sequence[str] | None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    rid: str | Sequence[str] | None,
    stream: bool,
    fields: Mapping[str, Any],
) -> Json:
    """The body of `/generate`. `fields` are further fields of SGLang's `GenerateReqInput`; those of None are left out.

    Raises BadInputError before anything is sent.
    """
    require((prompt is None) != (input_ids is None), "give either `prompt` or `input_ids`, not both or none")
    batch = is_batch(prompt, input_ids)
    require(not (stream and batch), "a stream takes one prompt, got a list: make one call per prompt")
    num_prompts = _check_input_ids(input_ids, limits) if input_ids is not None else _check_prompts(prompt)
    if rid is not None:
        rids = rid if is_list(rid) else [rid]
        require(all(isinstance(r, str) and r for r in rids), f"rid must be a non-empty string, got {rid!r}")
    fields = batch_fields(fields) if batch else fields
    check_lengths({**fields, "sampling_params": sampling_params, "rid": rid}, num_prompts, batch=batch)
    all_params = _parse_all_sampling_params(sampling_params)
    plain = plain_prompts({"prompt": prompt, "input_ids": input_ids})
    body: Json = {"text": plain["prompt"], "input_ids": plain["input_ids"], "sampling_params": all_params, "rid": rid}
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
        _check_token_ids(input_ids, "input_ids", limits)
        return 1
    for index, token_ids in enumerate(input_ids):
        _check_token_ids(token_ids, f"input_ids[{index}]", limits)
    return len(input_ids)


def _check_token_ids(token_ids: Any, name: str, limits: PromptLimits) -> None:
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
