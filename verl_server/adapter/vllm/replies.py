"""vLLM's replies in the form of SGLang's replies, which users of this library know, and vLLM's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_server.adapter.sglang import replies
from verl_server.adapter.sglang.replies import MAX_MESSAGE_CHARACTERS, error_message
from verl_server.adapter.vllm.requests import RETURNED_ID_PREFIX
from verl_server.errors import BadInputError, ServerError, VerlServerError
from verl_server.types import Json, parse_weight_version

#: vLLM's finish reason when the server ended a request because its text repeats itself.
REPETITION = "repetition"
#: SGLang's finish reason of an aborted request.
ABORTED: Mapping[str, str] = {"type": "abort", "message": "the request was aborted"}
#: What vLLM sends instead of a log probability that is NaN or minus infinity.
NO_LOGPROB = -9999.0


def parse_generation(reply: Json, *, return_logprob: bool = False, top_logprobs_num: int = 0) -> Json:
    """The reply of `/inference/v1/generate` as SGLang's `/generate` would answer. Raises ServerError for another reply.

    `output_ids` has the token ids, end token included. `meta_info` has `id`, `finish_reason`, `prompt_tokens`,
    `completion_tokens`, `cached_tokens`, `weight_version`, `weight_versions` and, with `return_logprob`,
    `output_token_logprobs`: `[log probability, token id, None]` for each token.
    """
    return parse_generations(reply, return_logprob=return_logprob, top_logprobs_num=top_logprobs_num)[0]


def parse_generations(reply: Json, *, return_logprob: bool = False, top_logprobs_num: int = 0) -> list[Json]:
    """`parse_generation` for each of the `n` generations of a request."""
    try:
        usage = reply["usage"]
        meta = {
            "id": str(reply["request_id"]).removeprefix(RETURNED_ID_PREFIX),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": _cached_tokens(usage),
        }
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        if not choices:
            raise ServerError("vLLM's reply has no generation")
        return [
            _parse_choice(each, meta, len(each["token_ids"]), each["token_ids"], return_logprob, top_logprobs_num)
            for each in choices
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"the reply does not have vLLM's form: {type(error).__name__}: {error}") from error


def _cached_tokens(usage: Json) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def without_tokens(reply: Json) -> Json:
    """A copy of vLLM's reply whose generations have no tokens. Their weight versions are kept, for zero tokens."""
    choices = [
        {
            **choice,
            "token_ids": [],
            "finish_reason": choice["finish_reason"] if choice["finish_reason"] == "abort" else "length",
            "logprobs": None,
            "weight_versions": [{**span, "start": 0, "end": 0} for span in (choice.get("weight_versions") or ())[:1]],
            **({"text": ""} if "text" in choice else {}),
        }
        for choice in reply["choices"]
    ]
    return {**reply, "choices": choices}


def _parse_choice(
    choice: Json, meta: Json, num_tokens: int, last_ids: Sequence[int], return_logprob: bool, top_logprobs_num: int
) -> Json:
    """A generation, or the part of it that one event of a stream has, with the values of `meta`.

    `num_tokens`: number of tokens so far. `last_ids`: the last tokens so far.
    """
    output_ids = list(choice["token_ids"])
    reason = parse_finish_reason({**choice, "token_ids": last_ids}, num_tokens)
    meta = {**meta, "finish_reason": reason, "completion_tokens": num_tokens}
    spans = parse_spans(choice.get("weight_versions") or ())
    if spans or reason is not None:
        meta["weight_versions"] = spans
    if spans:
        meta["weight_version"] = spans[-1]["version"]
    if return_logprob:
        meta |= parse_logprobs(choice, output_ids, top_logprobs_num)
    reply: Json = {"output_ids": output_ids, "meta_info": meta}
    return {**reply, "text": choice["text"]} if "text" in choice else reply


def parse_logprobs(choice: Json, output_ids: Sequence[int], top_logprobs_num: int) -> Json:
    """The lists of `meta_info` with the log probabilities of these tokens.

    The log probability of a sampled token is None where vLLM had no finite number: the model has computed NaN.
    """
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(output_ids):
        raise ServerError(f"vLLM returned {len(content)} log probabilities for {len(output_ids)} tokens")
    logprobs = [entry["logprob"] if entry["logprob"] > NO_LOGPROB else None for entry in content]
    meta: Json = {
        "output_token_logprobs": [
            [logprob, token_id, None] for logprob, token_id in zip(logprobs, output_ids, strict=True)
        ]
    }
    if top_logprobs_num:
        meta["output_top_logprobs"] = [_top(entry["top_logprobs"], top_logprobs_num) for entry in content]
    return meta


def _top(entries: Sequence[Json], count: int) -> list[Any]:
    """The `count` most probable tokens. vLLM adds the sampled token if it is not among them."""
    best = sorted(entries, key=lambda entry: int(entry["rank"]))[:count]
    return [[entry["logprob"], entry["token_id"], None] for entry in best]


def parse_spans(spans: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The weight version of each part of the output: `version` as an int, `start` and `end` as positions of tokens."""
    return [
        {"version": parse_weight_version(span["version"]), "start": int(span["start"]), "end": int(span["end"])}
        for span in spans
    ]


def parse_finish_reason(choice: Mapping[str, Any], num_tokens: int) -> Json | None:
    """SGLang's finish reason, an object with `type`, for vLLM's word. None while the generation runs.

    A stop at an end token of the model has vLLM's `stop_reason` None; the last token is the one that matched.
    """
    reason, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": num_tokens}
    if reason == "abort":
        return dict(ABORTED)
    if reason in ("stop", REPETITION):
        last = choice["token_ids"][-1] if choice["token_ids"] else None
        return {"type": "stop", "matched": last if matched is None else matched}
    raise ServerError(f"vLLM ended the generation with the unknown reason {reason!r}")


def error_from_reply(status: int, url: str, body: Any) -> VerlServerError:
    """The typed error for a reply whose HTTP status is not a success."""
    if status == 404:  # a model that vLLM does not have: the name of a LoRA adapter
        message = error_message(body)[:MAX_MESSAGE_CHARACTERS]
        return BadInputError(f"{url} refused the request (404): {message}", status=404, url=url, body=message)
    return replies.error_from_reply(status, url, body)


# -- Stream -----------------------------------------------------------------------------------------
# vLLM's stream of one request as the events of SGLang's stream with `incremental_streaming_output`.


class StreamedGeneration:
    """Makes SGLang's events of vLLM's chunks. Each event has the tokens since the event before.

    vLLM sends the weight versions with the last chunk of a generation, and the number of cached tokens behind it, with
    the usage of the request. The last event waits for both, so that it has them.
    """

    def __init__(self, rid: str, num_prompt_tokens: int, *, return_logprob: bool, top_logprobs_num: int) -> None:
        self._rid, self._num_prompt_tokens = rid, num_prompt_tokens
        self._return_logprob, self._top_logprobs_num = return_logprob, top_logprobs_num
        self._num_tokens: dict[int, int] = {}
        self._last_ids: dict[int, list[int]] = {}
        self._last_events: list[Json] = []

    def add(self, chunk: Any, weight_version: int) -> Iterator[Json]:
        """The events of one chunk. `weight_version`: the version of the server's weights now.

        Raises the error that the chunk reports, and ServerError for a chunk with another form than vLLM's.
        """
        try:
            if "error" in chunk:
                raise error_from_reply(int(chunk["error"].get("code") or 500), "the stream", chunk)
            for choice in chunk["choices"]:
                event = self._event(choice, weight_version)
                if event["meta_info"]["finish_reason"] is None:
                    yield event
                else:
                    self._last_events.append(event)
            if not chunk["choices"]:
                yield from self._finished(chunk["usage"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"the stream does not have vLLM's form: {type(error).__name__}: {error}") from error

    def _event(self, choice: Json, weight_version: int) -> Json:
        index, new_ids = int(choice["index"]), choice["token_ids"]
        count = self._num_tokens[index] = self._num_tokens.get(index, 0) + len(new_ids)
        if new_ids:
            self._last_ids[index] = new_ids[-1:]
        meta = {
            "id": self._rid,
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": 0,
            "weight_version": weight_version,
        }
        last_ids = self._last_ids.get(index, [])
        event = _parse_choice(choice, meta, count, last_ids, self._return_logprob, self._top_logprobs_num)
        return {"index": index, **event}

    def _finished(self, usage: Json) -> Iterator[Json]:
        """The last event of each generation, with the number of cached tokens."""
        events, self._last_events = self._last_events, []
        for event in events:
            event["meta_info"]["cached_tokens"] = _cached_tokens(usage)
            yield event
