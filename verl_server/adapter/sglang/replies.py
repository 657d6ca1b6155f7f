"""SGLang's replies: errors, weight versions, and what a server reports about itself."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from verl_server.adapter.sglang.requests import PromptLimits
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.platforms.server_report import PARAMETER_DTYPES, RELEASED_MEMORY
from verl_server.types import Json, parse_weight_version

# -- Finish reasons ---------------------------------------------------------------------------------
# Finish reasons of aborted generations. Pure functions.
#
# SGLang runs one more step for a request that it aborts, and the abort hides what that step has found: an end token,
# or the maximum number of tokens. Such a generation is finished. To continue it would add tokens after its end.

DEFAULT_MAX_NEW_TOKENS = 128
"""`max_new_tokens` of SGLang for a request without it. None means no limit: the output may fill the context."""


ADDITIONAL_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens with which SGLang ends a generation if the tokenizer has added them."""


def find_end_tokens(model_config: Json, generation_config: Json, tokenizer_config: Json) -> frozenset[int]:
    """The ids of the end tokens that a model's configuration files name. Those of its tokenizer may differ."""
    found: set[int] = set()
    for config in (model_config, model_config.get("text_config") or {}, generation_config):
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    token = tokenizer_config.get("eos_token")
    names = {token.get("content") if isinstance(token, dict) else token, *ADDITIONAL_END_TOKENS}
    added = tokenizer_config.get("added_tokens_decoder") or {}
    return frozenset(found).union(int(token_id) for token_id, item in added.items() if item.get("content") in names)


def correct_aborts(replies: Sequence[Json], sampling_params: Any, end_tokens: Collection[int]) -> None:
    """Give each reply that was aborted at its end the finish reason `stop` or `length`.

    `sampling_params` as they were sent: a dict, or a list with one dict for each prompt. Such a list with several
    samples for each prompt is left out.
    """
    if isinstance(sampling_params, list) and len(sampling_params) != len(replies):
        return
    for number, reply in enumerate(replies):
        params = sampling_params[number] if isinstance(sampling_params, list) else sampling_params
        reason = _reason_at_end(reply, params or {}, end_tokens)
        if reason is not None:
            reply["meta_info"]["finish_reason"] = reason


def _reason_at_end(reply: Json, params: Mapping[str, Any], end_tokens: Collection[int]) -> Json | None:
    reason, output_ids = reply["meta_info"].get("finish_reason") or {}, reply.get("output_ids")
    if reason.get("type") != "abort" or reason.get("status_code") or not output_ids:
        return None
    last, limit = output_ids[-1], params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    may_stop = not params.get("ignore_eos") and len(output_ids) >= (params.get("min_new_tokens") or 0)
    if may_stop and (last in end_tokens or last in (params.get("stop_token_ids") or ())):
        return {"type": "stop", "matched": last}
    if limit is not None and len(output_ids) >= limit:
        return {"type": "length", "length": limit}
    return None


# -- Endpoints --------------------------------------------------------------------------------------
# SGLang's HTTP routes: the key that a route needs, its class of deadline, and whether a request may be retried.


class OperationKind(enum.Enum):
    """Classes of operations. Each class has its own deadline in `Timeouts`."""

    CONTROL = "control"
    WEIGHTS = "weights"
    GENERATION = "generation"


@dataclass(frozen=True)
class Endpoint:
    """One HTTP route of the server."""

    path: str
    kind: OperationKind = OperationKind.CONTROL
    method: str = "POST"
    needs_admin_key: bool = False
    retryable: bool = False
    """Whether the request can be sent a second time without harm, for example after a broken connection."""
    is_optional: bool = False
    """Whether some supported versions of SGLang do not have the route."""
    reply_types: type | tuple[type, ...] = object
    """Types that the JSON of a successful reply can have. A reply of another type does not come from SGLang."""


_WEIGHTS = OperationKind.WEIGHTS

GENERATE = Endpoint("/generate", OperationKind.GENERATION, reply_types=(dict, list))
ABORT = Endpoint("/abort_request", needs_admin_key=True, retryable=True)
PAUSE = Endpoint("/pause_generation", needs_admin_key=True, retryable=True)
CONTINUE = Endpoint("/continue_generation", needs_admin_key=True, retryable=True)
FLUSH = Endpoint("/flush_cache", needs_admin_key=True, retryable=True)
BEGIN_UPDATE = Endpoint("/begin_weight_update", _WEIGHTS, needs_admin_key=True, is_optional=True)
END_UPDATE = Endpoint("/end_weight_update", _WEIGHTS, needs_admin_key=True, is_optional=True)
UPDATE_FROM_TENSOR = Endpoint("/update_weights_from_tensor", _WEIGHTS, needs_admin_key=True)
UPDATE_FROM_DISTRIBUTED = Endpoint("/update_weights_from_distributed", _WEIGHTS, needs_admin_key=True)
UPDATE_FROM_DISK = Endpoint("/update_weights_from_disk", _WEIGHTS, needs_admin_key=True)
INIT_UPDATE_GROUP = Endpoint("/init_weights_update_group", _WEIGHTS, needs_admin_key=True)
DESTROY_UPDATE_GROUP = Endpoint("/destroy_weights_update_group", _WEIGHTS, needs_admin_key=True)
WEIGHT_VERSION = Endpoint("/update_weight_version", needs_admin_key=True, retryable=True)
LOAD_LORA = Endpoint("/load_lora_adapter_from_tensors", _WEIGHTS, needs_admin_key=True)
UNLOAD_LORA = Endpoint("/unload_lora_adapter", _WEIGHTS, needs_admin_key=True)
WEIGHTS_CHECKER = Endpoint("/weights_checker", _WEIGHTS, needs_admin_key=True, is_optional=True)
RELEASE_MEMORY = Endpoint("/release_memory_occupation", needs_admin_key=True)
RESUME_MEMORY = Endpoint("/resume_memory_occupation", needs_admin_key=True)
#: Reports settings of a cache. The only route with an admin key that changes nothing and asks no other process.
ADMIN_STATUS = Endpoint(
    "/hicache/storage-backend", method="GET", needs_admin_key=True, retryable=True, is_optional=True
)
OPENAPI = Endpoint("/openapi.json", method="GET", retryable=True, is_optional=True, reply_types=dict)
MODEL_INFO = Endpoint("/model_info", method="GET", retryable=True, reply_types=dict)
SERVER_INFO = Endpoint("/server_info", method="GET", retryable=True, reply_types=dict)
#: The served model, and its LoRA adapters as models with a `parent`.
MODELS = Endpoint("/v1/models", method="GET", retryable=True, reply_types=dict)
LOADS = Endpoint("/v1/loads", method="GET", retryable=True, is_optional=True, reply_types=dict)
READY = Endpoint("/ready", method="GET", retryable=True)
HEALTH = Endpoint("/health", method="GET", retryable=True)
PING = Endpoint("/ping", method="GET", retryable=True)


# -- Replies ----------------------------------------------------------------------------------------

MAX_MESSAGE_CHARACTERS = 2000
MAX_LOGPROB = 1e-3
"""Log probabilities are at most 0, but for rounding."""
MAX_SHOWN_BYTES = 200
"""Number of bytes that an error shows of a reply that SGLang does not send."""
JSON_TYPE, HTML_TYPE = "application/json", "text/html"


def parse_json_or_text(raw: bytes) -> Any:
    """The body of an error reply: JSON, or text, which also proxies in front of a server send."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode("utf-8", "replace")


def decode_reply(raw: bytes, content_type: str, endpoint: Endpoint, url: str) -> Any:
    """The body of a successful reply: JSON, or text where SGLang sends none.

    Raises ServerError for a reply that SGLang does not send: HTML, JSON that cannot be read or of another type than
    `endpoint` has.
    """
    reply: Any = raw.decode("utf-8", "replace")
    try:
        if raw and content_type == JSON_TYPE:
            reply = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise foreign_reply_error(url, raw) from None
    if content_type == HTML_TYPE or not isinstance(reply, endpoint.reply_types):
        raise foreign_reply_error(url, raw)
    return reply


def foreign_reply_error(url: str, raw: bytes) -> ServerError:
    """The error for a reply with status 200 that SGLang does not send."""
    shown = raw[:MAX_SHOWN_BYTES].decode("utf-8", "replace").strip() or "(empty)"
    return ServerError(
        f"{url} answered 200 with something that SGLang does not send: {shown}\nCheck that the host, the port and "
        "the path prefix of the URL are those of an SGLang server, and that no proxy answers in its place",
        status=200,
        url=url,
        body=shown,
    )


def parse_event(data: bytes, url: str) -> Json:
    """One event of the stream of a generation. Raises the error that it reports, ServerError if it is no such event."""
    event = parse_json_or_text(data)
    error = event.get("error") if isinstance(event, dict) else None
    if isinstance(error, dict):
        code = error.get("code", 400)
        raise error_from_reply(code if isinstance(code, int) else 502, url, event)
    if not _is_generation(event):
        raise foreign_reply_error(url, data)
    parsed: Json = event
    return parsed


def _is_generation(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("meta_info"), dict)


def require_answers(reply: Any, body: Json, vocab_size: int | None, url: str) -> list[Json]:
    """The generations in the reply of `/generate`. Raises ServerError unless it answers `body`: one consistent
    generation for each sample."""
    replies = reply if isinstance(reply, list) else [reply]
    if not (replies and all(map(_is_generation, replies))):
        raise foreign_reply_error(url, orjson.dumps(reply))
    prompts, params = body.get("input_ids") or body["text"], body.get("sampling_params") or {}
    is_batch = isinstance(prompts, list) and isinstance(prompts[0], (list, str))
    all_params = params if isinstance(params, list) else [params] * (len(prompts) if is_batch else 1)
    if any(each.get("beam_width") for each in all_params):  # one reply has the tokens of all beams
        for each in replies:
            require_logprobs(each)
        return replies
    samples = [each for each in all_params for _ in range(each.get("n") or 1)]
    if isinstance(reply, list) != (is_batch or len(samples) > 1) or len(replies) != len(samples):
        raise wrong_answer(url, f"{len(replies)} generations in a {type(reply).__name__} for {len(samples)} samples")
    rid = None if isinstance(reply, list) else body.get("rid")
    for each, sampling_params in zip(replies, samples, strict=True):
        require_answer(each, rid, sampling_params, vocab_size, url)
    return replies


def require_answer(reply: Json, rid: Any, params: Json, vocab_size: int | None, url: str, num_checked: int = 0) -> int:
    """Raise ServerError for one generation, whole or so far, that contradicts itself or its request, or with a log
    probability that is NaN. Whatever is behind the URL, no batch gets such tokens.

    The first `num_checked` tokens are not checked. Returns the number of checked tokens. Takes 0.25 ms for 1,000.
    """
    meta, ids = reply["meta_info"], reply.get("output_ids")
    if not isinstance(ids, list):
        raise wrong_answer(url, "no output_ids")
    if rid is not None and meta.get("id", rid) != rid:
        raise wrong_answer(url, f"the request {meta['id']!r:.80} instead of {rid!r:.80}")
    limit, new = params.get("max_new_tokens"), ids[num_checked:]
    if limit is not None and len(ids) > max(limit, 1):
        raise wrong_answer(url, f"{len(ids)} tokens for max_new_tokens={limit}")
    try:
        if new and (min(new) < 0 or max(new) >= (vocab_size or 2**31)):
            raise wrong_answer(url, f"token ids from {min(new)} to {max(new)}, beyond the vocabulary of {vocab_size}")
        logprobs = meta.get("output_token_logprobs")
        for token_id, entry in zip(new, () if logprobs is None else logprobs[num_checked:], strict=False):
            if entry[1] != token_id or (entry[0] or 0.0) > MAX_LOGPROB:
                raise wrong_answer(url, f"the log probability {entry[0]} of token {entry[1]} for token {token_id}")
    except (TypeError, LookupError) as error:
        raise wrong_answer(url, f"tokens of a wrong type: {error}") from error
    reason = meta.get("finish_reason")
    if reason and reason.get("type") != "abort":  # an abort ends between two steps, which may have counted more
        counts = [meta.get("completion_tokens", len(ids)), *([] if logprobs is None else [len(logprobs)])]
        if any(count != len(ids) for count in counts):
            raise wrong_answer(url, f"{len(ids)} tokens, but counts (completion_tokens, log probabilities) of {counts}")
    require_logprobs(reply, num_checked)
    return len(ids) if logprobs is None else min(len(ids), len(logprobs))


def wrong_answer(url: str, problem: str) -> ServerError:
    return ServerError(f"{url} answered with {problem}: the server or a proxy before it is faulty", status=200, url=url)


def error_message(body: Any) -> str:
    """The server's message in the body of an error reply. SGLang's routes use several JSON shapes and plain text."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner.get("error_message") or inner.get("detail") or inner)
        return str(inner)
    return str(body).strip() or "(no message)"


def error_from_reply(status: int, url: str, body: Any, is_optional: bool = False) -> VerlServerError:
    """The typed error for a reply whose HTTP status is not a success.

    `is_optional`: some supported versions of SGLang do not have the endpoint.
    """
    message = error_message(body)[:MAX_MESSAGE_CHARACTERS]
    details: Json = {"status": status, "url": url, "body": message}
    if isinstance(body, dict) and body.get("success") is False:
        return ServerError(f"{url} reports failure: {message}", **details)
    if status in (400, 413, 422):
        return BadInputError(f"{url} refused the request ({status}): {message}", **details)
    if status == 404:
        cure = "check the host, the port and the path prefix of the URL"
        if is_optional:
            return UnsupportedError(
                f"{url} does not exist (404): this version of SGLang does not have it. If all requests fail so, {cure}",
                **details,
            )
        return ServerError(f"{url} does not exist (404), but every SGLang server has it: {cure}", **details)
    if status == 501:  # a server of another engine
        return UnsupportedError(f"{url} is not supported (501): {message}", **details)
    if status == 409:
        return ServerBusyError(f"{url} refused for now ({status}): {message}", **details)
    if status == 503:
        return NotReadyError(f"{url} is not ready (503): {message}", **details)
    return ServerError(f"{url} failed ({status}): {message}", **details)


def require_no_abort(event: Json, url: str) -> None:
    """Raise the error of a stream event that ends a generation because the server cannot run it.

    Without a stream, SGLang answers such a request with the HTTP status that `finish_reason` has here: for example 400
    for an invalid grammar, 503 for a full queue, 500 when the KV cache is too small. An abort without a status, for
    example for a weight update, is no error.
    """
    reason = event.get("meta_info", {}).get("finish_reason") or {}
    status = reason.get("status_code") if reason.get("type") == "abort" else None
    if status is not None and status >= 400:
        raise error_from_reply(int(status), url, {"error": {"message": str(reason.get("message"))}})


#: Lists of the reply's `meta_info` with one entry for each output token, of which incremental events have the new ones.
_OUTPUT_LISTS = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)  # fmt: skip


class IncrementalStream:
    """The whole reply so far, from the events of a server with `incremental_streaming_output`.

    Each event of such a server has the tokens since the last event only. When the server aborts a waiting request, its
    last event repeats the last token, and all log probabilities and all text.
    """

    def __init__(self) -> None:
        self._output_ids: list[int] = []
        self._lists: dict[str, list[Any]] = {}
        self._text = ""

    def add(self, event: Json) -> Json:
        """The reply with all tokens so far. Its lists are not changed by later events."""
        meta = dict(event["meta_info"])
        received = len(self._output_ids) + len(event["output_ids"])
        count = min(meta.get("completion_tokens", received), received)
        self._output_ids = _joined(self._output_ids, event["output_ids"], count)
        for name in _OUTPUT_LISTS:
            if name in meta:
                self._lists[name] = meta[name] = _joined(self._lists.get(name, ()), meta[name] or (), count)
        reply = {**event, "output_ids": self._output_ids, "meta_info": meta}
        if "text" in event:
            new_text = event["text"] or ""
            if count < received:  # new text that was not sent yet, if any, and then all text
                self._text = new_text[(len(new_text) - len(self._text)) // 2 :]
            else:
                self._text += new_text
            reply["text"] = self._text
        return reply


def _joined(earlier: Sequence[Any], new: Sequence[Any], count: int) -> list[Any]:
    """A new list with the first `count` of the earlier and the new entries."""
    joined = [*earlier, *new]
    del joined[count:]
    return joined


def key_error(base_url: str, endpoint: Endpoint, has_key: bool) -> ServerError:
    """The error for status 401. `has_key`: whether this client was given the key that the endpoint needs."""
    name = "admin_api_key" if endpoint.needs_admin_key else "api_key"
    path = endpoint.path
    problem = f"refused the {name} for {path}" if has_key else f"needs an {name} for {path}, but none was given"
    return ServerError(
        f"the server at {base_url} {problem} (401). Pass the {name} that the server was started with, for example "
        f"RemoteServer({base_url!r}, api_key=..., admin_api_key=...). Commands read it from VERL_SERVER_{name.upper()}",
        status=401,
        url=base_url + endpoint.path,
        key=name,
    )


def require_success(reply: Any, url: str) -> Json:
    """Return the reply, or raise ServerError when it carries `success: false`, which SGLang sends with status 200."""
    if isinstance(reply, dict) and reply.get("success") is False:
        message = error_message(reply)
        raise ServerError(f"{url} reports failure: {message}", url=url, body=message)
    return reply if isinstance(reply, dict) else {"message": reply}


def require_logprobs(reply: Json, num_checked: int = 0) -> None:
    """Raise ServerError if a sampled token in a generation has no log probability: its logits were NaN.

    The first `num_checked` tokens are not checked. SGLang sends NaN as null, and null for no other reason.
    """
    entries = reply["meta_info"].get("output_token_logprobs") or ()
    for index in range(num_checked, len(entries)):
        logprob = entries[index][0]
        if logprob is None or logprob != logprob:
            raise ServerError(
                f"the log probability of output token {index} is NaN: the model has computed NaN logits, and the token "
                "has no meaning. Look for NaN in the weights (update_weights_from_tensor with check_finite=True "
                "refuses them), for values that overflow in the server's dtype (bfloat16 instead of float16), or for a "
                "faulty kernel or device of the server",
                status=200,
                token_index=index,
            )


def convert_weight_versions(reply: Json) -> Json:
    """Replace SGLang's string labels by ints, in place, in one generation.

    `meta_info["weight_version"]` is the version that made the last token. `meta_info["weight_versions"]` is a list of
    `{"version", "start", "end"}` over the output tokens; SGLang sends it with the last event of a stream only.
    """
    meta_info = reply["meta_info"]
    if "weight_version" in meta_info:
        meta_info["weight_version"] = parse_weight_version(meta_info["weight_version"])
    for span in meta_info.get("weight_versions") or ():
        span["version"] = parse_weight_version(span["version"])
    return reply


def prompt_limits(
    server_info: Json, model_config: Json, generation_config: Json, tokenizer_config: Json
) -> PromptLimits:
    """The longest prompt, from `/server_info`, and the vocabulary size and end tokens, from the model's files.

    SGLang's `max_req_input_len` is the shortest prompt that the server refuses.
    """
    text_config = model_config.get("text_config") or model_config
    shortest_refused = max_request_tokens(server_info)
    return PromptLimits(
        vocab_size=text_config.get("vocab_size"),
        max_prompt_tokens=None if shortest_refused is None else shortest_refused - 1,
        end_tokens=find_end_tokens(model_config, generation_config, tokenizer_config),
    )


def released_memory(server_info: Json) -> frozenset[str] | None:
    """The memory tags that a server says are released. None for a server that does not tell them."""
    states = server_info.get("internal_states") or []
    told = [state[RELEASED_MEMORY] for state in states if RELEASED_MEMORY in state]
    return frozenset[str]().union(*told) if told else None


def parameter_dtypes(server_info: Json) -> Json | None:
    """The server's report on the dtypes of its parameters (`report_dtypes`). None for a server that does not tell."""
    states = server_info.get("internal_states") or []
    return next((state[PARAMETER_DTYPES] for state in states if PARAMETER_DTYPES in state), None)


def count_requests(loads: Json) -> int:
    """Number of running and waiting requests in a reply of `/v1/loads`, summed over all DP ranks."""
    return sum(
        int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0)) for load in loads.get("loads", [])
    )


def remove_keys(server_info: Json) -> Json:
    """A reply of `/server_info` without the server's API keys, so that callers can print it."""
    states = [remove_keys(state) for state in server_info.get("internal_states") or [] if isinstance(state, dict)]
    kept = {name: value for name, value in server_info.items() if name not in ("api_key", "admin_api_key")}
    return {**kept, "internal_states": states} if "internal_states" in kept else kept


def max_request_tokens(server_info: Json) -> int | None:
    """Maximum number of tokens of a prompt with its response, from `/server_info`. None if the server does not tell it.

    SGLang calls the number `max_req_input_len`. It is also the shortest prompt that the server refuses.
    """
    states = server_info.get("internal_states") or [{}]
    number = server_info.get("max_req_input_len") or states[0].get("max_req_input_len")
    return None if number is None else int(number)


def max_running_requests(server_info: Json) -> int | None:
    """Number of requests that a server processes at a time, from `/server_info`. None if the server does not tell it.

    SGLang calls it `effective_max_running_requests_per_dp`: the number for each data parallel rank.
    """
    states = server_info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    number = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
    if not isinstance(number, int) or number < 1:
        return None
    return number * num_data_parallel_ranks(server_info)


def num_data_parallel_ranks(server_args: Mapping[str, Any]) -> int:
    """Number of ranks with a scheduler of their own, from `/server_info` or from the arguments of a server.

    SGLang 0.5.23 replaces `dp_size` by `attn_dp_size` if there is DP attention, and refuses both above 1.
    """
    return max(int(server_args.get(name) or 1) for name in ("dp_size", "attn_dp_size"))
