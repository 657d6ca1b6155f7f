"""`GenerateFn`: the function through which episodes ask an engine or a router for tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


RETRY_INTERVAL_S = 0.05
"""Seconds before an aborted generation is requested again."""
MAX_ABORTS_PER_TURN = 64
"""Maximum number of weight updates that may abort the generation of one turn."""


class GenerateFn(Protocol):
    """Generates tokens for one prompt: `RolloutRouter.generate`, `RouterClient.generate`, or `as_generate_fn(adapter)`.

    `rid`: request id. `session_id`: requests of one session go to the same replica if possible. `request`: SGLang's
    arguments (`input_ids`, `sampling_params`, `return_logprob`, ...). Returns SGLang's reply.
    """

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Json: ...


def as_generate_fn(adapter: AsyncHttpServerEngineAdapter) -> GenerateFn:
    """A `GenerateFn` that sends all requests to one server.

    A generation that a weight update aborts is continued from the tokens that the server has returned.
    """

    async def generate(*, rid: str, session_id: str, **request: Any) -> Json:
        del session_id  # there is only one server
        generation = ResumableGeneration(request)
        for _ in range(MAX_ABORTS_PER_TURN):
            attempt_rid = f"{rid}~{generation.attempts}"
            generation.record_event(await adapter.generate(rid=attempt_rid, **generation.begin_attempt()))
            reply = generation.reply()
            if not generation.is_aborted:
                break
            generation.end_attempt()
            if generation.is_complete:
                return generation.reply()
            await asyncio.sleep(RETRY_INTERVAL_S)
        return reply

    return generate


async def generate_whole_turn(generate: GenerateFn, *, rid: str, session_id: str, **request: Any) -> Json:
    """Call `generate` until its reply is complete. A reply is partial if a weight update aborted the generation."""
    for _ in range(MAX_ABORTS_PER_TURN):
        reply = await generate(rid=rid, session_id=session_id, **request)
        finish_reason = reply["meta_info"].get("finish_reason") or {}
        if finish_reason.get("type") != "abort":
            break
        await asyncio.sleep(RETRY_INTERVAL_S)
    return reply
