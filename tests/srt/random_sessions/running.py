"""Runs of a batch of sessions on a real server: whole, cancelled, or killed with SIGKILL, and then resumed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from helpers import processes
from transformers import AutoTokenizer

from random_sessions.environment import PlannedEnvironment
from random_sessions.events import EventLog, FaultInjector, read_events
from random_sessions.plans import BatchPlan, Interruption
from verl_server import AsyncHttpServerEngineAdapter
from verl_server.agent import RolloutRunner, Sample, Task, as_generate_fn
from verl_server.agent.engines import GenerateFn
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, list_sessions, load_session
from verl_server.types import Json

CHILD_TIMEOUT_S = 120.0
"""Maximum seconds of a run in a child process, also on a busy machine."""
Push = Callable[[], Awaitable[None]]
"""Pushes other weights into the server."""


@dataclass(frozen=True)
class Server:
    """The server of a test: its generate function, and how a child process reaches the server."""

    generate: GenerateFn
    url: str
    api_key: str | None
    model: Path
    """Folder of the model, for the tokenizer."""
    renderer: ChatRenderer


@dataclass(frozen=True)
class Run:
    """One run of a batch."""

    events: list[Json]
    before: dict[str, TrajectoryGraph]
    """The recorded graph of each session before the run."""
    after: dict[str, TrajectoryGraph]
    """The recorded graph of each session after the run, before bytes are cut off."""
    samples: dict[str, Sample] | None
    """The samples by session, from memory. None if the run was interrupted."""
    is_killed: bool = False

    def events_of(self, session: str) -> list[Json]:
        """The events of one session in their order."""
        return [event for event in self.events if event["session"] == session]


@dataclass(frozen=True)
class BatchResult:
    """All runs of a batch. The last two runs were not interrupted: the second finds the sessions finished."""

    plan: BatchPlan
    runs: list[Run]
    run_dir: Path

    @property
    def sessions(self) -> list[str]:
        """The ids of the sessions in the order of their plans."""
        return [f"s{index}-0" for index in range(len(self.plan.sessions))]


async def run_sessions(
    plan: BatchPlan, generate: GenerateFn, renderer: ChatRenderer, run_dir: Path, log: EventLog
) -> dict[str, Sample]:
    """Run the sessions of a batch with one runner. Returns the samples by session."""
    runner = RolloutRunner(
        PlannedEnvironment,
        FaultInjector(generate, log),
        renderer=renderer,
        limits=plan.limits,
        run_dir=run_dir,
        max_concurrency=plan.max_concurrency,
    )
    tasks = [
        Task(f"s{index}", [{"role": "user", "content": text} for text in session.texts], {"plan": session, "log": log})
        for index, session in enumerate(plan.sessions)
    ]
    async with contextlib.aclosing(runner.run(tasks)) as groups:
        return {f"{group.task.id}-0": group.samples[0] async for group in groups}


def run_batch(plan: BatchPlan, server: Server, folder: Path, push: Push | None = None) -> BatchResult:
    """Run a batch with its interruptions, then until its sessions have finished, and once more."""
    result = BatchResult(plan, [], folder / "sessions")
    for interruption in [*plan.interruptions, None, None]:
        log_path = folder / f"events-{len(result.runs)}.jsonl"
        before = _load_all(result.run_dir)
        samples, is_killed = None, False
        if interruption is not None and interruption.is_kill:
            is_killed = _run_in_child(plan, server, result.run_dir, log_path, interruption)
        else:
            pushes = push if not result.runs else None
            samples = _run_here(plan, server, result.run_dir, log_path, interruption, pushes)
        after = _load_all(result.run_dir)
        result.runs.append(Run(read_events(log_path), before, after, samples, is_killed))
        if interruption is not None and interruption.torn_bytes:
            for path in list_sessions(result.run_dir):
                _tear(path, interruption.torn_bytes)
    return result


def _load_all(run_dir: Path) -> dict[str, TrajectoryGraph]:
    return {path.stem: load_session(path) for path in list_sessions(run_dir)}


def _tear(path: Path, num_bytes: int) -> None:
    """Cut bytes off the last line of a file, as if the machine had lost its power while the line was written."""
    content = path.read_bytes()
    start_of_line = content.rfind(b"\n", 0, len(content) - 1) + 1
    path.write_bytes(content[: max(len(content) - num_bytes, start_of_line)])


def _run_here(
    plan: BatchPlan, server: Server, run_dir: Path, log_path: Path, interruption: Interruption | None, push: Push | None
) -> dict[str, Sample] | None:
    """Run the batch in this process. Returns None if the run was cancelled."""
    log = EventLog(log_path)

    async def run() -> dict[str, Sample]:
        task = asyncio.current_task()
        assert task is not None
        pushes: list[asyncio.Future[None]] = []

        def on_event(number: int) -> None:
            if interruption is not None and number == interruption.at_event:
                task.cancel()
            if push is not None and number in plan.update_events:
                pushes.append(asyncio.ensure_future(push()))

        log.on_event = on_event
        samples = await run_sessions(plan, server.generate, server.renderer, run_dir, log)
        await asyncio.gather(*pushes)
        return samples

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return None
    finally:
        log.close()


def _run_in_child(plan: BatchPlan, server: Server, run_dir: Path, log_path: Path, interruption: Interruption) -> bool:
    """Run the batch in a child process that is killed. Returns whether the process was killed before its end."""
    arguments = (plan, server.url, server.api_key, server.model, run_dir, log_path, interruption)
    process = processes().Process(target=child_main, args=arguments)
    process.start()
    process.join(CHILD_TIMEOUT_S)
    is_late = process.is_alive()
    process.kill()
    process.join()
    assert not is_late, "the child process does not finish"
    assert process.exitcode in (0, -signal.SIGKILL), f"the child process has failed: {process.exitcode}"
    return bool(process.exitcode)


def child_main(
    plan: BatchPlan,
    url: str,
    api_key: str | None,
    model: Path,
    run_dir: Path,
    log_path: Path,
    interruption: Interruption,
) -> None:
    """Main function of the child process. SIGKILL comes at an event, or from a thread some time after the event."""
    logging.getLogger("verl_server").setLevel(logging.CRITICAL)  # samples fail and are resumed on purpose
    log = EventLog(log_path)

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_event(number: int) -> None:
        if number == interruption.at_event:
            threading.Timer(interruption.delay_s, kill).start() if interruption.delay_s else kill()

    log.on_event = on_event
    generate = as_generate_fn(AsyncHttpServerEngineAdapter.attach(url, api_key=api_key))
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    asyncio.run(run_sessions(plan, generate, renderer, run_dir, log))
