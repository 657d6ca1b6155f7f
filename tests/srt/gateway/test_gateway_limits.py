"""Limits of requests: sizes of texts and images, content parts, and open requests of a session and of the gateway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.client
import io
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from agent_helpers import ScriptedGenerateFn, renderer_with_template
from PIL import Image
from transformers import AutoProcessor
from vision_models import make_vision_model

from verl_server.agent import RolloutLimits
from verl_server.errors import ServerDiedError
from verl_server.gateway import Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.dialects.content import ImageCheck, num_pixels
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.turns import Client, Generation, Slots, Turns
from verl_server.gateway.turn_text.splitting import TurnProgress
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import (
    ChatRenderer,
    ForkReason,
    Node,
    Span,
    TrajectoryGraph,
    get_renderer,
    load_session,
)

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_with_template(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), CHAT_TEMPLATE)


@pytest.fixture
def gateway(renderer: ChatRenderer, tmp_path: Path) -> Iterator[Gateway]:
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        yield gateway


def ask(gateway: Gateway, key: str, content: Any, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}], **fields}
    return httpx.post(f"{gateway.url}{path}", json=body, headers={"x-api-key": key}, timeout=60.0)


# -- long texts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions"])
def test_a_text_that_is_much_too_long_is_refused_after_a_part_of_it(
    gateway: Gateway, renderer: ChatRenderer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = gateway.create_session("a")
    encode, num_chars = renderer.encode, list[int]()

    def count(text: str) -> list[int]:
        num_chars.append(len(text))
        return encode(text)

    monkeypatch.setattr(renderer, "encode", count)
    text = "many words " * 1_000_000
    is_raw = path == "/v1/completions"
    reply = ask(gateway, key, "" if is_raw else text, path, prompt=text if is_raw else "")
    assert reply.status_code == 400
    assert ("prompt is too long" if path == MESSAGES else "maximum context length is 2000") in reply.text
    assert sum(num_chars) < 200_000, "ten million characters are not tokenized"
    (note,) = load_session(gateway.config.run_dir / "a.jsonl").notes
    assert note.value == {"limit": "max_context_tokens", "num_tokens": None}


def test_a_text_of_many_characters_and_few_tokens_is_served(gateway: Gateway) -> None:
    """The bound is not the number of characters: white space at the ends of a piece may be left out."""
    _, key = gateway.create_session()
    assert ask(gateway, key, "a" + " " * 40_000 + "b", max_tokens=5).status_code in (200, 400)
    assert ask(gateway, key, "a" * 1500).status_code == 200
    assert ask(gateway, key, "a" * 2500).status_code == 400


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES])
def test_the_stop_sequences_of_a_request_have_limits(gateway: Gateway, path: str) -> None:
    _, key = gateway.create_session()
    name = "stop_sequences" if path == MESSAGES else "stop"
    longest = [str(number).rjust(1000, "#") for number in range(64)]
    assert ask(gateway, key, "a", path, prompt="a", **{name: longest}).status_code == 200
    for stop, limit in (([*longest, "one more"], "64 items"), (["#" * 1001], "1000 characters")):
        reply = ask(gateway, key, "a", path, prompt="a", **{name: stop})
        assert reply.status_code == 400
        assert f"'{name}' must" in reply.text
        assert f"at most {limit}" in reply.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT, "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("part", [b"[1],", b"{},"])
def test_a_body_with_millions_of_values_is_refused_before_it_is_parsed(
    gateway: Gateway, path: str, part: bytes
) -> None:
    """A parser that makes millions of objects stops the event loop for seconds. The body is no valid JSON."""
    _, key = gateway.create_session()
    body = b'{"model":"m","metadata":[' + part * 500_001
    reply = httpx.post(f"{gateway.url}{path}", content=body, headers={"x-api-key": key}, timeout=60.0)
    assert reply.status_code == 413
    assert "more than 1000000 commas and opening brackets" in reply.text


# -- content parts and images -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
def test_too_many_content_parts_are_refused(gateway: Gateway, path: str) -> None:
    _, key = gateway.create_session()
    kind = "input_text" if path == "/v1/responses" else "text"
    messages = [{"role": "user", "content": [{"type": kind, "text": ""}] * 5001}] * 2
    reply = ask(gateway, key, "", path, **{"input" if path == "/v1/responses" else "messages": messages})
    assert reply.status_code == 413
    assert "10002 content parts, and 10000 are allowed" in reply.text


@pytest.mark.parametrize("place", ["a tool result", "system", "an output"])
def test_content_parts_count_wherever_they_are(gateway: Gateway, place: str) -> None:
    _, key = gateway.create_session()
    parts = [{"type": "input_text" if place == "an output" else "text", "text": ""}] * 10_001
    user: dict[str, Any] = {"role": "user", "content": "a"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": parts}]}
    path, fields = {
        "a tool result": (MESSAGES, {"messages": [user, call, result]}),
        "system": (MESSAGES, {"messages": [user], "system": parts}),
        "an output": (
            "/v1/responses",
            {"input": [user, {"type": "function_call_output", "call_id": "t", "output": parts}]},
        ),
    }[place]
    reply = ask(gateway, key, "", path, **fields)
    assert reply.status_code == 413
    assert "content parts, and 10000 are allowed" in reply.text


def image_message(content: bytes) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def encoded(image_format: str, size: tuple[int, int] = (20, 10)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, image_format)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG file, which tells the size."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = struct.pack(">I", 100) + b"IDAT" + b"\0" * 104
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data)) + pixels


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoProcessor.from_pretrained(make_vision_model(tmp_path_factory.mktemp("vision") / "model", "qwen2_5_vl"))


def check_images(processor: Any, messages: list[dict[str, Any]], max_pixels: int) -> list[Any]:
    """The contents as the policy reads them."""
    checked = ImageCheck(get_renderer(processor)).check(TurnRequest("m", messages), max_pixels)
    return [message["content"] for message in checked.messages]


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images_of_the_public_apis_are_accepted(processor: Any, image_format: str) -> None:
    image, png = image_message(encoded(image_format)), image_message(encoded("PNG"))
    assert check_images(processor, image, 200) == [image[0]["content"]]
    with pytest.raises(GatewayError, match="have 200 pixels or more, and 199 are allowed"):
        check_images(processor, image, 199)
    assert check_images(processor, [*image, *image], 400) == [image[0]["content"]] * 2
    with pytest.raises(GatewayError, match="have 400 pixels or more, and 399 are allowed"):
        check_images(processor, [*image, *png], 399)


@pytest.mark.parametrize("content", [b"", b"no image", encoded("BMP"), encoded("TIFF"), encoded("PPM"), encoded("ICO")])
def test_other_formats_are_not_decoded(processor: Any, content: bytes) -> None:
    assert num_pixels(image_message(content)[0]["content"][0]["image_url"]["url"]) is None
    assert check_images(processor, image_message(content), 1 << 30) == ["[image omitted: it cannot be read]"]


@pytest.fixture(scope="module")
def seeing(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose policy reads images. The images of other policies are not read at all."""
    folder = tmp_path_factory.mktemp("seeing")
    policy = ScriptedGenerateFn(processor.tokenizer, lambda prompt: "yes")
    limits = RolloutLimits(max_context_tokens=999)
    with Gateway(policy, folder / "run", renderer=get_renderer(processor), limits=limits) as gateway:
        yield gateway


@pytest.mark.parametrize("size", [(60_000, 60_000), (20_000, 8_000), (65_000, 2_500)])
def test_an_image_with_a_billion_pixels_is_refused_by_its_header(
    gateway: Gateway, seeing: Gateway, size: tuple[int, int]
) -> None:
    _, key = gateway.create_session()
    assert ask(gateway, key, image_message(png_header(*size))[0]["content"]).status_code == 200, "it is not read"
    gateway, (_, key) = seeing, seeing.create_session()
    bomb = png_header(*size)
    reply = ask(gateway, key, image_message(bomb)[0]["content"])
    assert reply.status_code in (400, 413)
    assert f"have {size[0] * size[1]} pixels or more, and 134217728 are allowed; send fewer or smaller" in reply.text
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(bomb).decode()}
    reply = ask(gateway, key, [{"type": "image", "source": source}], MESSAGES)
    assert "pixels" in reply.text
    assert reply.json()["error"]["type"] in ("request_too_large", "invalid_request_error")


def webp_header(width: int, height: int) -> bytes:
    """An animated WebP file without a frame, which tells the size of its canvas."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<II", 10, 2) + size + b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def test_a_webp_image_whose_memory_pillow_refuses_is_too_large(seeing: Gateway) -> None:
    gateway, (_, key) = seeing, seeing.create_session()
    reply = ask(gateway, key, image_message(webp_header(16_000, 16_000))[0]["content"])
    assert (reply.status_code, "too many pixels" in reply.text) == (413, True)
    source = {
        "type": "base64",
        "media_type": "image/webp",
        "data": base64.b64encode(webp_header(16_000, 16_000)).decode(),
    }
    assert ask(gateway, key, [{"type": "image", "source": source}], MESSAGES).status_code == 413


def test_the_limit_of_pixels_does_not_depend_on_that_of_pillow(processor: Any) -> None:
    """Pillow warns at 89 million pixels. Its warnings are settings of the whole process, and other threads run."""
    image = image_message(png_header(10_000, 10_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert num_pixels(image[0]["content"][0]["image_url"]["url"]) == 100_000_000
        with pytest.raises(GatewayError, match="have 100000000 pixels or more, and 99999999 are allowed"):
            check_images(processor, image, 99_999_999)


# -- open requests ----------------------------------------------------------------------------------------


class HeldGenerateFn(ScriptedGenerateFn):
    """A policy whose turns wait for `go`."""

    def hold(self) -> None:
        self.go, self.num_calls = threading.Event(), 0

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.num_calls += 1
        assert await asyncio.to_thread(self.go.wait, 60)
        return await super().__call__(rid=rid, session_id=session_id, **request)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def small_gateway(
    generate: HeldGenerateFn, renderer: ChatRenderer, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gateway]:
    """A gateway with two open requests in a session, and three in all sessions. Its turns end at the end."""
    generate.hold()
    small = functools.partial(GatewayConfig, max_session_requests=2, max_requests=3)
    monkeypatch.setattr("verl_server.gateway.gateway.GatewayConfig", small)
    with Gateway(generate, run_dir, renderer=renderer, limits=LIMITS) as gateway:
        try:
            yield gateway
        finally:
            generate.go.set()


def begin_request(gateway: Gateway, key: str, path: str, num_bytes: int) -> http.client.HTTPConnection:
    """A request whose body has not been sent."""
    connection = http.client.HTTPConnection(*gateway._address, timeout=30.0)
    connection.putrequest("POST", path)
    connection.putheader("x-api-key", key)
    connection.putheader("content-length", str(num_bytes))
    connection.endheaders()
    return connection


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT])
@pytest.mark.parametrize("num_readers", [0, 1])
def test_few_bodies_of_requests_without_a_slot_are_read(
    renderer: ChatRenderer, tmp_path: Path, path: str, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_readers`: number of such requests that are read at a time. Further requests are refused at once."""
    monkeypatch.setattr("verl_server.gateway.http.app.MAX_REFUSED_READERS", num_readers)
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with ThreadPoolExecutor(4) as pool, small_gateway(generate, renderer, tmp_path, monkeypatch) as gateway:
        (_, first), (_, second) = gateway.create_session("a"), gateway.create_session("b")
        running = [pool.submit(ask, gateway, first, str(number)) for number in range(2)]
        wait_until(lambda: generate.num_calls == 2)
        begun = [begin_request(gateway, first, path, 10)]
        assert httpx.get(f"{gateway.url}/health/liveness").status_code == 200  # the gateway has read the first head
        begun.append(begin_request(gateway, first, path, 10))
        replies = [begun[-1].getresponse()]
        begun[0].send(b"x" * 10)
        replies.append(begun[0].getresponse())
        assert [(reply.status, reply.headers["retry-after"]) for reply in replies] == [(429, "1")] * 2
        running.append(pool.submit(ask, gateway, second, "c"))
        wait_until(lambda: generate.num_calls == 3)
        reply = ask(gateway, second, "d", path)
        assert (reply.status_code, reply.headers["retry-after"]) == (503 if path == CHAT else 529, "1")
        generate.go.set()
        assert [request.result().status_code for request in running] == [200] * 3
        assert ask(gateway, first, "c", path).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COUNT])
def test_the_number_of_bodies_that_arrive_is_limited(
    renderer: ChatRenderer, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]})
    with small_gateway(generate, renderer, tmp_path, monkeypatch) as gateway:
        (_, key), (_, other) = gateway.create_session("a"), gateway.create_session("b")
        generate.go.set()
        assert [ask(gateway, each, "a").status_code for each in (key, other)] == [200, 200]
        slots = gateway._store.session("a").slots
        begun = [begin_request(gateway, key, path, len(body)) for _ in range(2)]
        wait_until(lambda: slots.arrivals.num_taken + slots.num_taken == 2)
        reply = ask(gateway, key, "b", path)
        assert reply.status_code == 429
        assert "the session has 2 open requests already" in reply.text
        begun.append(begin_request(gateway, other, path, len(body)))
        wait_until(lambda: gateway._slots.arrivals.num_taken + gateway._slots.num_taken == 3)
        reply = ask(gateway, other, "b", path)
        assert reply.status_code == (503 if path == CHAT else 529)
        assert "the gateway has 3 open requests already" in reply.text
        for connection in begun:
            connection.send(body)
            assert connection.getresponse().status == 200
        assert ask(gateway, key, "b", path).status_code == 200
        assert (slots.arrivals.num_taken, slots.num_taken) == (0, 0)


def test_a_request_that_was_refused_before_it_was_read_gets_a_turn_of_its_own(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal requests are samples. The retry of a refused sample must not get the turn of another one."""
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with ThreadPoolExecutor(4) as pool, small_gateway(generate, renderer, tmp_path, monkeypatch) as gateway:
        _, key = gateway.create_session("a")
        running = [pool.submit(ask, gateway, key, "a") for _ in range(2)]
        wait_until(lambda: generate.num_calls == 2)
        assert ask(gateway, key, "a").status_code == 429
        generate.go.set()
        assert [request.result().status_code for request in running] == [200] * 2
        for num_calls in (3, 3):
            assert send_again(gateway, key, "a").status_code == 200
            assert generate.num_calls == num_calls


@pytest.mark.parametrize("num_refusals", [1, 3])
def test_a_refused_request_that_comes_back_uses_up_its_refusal(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_refusals: int
) -> None:
    """Otherwise, the next retry of an answered request would be sampled a second time."""
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with ThreadPoolExecutor(4) as pool, small_gateway(generate, renderer, tmp_path, monkeypatch) as gateway:
        _, key = gateway.create_session("a")
        running = [pool.submit(ask, gateway, key, text) for text in ("a", "b")]
        wait_until(lambda: generate.num_calls == 2)
        for number in range(num_refusals):
            assert send_again(gateway, key, "c", number).status_code == 429
        generate.go.set()
        assert [request.result().status_code for request in running] == [200] * 2
        for text, num_calls in (("c", 3), ("a", 3), ("b", 3)):
            assert send_again(gateway, key, text, num_refusals).status_code == 200
            assert generate.num_calls == num_calls


def send_again(gateway: Gateway, key: str, content: str, num_retries: int = 1) -> httpx.Response:
    """Send the request of `ask` again, as the official SDKs do."""
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    headers = {"x-api-key": key, "x-stainless-retry-count": str(num_retries)}
    return httpx.post(f"{gateway.url}{CHAT}", json=body, headers=headers, timeout=60.0)


def test_the_turn_of_a_client_that_left_uses_up_no_refusal(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two equal requests, one is refused and gets the turn of the other. The other one gets a turn of its own."""
    monkeypatch.setattr("verl_server.gateway.gateway.GatewayConfig", functools.partial(GatewayConfig, max_requests=1))
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    generate.hold()
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway, ThreadPoolExecutor(1) as pool:
        _, key = gateway.create_session("a")
        body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]})
        left = begin_request(gateway, key, CHAT, len(body))
        left.send(body)
        wait_until(lambda: generate.num_calls == 1)
        try:
            assert ask(gateway, key, "a").status_code == 503
            left.close()
            session = gateway._call(lambda: gateway._store.session("a"))
            wait_until(lambda: all(turn.is_abandoned for turn in list(session._turns)))
            refused = pool.submit(send_again, gateway, key, "a")
            wait_until(lambda: not any(turn.is_abandoned for turn in list(session._turns)))
            assert send_again(gateway, key, "a").status_code == 503
        finally:
            generate.go.set()
        ids = {refused.result().json()["id"], send_again(gateway, key, "a", 2).json()["id"]}
        assert (len(ids), generate.num_calls) == (2, 2)


def test_refused_requests_that_never_come_back_double_no_other_request(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with ThreadPoolExecutor(2) as pool, small_gateway(generate, renderer, tmp_path, monkeypatch) as gateway:
        _, key = gateway.create_session("a")
        running = [pool.submit(ask, gateway, key, text) for text in ("a", "b")]
        wait_until(lambda: generate.num_calls == 2)
        assert [ask(gateway, key, f"given up {number}").status_code for number in range(3)] == [429] * 3
        generate.go.set()
        ids = [request.result().json()["id"] for request in running]
        assert [send_again(gateway, key, text).json()["id"] for text in ("a", "b")] == ids
        assert generate.num_calls == 2


def test_the_number_of_retries_tells_which_request_was_refused(renderer: ChatRenderer) -> None:
    asyncio.run(refuse_equal_requests(renderer))


async def refuse_equal_requests(renderer: ChatRenderer) -> None:
    turns = Turns(TrajectoryGraph("s"))
    refuse(turns, b"a")
    assert turns.find(Client(b"a")) is None, "another sample"
    answered = await delivered_turn(turns, b"a", renderer)
    for num_retries in (1, 2):
        turns.note_refusal(Client(b"a", num_retries=num_retries))  # still the request that was refused above
    assert turns.find(Client(b"a", num_retries=1)) is answered
    assert turns.find(Client(b"a", num_retries=2)) is answered
    assert turns.find(Client(b"a", num_retries=3)) is None
    assert turns.find(Client(b"a", num_retries=3)) is answered
    turns.note_refusal(Client(b"a", num_retries=1))  # its turn is known
    assert turns.find(Client(b"a", num_retries=2)) is answered


async def delivered_turn(turns: Turns, fingerprint: bytes, renderer: ChatRenderer) -> Node:
    """A turn of `turns` that its client has received."""

    async def turn() -> AssistantTurn:
        return AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())

    node = turns._graph.add_node(
        None, [1], sampled=True, fork_reason=ForkReason.SAMPLE, logprobs=[-1.0], spans=[Span(1, 0, 1)]
    )
    progress = TurnProgress(renderer, (), TurnRequest("", ()), {})
    progress.node_id = node.id
    generation = Generation(turn(), 1, progress)
    turns.add(Client(fingerprint), generation)
    with generation.join():
        await generation.wait()
        generation.set_delivered()
    return node


def refuse(turns: Turns, fingerprint: bytes) -> None:
    """A request is refused after it was read."""
    with pytest.raises(GatewayError), turns.refusals_of(Client(fingerprint)):
        raise GatewayError(ErrorKind.TOO_MANY_REQUESTS, "the session has too many open requests")


def test_refusals_that_were_used_up_displace_no_other_refusal(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.turns.MAX_REFUSED", 2)
    asyncio.run(refuse_many(renderer))


async def refuse_many(renderer: ChatRenderer) -> None:
    turns = Turns(TrajectoryGraph("s"))
    answered = await delivered_turn(turns, b"a", renderer)
    refuse(turns, b"a")
    for number in range(4):
        refuse(turns, b"%d" % number)
        assert turns.find(Client(b"%d" % number, num_retries=1)) is None
    refuse(turns, b"b")
    assert turns.find(Client(b"a", num_retries=1)) is None, "the retry of the refused request"
    assert turns.find(Client(b"a", num_retries=1)) is answered


def test_of_too_many_refusals_the_oldest_is_forgotten(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.turns.MAX_REFUSED", 2)
    asyncio.run(refuse_three(renderer))


async def refuse_three(renderer: ChatRenderer) -> None:
    turns = Turns(TrajectoryGraph("s"))
    first, last = await delivered_turn(turns, b"a", renderer), await delivered_turn(turns, b"c", renderer)
    for fingerprint in (b"a", b"b", b"c"):
        refuse(turns, fingerprint)
    assert turns.find(Client(b"a", num_retries=1)) is first
    assert turns.find(Client(b"c", num_retries=1)) is None, "the retry of the refused request"
    assert turns.find(Client(b"c", num_retries=1)) is last


def test_a_turn_that_began_before_a_failure_does_not_clear_it(renderer: ChatRenderer) -> None:
    asyncio.run(fail_during_a_turn(renderer))


async def fail_during_a_turn(renderer: ChatRenderer) -> None:
    go, turns, error = asyncio.Event(), Turns(TrajectoryGraph("s")), ServerDiedError("it has died")
    progress = TurnProgress(renderer, (), TurnRequest("", ()), {})

    async def turn() -> AssistantTurn:
        await go.wait()
        return AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())

    async def fail() -> AssistantTurn:
        raise error

    generations = [Generation(turn(), 1, progress), Generation(fail(), 1, progress)]
    for generation in generations:
        turns.add(Client(b"a"), generation)
    with pytest.raises(ServerDiedError):
        await generations[1].task
    go.set()
    await generations[0].task
    assert turns.failure is error
    await delivered_turn(turns, b"b", renderer)
    assert turns.failure is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_has_a_limited_number_of_open_requests(
    renderer: ChatRenderer, tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    generate.hold()
    small = functools.partial(GatewayConfig, max_session_requests=2, max_requests=3)
    monkeypatch.setattr("verl_server.gateway.gateway.GatewayConfig", small)
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway, ThreadPoolExecutor(4) as pool:
        (_, first), (_, second) = gateway.create_session("a"), gateway.create_session("b")
        running = [pool.submit(ask, gateway, first, str(number), stream=stream) for number in range(2)]
        wait_until(lambda: generate.num_calls == 2)
        try:
            for path, status, kind in ((CHAT, 429, "rate_limit_error"), (MESSAGES, 429, "rate_limit_error")):
                reply = ask(gateway, first, "c", path, stream=stream)
                assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
                assert reply.headers["retry-after"] == "1"
                assert "the session has 2 open requests already" in reply.text
            running.append(pool.submit(ask, gateway, second, "d", stream=stream))
            wait_until(lambda: generate.num_calls == 3)
            for path, status, kind in ((CHAT, 503, "server_error"), (MESSAGES, 529, "overloaded_error")):
                reply = ask(gateway, second, "e", path, stream=stream)
                assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
                assert "the gateway has 3 open requests already" in reply.text
        finally:
            generate.go.set()
        assert [request.result().status_code for request in running] == [200] * 3
        assert ask(gateway, first, "c", stream=stream).status_code == 200
        assert ask(gateway, second, "e", stream=stream).status_code == 200
    assert generate.num_calls == 5


def test_a_turn_without_a_client_has_a_slot(renderer: ChatRenderer) -> None:
    """A running turn keeps one slot, and each further client needs a slot."""
    asyncio.run(use_slots(renderer))


async def use_slots(renderer: ChatRenderer) -> None:
    slots, go = Slots(2), asyncio.Event()

    async def turn() -> AssistantTurn:
        await go.wait()
        raise RuntimeError("an error of the engine")

    slots.take()
    generation = Generation(turn(), 1, TurnProgress(renderer, (), TurnRequest("", ()), {}), slots)
    with generation.join():
        assert slots.num_taken == 1
        with generation.join():
            assert slots.num_taken == 2
            with pytest.raises(GatewayError, match="2 open requests"):
                generation.join()
        assert slots.num_taken == 1
    assert slots.num_taken == 1, "the turn runs without a client"
    with generation.join():
        assert slots.num_taken == 1
        go.set()
        with pytest.raises(RuntimeError):
            await generation.wait()
        assert slots.num_taken == 1
    assert slots.num_taken == 0


def test_which_turns_a_request_without_a_slot_can_get(renderer: ChatRenderer) -> None:
    """The request that joins a running turn without a client needs no slot."""
    asyncio.run(find_without_slots(renderer))


async def find_without_slots(renderer: ChatRenderer) -> None:
    slots, go, turns = Slots(1), asyncio.Event(), Turns(TrajectoryGraph("s"))
    progress = TurnProgress(renderer, (), TurnRequest("", ()), {})

    async def turn() -> AssistantTurn:
        await go.wait()
        return AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())

    slots.take()
    held = Generation(turn(), 1, progress, slots)
    turns.add(Client(b"a"), held)
    with held.join():
        with pytest.raises(GatewayError, match="1 open requests"), turns.arriving(slots):
            pass
        await delivered_turn(turns, b"b", renderer)
        turns.note_refusal(Client(b"a"))
        assert turns.find(Client(b"a", num_retries=1)) is None, "the request that was refused above"
        assert turns.find(Client(b"a", num_retries=1)) is held
    with turns.arriving(slots):
        assert turns.find(Client(b"a")) is held
    go.set()
    await held.task
