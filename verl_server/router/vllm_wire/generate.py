"""The routes of vLLM-RL servers that generate, `/inference/v1/generate` and `/v1/completions`: vLLM's names."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from verl_server.adapter.vllm.replies import NO_LOGPROB
from verl_server.adapter.vllm.requests import GRAMMARS, MAX_LOGPROBS, RETURNED_ID_PREFIX, SAMPLING_NAMES
from verl_server.errors import BadInputError
from verl_server.router.dispatcher import Dispatcher, gather_all
from verl_server.router.request_checks import json_response, parse_object, read_body, validate_id
from verl_server.router.resumable_generation import version_spans
from verl_server.router.vllm_wire.models import ServedModel, ServedModels
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool, is_list, is_whole_number

# -- Logprobs ---------------------------------------------------------------------------------------
# Log probabilities, finish reasons and weight versions of a generation as vLLM returns them. Pure functions.


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


# -- Fields -----------------------------------------------------------------------------------------
# vLLM's names, and the request with the names of this library. Pure functions.
#
# vLLM ignores fields and sampling parameters that it does not know. Here they are refused: a misspelled one would have
# no effect.

MAX_SAMPLES = 1024
"""Maximum of `n`. Each sample is a generation of its own."""
#: vLLM's sampling parameters, and the names of the same parameters in this library (SGLang's names).
_NAMES: Mapping[str, str] = {
    "include_stop_str_in_output": "no_stop_trim",
    **{theirs: ours for ours, theirs in SAMPLING_NAMES.items() if theirs not in ("n", "stream_interval")},
}
#: Keys of vLLM's `structured_outputs`, and the names of the same grammars in this library.
_GRAMMARS: Mapping[str, str] = {theirs: ours for ours, theirs in GRAMMARS.items()}
_SAMPLING_FIELDS = frozenset({*_NAMES, "n", "logprobs", "prompt_logprobs", "structured_outputs"})
_ROUTER_FIELDS = frozenset({"session_id", "weight_version", "min_weight_version", "timeout_s"})
_BODY_FIELDS = frozenset({"request_id", "model", "return_token_ids", "cache_salt", *_ROUTER_FIELDS})
_GENERATE_FIELDS = frozenset({"token_ids", "sampling_params", *_BODY_FIELDS})
_COMPLETION_FIELDS = frozenset({"prompt", *_SAMPLING_FIELDS, *_BODY_FIELDS})
#: Fields and parameters that change no token of a reply. Trainers also send some that vLLM does not know.
_WITHOUT_EFFECT = frozenset({
    "output_kind", "stream_interval", "skip_clone", "flat_logprobs", "detokenize", "routed_experts_prompt_start",
    "routed_experts_start_len", "reasoning_effort", "token_offsets", "stream_options",
})  # fmt: skip
_WITHOUT_EFFECT_ON_COMPLETIONS = frozenset({
    *_WITHOUT_EFFECT, "user", "return_tokens_as_token_ids", "add_special_tokens", "service_tier", "metadata",
})  # fmt: skip
#: Fields and parameters without a counterpart here, with their default value in vLLM. None and other empty values have
#: no effect either.
_UNSUPPORTED: Mapping[str, Any] = {
    "allowed_token_ids": None, "bad_words": None, "extra_args": None, "logprob_token_ids": None,
    "prompt_logprob_start": None, "prompt_logprob_token_ids": None, "repetition_detection": None,
    "thinking_token_budget": None, "watermarking": None, "features": None, "content_parts": None, "stream": None,
    "output_mode": "tokens", "priority": None, "kv_transfer_params": None, "ec_transfer_params": None,
    "reasoning_ended": None, "reasoning_parser_kwargs": None, "echo": None, "suffix": None, "best_of": 1,
    "use_beam_search": None, "truncate_prompt_tokens": None, "truncation_side": None, "prompt_embeds": None,
    "length_penalty": 1, "response_format": {"type": "text"}, "vllm_xargs": None,
}  # fmt: skip
_CURES: Mapping[str, str] = {
    "features": "send images to /generate, as `image_data`",
    "content_parts": "send images to /generate, as `image_data`",
    "priority": "low numbers come first in vLLM, and high numbers in SGLang; leave it out",
    "output_mode": "decode token_ids yourself",
}


def known_fields(given: Any, place: str, known: Collection[str], without_effect: Collection[str]) -> Json:
    """The fields of `given` that are known, without those of None. Raises BadInputError for fields that change a reply.

    `place`: what `given` is, for the error.
    """
    if not isinstance(given, Mapping):
        raise BadInputError(f"{place} must be an object, got {type(given).__name__}")
    fields = {name: value for name, value in given.items() if value is not None and name not in without_effect}
    for name, value in fields.items():
        if name in _UNSUPPORTED and (value in (False, 0, "", [], {}) or value == _UNSUPPORTED[name]):
            continue
        if name in _UNSUPPORTED:
            raise BadInputError(f"{name!r} is not supported by this router: {_CURES.get(name, 'leave it out')}")
        if name not in known:
            raise BadInputError(f"there is no {name!r} in {place}{did_you_mean(name, known)}")
    return {name: value for name, value in fields.items() if name in known}


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
    """The sampling parameters of a request. Raises BadInputError. The adapter of a server checks most of the values.

    Without `max_tokens`, and with more than the context has room for, the output may fill the context, as in vLLM.
    `max_model_len`: length of the context in tokens, None if it is not known.
    """
    fields = known_fields(given, "sampling_params", _SAMPLING_FIELDS, {*_WITHOUT_EFFECT, "return_token_ids"})
    params = {"max_new_tokens": None, **{_NAMES[name]: value for name, value in fields.items() if name in _NAMES}}
    if "seed" in fields and not is_whole_number(fields["seed"]):
        raise BadInputError(f"seed must be a whole number, got {fields['seed']!r:.100}")
    if fields.get("seed") == -1:
        del params["sampling_seed"]  # in vLLM, this value means no seed
    if params.get("top_k") == 0:
        params["top_k"] = -1  # both mean all tokens, but SGLang knows only this value
    if params.get("no_stop_trim") is False:
        del params["no_stop_trim"]
    limit, room = params["max_new_tokens"], None if max_model_len is None else max_model_len - num_prompt_tokens
    if room is not None and room > 0 and is_whole_number(limit):  # SGLang refuses more than the context has room for
        params["max_new_tokens"] = min(limit, room)
    n = fields.get("n", 1)
    if not (is_whole_number(n) and 1 <= n <= MAX_SAMPLES):
        raise BadInputError(f"n must be a whole number from 1 to {MAX_SAMPLES}, got {n!r:.100}")
    params |= _grammar(fields.get("structured_outputs", {}))
    return Sampling(params, n, _count(fields, "logprobs"), _count(fields, "prompt_logprobs"))


def _count(given: Mapping[str, Any], name: str) -> int | None:
    """A number of most probable tokens. True stands for 1, as in vLLM, and False for none."""
    value = given.get(name)
    if value is None or is_bool(value):
        return 1 if value else None
    if not (is_whole_number(value) and 0 <= value <= MAX_LOGPROBS):
        raise BadInputError(
            f"{name} must be a whole number from 0 to {MAX_LOGPROBS}, got {value!r:.100}; -1 (all tokens) is refused"
        )
    return int(value)


def _grammar(given: Any) -> Json:
    """The grammar in vLLM's `structured_outputs`."""
    if not isinstance(given, Mapping):
        raise BadInputError(f"structured_outputs must be an object, got {type(given).__name__}")
    named = {name: value for name, value in given.items() if value not in (None, False)}
    if len(named) > 1 or named.keys() - _GRAMMARS.keys():
        raise BadInputError(f"structured_outputs must have one of {sorted(_GRAMMARS)}, got {sorted(named)}")
    return {
        _GRAMMARS[name]: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in named.items()
    }


@dataclass(frozen=True)
class TokenRequest:
    """A request for samples of one prompt of token ids, with the names of this library."""

    prompt: list[int]
    sampling: Sampling
    fields: Json
    """`lora_path` and `extra_key` (vLLM's `cache_salt`), and the fields that the router itself reads."""

    def of_sample(self, index: int) -> Json:
        """The request for one sample, as `Dispatcher.generate_request` takes it, without a request id."""
        return {
            "input_ids": self.prompt,
            "sampling_params": self.sampling.of_sample(index),
            **self.sampling.logprob_fields(),
            **self.fields,
        }


def is_token_completion(body: Json) -> bool:
    """Whether a request has one prompt of token ids, asks for token ids, and is not streamed."""
    prompt = body.get("prompt")
    is_one_prompt = is_list(prompt) and len(prompt) > 0 and not isinstance(prompt[0], str) and not is_list(prompt[0])
    return is_one_prompt and bool(body.get("return_token_ids")) and not body.get("stream")


# -- Replies ----------------------------------------------------------------------------------------

DEFAULT_MAX_TOKENS = 16
"""Maximum number of tokens of a completion without `max_tokens`, as OpenAI documents it."""


def _choices(request: TokenRequest, replies: Sequence[Json]) -> Iterator[tuple[Json, Json, list[Json] | None]]:
    """For each sample: the fields that both routes have in a choice, the reply, and the log probabilities if asked."""
    stop_token_ids: Collection[int] = request.sampling.params.get("stop_token_ids") or ()
    count = request.sampling.logprobs
    for index, reply in enumerate(replies):
        finish_reason, stop_reason = finish_of(reply, stop_token_ids)
        choice = {
            "index": index,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": reply["output_ids"],
            "routed_experts": None,
            "weight_versions": weight_spans(reply),
        }
        yield choice, reply, None if count is None else output_logprobs(reply, count)


def generate_reply(body: Json, request_id: str, request: TokenRequest, replies: Sequence[Json], model: str) -> Json:
    """The reply to a request with this body. Every field of vLLM's reply is there; those without a value are None."""
    count = request.sampling.prompt_logprobs
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
        "choices": [
            {**choice, "sampling_mask": None, "logprobs": None if entries is None else {"content": entries}}
            for choice, _, entries in _choices(request, replies)
        ],
    }


def completion_reply(request_id: str, request: TokenRequest, replies: Sequence[Json], model: str) -> Json:
    """The reply to a request. Every choice has `token_ids`, and the log probabilities of the prompt if asked for.

    `text` is that of the replica: a router cannot decode. It is None where a replica returned none (vLLM's, and after
    the loss of a replica).
    """
    count = request.sampling.prompt_logprobs
    choices = [
        {
            **choice,
            "text": reply.get("text"),
            "logprobs": None if entries is None else _completion_logprobs(entries),
            "prompt_token_ids": request.prompt,
            "prompt_logprobs": None if count is None else prompt_logprobs(reply, count),
        }
        for choice, reply, entries in _choices(request, replies)
    ]
    head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage_of(replies)}


def _completion_logprobs(entries: Sequence[Json]) -> Json:
    """Log probabilities as completions have them. Tokens are written `token_id:N`. Offsets in the text are unknown."""
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
        given = parse_object(await read_body(request))
        body = known_fields(given, "the body of /inference/v1/generate", _GENERATE_FIELDS, _WITHOUT_EFFECT)
        model = await self._models.find(body.get("model"))
        tokens = _token_request(body, "token_ids", body.get("sampling_params", {}), model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request))
        return json_response(generate_reply(body, rid, tokens, replies, model.name))

    async def completions(
        self, request: web.BaseRequest, forward: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """`POST /v1/completions`. Requests with a text as prompt, with several prompts, and streams are forwarded.

        vLLM's request has all sampling parameters beside the prompt.
        """
        given = parse_object(await read_body(request))
        if not is_token_completion(given):
            return await forward(request)
        body = known_fields(
            given, "a completion of a prompt of token ids", _COMPLETION_FIELDS, _WITHOUT_EFFECT_ON_COMPLETIONS
        )
        model = await self._models.find(body.get("model"))
        params = {name: value for name, value in body.items() if name in _SAMPLING_FIELDS}
        tokens = _token_request(body, "prompt", {"max_tokens": DEFAULT_MAX_TOKENS, **params}, model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request))
        return json_response(completion_reply(rid, tokens, replies, model.name))

    async def models(self, _: web.BaseRequest) -> web.StreamResponse:
        """`GET /v1/models`. It is answered also while the router is paused."""
        return json_response(await self._models.listing())

    async def _sample(self, request: TokenRequest, rid: str | None) -> tuple[str, list[Json]]:
        """The id of the request, which is a random one if it has none, and the replies of its samples.

        The samples of a repeated id are those of the first call.
        """
        count = request.sampling.n
        rids = [rid if count == 1 or rid is None else f"{rid}/{index}" for index in range(count)]
        replies = await gather_all(
            self._dispatcher.generate_request({**request.of_sample(index), "rid": sample_rid}, is_remote=True)
            for index, sample_rid in enumerate(rids)
        )
        return rid or uuid.uuid4().hex, replies


def _token_request(body: Json, name: str, params: Any, model: ServedModel, request: web.BaseRequest) -> TokenRequest:
    """The request for one prompt, the field `name` of a body. The adapter of a server checks the token ids."""
    prompt, salt = body.get(name), body.get("cache_salt")
    if not is_list(prompt) or not prompt or is_list(prompt[0]):
        raise BadInputError(f"{name} must be one list of token ids, not empty; send one request for each prompt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadInputError(f"cache_salt must be a non-empty string, got {salt!r:.100}")
    session_id = request.headers.get(SESSION_HEADER) or body.get("session_id")
    fields = {name: body.get(name) for name in _ROUTER_FIELDS}
    fields |= {"session_id": session_id, "lora_path": model.lora_path, "extra_key": salt}
    given = {name: value for name, value in fields.items() if value is not None}
    return TokenRequest(list(prompt), parse_sampling(params, len(prompt), model.max_model_len), given)


def _request_id(body: Json, request: web.BaseRequest) -> str | None:
    """The id that the caller gave to the request. As in vLLM, that of the header comes first."""
    rid = request.headers.get(REQUEST_HEADER) or body.get("request_id")
    validate_id(rid, "request_id")
    return rid
