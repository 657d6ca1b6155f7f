"""Holds the conversation through the official SDKs of OpenAI and Anthropic.

The tests import it with the versions that SGLang needs, and run it in the environment of `requirements.lock`, which has
the newest versions. Standard input and output: as those of `litellm_client.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai

SYSTEM, QUESTION, RESULT, NEXT_QUESTION = "Use the tool.", "What is 1 + 2?", "3", "Are you sure?"
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"name": "add", "description": "The sum of two numbers.", "parameters": SCHEMA}


def converse_by_chat(url: str, key: str, stream: bool) -> list[Any]:
    """The conversation through OpenAI's chat API."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:

        def ask(*new: Any) -> Any:
            messages.extend(new)
            arguments: Any = {"model": "policy", "messages": messages, "max_tokens": 400}
            arguments["tools"] = [{"type": "function", "function": TOOL}]
            if stream:
                with client.chat.completions.stream(**arguments) as events:
                    message: Any = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**arguments).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            return message

        (call,) = ask().tool_calls
        answer = ask({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        return [json.loads(call.function.arguments), answer.content, ask(user(NEXT_QUESTION)).content]


def converse_by_responses(url: str, key: str, stream: bool) -> list[Any]:
    """The conversation through OpenAI's Responses API."""
    items: list[Any] = [user(QUESTION)]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:

        def ask(*new: Any) -> Any:
            items.extend(new)
            arguments: Any = {"model": "policy", "instructions": SYSTEM, "input": items, "max_output_tokens": 400}
            arguments["tools"] = [{"type": "function", "strict": False, **TOOL}]
            if stream:
                with client.responses.stream(**arguments) as events:
                    reply: Any = events.get_final_response()
            else:
                reply = client.responses.create(**arguments)
            items.extend(item.to_dict() for item in reply.output)
            return reply

        (call,) = [item for item in ask().output if item.type == "function_call"]
        answer = ask({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        return [json.loads(call.arguments), answer.output_text, ask(user(NEXT_QUESTION)).output_text]


def converse_by_messages(url: str, key: str, stream: bool) -> list[Any]:
    """The conversation through Anthropic's Messages API."""
    messages: list[Any] = [user(QUESTION)]
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:

        def ask(*new: Any) -> Any:
            messages.extend(new)
            arguments: Any = {"model": "claude-policy", "max_tokens": 400, "system": SYSTEM, "messages": messages}
            arguments["tools"] = tools
            if stream:
                with client.messages.stream(**arguments) as events:
                    reply: Any = events.get_final_message()
            else:
                reply = client.messages.create(**arguments)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            return {block.type: block for block in reply.content}

        use = ask()["tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
        answer = ask({"role": "user", "content": [result]})
        return [use.input, answer["text"].text, ask(user(NEXT_QUESTION))["text"].text]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SDKS: dict[str, Callable[[str, str, bool], list[Any]]] = {
    "chat": converse_by_chat,
    "responses": converse_by_responses,
    "messages": converse_by_messages,
}


def main() -> None:
    given = json.load(sys.stdin)
    replies = []
    for run in given["runs"]:
        url = given["url" if run["api"] == "messages" else "openai_url"]
        arguments, *answers = SDKS[run["api"]](url, run["key"], run["stream"])
        replies.append([json.dumps(arguments), *answers])
    json.dump(replies, sys.stdout)


if __name__ == "__main__":
    main()
