"""The items of a response of OpenAI's `/v1/responses`, and the events with which a response is streamed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from verl_server.gateway.conversation import AssistantTurn, ToolUse, TurnDelta, TurnRequest
from verl_server.gateway.dialects.dialect import openai_error
from verl_server.gateway.dialects.reply_stream import Event, ReplyStream
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.types import Json

ERROR_CODES = {
    ErrorKind.INVALID_REQUEST: "invalid_prompt",
    ErrorKind.CONTEXT_OVERFLOW: "context_length_exceeded",  # not in OpenAI's types, but sent; Codex compacts then
    ErrorKind.LIMIT_REACHED: "rate_limit_exceeded",
    ErrorKind.TOO_MANY_REQUESTS: "rate_limit_exceeded",
}
"""Codes of errors in a stream. Other errors have the code `server_error`."""


def reasoning_item(reply_id: str, text: str) -> Json:
    """The item of a thought."""
    thought = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{reply_id}", "status": "completed", "summary": [], "content": [thought]}


def message_item(reply_id: str, text: str, status: str) -> Json:
    """The item of a text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{reply_id}", "status": status, "role": "assistant", "content": [part]}


def call_item(call: ToolUse) -> Json:
    """The item of a tool call."""
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def output_items(turn: AssistantTurn, reply_id: str) -> list[Json]:
    """The items of a turn. A turn without calls has a message, also without a text, so that agents repeat the turn."""
    items = [reasoning_item(reply_id, turn.reasoning)] if turn.reasoning else []
    if turn.text or not turn.tool_calls:
        status = "incomplete" if turn.finish_reason == "length" and not turn.tool_calls else "completed"
        items.append(message_item(reply_id, turn.text, status))
    return [*items, *map(call_item, turn.tool_calls)]


class ResponseStream(ReplyStream):
    """Events of a response. The items come one after the other: the thought, the message, each tool call."""

    def __init__(
        self,
        request: TurnRequest,
        reply_id: str,
        make_response: Callable[..., Json],
        finish_response: Callable[[TurnRequest, AssistantTurn, str], Json],
    ) -> None:
        """`make_response`: the response of a request that is not finished. `finish_response`: that of a turn."""
        super().__init__(request, reply_id)
        self._make_response, self._finish_response = make_response, finish_response
        self._numbers = itertools.count()
        self._last_number = 0
        self._index = -1
        """Index of the item that has begun."""
        self._open: Json | None = None
        """The item that has begun, without its text."""
        self._text = list[str]()
        """The text of that item so far."""

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        response = self._make_response(self.request, self.reply_id, "in_progress", ())
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=response)

    def keep_alive(self) -> bytes:
        # OpenAI sends this event, too. A comment would not reset the timer of Codex for idle streams (300 s).
        return Event({"type": "keepalive", "sequence_number": self._last_number}, "keepalive").encode()

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._begin_item(reasoning_item(self.reply_id, ""))
            yield self._add_text(delta.reasoning)
        if delta.text:
            yield from self._begin_item(message_item(self.reply_id, "", "in_progress"))
            yield self._add_text(delta.text)

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        response = self._finish_response(self.request, turn, self.reply_id)
        for item in response["output"]:
            if item["type"] == "function_call":
                yield from self._end_item()
                yield from self._call_events(item)
            elif item["type"] == "message":
                yield from self._begin_item(message_item(self.reply_id, "", "in_progress"))
                yield from self._end_item(item)
        yield from self._end_item()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: GatewayError) -> Event:
        code = ERROR_CODES.get(error.kind, "server_error")
        fields = {"code": code, "message": openai_error(error)[1]["error"]["message"]}
        response = self._make_response(self.request, self.reply_id, "failed", (), error=fields)
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._last_number = next(self._numbers)
        return Event({"type": kind, "sequence_number": self._last_number, **fields}, kind)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": self._index}

    def _begin_item(self, item: Json) -> Iterator[Event]:
        """Begin the item of a text, unless it has begun already."""
        if self._open is not None and self._open["type"] == item["type"]:
            return
        yield from self._end_item()
        self._open, self._index = item, self._index + 1
        empty = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=self._index, item=empty)
        part = item["content"][0]
        yield self._event("response.content_part.added", **self._place(item), content_index=0, part=part)

    def _add_text(self, text: str) -> Event:
        assert self._open is not None
        self._text.append(text)
        return self._text_event("delta", delta=text)

    def _text_event(self, kind: str, **fields: str) -> Event:
        assert self._open is not None
        name = self._open["content"][0]["type"]
        logprobs: Json = {"logprobs": []} if name == "output_text" else {}
        return self._event(f"response.{name}.{kind}", **self._place(self._open), content_index=0, **fields, **logprobs)

    def _end_item(self, item: Json | None = None) -> Iterator[Event]:
        """End the item that has begun, if there is one. `item`: the finished item. None: the item with its text."""
        if self._open is None:
            return
        text, self._text = "".join(self._text), []
        if item is None:
            part = {**self._open["content"][0], "text": text}
            item = {**self._open, "status": "completed", "content": [part]}
        yield self._text_event("done", text=text)
        place = self._place(item)
        yield self._event("response.content_part.done", **place, content_index=0, part=item["content"][0])
        self._open = None
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _call_events(self, item: Json) -> Iterator[Event]:
        """The events of a tool call, from its beginning to its end."""
        self._index += 1
        place, arguments = self._place(item), item["arguments"]
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        kind = "response.function_call_arguments.done"
        yield self._event(kind, **place, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
