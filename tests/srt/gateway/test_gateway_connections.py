"""Connections of the gateway: clients that send nothing, that are slow or idle, and too many connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from agent_helpers import renderer_with_template
from starlette.types import Message
from test_gateway_limits import CHAT, LIMITS, HeldGenerateFn, ask, wait_until

from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.http.app import PART_BYTES, TurnReply, run_until
from verl_server.gateway.http.connections import CONNECTION, MAX_WAITING_REQUESTS
from verl_server.gateway.sessions.turns import Generation
from verl_server.gateway.turn_text.splitting import TurnProgress
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import ChatRenderer

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key: KEY\r\ncontent-length: 1000\r\n\r\n"
READY = "GET /health/liveness HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = READY.replace("host: a", "host: a\r\nconnection: close")
Open = Callable[..., Gateway]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_with_template(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), CHAT_TEMPLATE)


@pytest.fixture
def generate(renderer: ChatRenderer) -> HeldGenerateFn:
    made = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    made.hold()
    return made


@pytest.fixture
def open_gateway(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Makes a gateway with settings of `GatewayConfig`."""
    made = list[Gateway]()

    def make(**settings: Any) -> Gateway:
        monkeypatch.setattr("verl_server.gateway.gateway.GatewayConfig", functools.partial(GatewayConfig, **settings))
        made.append(Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS))
        return made[-1]

    yield make
    generate.go.set()
    for gateway in made:
        gateway.shutdown()


@contextlib.contextmanager
def ending(*events: threading.Event) -> Iterator[None]:
    """Set events at the end of the block, so that no thread waits for them after a failure."""
    try:
        yield
    finally:
        for event in events:
            event.set()


def send_slowly_until_closed(gateway: Gateway, begin: str, byte: bytes) -> bytes:
    """Send a text, and then the same byte again and again. Returns what the gateway has sent until it closed."""
    received, deadline = b"", time.monotonic() + 60.0
    with socket.create_connection(gateway._address) as client:
        client.settimeout(0.05)
        client.sendall(begin.encode())
        while True:
            assert time.monotonic() < deadline, "the gateway does not close the connection"
            try:
                if not (found := client.recv(1 << 16)):
                    return received
                received += found
            except TimeoutError:
                pass
            except ConnectionError:
                return received
            try:
                client.sendall(byte)
            except ConnectionError:
                return received


@pytest.mark.parametrize(
    ("begin", "byte", "reply"),
    [
        ("", b"", b""),
        ("", b"\r\n", b""),
        ("GE", b"", b""),
        ("GET / HTTP/1.1\r\nx: ", b"y", b""),
        (HEAD, b"", b""),
        (HEAD, b" ", b""),
        (HEAD.replace("KEY", "wrong"), b" ", b"401 Unauthorized"),
        (READY, b"", b"200 OK"),
        (READY, b"\r\n", b"200 OK"),
        (READY + "GET / HTTP/1.1\r\nx: ", b"y", b"200 OK"),
    ],
)
def test_a_slow_or_idle_client_does_not_keep_its_connection(
    open_gateway: Open, begin: str, byte: bytes, reply: bytes
) -> None:
    """`byte`: what the client sends 20 times a second."""
    gateway = open_gateway(head_timeout_s=0.3, body_timeout_s=0.5, idle_timeout_s=1)
    _, key = gateway.create_session("a")
    received = send_slowly_until_closed(gateway, begin.replace("KEY", key), byte)
    assert reply in received
    assert bool(received) == bool(reply)
    slots = gateway._call(lambda: gateway._store.session("a").slots)
    wait_until(lambda: (slots.arrivals.num_taken, slots.num_taken) == (0, 0))


def test_deadlines_of_requests_do_not_end_their_turns(open_gateway: Open, generate: HeldGenerateFn) -> None:
    gateway = open_gateway(head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1)
    _, key = gateway.create_session("a")
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, gateway, key, "a", stream=stream) for stream in (False, True)]
        wait_until(lambda: generate.num_calls == 2)
        send_slowly_until_closed(gateway, HEAD.replace("KEY", key), b" ")  # both deadlines have passed
        generate.go.set()
        replies = [request.result() for request in running]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[1].text.rstrip().endswith("[DONE]")


def body_of(content: str, **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields})


def turn(key: str, content: str, **fields: Any) -> bytes:
    """A request for a turn."""
    body = body_of(content, **fields)
    return HEAD.replace("KEY", key).replace("1000", str(len(body))).encode() + body


@pytest.mark.parametrize("behind", [READY, HEAD + "{", READY + READY + "GET / HT"])
@pytest.mark.parametrize("later", [False, True])
def test_a_client_that_leaves_with_waiting_requests_leaves_its_turn(
    open_gateway: Open,
    generate: HeldGenerateFn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    behind: str,
    later: bool,
) -> None:
    """`behind`: what the client sends before the reply to its turn. `later`: after the turn has begun."""
    monkeypatch.setattr("verl_server.gateway.sessions.turns.ABANDONED_S", 0.0)
    gateway = open_gateway()
    _, key = gateway.create_session("a")
    slots = gateway._call(lambda: gateway._store.session("a").slots)
    with socket.create_connection(gateway._address) as client:
        client.sendall(turn(key, "a") + (b"" if later else behind.encode()))
        wait_until(lambda: generate.num_calls == 1)
        if later:
            client.sendall(behind.encode())
            connections: Any = gateway._server.server_state.connections
            wait_until(lambda: any(connection.pipeline for connection in list(connections)))
        assert slots.num_taken == 1
    wait_until(lambda: slots.num_taken == 0)
    generate.go.set()
    gateway.shutdown()
    assert "Exception in ASGI application" not in caplog.text, "nothing is sent to a client that has left"


class SlowRenderer(ChatRenderer):
    """A renderer whose prompts wait for `go`."""

    def hold(self) -> None:
        self.is_rendering, self.go = threading.Event(), threading.Event()

    def render_prompt(self, messages: Any, tools: Any = None) -> list[int]:
        self.is_rendering.set()
        assert self.go.wait(30), "the test lets the prompt go on"
        return super().render_prompt(messages, tools)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_rendered_gets_its_turn_when_it_asks_again(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The client says nothing about its first request. The second request waits for the prompt of the first."""
    monkeypatch.setattr("verl_server.gateway.threads.MAX_RENDERED_CHARS", 0)  # all prompts count as long
    slow, generate = SlowRenderer(renderer.tokenizer), HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    slow.hold()
    generate.hold()
    with (
        Gateway(generate, tmp_path, renderer=slow, limits=LIMITS) as gateway,
        ThreadPoolExecutor(1) as pool,
        ending(slow.go, generate.go),
    ):
        _, key = gateway.create_session("a")
        slots = gateway._call(lambda: gateway._store.session("a").slots)
        with socket.create_connection(gateway._address) as client:
            client.sendall(turn(key, "a", stream=stream))
            assert slow.is_rendering.wait(30)
        wait_until(lambda: not gateway._server.server_state.connections)
        url, headers, content = f"{gateway.url}{CHAT}", {"x-api-key": key}, body_of("a", stream=stream)
        again = pool.submit(httpx.post, url, headers=headers, content=content, timeout=60.0)
        wait_until(lambda: slots.arrivals.num_taken == 2)
        slow.go.set()
        wait_until(lambda: slots.arrivals.num_taken == 0)
        generate.go.set()
        assert again.result().status_code == 200
        assert generate.num_calls == 1


def test_the_deadline_of_a_waiting_request_does_not_end_the_turn_before_it(
    open_gateway: Open, generate: HeldGenerateFn
) -> None:
    """The time for the body of the waiting request begins after the reply to the turn."""
    gateway = open_gateway(head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1)
    _, key = gateway.create_session("a")
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(turn(key, "a") + HEAD.replace("KEY", key).encode())
        wait_until(lambda: generate.num_calls == 1)
        send_slowly_until_closed(gateway, HEAD.replace("KEY", key), b" ")  # the deadline has passed
        generate.go.set()
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.1 200 OK")
    slots = gateway._call(lambda: gateway._store.session("a").slots)
    wait_until(lambda: (slots.arrivals.num_taken, slots.num_taken) == (0, 0))


def test_a_waiting_request_that_has_arrived_whole_has_no_deadline(open_gateway: Open, generate: HeldGenerateFn) -> None:
    gateway = open_gateway(head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1)
    _, key = gateway.create_session("a")
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(turn(key, "a") + turn(key, "b"))
        wait_until(lambda: generate.num_calls == 1)
        first = generate.go
        generate.hold()  # the turn of the second request
        first.set()
        wait_until(lambda: generate.num_calls == 1)
        send_slowly_until_closed(gateway, HEAD.replace("KEY", key), b" ")  # an equal deadline has passed
        generate.go.set()
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 2


def test_few_waiting_requests_are_read(open_gateway: Open, generate: HeldGenerateFn) -> None:
    """The others stay in the buffers of the connection. All of them are answered."""
    gateway = open_gateway()
    _, key = gateway.create_session("a")
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(turn(key, "a"))
        wait_until(lambda: generate.num_calls == 1)
        connections: Any = gateway._server.server_state.connections
        (connection,) = connections
        for number in range(2 * MAX_WAITING_REQUESTS):
            client.sendall(READY.encode())
            ask_liveness(gateway)  # the gateway has read the request, or it reads no more
            assert len(connection.pipeline) == min(number, MAX_WAITING_REQUESTS) + 1
        client.sendall(LAST.encode())
        generate.go.set()
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 2 + 2 * MAX_WAITING_REQUESTS


def test_the_number_of_connections_is_limited(open_gateway: Open) -> None:
    gateway = open_gateway(max_connections=2)
    connections = [http.client.HTTPConnection(*gateway._address, timeout=30.0) for _ in range(2)]
    for connection in connections:
        connection.request("GET", "/health/liveness")
        assert connection.getresponse().read()
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in received
    assert b"the gateway has 2 open connections already" in received
    connections[0].request("GET", "/health/liveness")
    assert connections[0].getresponse().status == 200
    for connection in connections:
        connection.close()

    def is_served() -> bool:
        with socket.create_connection(gateway._address, timeout=30.0) as client:
            client.sendall(LAST.encode())
            try:
                return client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            except ConnectionError:
                return False

    wait_until(is_served)


def test_a_client_that_leaves_in_the_middle_of_a_long_reply_has_no_turn(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Its request gets the turn when it is sent again. The reply is longer than the buffers of the connection."""
    generate = HeldGenerateFn(renderer.tokenizer, lambda prompt: "y" * 120_000)
    generate.hold()
    generate.go.set()
    body = orjson.dumps({"model": "m", "logprobs": True, "messages": [{"role": "user", "content": "a"}]})
    with Gateway(generate, tmp_path, renderer=renderer, limits=RolloutLimits(max_context_tokens=200_000)) as gateway:
        _, key = gateway.create_session("a")
        slots = gateway._call(lambda: gateway._store.session("a").slots)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60.0)
            client.connect(gateway._address)
            client.sendall(HEAD.replace("KEY", key).replace("1000", str(len(body))).encode() + body)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: slots.num_taken == 0)
        for num_calls in (1, 2):
            reply = httpx.post(f"{gateway.url}{CHAT}", content=body, headers={"x-api-key": key}, timeout=60.0)
            assert len(reply.json()["choices"][0]["logprobs"]["content"]) == 120_000
            assert generate.num_calls == num_calls


@pytest.mark.parametrize("num_bytes", [10, 3 * PART_BYTES])
def test_a_reply_to_a_connection_that_closes_is_not_delivered(num_bytes: int, renderer: ChatRenderer) -> None:
    """The parts of a reply to such a connection wait for nothing, and the application is told later that it closed."""

    async def send_reply(is_closing: bool) -> bool:
        turn = AssistantTurn("id", 1, "", "", (), "stop", None, 1, 0, (), (), ())
        generation = Generation(asyncio.sleep(0, turn), 1, TurnProgress(renderer, (), TurnRequest("", ()), {}))
        client, sent = contextlib.ExitStack(), list[Message]()
        client.enter_context(generation.join())
        reply = TurnReply(b"a" * num_bytes, generation, client)

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("the body has been read")

        connection = SimpleNamespace(is_closing=is_closing)
        await reply({"type": "http", "state": {CONNECTION: connection}}, receive, send)
        assert sum(len(message.get("body", b"")) for message in sent) == num_bytes
        return generation.is_delivered

    assert asyncio.run(send_reply(False))
    assert not asyncio.run(send_reply(True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_bytes", [100, 70_000, 300_000])
def test_a_client_that_leaves_after_a_large_body_is_noticed(
    num_bytes: int, stream: bool, generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """uvicorn reads a connection no more after a large part of a body, and finds its end no more."""
    with Gateway(generate, tmp_path, renderer=renderer, limits=RolloutLimits(max_context_tokens=900_000)) as gateway:
        _, key = gateway.create_session("a")
        message = {"role": "user", "content": "a" * num_bytes}
        body = orjson.dumps({"model": "m", "stream": stream, "messages": [message]})
        turns = gateway._call(lambda: gateway._store.session("a")._turns)
        with socket.create_connection(gateway._address, timeout=30.0) as client:
            client.sendall(HEAD.replace("KEY", key).replace("1000", str(len(body))).encode())
            for start in range(0, len(body), 1 << 16):
                client.sendall(body[start : start + (1 << 16)])
            wait_until(lambda: generate.num_calls == 1)
            (turn,) = gateway._call(lambda: list(turns))
            assert turn.is_open
            assert not turn.is_abandoned
        wait_until(lambda: turn.is_abandoned)
        generate.go.set()


def test_a_task_is_cancelled_once_when_its_client_leaves() -> None:
    async def run() -> list[str]:
        found, loop = list[str](), asyncio.get_running_loop()

        async def work(seconds: float) -> int:
            try:
                await asyncio.sleep(seconds)
                found.append("done")
                return 1  # noqa: TRY300
            except asyncio.CancelledError:
                found.append("cancelled")
                raise

        end: asyncio.Future[None] = loop.create_future()
        assert await run_until(end, work(0)) == 1
        loop.call_later(0.01, end.set_result, None)
        assert await run_until(end, work(60)) is None
        await asyncio.sleep(0)  # the task itself is not cancelled
        outer = asyncio.create_task(run_until(loop.create_future(), work(60)))
        await asyncio.sleep(0.01)
        outer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await outer
            found.append("the cancellation is lost")
        return found

    assert asyncio.run(run()) == ["done", "cancelled", "cancelled"]


def exchange(gateway: Gateway, *parts: bytes) -> bytes:
    """Send parts, each after the gateway has read the part before. Returns what the gateway sends until it closes."""
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        for part in parts:
            client.sendall(part)
            ask_liveness(gateway)  # on another connection of the same event loop
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def ask_liveness(gateway: Gateway) -> None:
    connection = http.client.HTTPConnection(*gateway._address, timeout=30.0)
    connection.request("GET", "/health/liveness", headers={"connection": "close"})
    assert connection.getresponse().status == 200
    connection.close()


LONG = 70_000


@pytest.mark.parametrize(
    "request_text",
    [
        f"GET /{'a' * LONG}",
        f"GET / HTTP/1.1\r\nhost: a\r\nx: {'a' * LONG}",
        f"GET /health/liveness HTTP/1.1\r\nhost: a\r\nx: {'a' * LONG}\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\n" + "x: y\r\n" * (LONG // 6),
    ],
)
@pytest.mark.parametrize("begin", ["", READY])
def test_a_head_that_is_too_long_is_refused(open_gateway: Open, begin: str, request_text: str) -> None:
    gateway = open_gateway()
    received = exchange(gateway, begin.encode(), request_text.encode())
    assert received.count(b"HTTP/1.1 200") == (1 if begin else 0)
    assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" in received
    assert b"have more than 65536 bytes" in received


def test_a_head_that_is_too_long_writes_nothing_into_the_reply_before(
    open_gateway: Open, generate: HeldGenerateFn
) -> None:
    """A client would take the refusal for the reply to its running request."""
    gateway = open_gateway()
    _, key = gateway.create_session("a")
    received = b""
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(turn(key, "a"))
        wait_until(lambda: generate.num_calls == 1)
        client.sendall(f"GET / HTTP/1.1\r\nx: {'a' * LONG}".encode())
        with contextlib.suppress(ConnectionError):
            while found := client.recv(1 << 16):
                received += found
    assert received == b""


def test_a_client_that_still_sends_its_head_can_read_the_refusal(
    open_gateway: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed connection would end the client with an error while it sends."""
    monkeypatch.setattr("verl_server.gateway.http.connections.LINGER_S", 60.0)
    gateway = open_gateway()
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(20):
            client.sendall(b"a" * LONG)
            ask_liveness(gateway)
        assert b"".join(iter(lambda: client.recv(1 << 16), b"")).startswith(b"HTTP/1.1 431")


def test_a_trailer_that_is_too_long_is_refused(open_gateway: Open) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    received = exchange(open_gateway(), head.encode(), b"2\r\n{}\r\n0\r\nx: ", b"a" * LONG)
    assert received.count(b"HTTP/1.1") == 2
    assert b"HTTP/1.1 431" in received


@pytest.mark.parametrize("is_split", [False, True])
def test_trailers_are_no_headers(open_gateway: Open, generate: HeldGenerateFn, is_split: bool) -> None:
    """A key in a trailer would count or not, as the packets come."""
    gateway = open_gateway()
    generate.go.set()
    keys = [gateway.create_session(name)[1] for name in ("a", "b")]
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    for key, status in ((keys[0], b"200"), ("", b"401")):
        sent = f"x-api-key: {key}\r\n" if key else ""
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{sent}transfer-encoding: chunked\r\n\r\n"
        trailer = f"authorization: Bearer {keys[1]}\r\nx-request-id: of-the-trailer\r\n\r\n"
        rest = b"%x\r\n%s\r\n0\r\n%s" % (len(body), body, trailer.encode())
        received = exchange(gateway, *((head.encode(), rest) if is_split else (head.encode() + rest,)))
        assert received[9:12] == status
        assert b"of-the-trailer" not in received
    assert [gateway._store.record_file(name).exists() for name in ("a", "b")] == [True, False]


def test_a_long_head_within_the_limit_is_served(open_gateway: Open) -> None:
    head = READY.replace("host: a", f"host: a\r\nx: {'a' * 60_000}")
    parts = [head[:100].encode(), head[100:].encode()] * 2
    assert exchange(open_gateway(), *parts, LAST.encode()).count(b"HTTP/1.1 200") == 3


UPGRADE = "\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABk\r\nupgrade: PROTOCOL\r\n\r\n"


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("split", [0, 1, 20])
def test_the_body_of_a_request_to_upgrade_is_no_request(open_gateway: Open, protocol: str, split: int) -> None:
    gateway = open_gateway()
    _, key = gateway.create_session("a")
    inner = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\n\r\n".encode()
    head = HEAD.replace("KEY", "wrong").replace("1000", str(len(inner))).replace("\r\n\r\n", UPGRADE)
    outer = head.replace("PROTOCOL", protocol).encode()
    received = exchange(gateway, outer + inner[:split], inner[split:], LAST.encode())
    assert (received.count(b"HTTP/1.1 401"), received.count(b"HTTP/1.1 200")) == (1, 1)
    assert b"policy" not in received


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_to_upgrade_is_answered_as_any_request(
    open_gateway: Open, generate: HeldGenerateFn, protocol: str, is_chunked: bool
) -> None:
    gateway = open_gateway()
    generate.go.set()
    _, key = gateway.create_session("a")
    body = b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}'
    head = HEAD.replace("KEY", key).replace("\r\n\r\n", UPGRADE).replace("PROTOCOL", protocol)
    if is_chunked:
        head = head.replace("content-length: 1000", "transfer-encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = head.replace("1000", str(len(body)))
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        for part in (body, b""):
            client.sendall(head.encode() + part)
            if not part:
                ask_liveness(gateway)
                client.sendall(body)
            reply = http.client.HTTPResponse(client)
            reply.begin()
            assert (reply.status, b'"yes"' in reply.read()) == (200, True)


def test_many_requests_to_upgrade_in_a_segment_are_answered(open_gateway: Open) -> None:
    request = READY.replace("\r\n\r\n", UPGRADE).replace("PROTOCOL", "h2c").encode()
    assert exchange(open_gateway(), request * 500 + LAST.encode()).count(b"HTTP/1.1 200") == 501


@pytest.mark.parametrize(("version", "connection"), [("1.1", "Upgrade, close"), ("1.0", "Upgrade")])
@pytest.mark.parametrize("split", [0, 5, 150])
def test_a_request_to_upgrade_without_keep_alive_is_answered(
    open_gateway: Open, generate: HeldGenerateFn, version: str, connection: str, split: int
) -> None:
    gateway = open_gateway()
    generate.go.set()
    _, key = gateway.create_session("a")
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    head = HEAD.replace("KEY", key).replace("HTTP/1.1", f"HTTP/{version}").replace("1000", str(len(body)))
    sent = head.replace("\r\n\r\n", f"\r\nconnection: {connection}\r\nupgrade: h2c\r\n\r\n").encode() + body
    received = exchange(gateway, sent[: len(sent) - split], sent[-split:] if split else b"")
    assert (received[9:12], b'"yes"' in received) == (b"200", True)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("behind", [b"\x00\x01garbage\r\n\r\n", b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n"])
def test_bytes_behind_a_turn_that_are_no_request_have_no_reply(
    open_gateway: Open, generate: HeldGenerateFn, behind: bytes, is_stream: bool
) -> None:
    """A reply to them would be the reply to the turn, or a part of its stream. The connection is closed."""
    gateway = open_gateway()
    _, key = gateway.create_session("a")
    body = orjson.dumps({"model": "m", "stream": is_stream, "messages": [{"role": "user", "content": "a"}]})
    with socket.create_connection(gateway._address, timeout=30.0) as client:
        client.sendall(HEAD.replace("KEY", key).replace("1000", str(len(body))).encode() + body)
        wait_until(lambda: generate.num_calls == 1)
        received = client.recv(1 << 16) if is_stream else b""
        client.sendall(behind)
        with contextlib.suppress(ConnectionError):
            received += b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1") == is_stream
    assert b"400" not in received
    reply = ask(gateway, key, "b", path="/v1/messages", max_tokens=0)
    assert reply.status_code == 400
    assert exchange(gateway, behind).startswith(b"HTTP/1.1 400"), "other bytes are answered"


def test_connect_is_refused(open_gateway: Open) -> None:
    received = exchange(open_gateway(), b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")
