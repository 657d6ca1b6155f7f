"""Reports of the tokens of running generations: from the dispatcher, through threads, and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from test_dispatcher import API_KEY, RecordingServer, http_router, wait_for

from verl_server import RouterClient
from verl_server.adapter.blocking import EventLoopThread
from verl_server.errors import BadInputError, NotReadyError, ServerError
from verl_server.router.dispatcher import Dispatcher, RolloutRouter

REQUEST: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 30}, "return_logprob": True}
TOKENS = list(range(2, 32))
"""Output of `REQUEST`: each token is one more than the token before."""


class CountingServer(RecordingServer):
    """Sends a token for each event, and waits before token `pause_at` until `may_go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_at = 40
        self.may_go_on = asyncio.Event()
        self.is_paused = False
        self.error: Exception | None = None
        """What happens at the pause."""
        self.version_at_pause = 0

    async def generate_stream(self, **request: Any) -> Any:
        self.requests.append(request)
        first, count = len(request["input_ids"]), request["sampling_params"]["max_new_tokens"]
        for number in range(1, count + 1):
            if first + number == self.pause_at:
                self.is_paused = True
                await self.may_go_on.wait()
                if self.error is not None:
                    raise self.error
                self.weight_version = self.version_at_pause
            token_ids = list(range(first, first + number))
            is_last = number == count
            meta: dict[str, Any] = {
                "weight_version": self.weight_version,
                "finish_reason": {"type": "length", "length": count} if is_last else None,
                "output_token_logprobs": [[-float(token), token, None] for token in token_ids],
            }
            if is_last:
                meta["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": count}]
            yield {"output_ids": token_ids, "meta_info": meta}
            await asyncio.sleep(0)

    async def generate(self, **request: Any) -> Any:
        async for reply in self.generate_stream(**request):
            last = reply
        return last


class Reader:
    """A caller that gets tokens."""

    def __init__(self) -> None:
        self.token_ids = list[int]()
        self.starts = list[int]()
        self.threads = set[threading.Thread]()

    def __call__(self, start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert token_ids
        assert list(logprobs) == [-float(token) for token in token_ids]
        self.starts.append(start)
        self.threads.add(threading.current_thread())
        del self.token_ids[start:]
        self.token_ids += token_ids


def dispatcher_of(**servers: Any) -> Dispatcher:
    dispatcher = Dispatcher()
    for name, server in servers.items():
        dispatcher.pool.add_replica(name, server, 0)
    return dispatcher


def test_each_token_is_reported_once_also_when_its_server_is_lost() -> None:
    async def run() -> None:
        server, reader = CountingServer(), Reader()
        dispatcher = dispatcher_of(a=server)
        server.pause_at, server.error = 12, ServerError("lost", status=500)
        call = asyncio.ensure_future(dispatcher.generate(REQUEST, rid="r", on_tokens=reader))
        await wait_for(lambda: len(reader.token_ids) == 9 and server.is_paused)
        assert not call.done()
        server.pause_at = 40
        server.may_go_on.set()
        reply = await call
        assert reader.token_ids == reply["output_ids"] == TOKENS
        assert reader.starts == sorted(set(reader.starts)), "no token was reported twice"
        assert len(server.requests) == 2

    asyncio.run(run())


def test_a_call_that_joins_a_generation_gets_all_its_tokens() -> None:
    """While it runs, and its stored result."""

    async def run() -> None:
        server, readers = CountingServer(), [Reader(), Reader(), Reader()]
        dispatcher = dispatcher_of(a=server)
        server.pause_at = 12
        calls = [asyncio.ensure_future(dispatcher.generate(REQUEST, rid="r", on_tokens=readers[0]))]
        await wait_for(lambda: len(readers[0].token_ids) == 9)
        calls.append(asyncio.ensure_future(dispatcher.generate(REQUEST, rid="r", on_tokens=readers[1])))
        await wait_for(lambda: len(readers[1].token_ids) == 9)
        server.may_go_on.set()
        replies = [*await asyncio.gather(*calls), await dispatcher.generate(REQUEST, rid="r", on_tokens=readers[2])]
        for reply, reader in zip(replies, readers, strict=True):
            assert reader.token_ids[: len(reply["output_ids"])] == TOKENS[: len(reader.token_ids)] == TOKENS
        assert len(server.requests) == 1

    asyncio.run(run())


@pytest.mark.parametrize("params", [{"stop": "x"}, {"regex": "a*"}, {"presence_penalty": 1.0}])
def test_a_generation_that_would_start_again_reports_nothing(params: dict[str, Any]) -> None:
    async def run() -> None:
        reader = Reader()
        request = {**REQUEST, "sampling_params": {"max_new_tokens": 5, **params}}
        await dispatcher_of(a=CountingServer()).generate(request, on_tokens=reader)
        assert reader.token_ids == []

    asyncio.run(run())


def test_tokens_after_a_weight_update_are_reported_when_they_are_certain() -> None:
    """A server that is lost then takes them away: their weight version is not known."""

    async def run() -> None:
        server, reader = CountingServer(), Reader()
        dispatcher = dispatcher_of(a=server)
        server.pause_at, server.version_at_pause = 12, 1
        call = asyncio.ensure_future(dispatcher.generate(REQUEST, on_tokens=reader))
        await wait_for(lambda: len(reader.token_ids) == 9)
        server.may_go_on.set()
        reply = await call
        assert reader.starts[-1] == 9, "the other tokens came with the last event"
        assert reader.token_ids == reply["output_ids"] == TOKENS

    asyncio.run(run())


def test_a_router_in_another_thread_reports_in_the_event_loop_of_the_call() -> None:
    loop, reader = EventLoopThread(), Reader()
    try:

        async def make() -> Dispatcher:
            return dispatcher_of(a=CountingServer())

        router = RolloutRouter(loop.run(make()), loop)
        reply = asyncio.run(router.generate(rid="r", on_tokens=reader, **REQUEST))
        assert reader.token_ids == reply["output_ids"] == TOKENS
        assert reader.threads == {threading.current_thread()}
    finally:
        loop.close()


# -- over HTTP ---------------------------------------------------------------------------------------


def test_a_client_gets_tokens_over_http() -> None:
    async def run() -> None:
        server, reader = CountingServer(), Reader()
        server.pause_at = 12
        async with http_router(dispatcher_of(a=server)) as url, RouterClient(url, API_KEY) as client:
            call = asyncio.ensure_future(client.generate(rid="r", on_tokens=reader, **REQUEST))
            await wait_for(lambda: len(reader.token_ids) == 9)
            server.may_go_on.set()
            reply = await call
            assert reader.token_ids == reply["output_ids"] == TOKENS
            assert await client.generate(rid="r", **REQUEST) == reply, "the same generation"
            stopping = {**REQUEST, "sampling_params": {"max_new_tokens": 5, "stop": "x"}}
            assert (await client.generate(on_tokens=reader, **stopping))["output_ids"] == TOKENS[:5]
            assert len(server.requests) == 2

    asyncio.run(run())


@pytest.mark.parametrize("pause_at", [3, 12])
def test_errors_over_http_are_those_of_the_router(pause_at: int) -> None:
    """Before the first token and after tokens."""

    async def run() -> None:
        server, reader = CountingServer(), Reader()
        server.pause_at, server.error = pause_at, BadInputError("no such adapter")
        server.may_go_on.set()
        dispatcher = dispatcher_of(a=server)
        dispatcher.pool.update_replica("a", admitted=True)
        async with http_router(dispatcher) as url, RouterClient(url, API_KEY) as client:
            with pytest.raises(BadInputError, match="no such adapter"):
                await client.generate(rid="r", on_tokens=reader, **REQUEST)
            assert len(reader.token_ids) == pause_at - 3
            dispatcher.pool.update_replica("a", admitted=False, will_serve=False)
            with pytest.raises(NotReadyError):
                await client.generate(rid="other", on_tokens=reader, **REQUEST)

    asyncio.run(run())


def test_a_broken_connection_joins_the_generation_again() -> None:
    """One generation, and its tokens are reported from the start again."""

    async def run() -> None:
        server, reader = CountingServer(), Reader()
        server.pause_at = 12
        async with (
            http_router(dispatcher_of(a=server)) as url,
            Cutter(url) as cutter,
            RouterClient(cutter.url, API_KEY) as client,
        ):
            call = asyncio.ensure_future(client.generate(rid="r", on_tokens=reader, **REQUEST))
            await wait_for(lambda: len(reader.token_ids) == 9)
            cutter.cut()
            await wait_for(lambda: reader.starts.count(0) == 2)
            server.may_go_on.set()
            reply = await call
        assert reader.token_ids == reply["output_ids"] == TOKENS
        assert len(server.requests) == 1

    asyncio.run(run())


class Cutter:
    """Forwards connections to a server until they are cut."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._writers = list[asyncio.StreamWriter]()
        self._tasks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, other_writer]
        for source, target in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.ensure_future(self._copy(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()
