"""OpenAI's `/v1/completions`: the policy continues a text or a list of token ids. The prompt is not a chat.

A text is encoded as it is: control tokens in the text become control tokens, and no token is added at the beginning.
Prompts as token ids continue a recorded path exactly: send the ids of an earlier prompt, the ids of its turn (the field
`token_ids` of a choice, which vLLM's replies have too), and further ids.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence
from typing import Any

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest
from verl_server.gateway.dialects.chat import usage
from verl_server.gateway.dialects.dialect import Dialect, openai_error
from verl_server.gateway.dialects.fields import (
    bad_request,
    read_count,
    read_flag,
    read_logit_bias,
    read_number,
    read_object,
    read_seed,
    read_stop,
    read_text,
    read_top_k,
    refuse,
    sampling_params,
)
from verl_server.gateway.dialects.reply_stream import Event, ReplyStream
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json

DEFAULT_MAX_TOKENS = 16
"""Maximum number of tokens of a completion without `max_tokens`, as OpenAI documents it."""


class CompletionsDialect(Dialect):
    """Completions of raw prompts."""

    path = "/v1/completions"

    def parse(self, body: Json) -> TurnRequest:
        for name in ("n", "best_of"):
            refuse(body, name, (1,), "send several requests")
        refuse(body, "echo", (False,), "replies have the new tokens only")
        refuse(body, "suffix", ("",), "the policy continues the prompt")
        if isinstance(body.get("logprobs"), bool):
            raise bad_request("'logprobs' must be 0 or 1")
        refuse(body, "logprobs", (0, 1), "replies have the log probabilities of the sampled tokens only; use 0 or 1")
        return TurnRequest(
            model=read_text(body, "model", default=""),
            messages=(),
            sampling_params=sampling_params(
                max_new_tokens=read_count(body, "max_tokens") or DEFAULT_MAX_TOKENS,
                temperature=read_number(body, "temperature", 0, 100),
                top_p=read_number(body, "top_p", 0, 1),
                top_k=read_top_k(body),
                presence_penalty=read_number(body, "presence_penalty", -2, 2),
                frequency_penalty=read_number(body, "frequency_penalty", -2, 2),
                stop=read_stop(body, "stop"),
                sampling_seed=read_seed(body),
                logit_bias=read_logit_bias(body),
            ),
            stream=read_flag(body, "stream"),
            logprobs=body.get("logprobs") is not None,
            include_usage=read_flag(read_object(body, "stream_options"), "include_usage"),
            raw_prompt=_parse_prompt(body.get("prompt")),
        )

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        logprobs = _logprobs(turn, _TextOffsets()) if request.logprobs else None
        choice = _choice(turn.text, turn.finish_reason, logprobs, turn.token_ids)
        return {**_head(request, turn.id), "choices": [choice], "usage": usage(turn)}

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return CompletionStream(request, reply_id)

    def error(self, error: GatewayError) -> tuple[int, Json]:
        return openai_error(error)


class CompletionStream(ReplyStream):
    """Chunks of a completion."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._head = _head(request, reply_id)
        self._offsets = _TextOffsets()

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        return iter(())

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        if delta.text or delta.token_ids:
            logprobs = _logprobs(delta, self._offsets) if self.request.logprobs else None
            yield Event({**self._head, "choices": [_choice(delta.text, None, logprobs, delta.token_ids)]})

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        yield Event({**self._head, "choices": [_choice("", turn.finish_reason, None, ())]})
        if self.request.include_usage:
            yield Event({**self._head, "choices": [], "usage": usage(turn)})
        yield Event("[DONE]")

    def fail(self, error: GatewayError) -> Event:
        return Event(openai_error(error)[1])


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    """A text or token ids. A list with one prompt is accepted, too."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        return tuple(value)
    raise bad_request("'prompt' must be one text or one list of token ids, not empty; send several requests otherwise")


def _head(request: TurnRequest, reply_id: str) -> Json:
    head = {"id": f"cmpl-{reply_id}", "object": "text_completion", "created": int(time.time())}
    return {**head, "model": request.model}


def _choice(text: str, finish_reason: str | None, logprobs: Json | None, token_ids: Sequence[int]) -> Json:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**choice, "token_ids": list(token_ids)}


class _TextOffsets:
    """The characters of a completion at which its tokens begin. A character may have several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        """Number of whole characters of the tokens so far."""

    def add(self, token: bytes) -> int:
        """The offset of the next token. A token within a character has the offset of the character."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def _logprobs(turn: AssistantTurn | TurnDelta, offsets: _TextOffsets) -> Json:
    """The log probabilities of the sampled tokens. Those of other tokens are not known."""
    return {
        "tokens": turn.token_texts,
        "token_logprobs": list(turn.logprobs),
        "top_logprobs": None,
        "text_offset": [offsets.add(token) for token in turn.tokens],
    }
