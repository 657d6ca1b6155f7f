"""`/abort_request`: SGLang aborts by the beginning of an id, vLLM by exact ids."""

from __future__ import annotations

import asyncio

from verl_server.adapter.vllm.endpoints import ABORT, ABORT_ALL
from verl_server.adapter.vllm.payloads import abort_payload
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import RunningRequest, ServerState

MAX_ATTEMPTS = 200
ATTEMPT_INTERVAL_S = 0.05
"""vLLM ignores the abort of a request that has not reached its engine yet, so the abort is sent again."""


async def abort_request(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Abort the generations whose id starts with `rid`, or all with `abort_all`, also those of other routes."""
    rid, abort_all = body.get("rid") or "", bool(body.get("abort_all"))
    if not isinstance(rid, str) or not (rid or abort_all):
        raise BadInputError("an abort needs a non-empty rid, or abort_all")
    if abort_all:
        await calls.call(ABORT_ALL, {})
    for request in (requests := state.requests("" if abort_all else rid)):
        request.aborted.set()
    await end_requests(state, calls, requests)
    return {}


async def end_requests(state: ServerState, calls: InnerCalls, requests: list[RunningRequest]) -> None:
    """Abort these generations in vLLM until they have ended. Those that wait for the end of a pause are left alone."""
    for _ in range(MAX_ATTEMPTS):
        running = {id(request): request for request in state.requests()}
        rids = [request.rid for request in requests if id(request) in running and not request.is_held]
        if not rids:
            break
        await calls.call(ABORT, abort_payload(rids))
        await asyncio.sleep(ATTEMPT_INTERVAL_S)
