"""Requests and replies of OpenAI's chat and responses and of Anthropic's messages, as a client sees them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
"""Path of each dialect."""


class RetryableError(Exception):
    """The gateway asks to send the request again."""


@dataclass(frozen=True)
class Reply:
    """What a client got of a turn."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    logprobs: tuple[float, ...] | None
    """Log probability of each token. None in the dialects without log probabilities."""


def body_of(dialect: str, history: Sequence[tuple[str, str]], question: str, stream: bool) -> dict[str, Any]:
    """The request for the next turn. `history`: questions and answers."""
    messages = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    messages.append({"role": "user", "content": question})
    if dialect == "responses":
        return {"model": "m", "input": messages, "stream": stream}
    if dialect == "messages":
        return {"model": "m", "messages": messages, "max_tokens": 500, "stream": stream}
    return {
        "model": "m", "messages": messages, "stream": stream, "logprobs": True,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip


def read_reply(dialect: str, reply: dict[str, Any]) -> Reply:
    """The turn of a reply without a stream."""
    if dialect == "chat":
        choice, usage = reply["choices"][0], reply["usage"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        text = choice["message"]["content"]
        return Reply(text, usage["prompt_tokens"], usage["completion_tokens"], tuple(logprobs) if text else None)
    if dialect == "messages":
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        return Reply(text, _anthropic_prompt(reply["usage"]), reply["usage"]["output_tokens"], None)
    texts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    return Reply("".join(texts), reply["usage"]["input_tokens"], reply["usage"]["output_tokens"], None)


def read_events(dialect: str, events: Sequence[Any]) -> Reply | None:
    """The turn of the events of a stream. None if the stream has not ended. Raises RetryableError for an error."""
    for event in events:
        if isinstance(event, dict) and (event.get("error") or event.get("type") in ("error", "response.failed")):
            raise RetryableError(str(event)[:300])
    if dialect == "chat":
        return _read_chat_events(events)
    if dialect == "messages":
        return _read_messages_events(events)
    done = [event for event in events if event["type"] in ("response.completed", "response.incomplete")]
    return read_reply(dialect, done[0]["response"]) if done else None


def _read_chat_events(events: Sequence[Any]) -> Reply | None:
    if not events or events[-1] != "[DONE]":
        return None
    text, logprobs, usage = "", list[float](), dict[str, int]()
    for event in events[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
    known = tuple(logprobs) if text else None  # a chunk of text has the log probabilities
    return Reply(text, usage["prompt_tokens"], usage["completion_tokens"], known)


def _read_messages_events(events: Sequence[Any]) -> Reply | None:
    if not events or events[-1]["type"] != "message_stop":
        return None
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    (usage,) = (event["usage"] for event in events if event["type"] == "message_delta")
    return Reply(text, _anthropic_prompt(usage), usage["output_tokens"], None)


def _anthropic_prompt(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
