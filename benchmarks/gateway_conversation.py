"""A conversation of many turns through each dialect of the gateway, and the CPU time of the gateway for each turn."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from gateway_systems import System
from http_load import body_of, connect, cpu_seconds, encode_head

from verl_server.types import Json

QUESTION = "Find the mistake in the program and repair it. " * 4
RESULT_LINE = "a line of the file. "
RESULT_LINES = 50
"""Number of lines of the result of a tool: 1,000 characters."""
SETTLE_S = 0.002
"""Seconds before and after a turn, in which the gateway ends the work on a turn."""
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "read_file", "description": "The text of a file."}


class ChatConversation:
    """The conversation as OpenAI's chat messages."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "user", "content": QUESTION}]
        self.fields: Json = {"tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]}
        self.fields["max_tokens"] = 200

    def body(self) -> Json:
        return {"model": "policy", "messages": self.messages, **self.fields}

    def add(self, reply: Json, result: str) -> None:
        message = reply["choices"][0]["message"]
        self.messages.append(message)
        (call,) = message["tool_calls"]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


class ResponsesConversation(ChatConversation):
    """The conversation as items of OpenAI's Responses API."""

    path = "/v1/responses"

    def __init__(self) -> None:
        super().__init__()
        self.fields = {"tools": [{"type": "function", **TOOL, "parameters": SCHEMA}], "max_output_tokens": 200}

    def body(self) -> Json:
        return {"model": "policy", "input": self.messages, **self.fields}

    def add(self, reply: Json, result: str) -> None:
        self.messages += reply["output"]
        (call,) = (item for item in reply["output"] if item["type"] == "function_call")
        self.messages.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})


class MessagesConversation(ChatConversation):
    """The conversation as Anthropic's messages."""

    path = "/v1/messages"

    def __init__(self) -> None:
        super().__init__()
        self.fields = {"tools": [{**TOOL, "input_schema": SCHEMA}], "max_tokens": 200}

    def add(self, reply: Json, result: str) -> None:
        self.messages.append({"role": "assistant", "content": reply["content"]})
        (use,) = (block for block in reply["content"] if block["type"] == "tool_use")
        block = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
        self.messages.append({"role": "user", "content": [block]})


DIALECTS = {"chat": ChatConversation, "responses": ResponsesConversation, "messages": MessagesConversation}


async def measure_conversation(system: System, dialect: str, turns: int) -> tuple[list[float], int]:
    """Milliseconds of CPU time of the gateway for each turn of a new session, and the size of the last body."""
    assert system.pid is not None
    (key,), conversation, cpu_ms = system.make_keys(1), DIALECTS[dialect](), list[float]()
    connection, body = await connect(system.url), b""
    try:
        for turn in range(turns):
            body = orjson.dumps(conversation.body())
            request = encode_head(system.url, conversation.path, key, body) + body
            await asyncio.sleep(SETTLE_S)
            started = cpu_seconds(system.pid)
            reply = await connection.send(request)
            await asyncio.sleep(SETTLE_S)
            cpu_ms.append((cpu_seconds(system.pid) - started) * 1e3)
            conversation.add(orjson.loads(body_of(reply)), f"{turn} {RESULT_LINE * RESULT_LINES}")
    finally:
        connection.close()
    return cpu_ms, len(body)
