"""`ResumableGeneration`: one generation over several attempts, each of which may be lost with its server.

Pure: no input or output. With token ids the continuation is exact: the prompt of the next attempt is the original
prompt plus the tokens received so far. SGLang computes some results from the whole output (grammars, stop strings,
penalties). Such a generation cannot continue in the middle. It starts again; the caller has seen none of the first
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.http import read_events
from verl_server.adapter.sglang.replies import DEFAULT_MAX_NEW_TOKENS
from verl_server.adapter.sglang.requests import check_lengths, is_batch, plain_request, require_token_ids
from verl_server.errors import BadInputError, VerlServerError, from_wire, to_wire
from verl_server.types import Json, parse_weight_version

# -- Token reports ----------------------------------------------------------------------------------
# Reports of the tokens of a generation that still runs, for callers that show a turn while it is generated.

EVENT_STREAM = "text/event-stream"
STREAM_TOKENS = "stream_tokens"
"""Field of a request to a router that asks for the tokens while they are generated."""

OnTokens: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], None]
"""Function that gets new tokens of a generation: position of the first of them in the output, token ids, and their log
probabilities in nats (empty if the request has no `return_logprob`).

Only tokens that the final reply has are reported, so a generation that must start again when its server is lost (with a
grammar or stop strings, for example) reports none: its tokens are in the reply. Each token is reported once. Reports
begin again at position 0 if the connection of a `RouterClient` broke, and if a server has refused a continuation that
is longer than its context. The tokens are then the same, unless the generation started again: after this refusal, or
because the router was started again. The function must return at once, and must not raise.
"""


class TokenReports:
    """Reports the tokens of one generation to one caller."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._num_reported = 0

    def update(self, generation: ResumableGeneration) -> None:
        """Report the tokens that are new and certain."""
        num_certain = generation.num_certain_tokens
        if num_certain < self._num_reported:
            self._num_reported = 0
        if num_certain > self._num_reported:
            token_ids, logprobs = generation.certain_tokens(self._num_reported)
            self._on_tokens(self._num_reported, token_ids, logprobs)
            self._num_reported = num_certain


@contextlib.contextmanager
def report_tokens(generation: ResumableGeneration, on_tokens: OnTokens | None) -> Iterator[None]:
    """Report the tokens of a generation to a caller within a `with` block: those so far, and those that come."""
    if on_tokens is None:
        yield
        return
    reports = TokenReports(on_tokens)
    generation.reports.append(reports)
    try:
        reports.update(generation)
        yield
    finally:
        generation.reports.remove(reports)


async def send_reports(request: web.BaseRequest, generate: Callable[[OnTokens], Awaitable[Json]]) -> web.StreamResponse:
    """Answer a request with server-sent events: `{"start", "token_ids", "logprobs"}` for new tokens, then `{"reply"}`.

    Without tokens before the end, `generate` returns or raises first: then its reply is returned as JSON, and its error
    is raised. An error after the first tokens is the last event, `{"error"}`.
    """
    events = asyncio.Queue[Json | None]()
    task = asyncio.ensure_future(
        generate(
            lambda start, ids, logprobs: events.put_nowait({"start": start, "token_ids": ids, "logprobs": logprobs})
        )
    )
    task.add_done_callback(lambda _: events.put_nowait(None))
    response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
    try:
        while (event := await events.get()) is not None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        if not response.prepared:
            return web.Response(body=orjson.dumps(await task), content_type="application/json")
        try:
            last: Json = {"reply": await task}
        except VerlServerError as error:
            last = {"error": to_wire(error)}
        await response.write(b"data: " + orjson.dumps(last) + b"\n\n")
        return response
    finally:
        task.cancel()


async def receive_reports(content: aiohttp.StreamReader, on_tokens: OnTokens) -> Json:
    """The reply at the end of the events of `send_reports`.

    Raises the error that the last event reports, and aiohttp.ClientPayloadError if the last event is missing.
    """
    async for data in read_events(content):
        event = orjson.loads(data)
        if "reply" in event:
            reply: Json = event["reply"]
            return reply
        if "error" in event:
            raise from_wire(event["error"])
        on_tokens(event["start"], event["token_ids"], event["logprobs"])
    raise aiohttp.ClientPayloadError("the stream ended before its generation finished")


def in_running_loop(on_tokens: OnTokens) -> OnTokens:
    """`on_tokens`, called in the event loop that runs now, from any thread."""
    loop = asyncio.get_running_loop()

    def call(start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the caller has ended
            loop.call_soon_threadsafe(on_tokens, start, token_ids, logprobs)

    return call


# -- Resumable generation ---------------------------------------------------------------------------

#: Assumed number of output tokens of a generation without a limit.
ASSUMED_NEW_TOKENS = 4096
#: Request fields and sampling parameters that a continuation can have: their effect on a token does not depend on where
#: the output began, and their results are one entry for each token or belong to the prompt.
_CONTINUABLE = frozenset({
    "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
    "return_text_in_logprobs", "lora_path", "priority", "extra_key", "cache_salt", "routing_key", "routed_dp_rank",
    "session_id", "conversation_id", "custom_labels", "external_trace_header", "log_metrics", "no_logs", "background",
    "received_time", "max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "ignore_eos",
    "stop_token_ids", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "sampling_seed", "stream_interval",
})  # fmt: skip
#: Values of all other fields and parameters that have no effect.
_NEUTRAL_VALUE: tuple[Any, ...] = (None, False, 0, "", [])
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {"repetition_penalty": (None, 1)}
#: Lists in the reply's `meta_info` with one entry for each output token, and those with one for each prompt token.
LOGPROB_LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LOGPROB_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
#: Values of `meta_info` that describe the prompt. Those of a continuation describe its longer prompt.
_PROMPT_VALUES = ("prompt_tokens", "cached_tokens", *INPUT_LOGPROB_LISTS)


class ResumableGeneration:
    """A generation for one prompt, which collects the output of one or more attempts.

    `request` holds the keyword arguments of the adapter's `generate`. Each attempt calls `begin_attempt`, then
    `record_event` for each stream event, then `end_attempt` if the attempt was lost or aborted. Raises BadInputError
    for a request with several prompts or several samples.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        params = request.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise BadInputError(f"sampling_params must be one dict for one prompt, got {type(params).__name__}")
        self.request = plain_request(request)
        prompt = self.request.get("input_ids")
        if prompt is not None:
            require_token_ids("input_ids", prompt)
        if is_batch(None, prompt):
            raise BadInputError("a generation has one prompt, but input_ids is a list of prompts: call once for each")
        check_lengths(self.request, 1, batch=False)
        self._prompt: list[int] | None = prompt
        self._params: Json = self.request.get("sampling_params") or {}
        if self._params.get("n") not in (None, 1):
            raise BadInputError("a generation has n=1; make one call for each sample, each with its own rid")
        self._parts: list[Json] = []
        """The last event of each earlier attempt that brought tokens."""
        self._returned_parts = 0
        """Number of `_parts` that a caller has had."""
        self._event: Json | None = None
        """The last event of the current attempt."""
        self._event_versions: list[tuple[int, int]] = []
        """For each event of the current attempt: the number of tokens so far, and the server's weight version then."""
        self._num_certain_in_attempt = 0
        """Number of tokens of the current attempt whose weight version is certain, see `end_attempt`."""
        self.attempts = 0
        """Number of attempts that have begun."""
        self._paused_attempts = 0
        """Number of attempts that ended because the server aborted the generation."""
        self._is_in_attempt = False
        self.reports: list[TokenReports] = []
        """Who gets the tokens while the generation runs."""

    @property
    def num_certain_tokens(self) -> int:
        """Number of tokens that the final reply has, whatever happens to the server. 0 if it would start again."""
        if not self.can_continue:
            return 0
        return sum(len(part["output_ids"]) for part in self._parts) + self._num_certain_in_attempt

    def certain_tokens(self, start: int) -> tuple[list[int], list[float]]:
        """Ids and log probabilities of the tokens of `num_certain_tokens`, from position `start`."""
        token_ids, entries = list[int](), list[Any]()
        counts = [len(part["output_ids"]) for part in self._parts] + [self._num_certain_in_attempt]
        for part, count in zip(self._all_parts(), counts, strict=False):
            if start < count:
                token_ids += part["output_ids"][start:count]
                entries += (part["meta_info"].get("output_token_logprobs") or ())[start:count]
            start = max(0, start - count)
        return token_ids, [entry[0] for entry in entries]

    @functools.cached_property
    def can_continue(self) -> bool:
        """Whether a lost generation continues from the tokens received so far, instead of starting again."""
        values = (*self.request.items(), *self._params.items())
        is_neutral = (name in _CONTINUABLE or v in _NEUTRAL_VALUES.get(name, _NEUTRAL_VALUE) for name, v in values)
        return self._prompt is not None and all(is_neutral)

    @property
    def attempt_has_tokens(self) -> bool:
        """Whether the current attempt has returned a token."""
        return bool(self._event and self._event["output_ids"])

    @property
    def tokens(self) -> list[int]:
        """The output token ids received so far."""
        return [token for part in self._all_parts() for token in part["output_ids"]]

    def begin_attempt(self) -> Json:
        """Start the next attempt; returns its request."""
        self.attempts += 1
        self._is_in_attempt = True
        tokens = self.tokens
        params = dict(self._params)
        if tokens:
            if self._max_new_tokens is not None:
                params["max_new_tokens"] = self._max_new_tokens - len(tokens)
            if params.get("min_new_tokens"):
                params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(tokens))
        body = {**self.request, "sampling_params": params}
        if tokens:
            assert self._prompt is not None
            body["input_ids"] = [*self._prompt, *tokens]
            if body.get("logprob_start_len") is not None:
                body["logprob_start_len"] = -1  # the first attempt has returned the prompt's log probabilities
        return body

    def record_event(self, event: Json) -> None:
        """Record a stream event of the current attempt: the attempt's whole reply so far."""
        self._event = event
        count, version = len(event["output_ids"]), parse_weight_version(event["meta_info"].get("weight_version"))
        last_count = self._event_versions[-1][0] if self._event_versions else 0
        self._event_versions.append((count, version))
        is_certain = version == self._event_versions[0][1] and self._num_certain_in_attempt == last_count
        if is_certain or event["meta_info"].get("weight_versions"):
            self._num_certain_in_attempt = count
        for reports in self.reports:
            reports.update(self)

    def end_attempt(self, *, keep: bool = False) -> None:
        """End the current attempt. Keep tokens of a certain weight version, if they can be continued or `keep`."""
        if not self._is_in_attempt:
            return
        self._is_in_attempt = False
        self._paused_attempts += self.is_aborted
        event, event_versions = self._event, self._event_versions
        self._forget_attempt()
        if event is None or not (self.can_continue or keep):
            return
        if not event["meta_info"].get("weight_versions"):  # SGLang returns the spans only with the last event
            event = _truncate(event, *_certain_tokens(event_versions))
        if event["output_ids"]:
            self._parts.append(event)

    @property
    def counted_attempts(self) -> int:
        """Number of attempts without those that the server aborted."""
        return max(1, self.attempts - self._paused_attempts)

    def keep_tokens(self) -> None:
        """A caller has had all tokens of the attempts that have ended. `restart` does not forget them."""
        self._returned_parts = len(self._parts)

    def restart(self) -> bool:
        """Forget the tokens that earlier attempts brought and no caller has had; returns whether there were any."""
        if len(self._parts) == self._returned_parts:
            return False
        del self._parts[self._returned_parts :]
        self._forget_attempt()
        return True

    def _forget_attempt(self) -> None:
        self._event, self._event_versions, self._num_certain_in_attempt = None, [], 0

    @property
    def _max_new_tokens(self) -> int | None:
        """Maximum number of output tokens. None: the output may fill the context of the model."""
        limit: int | None = self._params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return limit

    @property
    def remaining_tokens(self) -> int:
        """Maximum number of output tokens that are still to be generated. An assumption if the request has no limit."""
        return ASSUMED_NEW_TOKENS if self._max_new_tokens is None else self._max_new_tokens - len(self.tokens)

    @property
    def is_complete(self) -> bool:
        """Whether all requested tokens were received, although the last attempt was lost before it finished."""
        if not self._parts or self._event is not None or self._max_new_tokens is None:
            return False
        return len(self.tokens) >= self._max_new_tokens

    @property
    def is_aborted(self) -> bool:
        """Whether the server aborted the generation before its end. A repeated request continues it."""
        reason = (self._event or {}).get("meta_info", {}).get("finish_reason") or {}
        return bool(reason.get("type") == "abort")

    @property
    def has_ended(self) -> bool:
        """Whether the last event of the current attempt has arrived: the reply only has to be delivered."""
        return bool(self._event and self._event["meta_info"].get("finish_reason"))

    @property
    def is_finished(self) -> bool:
        """Whether the reply is final: nothing remains to be generated."""
        return self.is_complete or (self._event is not None and not self.is_aborted)

    def _all_parts(self) -> list[Json]:
        return [*self._parts, *([self._event] if self._event is not None else [])]

    def reply(self) -> Json:
        """The whole reply: tokens, log probabilities and weight versions of all attempts, other values of the last one.

        `meta_info.attempts` is `counted_attempts`.

        A reply with tokens of a lost or aborted attempt has no text: the attempt may have ended inside a character.
        """
        parts = self._all_parts()
        if not parts:
            raise ValueError("the generation has received no event yet")
        last = parts[-1]
        meta: Json = {**parts[0]["meta_info"], **last["meta_info"], "attempts": self.counted_attempts}
        if len(parts) > 1:
            meta |= {name: parts[0]["meta_info"][name] for name in _PROMPT_VALUES if name in parts[0]["meta_info"]}
            meta["completion_tokens"] = len(self.tokens)
            meta["weight_versions"] = join_version_spans(parts)
            for name in LOGPROB_LISTS:
                if name in last["meta_info"]:
                    meta[name] = [entry for part in parts for entry in part["meta_info"].get(name) or []]
            if "output_token_logprobs_length" in meta:
                meta["output_token_logprobs_length"] = len(meta.get("output_token_logprobs") or ())
        reply = {**last, "output_ids": self.tokens, "meta_info": meta}
        if self._parts:
            reply.pop("text", None)
            if self.is_complete or (meta.get("finish_reason") or {}).get("type") == "length":
                meta["finish_reason"] = {"type": "length", "length": len(self.tokens)}
        return reply


def _certain_tokens(event_versions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The number of tokens that were certainly generated with the first event's weight version, and that version.

    Tokens between two events with different versions were generated before or after the weight update.
    """
    first_version = event_versions[0][1]
    count = 0
    for tokens, version in event_versions:
        if version != first_version:
            break
        count = tokens
    return count, first_version


def _truncate(event: Json, count: int, weight_version: int) -> Json:
    """The event with its first `count` tokens, all generated with `weight_version`."""
    meta = dict(event["meta_info"], completion_tokens=count)
    meta["weight_versions"] = [{"version": weight_version, "start": 0, "end": count}] if count else []
    for name in LOGPROB_LISTS:
        if meta.get(name):
            meta[name] = meta[name][:count]
    if "output_token_logprobs_length" in meta:
        meta["output_token_logprobs_length"] = count
    return {**event, "output_ids": event["output_ids"][:count], "meta_info": meta}


def join_version_spans(parts: list[Json]) -> list[Json]:
    """The weight versions of the whole output, as spans of tokens: `version`, `start`, `end` (exclusive)."""
    spans: list[Json] = []
    offset = 0
    for part in parts:
        for span in version_spans(part):
            start, end = offset + span["start"], offset + span["end"]
            if spans and spans[-1]["version"] == span["version"]:
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": span["version"], "start": start, "end": end})
        offset += len(part["output_ids"])
    return spans


def version_spans(reply: Mapping[str, Any]) -> list[Json]:
    """The weight versions of one reply's tokens. A reply without spans has one version for all of its tokens."""
    meta = reply["meta_info"]
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version"), "start": 0, "end": len(reply["output_ids"])}
    ]
    return [{**span, "version": parse_weight_version(span["version"])} for span in spans]
