"""Holds the conversation through LiteLLM as a client library. Runs in the environment of `requirements.lock`.

Standard input: JSON with `url`, `openai_url`, and `runs`: the API, whether it streams, and the key of a session.
Standard output: JSON with the arguments of the call and the two answers of each run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import litellm

SYSTEM, QUESTION, RESULT, NEXT_QUESTION = "Use the tool.", "What is 1 + 2?", "3", "Are you sure?"
TOOL: Any = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def ask_chat(messages: list[Any], stream: bool, **target: Any) -> Any:
    """The message of a chat completion."""
    tools = [{"type": "function", "function": TOOL}]
    reply = litellm.completion(messages=messages, tools=tools, stream=stream, max_tokens=400, timeout=60, **target)
    if stream:
        reply = litellm.stream_chunk_builder(list(reply), messages=messages)
    return reply.choices[0].message


def converse_by_chat(stream: bool, **target: Any) -> list[str]:
    """The conversation with chat messages, which LiteLLM converts for Anthropic's API."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    message = ask_chat(messages, stream, **target)
    (call,) = message.tool_calls
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    message = ask_chat(messages, stream, **target)
    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": NEXT_QUESTION}]
    return [call.function.arguments, message.content, ask_chat(messages, stream, **target).content]


def ask_responses(items: list[Any], stream: bool, **target: Any) -> list[Any]:
    """The items of a response."""
    tools: Any = [{"type": "function", "strict": False, **TOOL}]
    reply = litellm.responses(
        input=items, instructions=SYSTEM, tools=tools, stream=stream, max_output_tokens=400, timeout=60, **target
    )
    if stream:
        reply = list(reply)[-1].response  # the event `response.completed`
    return [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in reply.output]


def text_of(items: list[Any]) -> str:
    """The text of the message among the items."""
    return "".join(item["content"][0]["text"] for item in items if item["type"] == "message")


def converse_by_responses(stream: bool, **target: Any) -> list[str]:
    """The conversation with items of OpenAI's Responses API."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    items += (called := ask_responses(items, stream, **target))
    (call,) = [item for item in called if item["type"] == "function_call"]
    items.append({"type": "function_call_output", "call_id": call["call_id"], "output": RESULT})
    items += (answered := ask_responses(items, stream, **target))
    items.append({"role": "user", "content": NEXT_QUESTION})
    return [call["arguments"], text_of(answered), text_of(ask_responses(items, stream, **target))]


def ask_bridge(messages: list[Any], stream: bool, **target: Any) -> list[Any]:
    """The content blocks of a message of Anthropic's API, which LiteLLM asks for through OpenAI's Responses API."""
    tools: Any = [{"name": "add", "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    options: Any = {"system": SYSTEM, "tools": tools, "max_tokens": 400, "timeout": 60, **target}
    reply: Any = litellm.anthropic.messages.create(messages=messages, stream=stream, **options)
    return list(reply["content"])


def converse_by_bridge(stream: bool, **target: Any) -> list[str]:
    """The conversation with messages of Anthropic's API."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> dict[str, Any]:
        blocks = ask_bridge(messages, stream, **target)
        messages.append({"role": "assistant", "content": blocks})
        return {block["type"]: block for block in blocks}

    call = ask()["tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
    messages.append({"role": "user", "content": [result]})
    answer = ask()["text"]["text"]
    messages.append({"role": "user", "content": NEXT_QUESTION})
    return [json.dumps(call["input"]), answer, ask()["text"]["text"]]


def main() -> None:
    litellm.suppress_debug_info = True  # it would go to standard output
    given = json.load(sys.stdin)
    openai_url, url = given["openai_url"], given["url"]
    apis: dict[str, tuple[Callable[..., list[str]], str, str]] = {
        "chat": (converse_by_chat, "openai/policy", openai_url),
        "messages": (converse_by_chat, "anthropic/claude-policy", url),
        "responses": (converse_by_responses, "openai/policy", openai_url),
        "bridge": (converse_by_bridge, "openai/policy", openai_url),
    }
    replies = []
    for run in given["runs"]:
        converse, model, base_url = apis[run["api"]]
        replies.append(converse(run["stream"], model=model, api_base=base_url, api_key=run["key"]))
    json.dump(replies, sys.stdout)


if __name__ == "__main__":
    main()
