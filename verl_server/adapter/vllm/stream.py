"""vLLM's stream of one request as the events of SGLang's stream with `incremental_streaming_output`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_server.adapter.vllm.replies import error_from_reply, parse_finish_reason, parse_logprobs, parse_spans
from verl_server.errors import ServerError
from verl_server.types import Json


class StreamedGeneration:
    """Makes SGLang's events of vLLM's chunks. Each event has the tokens since the event before.

    vLLM sends the weight versions with the last chunk of a generation, and the number of cached tokens behind it, with
    the usage of the request. The last event waits for both, so that it has them.
    """

    def __init__(self, rid: str, num_prompt_tokens: int, *, return_logprob: bool, top_logprobs_num: int) -> None:
        self._rid, self._num_prompt_tokens = rid, num_prompt_tokens
        self._return_logprob, self._top_logprobs_num = return_logprob, top_logprobs_num
        self._num_tokens: dict[int, int] = {}
        self._last_tokens: dict[int, int] = {}
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
        index, new_ids = int(choice["index"]), list(choice["token_ids"])
        count = self._num_tokens[index] = self._num_tokens.get(index, 0) + len(new_ids)
        if new_ids:
            self._last_tokens[index] = new_ids[-1]
        last = [self._last_tokens[index]] if index in self._last_tokens else []
        meta: Json = {
            "id": self._rid,
            "finish_reason": parse_finish_reason({**choice, "token_ids": last}, count),
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": weight_version,
        }
        if choice.get("weight_versions"):
            meta["weight_versions"] = spans = parse_spans(choice["weight_versions"])
            meta["weight_version"] = spans[-1]["version"]
        elif meta["finish_reason"] is not None:
            meta["weight_versions"] = []
        if self._return_logprob:
            meta |= parse_logprobs(choice, new_ids, self._top_logprobs_num)
        event: Json = {"index": index, "output_ids": new_ids, "meta_info": meta}
        return {**event, "text": choice["text"]} if "text" in choice else event

    def _finished(self, usage: Json) -> Iterator[Json]:
        """The last event of each generation, with the number of cached tokens."""
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        events, self._last_events = self._last_events, []
        for event in events:
            event["meta_info"]["cached_tokens"] = cached
            yield event
