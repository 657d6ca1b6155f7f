"""vLLM's `/inference/v1/generate`: the request of a router for its body, and the body of its reply. Pure functions."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from verl_server.errors import BadInputError
from verl_server.router.dispatcher import Dispatcher, gather_all
from verl_server.router.request_checks import json_response, parse_object, read_body, validate_id
from verl_server.router.resumable_generation import version_spans
from verl_server.router.rl_wire.models import ServedModel, ServedModels
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_list, is_whole_number

# -- Logprobs ---------------------------------------------------------------------------------------
# Log probabilities, finish reasons and weight versions of a generation as vLLM returns them. Pure functions.

NO_LOGPROB = -9999.0
"""What vLLM sends for a log probability of minus infinity."""


def finish_of(reply: Json, stop_token_ids: Collection[int]) -> tuple[str, int | str | None]:
    """vLLM's `finish_reason` and `stop_reason`: the stop string or the token of `stop_token_ids` that has matched."""
    reason = reply["meta_info"].get("finish_reason") or {}
    matched = reason.get("matched")
    has_stopped = isinstance(matched, str) or (isinstance(matched, int) and matched in stop_token_ids)
    return str(reason.get("type") or "stop"), matched if has_stopped else None


def weight_spans(reply: Json) -> list[Json]:
    """The weight version of each part of the output. vLLM's versions are strings."""
    spans = [span for span in version_spans(reply) if span["end"] > span["start"]]
    return [{"version": str(span["version"]), "start": span["start"], "end": span["end"]} for span in spans]


def usage_of(replies: Sequence[Json]) -> Json:
    """The numbers of tokens of one prompt and all of its samples. Replicas of vLLM do not tell the cached ones."""
    prompt_tokens = int(replies[0]["meta_info"].get("prompt_tokens") or 0)
    output_tokens = sum(len(reply["output_ids"]) for reply in replies)
    cached = int(replies[0]["meta_info"].get("cached_tokens") or 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


def output_logprobs(reply: Json, count: int) -> list[Json]:
    """One entry for each output token: the sampled token with its `count` most probable tokens, at least itself.

    The sampled token is the first of them. Each token has both of its names: the number `token_id`, which vLLM 0.32
    returns, and `token` in the form `token_id:N`, which the client `renderers` 0.1.12 requires.
    """
    meta = reply["meta_info"]
    sampled, tops = meta.get("output_token_logprobs") or (), meta.get("output_top_logprobs") or ()
    entries = list[Json]()
    for position, (logprob, token_id, *_) in enumerate(sampled):
        top = (tops[position] if position < len(tops) else None) or ()
        candidates = _candidates(logprob, token_id, top)
        entries.append({**candidates[0], "top_logprobs": candidates[: max(count, 1)]})
    return entries


def prompt_logprobs(reply: Json, count: int) -> list[Any]:
    """One entry for each token of the prompt: log probabilities by token id, that of the prompt's token first.

    None for the first token, which nothing precedes.
    """
    meta = reply["meta_info"]
    tokens, tops = meta.get("input_token_logprobs") or (), meta.get("input_top_logprobs") or ()
    entries = list[Any]()
    for position, (logprob, token_id, *_) in enumerate(tokens):
        if logprob is None:
            entries.append(None)
            continue
        top = (tops[position] if position < len(tops) else None) or ()
        kept = _candidates(logprob, token_id, top[:count])
        entries.append({
            str(each["token_id"]): {"logprob": each["logprob"], "rank": each["rank"], "decoded_token": None}
            for each in kept
        })  # fmt: skip
    return entries


def _candidates(logprob: float, token_id: int, top: Sequence[Any]) -> list[Json]:
    """The token itself and then the most probable other tokens. The rank is None for a token that is not among them."""
    ranks = {each[1]: rank for rank, each in enumerate(top, start=1)}
    own = _candidate(logprob, token_id, ranks.get(token_id))
    return [own, *(_candidate(each[0], each[1], ranks[each[1]]) for each in top if each[1] != token_id)]


def _candidate(logprob: float, token_id: int, rank: int | None) -> Json:
    value = NO_LOGPROB if logprob is None else max(float(logprob), NO_LOGPROB)
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value, "rank": rank}


# -- Sampling ---------------------------------------------------------------------------------------
# vLLM's sampling parameters, and the request with the names of this library. Pure functions.
#
# vLLM ignores parameters that it does not know. Here they are refused: a misspelled parameter would have no effect.

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
_PARAMETERS_WITHOUT_EFFECT = frozenset({
    "output_kind", "stream_interval", "skip_clone", "flat_logprobs", "detokenize", "routed_experts_prompt_start",
    "routed_experts_start_len", "reasoning_effort", "return_token_ids",
})  # fmt: skip
#: vLLM's parameters without a counterpart. Their default values are accepted.
_UNSUPPORTED_PARAMETERS = frozenset({
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
        if value is None or name in _COUNTS or name in _PARAMETERS_WITHOUT_EFFECT:
            continue
        if name in _UNSUPPORTED_PARAMETERS:
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


# -- Generate ---------------------------------------------------------------------------------------

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


# -- Completions ------------------------------------------------------------------------------------
# `/v1/completions` with a prompt of token ids and `return_token_ids`: the body, and the body of the reply. Pure.
#
# vLLM's request has all sampling parameters beside the prompt. Its reply has text, which a router cannot decode:
# `text` is that of the replica, and None where a replica returned none (vLLM's, and after the loss of a replica).

DEFAULT_MAX_TOKENS = 16
"""Maximum number of tokens of a completion without `max_tokens`, as OpenAI documents it."""
#: Fields that are no sampling parameters. The last three are those of routers of this library.
_OWN_FIELDS = frozenset({
    "model", "prompt", "stream", "stream_options", "user", "return_token_ids", "return_tokens_as_token_ids",
    "request_id", "session_id", "cache_salt", "priority", "add_special_tokens", "service_tier", "metadata",
    "weight_version", "min_weight_version", "timeout_s",
})  # fmt: skip
#: Fields without a counterpart here, with the values that have no effect.
_UNSUPPORTED_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "echo": (None, False), "suffix": (None, ""), "best_of": (None, 1), "use_beam_search": (None, False),
    "truncate_prompt_tokens": (None,), "truncation_side": (None,), "prompt_embeds": (None,),
    "length_penalty": (None, 1), "response_format": (None, {"type": "text"}),
    "kv_transfer_params": (None,), "ec_transfer_params": (None,), "vllm_xargs": (None, {}),
}  # fmt: skip


def is_token_completion(body: Json) -> bool:
    """Whether a request has one prompt of token ids, asks for token ids, and is not streamed."""
    prompt = body.get("prompt")
    is_one_prompt = is_list(prompt) and len(prompt) > 0 and not isinstance(prompt[0], str) and not is_list(prompt[0])
    return is_one_prompt and bool(body.get("return_token_ids")) and not body.get("stream")


def sampling_of_completion(body: Json) -> Json:
    """vLLM's sampling parameters in a body. Raises BadInputError for fields that are not supported."""
    for name, accepted in _UNSUPPORTED_OF_COMPLETIONS.items():
        if body.get(name) not in accepted:
            raise BadInputError(f"{name} is not supported beside a prompt of token ids; leave it out")
    require_no_priority(body)
    params = {
        name: value
        for name, value in body.items()
        if name not in _OWN_FIELDS and name not in _UNSUPPORTED_OF_COMPLETIONS and value is not None
    }
    return {"max_tokens": DEFAULT_MAX_TOKENS, **params}


def completion_reply(request_id: str, request: TokenRequest, replies: Sequence[Json], model: str) -> Json:
    """The reply to a request. Every choice has `token_ids`, and the log probabilities of the prompt if asked for."""
    sampling = request.sampling
    stop_token_ids: Collection[int] = sampling.params.get("stop_token_ids") or ()
    choices = list[Json]()
    for index, reply in enumerate(replies):
        finish_reason, stop_reason = finish_of(reply, stop_token_ids)
        count = sampling.prompt_logprobs
        choices.append({
            "index": index,
            "text": reply.get("text"),
            "logprobs": None if sampling.logprobs is None else _logprobs(reply, sampling.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": reply["output_ids"],
            "prompt_token_ids": request.prompt,
            "prompt_logprobs": None if count is None else prompt_logprobs(reply, count),
            "routed_experts": None,
            "weight_versions": weight_spans(reply),
        })  # fmt: skip
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage_of(replies)}


def _logprobs(reply: Json, count: int) -> Json:
    """Log probabilities as completions have them. Tokens are written `token_id:N`. Offsets in the text are unknown."""
    entries = output_logprobs(reply, count)
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": [],
    }


# -- Routes -----------------------------------------------------------------------------------------
# `RlRoutes`: handlers of the routes of vLLM-RL servers that generate, and of `/v1/models`.

SESSION_HEADER, REQUEST_HEADER = "X-Session-ID", "X-Request-Id"


class RlRoutes:
    """Requests with vLLM's names. Each sample is a generation of the `Dispatcher`, which survives lost replicas."""

    def __init__(self, dispatcher: Dispatcher, models: ServedModels) -> None:
        self._dispatcher, self._models = dispatcher, models

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """`POST /inference/v1/generate`."""
        body = parse_object(await read_body(request))
        check_generate_body(body)
        model = await self._models.find(body.get("model"))
        tokens = _token_request(body, body["token_ids"], body.get("sampling_params", {}), model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request), "token_ids", "sampling_params")
        return json_response(generate_reply(body, rid, tokens, replies, model.name))

    async def completions(
        self, request: web.BaseRequest, forward: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """`POST /v1/completions`. Requests with a text as prompt, with several prompts, and streams are forwarded."""
        body = parse_object(await read_body(request))
        if not is_token_completion(body):
            return await forward(request)
        params = sampling_of_completion(body)
        model = await self._models.find(body.get("model"))
        tokens = _token_request(body, body["prompt"], params, model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request), "prompt", "")
        return json_response(completion_reply(rid, tokens, replies, model.name))

    async def models(self, _: web.BaseRequest) -> web.StreamResponse:
        """`GET /v1/models`. It is answered also while the router is paused."""
        return json_response(await self._models.listing())

    async def _sample(self, request: TokenRequest, rid: str | None, prompt: str, params: str) -> tuple[str, list[Json]]:
        """The id of the request, which is a random one if it has none, and the replies of its samples.

        The samples of a repeated id are those of the first call. `prompt` and `params`: see `with_given_names`.
        """
        count = request.sampling.n
        rids = [rid if count == 1 or rid is None else f"{rid}/{index}" for index in range(count)]
        try:
            replies = await gather_all(
                self._dispatcher.generate_request({**request.of_sample(index), "rid": sample_rid}, is_remote=True)
                for index, sample_rid in enumerate(rids)
            )
        except BadInputError as error:
            raise with_given_names(error, prompt, params) from error
        return rid or uuid.uuid4().hex, replies


def _token_request(body: Json, prompt: Any, params: Any, model: ServedModel, request: web.BaseRequest) -> TokenRequest:
    require_prompt(prompt, "the prompt")
    sampling = parse_sampling(params, len(prompt), model.max_model_len)
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadInputError(f"cache_salt must be a non-empty string, got {salt!r:.100}")
    session_id = request.headers.get(SESSION_HEADER) or body.get("session_id")
    return TokenRequest(list(prompt), sampling, model.lora_path, salt, router_fields_of(body, session_id))


def _request_id(body: Json, request: web.BaseRequest) -> str | None:
    """The id that the caller gave to the request. As in vLLM, that of the header comes first."""
    rid = request.headers.get(REQUEST_HEADER) or body.get("request_id")
    validate_id(rid, "request_id")
    return rid
