"""The HTTP client of the adapters and the thread of the blocking adapter, with small HTTP servers instead of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import re
import socket
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from helpers import free_port, wait_until
from stub_servers import serving

from verl_server import AdapterConfig, AsyncHttpServerEngineAdapter, RemoteServer, Timeouts
from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.sglang.replies import require_answers
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    UnsupportedError,
)
from verl_server.router.client import RouterClient
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.server.launch import PortReservation
from verl_server.server.process import ExitNotifier, ExitStatus, SchedulerCpu, ServerPids
from verl_server.types import Json


class IdleSupervisor(ExitNotifier):
    """A `Supervisor` of a server that the test ends with `note_exit`."""

    pids = ServerPids(main=1, warden=None, workers=())
    log_path: Path | None = None

    def died(self, url: str) -> ServerDiedError:
        return ServerDiedError(f"the server at {url} ended", url=url)

    def keep_log(self) -> None:
        """The server has no log."""

    def stop(self, deadline_s: float = 10.0) -> None:
        """The server is none of this test's processes."""

    def scheduler_cpu(self) -> SchedulerCpu:
        return SchedulerCpu(0.0, 0.0)


def test_broken_calls_learn_the_end_of_the_server_without_threads() -> None:
    """The default executor of the event loop may be busy: with 32 broken calls, they waited for its threads in turn."""

    async def run() -> None:
        broken = 0

        def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal broken
            broken += 1
            writer.close()

        supervisor, may_end = IdleSupervisor(), threading.Event()
        server = await asyncio.start_server(close, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = AdapterConfig(max_retries=0)
        adapter = AsyncHttpServerEngineAdapter.attach(url, config=config, process=supervisor)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, may_end.wait)
        try:
            calls = [asyncio.create_task(adapter.get_model_info()) for _ in range(32)]
            while broken < len(calls):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # the calls have noticed it, and wait for the end of the server
            supervisor.note_exit(ExitStatus("exit", 1, ""))
            for error in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0):
                assert isinstance(error, ServerDiedError), error
        finally:
            may_end.set()
            await busy
            server.close()
            await adapter.close_connections()

    asyncio.run(run())


def test_each_call_of_an_ended_server_raises_an_error_of_its_own() -> None:
    """Python adds the frames of each caller to an error: a shared one keeps the prompts of all callers in memory."""

    async def run() -> None:
        adapter = AsyncHttpServerEngineAdapter.attach("http://127.0.0.1:1")
        ended = ServerDiedError("the server ended", exit_code=-9)
        adapter.fail(ended)
        errors = []
        for _ in range(3):
            with pytest.raises(ServerDiedError, match="the server ended") as caught:
                await adapter.generate(input_ids=[1])
            errors.append(caught.value)
        assert len({id(error) for error in (ended, *errors)}) == 4
        assert [error.details for error in errors] == [{"exit_code": -9}] * 3
        assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1
        assert ended.__traceback__ is None

    asyncio.run(run())


def test_events_of_a_long_stream_have_several_tokens() -> None:
    """The time for whole replies grows with the square of the number of events."""
    bodies: list[Json] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": "none", "max_req_input_len": 10_241, "stream_interval": 3})
        bodies.append(orjson.loads(body)["sampling_params"])
        return stream_of({"output_ids": [1], "meta_info": {}})

    async def run(**params: Any) -> Any:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            async for _ in adapter.generate_stream(input_ids=[1], sampling_params=params):
                pass
            return bodies[-1].get("stream_interval")

    assert asyncio.run(run(max_new_tokens=8192)) == 8
    assert asyncio.run(run(max_new_tokens=8192, stream_interval=1)) == 1
    assert asyncio.run(run(max_new_tokens=2048)) is None, "the server sends fewer events already"
    assert asyncio.run(run(temperature=0.0)) is None
    for unlimited in (None, 10**9):
        assert asyncio.run(run(max_new_tokens=unlimited)) == 10, "the context ends before"


def test_closed_event_loops_are_not_kept() -> None:
    """An adapter that several calls of `asyncio.run` use keeps the event loop of the last call at most."""
    loops: list[weakref.ref[Any]] = []

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"weight_version": "3"})

    async def run() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert (await adapter.get_model_info())["weight_version"] == 3
        await runner.cleanup()

    port = free_port()
    adapter = AsyncHttpServerEngineAdapter.attach(f"http://127.0.0.1:{port}")
    for _ in range(5):
        asyncio.run(run())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


def test_an_event_loop_that_ends_after_a_shutdown_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A program's last lines are often the end of `with VerlEngine(...)` and of `asyncio.run`."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"weight_version": "3"})

    async def run(url: str) -> None:
        adapter = AsyncHttpServerEngineAdapter.attach(url)
        await adapter.get_model_info()
        adapter.fail(ShutDownError("the engine was shut down"))

    async def serve() -> None:
        async with serving(web.Server(answer)) as url:
            urls.append(url)
            await asyncio.Event().wait()

    urls, other_loop = list[str](), EventLoopThread()
    serving_future = other_loop.submit(serve())
    wait_until(lambda: bool(urls), 10.0, "no server")
    gc.collect()  # clients that earlier tests have left open
    caplog.clear()
    asyncio.run(run(urls[0]))
    gc.collect()
    serving_future.cancel()
    other_loop.close()
    assert not caplog.records


def test_the_error_of_a_blocking_call_is_freed_without_the_garbage_collector() -> None:
    """Its traceback refers to the frames of the caller, which may hold tensors."""
    loop, errors = EventLoopThread(), []

    async def fail() -> None:
        raise ServerError("failed")

    gc.disable()
    try:
        for _ in range(3):
            try:
                loop.run(fail())
            except ServerError as error:
                errors.append(weakref.ref(error))
    finally:
        loop.close()
        gc.enable()
    assert [error() for error in errors] == [None] * 3


def test_an_event_loop_that_ends_closes_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    """It closes all generators in any order, so there are many streams. Errors of it would be logged."""
    connections: list[asyncio.Transport | None] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({"model_path": "none"})
        connections.append(request.transport)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"output_ids": [1], "meta_info": {}}\n\n')
        await asyncio.sleep(60.0)
        return response

    async def start() -> tuple[web.ServerRunner, str]:
        runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def generate(adapter: AsyncHttpServerEngineAdapter) -> None:
        streams.extend(adapter.generate_stream(input_ids=[1]) for _ in range(20))
        for stream in streams:
            await anext(stream)

    streams: list[AsyncGenerator[Json, None]] = []
    thread = EventLoopThread()
    runner, url = thread.run(start())
    try:
        adapter = AsyncHttpServerEngineAdapter.attach(url)
        asyncio.run(generate(adapter))
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert len(connections) == len(streams) == 20
        wait_until(lambda: all(one is None or one.is_closing() for one in connections), 10.0, "a connection is open")
        asyncio.run(adapter.close_connections())
    finally:
        thread.run(runner.cleanup())
        thread.close()


@pytest.mark.parametrize("call", [EventLoopThread.run, EventLoopThread.submit])
def test_the_thread_of_an_event_loop_is_not_used_in_a_forked_child(call: Any) -> None:
    """The child has no such thread, so a call would wait for ever."""
    thread = EventLoopThread()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call(thread, asyncio.sleep(0))
        except BadInputError as error:
            code = 0 if "forked child process" in error.message else 2
        finally:
            thread.close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.submit(asyncio.sleep(0)).result(10.0)
    thread.close()


@pytest.mark.parametrize(
    ("status", "content_type", "body", "message"),
    [
        (200, "text/html", "<html>maintenance</html>", "something that SGLang does not send: <html>maintenance</html>"),
        (200, "application/json", "<html>", "something that SGLang does not send: <html>"),
        (502, "application/json", "<html>", r"failed \(502\): <html>"),
        (404, "text/plain", "404 page", "check the host, the port and the path prefix of the URL"),
        (404, "application/json", '{"detail": "Not Found"}', "check the host, the port and the path prefix of the URL"),
    ],
)
def test_replies_that_do_not_come_from_sglang(status: int, content_type: str, body: str, message: str) -> None:
    """A proxy or another program answers. The error has the HTTP status, so that a router tries another replica."""
    knows_server_info = False

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if knows_server_info and request.path == "/server_info":
            return web.json_response({"model_path": "none"})
        return web.Response(status=status, body=body.encode(), content_type=content_type)

    async def run() -> None:
        nonlocal knows_server_info
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with AsyncHttpServerEngineAdapter.attach(url) as adapter:
            for name in ("get_model_info", "get_server_info", "check_keys", "ping", "is_ready"):
                with pytest.raises(ServerError, match=message) as caught:
                    await getattr(adapter, name)()
                assert (type(caught.value), caught.value.details["status"]) == (ServerError, status)
            knows_server_info = True
            with pytest.raises(ServerError, match=message) as caught:
                await adapter.generate("x")
            with pytest.raises(ServerError, match=message) as streamed:
                await anext(adapter.generate_stream("x"))
            assert caught.value.details["status"] == streamed.value.details["status"] == status
            if status == 404:
                with pytest.raises(UnsupportedError, match="this version of SGLang does not have it"):
                    await adapter.get_loads()
        await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize("body", ["{}", "[]", '[{"output_ids": [7]}]', '{"meta_info": null}'])
def test_json_that_is_no_generation(body: str) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({"model_path": "none"})
        if b'"stream":true' in await request.read():
            return web.Response(body=f"data: {body}\n\n".encode(), content_type="text/event-stream")
        return web.Response(body=body.encode(), content_type="application/json")

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with AsyncHttpServerEngineAdapter.attach(url) as adapter:
            for call in (adapter.generate("x"), anext(adapter.generate_stream("x"))):
                with pytest.raises(ServerError, match="something that SGLang does not send") as caught:
                    await call
                assert caught.value.details["status"] == 200
        await runner.cleanup()

    asyncio.run(run())


def stream_of(*events: Json) -> web.Response:
    body = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    return web.Response(body=body, content_type="text/event-stream")


def test_the_samples_of_one_stream_are_kept_apart() -> None:
    """With `n` of 2, the events of both samples arrive in one stream. Each event has the tokens since the last one."""

    def event(index: int, tokens: list[int], count: int) -> Json:
        meta = {"completion_tokens": count, "weight_version": "0", "id": str(index)}
        return {"index": index, "output_ids": tokens, "text": "", "meta_info": meta}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": "none", "incremental_streaming_output": True})
        return stream_of(event(0, [1, 2], 2), event(1, [11, 12], 2), event(0, [3], 3), event(1, [13], 3))

    async def run() -> list[tuple[int, list[int]]]:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            events = adapter.generate_stream(input_ids=[1], sampling_params={"n": 2})
            return [(event["index"], event["output_ids"]) async for event in events]

    assert asyncio.run(run()) == [(0, [1, 2]), (1, [11, 12]), (0, [1, 2, 3]), (1, [11, 12, 13])]


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"stop_token_ids": [2]}, [5, 6, 2], {"type": "stop", "matched": 2}),
        ({}, [5, 6, 9], {"type": "stop", "matched": 9}),
        ({}, [5, 6, 8], {"type": "stop", "matched": 8}),
        ({}, [5, 6, 3], {"type": "stop", "matched": 3}),
        ({}, [5, 6, 4], {"type": "stop", "matched": 4}),
        ({}, [6, 7, 5], {"type": "abort"}),
        ({"min_new_tokens": 4}, [5, 6, 9], {"type": "abort"}),
        ({"ignore_eos": True, "stop_token_ids": [2]}, [5, 6, 9], {"type": "abort"}),
        ({"max_new_tokens": 3}, [5, 6, 7], {"type": "length", "length": 3}),
        ({"max_new_tokens": 3, "ignore_eos": True}, [5, 6, 9], {"type": "length", "length": 3}),
        ({"max_new_tokens": None}, [5] * 200, {"type": "abort"}),
        ({}, [5, 6, 7], {"type": "abort"}),
        ({}, [], {"type": "abort"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_was_aborted_at_its_end_is_finished(
    stream: bool, params: Json, tokens: list[int], reason: Json, tmp_path: Path
) -> None:
    """SGLang runs one more step for an aborted request, and the abort hides the end that it has found."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    added = {"3": {"content": "<|im_end|>"}, "4": {"content": "<|eom_id|>"}, "5": {"content": "<|im_start|>"}}
    tokenizer_config = {"eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    meta = {"completion_tokens": len(tokens), "weight_version": "0", "finish_reason": {"type": "abort"}}
    reply = {"output_ids": tokens, "text": "", "meta_info": meta}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": str(tmp_path)})
        return stream_of(reply) if stream else web.json_response(reply)

    async def run() -> Json:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            if not stream:
                return dict(await adapter.generate(input_ids=[1], sampling_params=params))
            return [event async for event in adapter.generate_stream(input_ids=[1], sampling_params=params)][-1]

    assert asyncio.run(run())["meta_info"]["finish_reason"] == reason


@pytest.mark.parametrize("code", [None, "bad", 502])
def test_error_events_of_a_proxy(code: Any) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": "none"})
        return stream_of({"error": {"message": "upstream", "code": code}})

    async def run() -> None:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            with pytest.raises(ServerError, match="upstream") as caught:
                await anext(adapter.generate_stream("x"))
            assert caught.value.details["status"] == 502

    asyncio.run(run())


def test_a_reply_that_has_arrived_is_returned() -> None:
    """A router forgets what it knew of a server after a failed probe. Other questions may not be answered then."""
    generates, may_reply = asyncio.Event(), asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": "none"}, status=500 if generates.is_set() else 200)
        generates.set()
        await may_reply.wait()
        meta = {"weight_version": "0", "completion_tokens": 2, "finish_reason": {"type": "length", "length": 2}}
        return web.json_response({"output_ids": [7, 8], "meta_info": meta})

    async def run() -> None:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            call = asyncio.ensure_future(adapter.generate(input_ids=[1], sampling_params={"max_new_tokens": 2}))
            await generates.wait()
            adapter.connection.forget_server()
            may_reply.set()
            assert (await call)["output_ids"] == [7, 8]

    asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("first", [True, False])
def test_a_router_learns_the_arguments_of_a_server_that_was_replaced(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with another `incremental_streaming_output` answers at the same address."""
    monkeypatch.setattr("verl_server.router.process.static_replicas.PROBE_INTERVAL_S", 0.05)
    tokens = list(range(1, 129))

    def server(is_incremental: bool) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            await request.read()
            if request.path != "/generate":
                info = {"weight_version": "0", "incremental_streaming_output": is_incremental}
                return web.json_response({"model_path": "none", **info})
            finish = {"type": "length", "length": 128}
            return stream_of(
                {"output_ids": tokens[:64], "text": "", "meta_info": {"completion_tokens": 64, "weight_version": "0"}},
                {
                    "output_ids": tokens[64 if is_incremental else 0 :],
                    "text": "",
                    "meta_info": {"completion_tokens": 128, "weight_version": "0", "finish_reason": finish},
                },
            )

        return answer

    async def run() -> None:
        dispatcher = Dispatcher()
        request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 128}}
        async with serving(web.Server(server(first))) as url:
            replicas = StaticReplicas([RemoteServer(url)])
            await replicas.start(dispatcher)
            assert (await dispatcher.generate(request))["output_ids"] == tokens
        (replica,) = dispatcher.snapshot().replicas
        while replica.admitted:
            await asyncio.sleep(0.05)
            (replica,) = dispatcher.snapshot().replicas
        async with serving(web.Server(server(not first)), int(url.rpartition(":")[2])):
            assert (await dispatcher.generate(request))["output_ids"] == tokens
        await replicas.close()
        await dispatcher.close()

    asyncio.run(asyncio.wait_for(run(), 30.0))


def _answer_of(ids: list[int], **meta: Any) -> Json:
    logprobs = [[-0.5, token_id, None] for token_id in ids]
    facts = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
    return {"output_ids": ids, "meta_info": {"id": "mine", **facts, **meta}}


def test_a_log_probability_of_a_beam_that_is_nan_is_an_error() -> None:
    """The tokens of beams are not compared with the request, because one reply has those of all beams."""
    beams = {"output_ids": [5, 6, 7], "meta_info": {"output_token_logprobs": [[-0.5, 5, None], [None, 6, None]]}}
    with pytest.raises(ServerError, match="output token 1 is NaN"):
        require_answers(beams, {"input_ids": [1], "sampling_params": {"beam_width": 2}}, 320, "http://h/generate")


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (_answer_of([5, 6], completion_tokens=8), "completion_tokens"),
        (_answer_of(list(range(58))), "58 tokens for max_new_tokens=8"),
        (_answer_of([5, 6], output_token_logprobs=[[-0.5, 5, None]]), "log probabilities"),
        (_answer_of([5, 320]), "beyond the vocabulary of 320"),
        (_answer_of([-5, 6]), "beyond the vocabulary of 320"),
        (_answer_of([5], output_token_logprobs=[[5.0, 5, None]]), "log probability 5.0"),
        (_answer_of([5], output_token_logprobs=[[-0.5, 7, None]]), "of token 7 for token 5"),
        (_answer_of([5], id="another"), "the request 'another' instead of 'mine'"),
        ([_answer_of([5])], "1 generations in a list for 1 samples"),
        ({"output_ids": "text", "meta_info": {}}, "no output_ids"),
        ({"output_ids": [[5]], "meta_info": {}}, "of a wrong type"),
    ],
)
def test_a_reply_that_contradicts_itself_is_an_error_of_the_replica(
    reply: Any, cause: str, tiny: Callable[..., Path]
) -> None:
    """A generation on a replica with such replies is run again on another one."""

    def server(answer: Any, model: str) -> web.Server:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            await request.read()
            if request.path == "/server_info":
                return web.json_response({"model_path": model})
            return web.json_response(answer)

        return web.Server(handle)

    async def run() -> None:
        request: Json = {"input_ids": [1], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        async with serving(server(reply, str(tiny("qwen3")))) as url:
            adapter = AsyncHttpServerEngineAdapter.attach(url)
            with pytest.raises(ServerError, match=cause) as caught:
                await adapter.generate(**request, rid="mine")
            assert caught.value.details["status"] == 200, "the server runs: the router asks another one"
            await adapter.close_connections()

    asyncio.run(run())


def process_server(*answers: str | None, paths: list[str] | None = None) -> web.Server:
    """A server whose replies name the processes `answers` in turns. None: no process, as SGLang's own server."""
    names = itertools.cycle(answers)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if paths is not None:
            paths.append(request.path)
        name = next(names)
        headers = {} if name is None else {"x-verl-server-process": name}
        return web.json_response({"weight_version": "3"}, headers=headers)

    return web.Server(answer)


def let_name_have(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host name policy.invalid have `addresses`, in any order."""
    lookup, turns = socket.getaddrinfo, itertools.count()

    def look_up(host: Any, port: int, *arguments: Any, **options: Any) -> Any:
        if host != "policy.invalid":
            return lookup(host, port, *arguments, **options)
        first = next(turns) % len(addresses)
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            (families[":" in each], socket.SOCK_STREAM, 6, "", (each, port) + (0, 0) * (":" in each))
            for each in addresses[first:] + addresses[:first]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_an_address_of_several_servers_is_refused_by_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with several addresses, as of a headless service, and an address behind which servers answer in turns."""

    async def run() -> list[str]:
        async with (
            serving(process_server("a", "b")) as turns,
            serving(process_server("c"), host="127.0.0.2") as url,
            serving(process_server("d"), int(url.rpartition(":")[2]), "127.0.0.3"),
        ):
            let_name_have(["127.0.0.2", "127.0.0.3"], monkeypatch)
            names = [turns, url.replace("127.0.0.2", "policy.invalid")]
            dispatcher = Dispatcher()
            replicas = StaticReplicas([RemoteServer(name) for name in names])
            try:
                await replicas.start(dispatcher)
                assert replicas._probed is not None
                for _ in range(3):
                    await replicas._probed.probe_all()
                return [dispatcher.pool.replicas[name].problem for name in names]
            finally:
                await replicas.close()
                await dispatcher.close()

    turns, several = asyncio.run(run())
    assert "several servers answer at" in turns
    assert re.search(r"policy.invalid:\d+ has the addresses 127.0.0.[23], 127.0.0.[23] of different servers", several)


@pytest.mark.parametrize("process", ["a", None])
def test_all_requests_go_to_one_address_of_a_server_with_several(
    process: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a tunnel, or with IPv4 and IPv6. Nothing answers at the third address. The name is looked up often."""

    async def run() -> None:
        first, second = list[str](), list[str]()
        reservation = PortReservation("127.0.0.1")  # connections of other programs take ports of IPv4 all the time
        port = reservation.port
        async with serving(process_server(process, paths=first), port, "::1"), contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(serving(process_server(process, paths=second), port))
            reservation.release()
            let_name_have(["127.0.0.4", "::1", "127.0.0.1"], monkeypatch)
            adapter = AsyncHttpServerEngineAdapter.attach(f"http://policy.invalid:{port}", config=AdapterConfig())
            for _ in range(6):
                await adapter.get_model_info()
                await adapter.close_connections()  # the next request looks the name up again
            counts = [paths.count("/model_info") for paths in (first, second)]
            assert sorted(counts) == [0, 6]
            assert adapter.connection.http.process == process
            if counts[1]:  # the address goes away
                await stack.aclose()
                with contextlib.suppress(ServerError):
                    await adapter.get_model_info()
                await adapter.close_connections()
                await adapter.get_model_info()
                assert "/model_info" in first
            await adapter.close_connections()

    asyncio.run(run())
    assert ("is used" in caplog.text) is (process is None), "these might be two servers"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_call_goes_to_another_address_of_its_server_when_the_first_one_ends(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, with its own retries. `is_silent`: the address refuses nothing; packets to it get no answer."""

    async def run() -> None:
        async with serving(process_server("a"), host="127.0.0.2") as url, contextlib.AsyncExitStack() as stack:
            port = int(url.rpartition(":")[2])
            await stack.enter_async_context(serving(process_server("a"), port, "127.0.0.3"))
            let_name_have(["127.0.0.3"], monkeypatch)
            config = AdapterConfig(Timeouts(connect_s=0.3))
            adapter = AsyncHttpServerEngineAdapter.attach(f"http://policy.invalid:{port}", config=config)
            await adapter.get_model_info()
            let_name_have(["127.0.0.3", "127.0.0.2"], monkeypatch)
            await stack.aclose()
            if is_silent:
                with silent_address("127.0.0.3", port):
                    with pytest.raises(DeadlineError, match="there was no connection"):
                        await adapter.get_model_info()
                    await adapter.get_model_info()
            calls = [adapter.get_model_info() for _ in range(8)]
            assert [each["weight_version"] for each in await asyncio.gather(*calls)] == [3] * 8
            await adapter.close_connections()

    asyncio.run(run())


@contextlib.contextmanager
def silent_address(host: str, port: int) -> Iterator[None]:
    """An address where connections are not accepted, and not refused: the queue of its socket is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, port), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield


@pytest.mark.parametrize("ping_s", [0.0, 1.0])
@pytest.mark.parametrize("other_answers", [False, True])
def test_the_server_is_found_among_the_addresses_of_its_name(
    ping_s: float, other_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it is too busy to answer at once, and beside another service, which names no process."""

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(ping_s)
        return web.json_response({"weight_version": "3"}, headers={"x-verl-server-process": "a"})

    async def other(request: web.BaseRequest) -> web.StreamResponse:
        raise web.HTTPNotFound

    async def run() -> None:
        async with serving(web.Server(slow), host="127.0.0.3") as url, contextlib.AsyncExitStack() as stack:
            port = int(url.rpartition(":")[2])
            if other_answers:
                await stack.enter_async_context(serving(web.Server(other), port, "127.0.0.2"))
            let_name_have(["127.0.0.2", "127.0.0.3"], monkeypatch)
            config = AdapterConfig(Timeouts(connect_s=0.3), max_retries=0)
            adapter = AsyncHttpServerEngineAdapter.attach(f"http://policy.invalid:{port}", config=config)
            assert (await adapter.get_model_info())["weight_version"] == 3
            await adapter.close_connections()

    asyncio.run(run())


def test_a_server_that_is_listed_under_two_addresses_is_one_replica() -> None:
    """The second address is used when nothing answers at the first."""

    async def run() -> None:
        async with serving(process_server("a")) as first, contextlib.AsyncExitStack() as stack:
            port = int(first.rpartition(":")[2])
            second = await stack.enter_async_context(serving(process_server("a"), port, "127.0.0.2"))
            dispatcher = Dispatcher()
            replicas = StaticReplicas([RemoteServer(second), RemoteServer(first)])
            await replicas.start(dispatcher)
            assert replicas._probed is not None
            try:
                await replicas._probed.probe_all()
                (refused,) = [each for each in dispatcher.pool.replicas.values() if not each.admitted]
                assert "one server answers at http://127.0.0." in refused.problem
                assert all(url in refused.problem for url in (first, second))
                if refused.name == first:
                    await stack.aclose()
                    for _ in range(2):
                        await replicas._probed.probe_all()
                    assert [each.name for each in dispatcher.pool.replicas.values() if each.admitted] == [first]
            finally:
                await replicas.close()
                await dispatcher.close()

    asyncio.run(run())


def test_a_router_sends_no_requests_to_a_server_that_came_back_with_its_checkpoint() -> None:
    versions = {"first": "5", "second": "5"}

    def server(name: str) -> web.Server:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return web.json_response({"weight_version": versions[name]})

        return web.Server(answer)

    async def run() -> None:
        async with serving(server("first")) as first, serving(server("second")) as second:
            dispatcher, replicas = Dispatcher(), StaticReplicas([RemoteServer(first), RemoteServer(second)])
            await replicas.start(dispatcher)
            assert replicas._probed is not None

            async def admitted() -> list[bool]:
                assert replicas._probed is not None
                await replicas._probed.probe_all()
                return [dispatcher.pool.replicas[url].admitted for url in (first, second)]

            try:
                assert await admitted() == [True, True]
                versions["second"] = "0"
                assert await admitted() == [True, False]
                assert "weight version 0, and another server has version 5" in dispatcher.pool.replicas[second].problem
                versions["second"] = "6"  # an update has reached it first
                await admitted()
                assert await admitted() == [False, True]
                versions["first"] = "6"
                assert await admitted() == [True, True]
            finally:
                await replicas.close()
                await dispatcher.close()

    asyncio.run(run())


def test_a_router_client_works_in_one_event_loop_after_another() -> None:
    """`asyncio.run` for each step. The connections of the loops that have ended are closed."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"output_ids": [1], "meta_info": {}})

    async def step(client: RouterClient) -> Any:
        return await client.generate(input_ids=[1])

    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(web.Server(answer)) as url:
            urls.append(url)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10)
        client = RouterClient(urls[0], None)
        for _ in range(3):
            assert asyncio.run(step(client))["output_ids"] == [1]
        asyncio.run(client.close())
    finally:
        stop.set()
        thread.join(10)
