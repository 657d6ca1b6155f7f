"""`ChatScheduler` and the progress bar on a real server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn, add, call_text, renderer_with_template
from helpers import QWEN, adapter_of, chat_tokenizer
from rich.console import Console
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import (
    ChatScheduler,
    EpisodeStopped,
    RolloutLimits,
    RolloutRunner,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
    Turn,
    as_generate_fn,
    with_progress,
)
from verl_server.errors import BadInputError, ServerError
from verl_server.trajectory import ChatRenderer

USER_MESSAGES = [{"role": "user", "content": "go on"}]
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


class RecordingServer:
    """A real server whose requests are recorded."""

    def __init__(self, engine: Any) -> None:
        self._generate = as_generate_fn(engine.adapter.asynchronous)
        self.requests: list[tuple[str, list[int]]] = []
        """Session id and prompt of each request."""

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.requests.append((session_id, list(request["input_ids"])))
        return await self._generate(rid=rid, session_id=session_id, **request)


class FailingOnceServer(RecordingServer):
    """A server whose first request fails."""

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        if not self.requests:
            self.requests.append(("", []))
            raise ServerError("not now")
        return await super().__call__(rid=rid, session_id=session_id, **request)


def make_scheduler(servers: list[Any], renderer: ChatRenderer, limits: RolloutLimits | None = None) -> ChatScheduler:
    return ChatScheduler(servers, renderer, limits or RolloutLimits(max_response_tokens=500), SAMPLING_PARAMS)


def test_callbacks_submit_the_next_turn(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    """Ten conversations of three turns stay on their server, and the two servers get five conversations each."""
    servers = [RecordingServer(shared_engine), RecordingServer(shared_engine)]
    episodes = {}

    async def run() -> None:
        scheduler = make_scheduler(servers, renderer)

        def on_turn(turn: Turn | None, info: Any, error: Exception | EpisodeStopped | None) -> None:
            assert error is None
            assert turn is not None
            assert len(turn.token_ids) == 8
            if info["remaining_turns"]:
                next_info = {**info, "remaining_turns": info["remaining_turns"] - 1}
                scheduler.submit(on_turn, USER_MESSAGES, session_id=session_ids[info["index"]], info=next_info)

        session_ids: dict[int, str] = {}
        for index in range(10):
            session_ids[index] = scheduler.submit(on_turn, USER_MESSAGES, info={"remaining_turns": 2, "index": index})
        with pytest.raises(BadInputError, match="has a running turn"):
            scheduler.submit(on_turn, USER_MESSAGES, session_id=session_ids[0])
        await scheduler.join()
        episodes.update({session_id: scheduler.finish(session_id) for session_id in session_ids.values()})
        with pytest.raises(BadInputError, match="there is no conversation"):
            scheduler.submit(on_turn, USER_MESSAGES, session_id=session_ids[0])
        await scheduler.close()

    asyncio.run(run())
    sessions_by_server = [{session_id for session_id, _ in server.requests} for server in servers]
    assert sessions_by_server[0] & sessions_by_server[1] == set()
    assert [len(session_ids) for session_ids in sessions_by_server] == [5, 5]
    for session_id, episode in episodes.items():
        assert episode.leaf is not None
        assert episode.graph.num_turns(episode.leaf) == 3
        prompts = [prompt for server in servers for name, prompt in server.requests if name == session_id]
        sampled = [node for node in episode.graph.nodes if node.sampled]
        assert prompts == [episode.graph.token_ids(node.parent) for node in sampled if node.parent is not None]


def test_failed_turn_can_be_submitted_again(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    """A callback gets the error of a failed turn. `join` raises the exceptions of callbacks."""
    outcomes: list[Any] = []

    async def run() -> None:
        limits = RolloutLimits(max_response_tokens=120, max_turns=2)
        scheduler = make_scheduler([FailingOnceServer(shared_engine)], renderer, limits)

        async def on_turn(turn: Turn | None, info: Any, error: Exception | EpisodeStopped | None) -> None:
            outcomes.append(error or turn)
            if len(outcomes) < 4:
                scheduler.submit(on_turn, USER_MESSAGES, session_id=conversation)
            else:
                raise RuntimeError("the callback failed")

        conversation = scheduler.submit(on_turn, USER_MESSAGES)
        with pytest.raises(ExceptionGroup, match="callbacks failed") as caught:
            await scheduler.join()
        assert "the callback failed" in str(caught.value.exceptions[0])
        episode = scheduler.finish(conversation)
        assert episode.leaf is not None
        assert episode.graph.num_turns(episode.leaf) == 2, "the path contains the failed turn"

    asyncio.run(run())
    assert isinstance(outcomes[0], ServerError)
    assert isinstance(outcomes[1], Turn)
    assert isinstance(outcomes[2], Turn)
    assert isinstance(outcomes[3], EpisodeStopped)
    assert outcomes[3].stop_reason == "max_turns"
    with pytest.raises(BadInputError, match="at least one server"):
        make_scheduler([], renderer)
    assert ChatScheduler.least_loaded([2, 1, 1]) == 1


def test_no_turn_is_lost_that_cancels_itself(renderer: ChatRenderer) -> None:
    """A generate function, or a callback, that awaits something which was cancelled."""
    errors: list[Any] = []

    async def generate(**_: Any) -> Any:
        raise asyncio.CancelledError

    def on_turn(turn: Turn | None, info: Any, error: Exception | EpisodeStopped | None) -> None:
        errors.append(error)
        raise asyncio.CancelledError

    async def run() -> None:
        scheduler = make_scheduler([generate], renderer)
        scheduler.submit(on_turn, USER_MESSAGES)
        with pytest.raises(ExceptionGroup, match="callback") as raised:
            await scheduler.join()
        assert "CancelledError" in str(raised.value.exceptions[0])

    asyncio.run(run())
    assert [type(error) for error in errors] == [RuntimeError]


@pytest.mark.parametrize("is_registry", [False, True])
def test_conversations_have_the_tools_of_the_scheduler(tmp_path: Path, is_registry: bool) -> None:
    """The first prompt has the tools, and the callback executes the calls of a turn."""
    tokenizer = chat_tokenizer(tmp_path)
    renderer = renderer_with_template(tokenizer, QWEN)
    policy = ScriptedGenerateFn(
        tokenizer, lambda prompt: "it is 42" if "\n42" in prompt else call_text("add", a=40, b=2)
    )
    loop, texts = ToolAgentLoop([add]), []

    async def run() -> None:
        limits = RolloutLimits(max_response_tokens=500)
        scheduler = ChatScheduler([policy], renderer, limits, {}, tools=loop.tools if is_registry else [add])

        async def on_turn(turn: Turn | None, info: Any, error: Exception | EpisodeStopped | None) -> None:
            assert turn is not None, error
            texts.append(turn.raw_text)
            if calls := loop.parse_tool_calls(turn):
                results = await loop.tools.call_all(calls)
                scheduler.submit(on_turn, [result.message for result in results], session_id=conversation)

        conversation = scheduler.submit(on_turn, USER_MESSAGES)
        await scheduler.join()
        assert scheduler.finish(conversation).tools.names == ["add"]

    asyncio.run(run())
    assert texts == [call_text("add", a=40, b=2), "it is 42"]
    assert all(prompt.startswith("add <|im_start|>user\n") for prompt in policy.prompts), (
        "the template writes the names"
    )
    assert len(policy.prompts) == 2


def test_progress_bar_shows_the_counters(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    output = io.StringIO()

    async def run() -> int:
        runner = RolloutRunner(
            SingleTurnLoop(),
            as_generate_fn(adapter_of(shared_engine).asynchronous),
            renderer=renderer,
            limits=RolloutLimits(max_response_tokens=50),
            sampling_params=SAMPLING_PARAMS,
            n=2,
            reward=lambda sample: 0.5,
        )
        tasks = [Task(f"t{index}", USER_MESSAGES) for index in range(5)]
        console = Console(file=output, force_terminal=True, width=200)
        groups = [group async for group in with_progress(runner, runner.run(tasks), total=5, console=console)]
        counters = runner.counters
        finished = (counters.num_finished_samples, counters.num_running_samples, counters.num_failed_samples)
        assert finished == (10, 0, 0)
        assert (counters.num_turns, counters.num_sampled_tokens) == (10, 80)
        steps = runner.steps(tasks, num_groups=3)
        sizes = [len(step.groups) async for step in with_progress(runner, steps, total=2, console=console)]
        assert sizes == [3, 2]
        return len(groups)

    assert asyncio.run(run()) == 5
    text = output.getvalue()
    for expected in ("5/5", "10 finished", "tokens/s", "mean reward 0.500", "2/2", "20 finished"):
        assert expected in text
