"""Requests that are sent again after something failed: each of them has one recorded turn. No test needs a server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from test_gateway_faults import CHAT, HELLO, Engine, OpenConnection, Served, renderer, served

from verl_server.errors import ServerDiedError
from verl_server.gateway.http.connections import CONNECTION
from verl_server.trajectory import ChatRenderer, Node, load_session

__all__ = ["renderer", "served"]

RETRY = {"x-stainless-retry-count": "1"}
END = "/admin/sessions/a/end"


def num_turns(served: Served) -> int:
    """Number of recorded turns of the session `a`."""
    return sum(node.sampled for node in load_session(served.store.record_file("a")).nodes)


class UnreadableTurns(ChatRenderer):
    """A renderer that cannot parse turns."""

    def parse_turn(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the turn cannot be parsed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, RETRY])
def test_a_turn_that_cannot_be_read_is_not_sampled_again(
    renderer: ChatRenderer, tmp_path: Path, headers: dict[str, str], stream: bool
) -> None:
    """Also not by a later gateway, which serves the other requests of the session."""

    async def run(served: Served, key: dict[str, str]) -> None:
        served.engine.go.set()
        for sent in (key, key | headers, key | headers):
            reply = await served.post(sent, stream=stream)
            assert reply.status_code == (200 if stream else 500)
            assert "RuntimeError" in reply.text
        assert num_turns(served) == 1

    first = Served(UnreadableTurns(renderer.tokenizer), tmp_path)
    key = first.key("a")
    asyncio.run(run(first, key))
    first.store.close()
    second = Served(UnreadableTurns(renderer.tokenizer), tmp_path)
    asyncio.run(run(second, key))
    second.store.close()
    third = Served(renderer, tmp_path)
    third.engine.go.set()
    assert asyncio.run(third.post(key | RETRY, stream=stream)).status_code == 200
    assert (num_turns(third), third.engine.num_calls) == (1, 0)


def test_a_recorded_turn_of_an_earlier_process_counts_as_a_retry(
    served: Served, renderer: ChatRenderer, tmp_path: Path
) -> None:
    key = served.key("a")
    for num_retries in (0, 1, 2):
        served.engine.go.set()
        assert asyncio.run(served.post(key | (RETRY if num_retries else {}))).status_code == 200
        text = served.app.state.metrics.text().decode()
        assert f"\nverl_gateway_attached_retries_total {min(num_retries, 1)}.0" in text
        served.store.close()
        served = Served(renderer, tmp_path)
    assert num_turns(served) == 1


class LeavingClient:
    """A client that closes its connection when `leave` is called. It speaks ASGI, as the server of the gateway does."""

    def __init__(self, leaves_at: bytes | None = None) -> None:
        """`leaves_at`: text of the reply at which the client leaves."""
        self._leaves_at, self._connection = leaves_at, OpenConnection()
        self.leave = self._connection.close

    async def post(self, served: Served, headers: dict[str, str], path: str = CHAT, **body: Any) -> None:
        """Send a request, and read the reply until the client leaves."""
        received = [orjson.dumps({"model": "m", "messages": HELLO, **body})]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": received.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if self._leaves_at is not None and self._leaves_at in message.get("body", b""):
                self.leave()

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "state": {CONNECTION: self._connection},
        }
        await served.app(scope, receive, send)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_leaves_when_its_turn_ends_has_no_reply(served: Served, leaves: bool) -> None:
    """The turn and the end of the connection are noticed at once. The next equal request gets the turn."""

    async def run() -> None:
        served.engine.go.set()
        key, client = served.key("a"), LeavingClient()

        def on_node(node: Node) -> None:
            if node.sampled and leaves:
                client.leave()

        session = served.store.session("a")
        session.record.on_node = on_node  # type: ignore[union-attr]
        await client.post(served, key)
        leaves_not = LeavingClient()
        await leaves_not.post(served, key)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == (1 if leaves else 2)


def test_a_retry_gets_the_turn_that_its_client_left_although_an_equal_request_runs(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        key, client, generate = served.key("a"), LeavingClient(), served.engine.generate
        gates, num_calls = [asyncio.Event(), asyncio.Event()], 0

        async def generate_in_order(**request: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            await gates[num_calls - 1].wait()
            return await generate(**request)

        async def wait_for_calls(count: int) -> None:
            while num_calls < count:
                await asyncio.sleep(0.01)

        monkeypatch.setattr(served.engine, "generate", generate_in_order)
        served.engine.go.set()
        record = served.store.session("a").record
        monkeypatch.setattr(record, "on_node", lambda node: client.leave() if node.sampled else None)
        left = asyncio.create_task(client.post(served, key))
        await wait_for_calls(1)
        other = asyncio.create_task(served.post(key))
        await wait_for_calls(2)
        gates[0].set()
        await left
        again = await asyncio.wait_for(served.post(key | RETRY), 5.0)
        gates[1].set()
        assert again.json()["id"] != (await other).json()["id"]

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == 2


def test_equal_bodies_on_two_paths_are_two_requests(served: Served) -> None:
    """The reply to one of them is no reply to the other, although both have the same tokens."""

    async def run() -> None:
        served.engine.go.set()
        key = served.key("a") | RETRY
        for num_recorded, path in ((1, CHAT), (1, CHAT), (2, "/v1/messages"), (2, "/v1/messages"), (2, CHAT)):
            assert (await served.post(key, path, max_tokens=5)).status_code == 200
            assert num_turns(served) == num_recorded

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_leaves_before_the_last_event_has_no_reply(served: Served, leaves: bool) -> None:
    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        await LeavingClient(b'"finish_reason":"stop"' if leaves else None).post(served, key, stream=True)
        await LeavingClient().post(served, key, stream=True)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == (1 if leaves else 2)


class SlowToAbort(Engine):
    """An engine that confirms the abort of a generation when `confirm` is set."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.is_aborting, self.confirm = asyncio.Event(), asyncio.Event()

    async def generate(self, *, rid: str, session_id: str, **request: Any) -> dict[str, Any]:
        try:
            return await super().generate(rid=rid, session_id=session_id, **request)
        except asyncio.CancelledError:
            self.is_aborting.set()
            await self.confirm.wait()
            raise


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, RETRY])
def test_a_request_gets_no_turn_that_is_being_aborted(
    renderer: ChatRenderer, tmp_path: Path, headers: dict[str, str], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client comes back after the time for which its turn was kept."""
    monkeypatch.setattr("verl_server.gateway.sessions.turns.ABANDONED_S", 0.0)
    served, engine = Served(renderer, tmp_path), SlowToAbort(renderer.tokenizer)
    served.engine = engine

    async def run() -> None:
        key, client = served.key("a"), LeavingClient()
        request = asyncio.create_task(client.post(served, key, stream=stream))
        await engine.wait_for_calls(1)
        client.leave()
        await engine.is_aborting.wait()
        engine.go.set()
        reply = await served.post(key | headers, stream=stream)
        assert (reply.status_code, '"content":"hi"' in reply.text) == (200, True)
        engine.confirm.set()
        await request
        await served.store.session("a").wait_for_turns()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert (num_turns(served), engine.num_calls) == (1, 2)


def test_a_turn_that_is_being_aborted_does_not_use_up_the_limit_of_turns(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.turns.ABANDONED_S", 0.0)
    served, engine = Served(renderer, tmp_path), SlowToAbort(renderer.tokenizer)
    served.engine = engine

    async def run() -> None:
        key = {"authorization": f"Bearer {served.store.create('a', limits={'max_turns': 1})[1]}"}
        client = LeavingClient()
        request = asyncio.create_task(client.post(served, key))
        await engine.wait_for_calls(1)
        client.leave()
        await engine.is_aborting.wait()
        engine.go.set()
        reply = await served.post(key | RETRY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert served.store.session("a").reached_limit is None
        engine.confirm.set()
        await request
        await served.store.session("a").wait_for_turns()
        while (reply := await served.post(key | RETRY)).status_code == 503:
            await asyncio.sleep(0)
        assert reply.status_code == 200

    asyncio.run(asyncio.wait_for(run(), 30))


# -- turns that are not kept in memory --------------------------------------------------------------------


async def end_of_leaving_client(served: Served, key: dict[str, str], **request: Any) -> None:
    """A client asks and leaves while its turn is generated. The turn then ends."""
    client, num_calls = LeavingClient(), served.engine.num_calls
    served.engine.go.clear()
    task = asyncio.create_task(client.post(served, key, **request))
    await served.engine.wait_for_calls(num_calls + 1)
    client.leave()
    await task
    served.engine.go.set()
    await served.store.session("a").wait_for_turns()


# -- the billing line, which Claude Code changes with each request ----------------------------------------

BILLING = "x-anthropic-billing-header: cch="
MESSAGES = "/v1/messages"


def asking(text: str, system: Any = None) -> dict[str, Any]:
    """The body of a request whose messages stand before the system prompt."""
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}
    return body if system is None else {**body, "system": system}


def billed(number: int, text: str = "S") -> list[Any]:
    return [{"type": "text", "text": f"{BILLING}{number};"}, {"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("path", "first", "second", "is_same"),
    [
        (CHAT, asking(f"What is {BILLING} in A?"), asking(f"What is {BILLING} in B?"), False),
        (MESSAGES, asking(f"What is {BILLING} in A?"), asking(f"What is {BILLING} in B?"), False),
        (MESSAGES, asking("a", "T"), asking("a", "U"), False),
        (MESSAGES, asking("a", f"T\n{BILLING}1;"), asking("a", f"T\n{BILLING}2;"), False),
        (MESSAGES, asking("a", f"{BILLING}1;\nT"), asking("a", f"{BILLING}2;\nU"), False),
        (MESSAGES, asking("a", f"{BILLING}1;\nT"), asking("a", f"{BILLING}2;\nT"), True),
        (MESSAGES, asking("a", billed(1, "T")), asking("a", billed(2, "U")), False),
        (MESSAGES, asking("a", billed(1)), asking("a", billed(2)), True),
        (MESSAGES, asking(f"What is {BILLING}?", billed(1)), asking(f"What is {BILLING}?", billed(2)), True),
    ],
)
def test_only_the_billing_line_may_differ_when_a_request_is_sent_again(
    served: Served, path: str, first: dict[str, Any], second: dict[str, Any], is_same: bool
) -> None:
    """The client of the first request has left. Its turn is no reply to another question."""

    async def run() -> None:
        key = served.key("a")
        await end_of_leaving_client(served, key, path=path, **first)
        assert (await served.post(key, path, **second)).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == (1 if is_same else 2)


# -- turns that are not kept in memory --------------------------------------------------------------------


async def forget_turns(served: Served, key: dict[str, str]) -> None:
    for number in range(4):
        assert (await served.post(key, **other_chat(f"forget {number}"))).status_code == 200


@pytest.mark.parametrize("headers", [{}, RETRY])
def test_an_old_turn_is_returned_from_the_record(served: Served, headers: dict[str, str]) -> None:
    """A session keeps open turns only. A finished turn is sampled again only if its client has the reply."""

    async def run() -> None:
        key = served.key("a")
        await end_of_leaving_client(served, key, **other_chat("left"))
        first = await served.post(key | {"idempotency-key": "1"})
        await forget_turns(served, key)
        for _ in range(2):
            again = await served.post(key | {"idempotency-key": "1"} | headers)
            assert again.json()["choices"] == first.json()["choices"]
            await forget_turns(served, key)
        num_known = num_turns(served)
        for num_more in (0, 0 if headers else 1):
            assert (await served.post(key | headers, **other_chat("left"))).status_code == 200
            assert num_turns(served) == num_known + num_more
            await forget_turns(served, key)
            num_known = num_turns(served)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_retry_of_an_old_failed_request_gets_a_turn_of_its_own(served: Served) -> None:
    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        first = await served.post(key)
        served.engine.error = ServerDiedError("the server has died")
        assert (await served.post(key)).status_code == 503
        served.engine.error = None
        await forget_turns(served, key)
        own = await served.post(key | RETRY)
        assert own.json()["id"] != first.json()["id"]
        assert (await served.post(key | RETRY)).json()["id"] == own.json()["id"]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_after_a_restart_the_retry_of_a_failed_sample_gets_a_turn_of_its_own(
    served: Served, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """Not the recorded turn of an equal request, which its client has received."""
    key = served.key("a")
    served.engine.go.set()
    first = asyncio.run(served.post(key)).json()["id"]
    served.store.close()
    served = Served(renderer, tmp_path)
    served.engine.go.set()
    assert asyncio.run(served.post(key | RETRY)).json()["id"] == first
    served.engine.error = ServerDiedError("the server has died")
    assert asyncio.run(served.post(key)).status_code == 503
    served.engine.error = None
    assert asyncio.run(served.post(key | RETRY)).json()["id"] != first
    assert num_turns(served) == 2


def test_metrics_count_a_client_that_left_before_its_reply(served: Served) -> None:
    async def run() -> None:
        key, client = served.key("a"), LeavingClient()
        request = asyncio.create_task(client.post(served, key))
        await served.engine.wait_for_calls(1)
        client.leave()
        await request
        await served.store.end("a")

    asyncio.run(asyncio.wait_for(run(), 30))
    text = served.app.state.metrics.text().decode()
    assert 'verl_gateway_turns_total{dialect="chat/completions",status="499"} 1.0' in text


# -- a full disk ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(served: Served) -> Iterator[None]:
    """The kernel refuses to write beyond the present end of the record of the session `a`."""
    size = served.store.record_file("a").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def other_chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


NO_SPACE = "the gateway cannot write its files: File too large; send the request again"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_ends_no_session(served: Served, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The record is read again when there is space. A turn that runs meanwhile is aborted, and can be sent again."""

    async def run() -> None:
        key = served.key("a")
        running = asyncio.create_task(served.post(key, stream=stream, **other_chat("a")))
        await served.engine.wait_for_calls(1)
        with full_disk(served):
            refused = await served.post(key, stream=stream, **other_chat("b"))
        assert (refused.status_code, NO_SPACE in refused.text) == (503, True)
        again = asyncio.create_task(served.post(key, stream=stream, **other_chat("b")))
        aborted = await running
        assert aborted.status_code == (200 if stream else 503)
        assert "send the request again" in aborted.text
        assert "has ended" not in aborted.text
        served.engine.go.set()
        assert (await again).status_code == 200
        assert (await served.post(key | RETRY, stream=stream, **other_chat("a"))).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == 2
    assert "OSError: [Errno 27]" in caplog.text, "the log has the whole error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_recorded_is_sampled_again(served: Served, stream: bool) -> None:
    async def run() -> None:
        key = served.key("a")
        running = asyncio.create_task(served.post(key, stream=stream))
        await served.engine.wait_for_calls(1)
        with full_disk(served):
            served.engine.go.set()
            reply = await running
        assert (reply.status_code, NO_SPACE in reply.text) == (200 if stream else 503, True)
        assert (await served.post(key | RETRY, stream=stream)).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 30))
    assert (num_turns(served), served.engine.num_calls) == (1, 2)


def test_after_a_full_disk_each_equal_request_keeps_its_turn(served: Served) -> None:
    """A turn that its client has received is not returned for another sample."""

    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        first = (await served.post(key)).json()["id"]
        await end_of_leaving_client(served, key, **other_chat("left"))
        left = load_session(served.store.record_file("a")).nodes[-1].id
        with full_disk(served):
            assert (await served.post(key)).status_code == 503
        second = (await served.post(key | RETRY)).json()["id"]
        third = (await served.post(key)).json()["id"]
        assert len({first, second, third}) == 3
        assert num_turns(served) == 4
        assert (await served.post(key, **other_chat("left"))).json()["id"].endswith(f"-{left}")
        assert num_turns(served) == 4

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_retry_of_a_turn_that_a_full_disk_aborted_gets_a_turn_of_its_own(served: Served) -> None:
    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        first = (await served.post(key)).json()["id"]
        served.engine.go.clear()
        running = asyncio.create_task(served.post(key))
        await served.engine.wait_for_calls(2)
        with full_disk(served):
            assert (await served.post(key, **other_chat("b"))).status_code == 503
        again = asyncio.create_task(served.post(key | RETRY))
        assert (await running).status_code == 503
        served.engine.go.set()
        assert (await again).json()["id"] != first

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_turns(served) == 2


@pytest.mark.parametrize("fails", ["the record", "the disk", "the settings"])
def test_a_session_that_could_not_end_knows_what_was_delivered(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Further equal requests are samples of their own. A turn that is being generated goes on if its record is whole.

    `fails`: the write of the end, its way to the disk, or the write of the settings of the session.
    """

    def end(reward: float) -> Any:
        return served.post({"authorization": "Bearer sk-admin"}, END, orjson.dumps({"reward": reward}))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        ids = [(await served.post(key)).json()["id"] for _ in range(2)]
        served.engine.go.clear()
        running = asyncio.create_task(served.post(key, **other_chat("running")))
        await served.engine.wait_for_calls(3)
        with monkeypatch.context() as patch:
            if fails == "the disk":
                patch.setattr(os, "fdatasync", fail)
            elif fails == "the settings":
                patch.setattr("verl_server.gateway.sessions.session_store.write_info", fail)
            with full_disk(served) if fails == "the record" else contextlib.nullcontext():
                assert (await end(0.5)).status_code == 503
        served.engine.go.set()
        ids += [(await served.post(key)).json()["id"] for _ in range(2)]
        assert len(set(ids)) == 4
        assert (await running).status_code == (503 if fails == "the record" else 200)
        assert (await end(1.0)).status_code == 200
        assert (await served.post(key)).status_code == 403

    asyncio.run(asyncio.wait_for(run(), 30))
    num_known = 4 if fails == "the record" else 5
    assert num_turns(served) == num_known
    graph = load_session(served.store.record_file("a"))
    assert [weight for _, weight in graph.trained_segments or ()] == [1.0] * num_known
    assert list(graph.rewards.values()) == [[1.0]] * num_known


def test_without_a_free_file_a_request_can_be_sent_again(served: Served) -> None:
    """A session opens its record with its first request."""
    first, second = served.key("a"), served.key("b")
    served.engine.go.set()

    async def run() -> list[Any]:
        replies = [await served.post(first)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            replies.append(await served.post(second))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return [*replies, await served.post(second | RETRY)]

    replies = asyncio.run(run())
    assert [reply.status_code for reply in replies] == [200, 503, 200]
    assert "Too many open files; send the request again" in replies[1].text


def test_an_expired_session_ends_when_its_end_can_be_written(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    key = served.key("a")
    served.engine.go.set()
    assert asyncio.run(served.post(key)).status_code == 200
    served.store.info("a").expires_at = 1.0
    with full_disk(served):
        for _ in range(3):
            asyncio.run(served.store.end_expired())
        assert asyncio.run(served.post(key)).status_code == 403
    assert served.store.info("a").ended_at is None
    assert caplog.text.count("cannot be ended") == 1, "once, not every some seconds"
    asyncio.run(served.store.end_expired())
    assert asyncio.run(served.post(key)).status_code == 403
    termination = load_session(served.store.record_file("a")).last_termination
    assert termination is not None
    assert termination.stop_reason == served.store.info("a").stop_reason == "expired"


def test_a_session_whose_end_cannot_be_written_has_not_ended(
    served: Served, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """Also for the next gateway. The trainer ends the session again."""
    key, end, result = served.key("a"), "/admin/sessions/a/end", orjson.dumps({"reward": 0.5})
    admin = {"authorization": "Bearer sk-admin"}
    served.engine.go.set()
    assert asyncio.run(served.post(key)).status_code == 200
    with full_disk(served):
        refused = asyncio.run(served.post(admin, end, result))
    assert (refused.status_code, NO_SPACE in refused.text) == (503, True)
    served.store.close()
    served = Served(renderer, tmp_path)
    served.engine.go.set()
    assert served.store.info("a").ended_at is None
    assert asyncio.run(served.post(key, **other_chat("b"))).status_code == 200
    assert asyncio.run(served.post(admin, end, result)).status_code == 200
    graph = load_session(served.store.record_file("a"))
    assert [weight for _, weight in graph.trained_segments or ()] == [1.0, 1.0]
    assert list(graph.rewards.values()) == [[0.5], [0.5]]


def test_the_reward_of_an_end_that_could_not_be_written_is_not_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent goes on, and the session ends without a reward."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run() -> None:
        served.engine.go.set()
        key = served.key("a")
        assert (await served.post(key)).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(OSError, match="Input/output error"):
                await served.store.end("a", reward=1.0)
        assert (await served.post(key)).status_code == 200
        await served.store.end("a", "expired")

    asyncio.run(asyncio.wait_for(run(), 30))
    graph = load_session(served.store.record_file("a"))
    assert num_turns(served) == 2
    assert (graph.rewards, served.store.info("a").reward) == ({}, None)
