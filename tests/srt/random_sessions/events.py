"""What happens in a run, as JSON lines in a file that also a killed process leaves, and the injector of faults."""

from __future__ import annotations

import contextvars
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from verl_server import ServerError
from verl_server.agent.engines import GenerateFn
from verl_server.types import Json

STEP: contextvars.ContextVar[tuple[str, tuple[str, ...]]] = contextvars.ContextVar("STEP")
"""The step of the plan that generates, and its faults. A request inherits the variable from its agent loop."""


class EventLog:
    """Appends the events of one run to a file. `on_event`: called with the number of events after each of them."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._num_events = 0
        self.on_event: Callable[[int], None] = lambda _: None
        self.unstable_calls: set[str] = set()
        """Sessions whose unstable tool has failed in this process."""

    def write(self, kind: str, session: str, **fields: Any) -> None:
        """Append one event, in one write."""
        os.write(self._fd, orjson.dumps({"kind": kind, "session": session, **fields}) + b"\n")
        self._num_events += 1
        self.on_event(self._num_events)

    def close(self) -> None:
        os.close(self._fd)


def read_events(path: Path) -> list[Json]:
    """The complete lines of a file of events."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [orjson.loads(line) for line in lines]


class FaultInjector:
    """A generate function in front of the real one. It logs every prompt and every reply, and fails as planned.

    The fault `before` is an overloaded server, which has not generated. With `after`, the connection is lost when the
    server has generated: the reply never arrives. Both are real requests of an agent, and only the failure is made.
    """

    def __init__(self, generate: GenerateFn, log: EventLog) -> None:
        self._generate, self._log = generate, log
        self._num_requests: Counter[tuple[str, str]] = Counter()

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Mapping[str, Any]:
        step, faults = STEP.get()
        number = self._num_requests[session_id, step]
        self._num_requests[session_id, step] += 1
        fault = faults[number] if number < len(faults) else None
        self._log.write("send", session_id, step=step, prompt=request["input_ids"], fault=fault)
        if fault == "before":
            raise ServerError("the server is overloaded (injected)", status=503)
        reply = await self._generate(rid=rid, session_id=session_id, **request)
        if fault == "after":
            raise ConnectionResetError("the connection was lost (injected)")
        params, meta = request["sampling_params"], reply["meta_info"]
        self._log.write(
            "reply",
            session_id,
            step=step,
            prompt=request["input_ids"],
            output=reply["output_ids"],
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            temperature=params["temperature"] or 1.0,
            max_new_tokens=params["max_new_tokens"],
        )
        return reply
