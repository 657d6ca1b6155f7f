"""Holds the conversation through OpenAI's Agents SDK. Runs in the environment of `requirements.lock`.

Standard input and output: as those of `litellm_client.py`. The SDK runs the tool and sends its result itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

calls: list[str] = []
"""Arguments of the calls of the tool."""


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    calls.append(json.dumps({"a": a, "b": b}))
    return a + b


async def run_agent(agent: Any, items: Any, stream: bool) -> Any:
    """The result of the agent: the policy may call tools until it answers."""
    if not stream:
        return await Runner.run(agent, items)
    result = Runner.run_streamed(agent, items)
    async for _ in result.stream_events():
        pass
    return result


async def converse(openai_url: str, run: Any) -> list[str]:
    """The call and the answers of one conversation."""
    calls.clear()
    async with AsyncOpenAI(base_url=openai_url, api_key=run["key"]) as client:
        kind = OpenAIChatCompletionsModel if run["api"] == "chat" else OpenAIResponsesModel
        model = kind(model="policy", openai_client=client)
        agent = Agent(name="adder", instructions="Use the tool.", model=model, tools=[function_tool(add)])
        first = await run_agent(agent, "What is 1 + 2?", run["stream"])
        items = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
        second = await run_agent(agent, items, run["stream"])
    return [*calls, first.final_output, second.final_output]


async def main() -> None:
    set_tracing_disabled(True)
    given = json.load(sys.stdin)
    json.dump([await converse(given["openai_url"], run) for run in given["runs"]], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
