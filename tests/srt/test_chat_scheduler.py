"""Conversations driven by callbacks, and the live bar of a runner, on a real server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from verl_server.agent.chat_scheduler import ChatScheduler, fewest
from verl_server.agent.episode import Budget, EndedError, Task, Turn, generate_of
from verl_server.agent.fair_scheduler import Turnstile
from verl_server.agent.loops import SingleTurnLoop
from verl_server.agent.progress import shown
from verl_server.agent.runner import RolloutRunner
from verl_server.errors import BadInputError, ServerError
from verl_server.trajectory.rendering import Renderer

USER = [{"role": "user", "content": "go on"}]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


class Server:
    """A real one, with its requests counted."""

    def __init__(self, engine: Any) -> None:
        self._generate = generate_of(engine.adapter.asynchronous)
        self.prompts: list[tuple[str, list[int]]] = []

    async def __call__(self, *, request_id: str, session_id: str, **request: Any) -> Any:
        self.prompts.append((session_id, list(request["input_ids"])))
        return await self._generate(request_id=request_id, session_id=session_id, **request)


def scheduler_of(servers: list[Any], renderer: Renderer, **changed: Any) -> ChatScheduler:
    return ChatScheduler(servers, renderer, changed.pop("budget", Budget(response_tokens=500)), {**SAMPLING, **changed})


def test_callbacks_submit_the_next_turn(shared_engine: Any, renderer: Renderer) -> None:
    """Ten conversations of three turns over two ways to a server: each stays where it began; no way has far more."""
    servers = [Server(shared_engine), Server(shared_engine)]
    rollouts = {}

    async def run() -> None:
        scheduler = scheduler_of(servers, renderer)

        def completed(turn: Turn | None, info: Any, error: Exception | None) -> None:
            assert error is None
            assert turn is not None
            assert len(turn.ids) == 8
            if info["left"]:
                again = {**info, "left": info["left"] - 1}
                scheduler.submit(completed, USER, session_id=info["ids"][info["number"]], info=again)

        ids: dict[int, str] = {}
        for number in range(10):
            ids[number] = scheduler.submit(completed, USER, info={"left": 2, "number": number, "ids": ids})
        with pytest.raises(BadInputError, match="has a turn under way"):
            scheduler.submit(completed, USER, session_id=ids[0])
        await scheduler.join()
        rollouts.update({one: scheduler.finish(one) for one in ids.values()})
        with pytest.raises(BadInputError, match="there is no conversation"):
            scheduler.submit(completed, USER, session_id=ids[0])
        await scheduler.close()

    asyncio.run(run())
    where = [{name for name, _ in server.prompts} for server in servers]
    assert where[0] & where[1] == set()
    assert [len(names) for names in where] == [5, 5]
    for name, rollout in rollouts.items():
        assert rollout.leaf is not None
        assert rollout.session.turns(rollout.leaf) == 3
        asked = [ids for server in servers for one, ids in server.prompts if one == name]
        spoken = [node for node in rollout.session.nodes if node.sampled]
        assert asked == [rollout.session.ids(node.parent) for node in spoken if node.parent is not None]


def test_failures_are_the_callbacks_to_decide(shared_engine: Any, renderer: Renderer) -> None:
    class Fails(Server):
        async def __call__(self, **request: Any) -> Any:
            if not self.prompts:
                self.prompts.append(("", []))
                raise ServerError("not now")
            return await super().__call__(**request)

    seen: list[Any] = []

    async def run() -> None:
        scheduler = scheduler_of([Fails(shared_engine)], renderer, budget=Budget(response_tokens=120, turns=2))

        async def completed(turn: Turn | None, info: Any, error: Exception | None) -> None:
            seen.append(error or turn)
            if len(seen) < 4:
                scheduler.submit(completed, USER, session_id=conversation)
            else:
                raise RuntimeError("what a callback raises")

        conversation = scheduler.submit(completed, USER)
        with pytest.raises(ExceptionGroup, match="callbacks failed") as caught:
            await scheduler.join()
        assert "what a callback raises" in str(caught.value.exceptions[0])
        rollout = scheduler.finish(conversation)
        assert rollout.leaf is not None
        assert rollout.session.turns(rollout.leaf) == 2, "what failed was asked again, and is not there twice"

    asyncio.run(run())
    assert isinstance(seen[0], ServerError)
    assert isinstance(seen[1], Turn)
    assert isinstance(seen[2], Turn)
    assert isinstance(seen[3], EndedError)
    assert seen[3].reason == "turns"
    with pytest.raises(BadInputError, match="at least one server"):
        scheduler_of([], renderer)
    assert fewest([2, 1, 1]) == 1


def test_a_live_bar(shared_engine: Any, renderer: Renderer) -> None:
    output = io.StringIO()

    async def run() -> int:
        runner = RolloutRunner(
            SingleTurnLoop(),
            generate_of(shared_engine.adapter.asynchronous),
            renderer,
            Budget(response_tokens=50),
            SAMPLING,
            reward=lambda sample: 0.5,
        )
        tasks = [Task(f"t{number}", USER) for number in range(5)]
        console = Console(file=output, force_terminal=True, width=200)
        groups = [group async for group in shown(runner, runner.run(tasks, samples=2), total=5, console=console)]
        assert (runner.counts.finished, runner.counts.running, runner.counts.failed) == (10, 0, 0)
        assert (runner.counts.turns, runner.counts.tokens) == (10, 80)
        return len(groups)

    assert asyncio.run(run()) == 5
    drawn = output.getvalue()
    for words in ("5/5", "10 finished", "tokens/s", "mean reward 0.500"):
        assert words in drawn


def test_who_is_behind_goes_first(shared_engine: Any) -> None:
    """One at a time: of those who wait, the one with the fewest turns; a cancelled one takes no place."""
    order: list[str] = []
    server = Server(shared_engine)

    async def run() -> None:
        stile = Turnstile(server, at_once=1)

        async def turn(name: str) -> None:
            await stile(request_id="r", session_id=name, input_ids=[1, 2], sampling_params={"max_new_tokens": 2})
            order.append(name)

        await turn("old")
        await turn("old")
        await turn("young")
        running = asyncio.create_task(turn("first"))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(turn(name)) for name in ("old", "gone", "young", "new")]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert stile._room == 1
        with pytest.raises(BadInputError, match="at_once"):
            Turnstile(server, 0)

    asyncio.run(run())
    assert order == ["old", "old", "young", "first", "new", "young", "old"]
