"""Calls of the methods of `WorkerExtension` in all workers."""

from __future__ import annotations

import uuid

from verl_server.adapter.vllm.endpoints import WORKER_CALL
from verl_server.errors import ServerError
from verl_server.types import Json
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import ServerState


async def call_workers(state: ServerState, calls: InnerCalls, method: str, *args: str) -> list[Json]:
    """The report of each worker, in the order of the ranks.

    Raises ServerError if the replies are those of an earlier call: vLLM mixes them up when a call of several workers
    has failed in one of them. The server is unhealthy from then on, so that a fleet replaces it.
    """
    call_id = uuid.uuid4().hex
    body = {"method": method, "args": list(args), "kwargs": {"call_id": call_id}}
    reports: list[Json] = (await calls.call(WORKER_CALL, body))["results"]
    for rank, report in enumerate(reports):
        if not isinstance(report, dict) or (report.get("rank"), report.get("call_id")) != (rank, call_id):
            state.fault = (
                f"vLLM's worker of rank {rank} answered an earlier call instead of {method}: that call has failed in "
                "another worker, and vLLM mixes up all replies since then. Start a new server"
            )
            raise ServerError(state.fault)
    return reports


async def call_all(state: ServerState, calls: InnerCalls, method: str, *args: str) -> list[Json]:
    """The reports of `call_workers`. Raises ServerError with the report of the first worker that has failed."""
    reports = await call_workers(state, calls, method, *args)
    for report in reports:
        if not report["ok"]:
            raise ServerError(f"{method} failed on rank {report['rank']}: {report['error']}")
    return reports
