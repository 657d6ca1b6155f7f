"""A gateway that starts again with the folder of an earlier gateway: the same turns, texts and limits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from agent_helpers import RecordingGenerateFn, ScriptedGenerateFn
from helpers import adapter_of
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from vision_models import make_vision_model

from verl_server import AsyncHttpServerEngineAdapter, VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.errors import ShutDownError
from verl_server.gateway import Gateway
from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.turns import Client, Generation, Turns
from verl_server.gateway.turn_text.splitting import TurnProgress
from verl_server.trajectory import ChatRenderer, ForkReason, TrajectoryGraph, get_renderer, image_data_url, load_session
from verl_server.trajectory.graph import Span

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)
SHORT = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def start(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> Callable[..., Gateway]:
    """Starts a gateway with a folder."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    generate = RecordingGenerateFn(shared_engine)

    def start(run_dir: Path, **options: Any) -> Gateway:
        return Gateway(generate, run_dir, **{"renderer": renderer, "limits": LIMITS, **options})

    return start


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(gateway: Gateway, key: str, messages: Any, *, retry: int = 0, headers: Any = (), **fields: Any) -> Any:
    """The reply to a chat."""
    body = {"model": "m", "messages": [user(messages)] if isinstance(messages, str) else messages, **fields}
    known = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry), **dict(headers)}
    reply = httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=known, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return reply.json()


def graph_of(gateway: Gateway, session_id: str = "a") -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def num_turns(gateway: Gateway) -> int:
    return sum(node.sampled for node in graph_of(gateway).nodes)


def test_only_the_same_request_gets_the_recorded_turn(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=SHORT)
        first = ask(gateway, key, "a")
    with start(tmp_path) as gateway:
        other = ask(gateway, key, "a", max_tokens=5)
        assert other["id"] != first["id"], "another body with the same prompt has a turn of its own"
        assert ask(gateway, key, "a")["id"] == first["id"], "the turn was perhaps not delivered"
        assert ask(gateway, key, "a", retry=1)["id"] == first["id"]
        assert ask(gateway, key, "a")["id"] not in (first["id"], other["id"]), "another sample of the prompt"
        assert num_turns(gateway) == 3


def test_a_repeated_request_gets_its_turn_although_other_turns_followed(
    start: Callable[..., Gateway], tmp_path: Path
) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=SHORT)
        first = ask(gateway, key, "a")
        messages = [user("a"), first["choices"][0]["message"], user("b")]
        second = ask(gateway, key, messages)
    with start(tmp_path) as gateway:
        for _ in range(2):
            assert ask(gateway, key, "a", retry=1)["choices"] == first["choices"]
        assert ask(gateway, key, messages, retry=2)["choices"] == second["choices"]
        assert num_turns(gateway) == 2
        ask(gateway, key, "a")
        assert num_turns(gateway) == 3, "the agent has continued the turn, so it wants another sample"


def test_a_turn_that_ended_at_a_stop_sequence_keeps_its_text(start: Callable[..., Gateway], tmp_path: Path) -> None:
    """The tokens of the turn contain the stop sequence, and the text that the agent repeats does not."""
    sampling = {**SHORT, "regex": "[a-z]{4}XY[a-z]{4}", "max_new_tokens": 100, "ignore_eos": False}
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=sampling)
        first = ask(gateway, key, "a", stop=["XY"])["choices"][0]
        assert "XY" not in first["message"]["content"]
    with start(tmp_path) as gateway:
        assert ask(gateway, key, "a", stop=["XY"], retry=1)["choices"][0] == first
        ask(gateway, key, [user("a"), first["message"], user("b")], stop=["XY"])
        graph = graph_of(gateway)
    assert len(graph.leaves) == 1, "the conversation goes on after the recorded turn"
    (turn, _) = (node for node in graph.nodes if node.sampled)
    assert (turn.message or {})["stop_sequence"] == "XY"


def test_the_seconds_of_a_session_count_from_its_creation(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        info, key = gateway.create_session("a", sampling_params=SHORT, limits={"timeout_s": 4.0})
        first = ask(gateway, key, "a")
    time.sleep(max(info.created_at + 4.1 - time.time(), 0.0))
    with start(tmp_path) as gateway:
        body = {"model": "m", "messages": [user("b")]}
        url, headers = f"{gateway.openai_url}/chat/completions", {"Authorization": f"Bearer {key}"}
        reply = httpx.post(url, json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 429
        assert "timeout_s" in reply.json()["error"]["message"]
        assert ask(gateway, key, "a")["id"] == first["id"], "a recorded turn needs no time"


class ImageRecordingFn(ScriptedGenerateFn):
    """A policy that records how many images each request has."""

    num_images: list[int]

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.num_images.append(len(request.get("image_data", ())))
        return await super().__call__(rid=rid, session_id=session_id, **request)


def test_images_before_the_restart_are_sent_with_later_turns(tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make_vision_model(tmp_path / "model", "qwen2_5_vl"))
    generate = ImageRecordingFn(processor.tokenizer, lambda prompt: "yes")
    generate.num_images = []
    options: Any = {"renderer": get_renderer(processor), "limits": LIMITS}
    url = image_data_url(Image.new("RGB", (64, 64)))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with Gateway(generate, tmp_path / "run", **options) as gateway:
        _, key = gateway.create_session("a")
        turn = ask(gateway, key, [image])["choices"][0]["message"]
    with Gateway(generate, tmp_path / "run", **options) as gateway:
        ask(gateway, key, [image, turn, user("b")])
        assert len(graph_of(gateway).leaves) == 1
    assert generate.num_images == [1, 1]


# -- equal requests ---------------------------------------------------------------------------------------


def test_an_idempotency_key_tells_equal_requests_apart(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=SHORT)
        turns = [ask(gateway, key, "a", headers={"Idempotency-Key": name})["id"] for name in "1212"]
        assert turns[:2] == turns[2:]
    with start(tmp_path) as gateway:
        assert [ask(gateway, key, "a", headers={"Idempotency-Key": name})["id"] for name in "12"] == turns[:2]
        assert num_turns(gateway) == 2


def graph_with_turns(count: int) -> TrajectoryGraph:
    """Turns after the same prompt."""
    graph = TrajectoryGraph("s")
    for number in range(count):
        reason = ForkReason.SAMPLE if number else None
        graph.add_node(None, [1], sampled=True, fork_reason=reason, logprobs=[-1.0], spans=[Span(1, 0, 1)])
    return graph


def progress_of(renderer: ChatRenderer, node_id: int | None) -> TurnProgress:
    progress = TurnProgress(renderer, (), TurnRequest("", ()), {})
    progress.node_id = node_id
    return progress


def test_the_retry_of_a_request_without_a_turn_gets_a_turn_of_its_own(tiny: Callable[..., Path]) -> None:
    """Of four equal requests, one fails and one is refused. Their retries do not get the turns of the other two."""
    asyncio.run(find_turns_after_failures(ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))))


async def find_turns_after_failures(renderer: ChatRenderer) -> None:
    async def turn(fails: bool) -> AssistantTurn:
        if fails:
            raise ValueError("the engine has died")
        return AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())

    graph = graph_with_turns(3)
    turns = Turns(graph)
    generations = [Generation(turn(node is None), 1, progress_of(renderer, node)) for node in (0, None, 2)]
    for generation in generations:
        turns.add(Client(b"a"), generation)
    with generations[0].join(), generations[2].join():
        await asyncio.gather(*(generation.task for generation in generations), return_exceptions=True)
        with pytest.raises(GatewayError), turns.refusals_of(Client(b"a")):
            raise GatewayError(ErrorKind.TOO_MANY_REQUESTS, "the session has too many open requests")
        generations[0].set_delivered()
        generations[2].set_delivered()
        assert turns.find(Client(b"a", num_retries=1)) is None, "the retry of the refused request"
        assert turns.find(Client(b"a", num_retries=1)) is None, "the retry of the failed request"
        assert turns.find(Client(b"a", num_retries=1)) is generations[2]
        turns._add_recorded(b"a", 1, is_delivered=False)
        assert turns.find(Client(b"a", num_retries=1)) is graph.node(1), "it comes before a received turn"
        again = Generation(turn(False), 1, progress_of(renderer, 1))
        turns.add(Client(b"a"), again)
        with again.join():
            again.set_delivered()
            assert turns.find(Client(b"a")) is None, "the turn is open"
            assert turns.find(Client(b"a", num_retries=1)) is again
            await again.wait()
        await asyncio.sleep(0)
        assert turns.find(Client(b"a")) is None, "the turn is delivered"
        assert turns.find(Client(b"a", num_retries=1)) is generations[2]
    assert turns.find(Client(b"a")) is None
    assert turns.find(Client(b"a", num_retries=1)) is graph.node(2), "the last turn"
    assert list(turns) == []


def test_a_repeated_request_gets_its_latest_recorded_turn() -> None:
    """Turns are not forgotten in the order in which they were recorded."""
    graph, turns = graph_with_turns(3), Turns(TrajectoryGraph("s"))
    turns.continue_with(graph)
    for node in (0, 2, 1):
        turns._add_recorded(b"a", node, is_delivered=True)
    assert turns.find(Client(b"a", num_retries=1)) is graph.node(2)


def test_a_turn_that_the_record_has_lost_is_not_found() -> None:
    """The id of its node will be that of another turn."""
    turns = Turns(graph_with_turns(3))
    for node, fingerprint in enumerate((b"a", b"b", b"c")):
        turns._add_recorded(fingerprint, node, is_delivered=node == 1)
    turns.continue_with(graph := graph_with_turns(1))
    graph.add_node(None, [1], sampled=True, fork_reason=ForkReason.SAMPLE, logprobs=[-1.0], spans=[Span(1, 0, 1)])
    assert turns.find(Client(b"a")) is graph.node(0)
    assert turns.find(Client(b"b", num_retries=1)) is None
    assert turns.find(Client(b"c")) is None


def test_an_open_turn_that_the_record_has_lost_is_not_found(tiny: Callable[..., Path]) -> None:
    """Its client still receives the reply when the record is read again."""
    asyncio.run(lose_an_open_turn(ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))))


async def lose_an_open_turn(renderer: ChatRenderer) -> None:
    async def turn() -> AssistantTurn:
        return AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())

    turns = Turns(graph_with_turns(2))
    kept, lost = (Generation(turn(), 1, progress_of(renderer, node)) for node in range(2))
    turns.add(Client(b"kept"), kept)
    turns.add(Client(b"lost"), lost)
    with kept.join(), lost.join():
        await asyncio.gather(kept.task, lost.task)
        turns.continue_with(graph := graph_with_turns(1))
        assert turns.find(Client(b"kept", num_retries=1)) is kept
        assert turns.find(Client(b"lost", num_retries=1)) is None, "a turn without a record"
        lost.set_delivered()
    assert not lost.is_open
    graph.add_node(None, [1], sampled=True, fork_reason=ForkReason.SAMPLE, logprobs=[-1.0], spans=[Span(1, 0, 1)])
    assert turns.find(Client(b"kept", num_retries=1)) is graph.node(0)
    assert turns.find(Client(b"lost", num_retries=1)) is None, "another turn has the id of the lost turn"
    assert list(turns) == []


def test_a_retry_gets_the_turn_whose_client_has_left(tiny: Callable[..., Path]) -> None:
    """Two clients send the same request on purpose. One of them leaves and comes back: it gets its own sample."""
    asyncio.run(find_turns(ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))))


async def find_turns(renderer: ChatRenderer) -> None:
    async def turn() -> AssistantTurn:
        await asyncio.Event().wait()
        raise AssertionError

    progress = TurnProgress(renderer, (), TurnRequest("", ()), {})
    turns, generations = Turns(TrajectoryGraph("s")), [Generation(turn(), 1, progress) for _ in range(3)]
    try:
        for generation in generations:
            turns.add(Client(b"a"), generation)
        assert turns.find(Client(b"b", num_retries=1)) is None
        with generations[0].join(), generations[2].join():
            with generations[1].join():
                assert turns.find(Client(b"a")) is None
                assert turns.find(Client(b"a", num_retries=1)) is generations[2], (
                    "no client has left, as far as it is known"
                )
            for num_retries in (1, 0):
                assert turns.find(Client(b"a", num_retries=num_retries)) is generations[1]
            generations[1].set_delivered()
            assert turns.find(Client(b"a")) is None
            generations[2].set_delivered()
            assert turns.find(Client(b"a", num_retries=1)) is generations[0], (
                "the other turns have reached their clients"
            )
    finally:
        for generation in generations:
            generation.task.cancel()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_seed_and_logit_bias_reach_the_engine(start: Callable[..., Gateway], tmp_path: Path, path: str) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params={**SHORT, "max_new_tokens": 8})
        url, headers = f"{gateway.openai_url}/{path}", {"Authorization": f"Bearer {key}"}

        def turn(**fields: Any) -> tuple[int, ...]:
            body = {"model": "m", "messages": [user("a")], "prompt": "a", **fields}
            reply = httpx.post(url, json=body, headers=headers, timeout=60.0)
            assert reply.status_code == 200, reply.text
            return graph_of(gateway).nodes[-1].token_ids

        assert turn(logit_bias={"65": 100}) == (65,) * 8
        assert turn(seed=5) == turn(seed=5)
        assert turn(seed=6) != turn(seed=5)
        refused = {"logit_bias": {"999999": 1}} if path == "completions" else {"functions": [{"name": "f"}]}
        reply = httpx.post(url, json={"messages": [user("a")], "prompt": "a", **refused}, headers=headers, timeout=60.0)
        assert reply.status_code == 400, reply.text
        assert "logit_bias" in reply.text or "functions" in reply.text


# -- the end of a gateway ---------------------------------------------------------------------------------


def test_a_gateway_that_was_shut_down_says_so(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        gateway.create_session("a")
        url = gateway.url
    assert (gateway.url, gateway.openai_url) == (url, f"{url}/v1")
    for call in (gateway.sessions, gateway.create_session, lambda: gateway.end_session("a", 1.0)):
        with pytest.raises(ShutDownError, match="the gateway was shut down"):
            call()


def test_no_connection_to_the_engine_is_left(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """aiohttp would write a message at the end of the program: nobody has closed the client session."""
    server = adapter_of(shared_engine)
    engine = AsyncHttpServerEngineAdapter.attach(server.base_url, api_key=server.api_key)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    before = open_client_sessions()
    for number in range(2):
        with Gateway(engine, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
            _, key = gateway.create_session(f"s{number}", sampling_params=SHORT)
            ask(gateway, key, "a")
            assert open_client_sessions() - before
        assert not open_client_sessions() - before, "the next gateway opens connections of its own"


def open_client_sessions() -> set[int]:
    """The ids of aiohttp's client sessions in this process that are not closed."""
    return {id(item) for item in gc.get_objects() if isinstance(item, aiohttp.ClientSession) and not item.closed}
