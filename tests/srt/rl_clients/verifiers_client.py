"""Rollouts with the training client of verifiers. Runs in the environment of `requirements.lock`.

Standard input: `{"url", "key", "model", "rollouts", "turns", "max_tokens"}`. `url` is that of a router, `model` the
folder of the model. Standard output: a JSON list with one list of turns for each rollout. A turn has `prompt_ids`,
`completion_ids`, `logprobs`, `finish_reason` and `id`. All rollouts run at the same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def run_rollout(client: TrainClient, given: Any, number: int) -> list[Any]:
    """The turns of one conversation. The parameters in `extra_body` are those that prime-rl sends."""
    extra = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": "0"}
    sampling = SamplingConfig(temperature=0.0, top_p=1.0, max_tokens=given["max_tokens"], extra_body=extra)
    messages: list[Any] = []
    turns = []
    for turn in range(given["turns"]):
        messages.append({"role": "user", "content": f"Rollout {number}, turn {turn}."})
        body = {"model": given["model"], "messages": messages}
        reply = await client.get_response(ChatDialect(), body, sampling, session_id=f"rollout-{number}")
        tokens = reply.tokens
        turns.append({
            "prompt_ids": list(tokens.prompt_ids),
            "completion_ids": list(tokens.completion_ids),
            "logprobs": list(tokens.completion_logprobs),
            "finish_reason": reply.finish_reason,
            "id": reply.id,
        })  # fmt: skip
        messages.append({"role": "assistant", "content": reply.message.content or ""})
    return turns


async def main() -> None:
    given = json.load(sys.stdin)
    os.environ["ROUTER_KEY"] = given["key"]
    config = TrainClientConfig(
        base_url=f"{given['url']}/v1", api_key_var="ROUTER_KEY", renderer_model_name=given["model"]
    )
    client = TrainClient(config)
    try:
        rollouts = await asyncio.gather(*(run_rollout(client, given, number) for number in range(given["rollouts"])))
    finally:
        await client.close()
    json.dump(rollouts, sys.stdout)


asyncio.run(main())
