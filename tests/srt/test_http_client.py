"""The HTTP client of the adapters and the thread of the blocking adapter, with small HTTP servers instead of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from helpers import free_port

from verl_server import AdapterConfig, AsyncHttpServerEngineAdapter, RemoteServer
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.errors import BadInputError, ServerBusyError, ServerDiedError, ServerError, UnsupportedError
from verl_server.platforms.http_hooks import RELEASED_MEMORY
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.server.cpu_time import SchedulerCpu
from verl_server.server.exit_status import ExitNotifier, ExitStatus
from verl_server.server.supervisor import ServerPids
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
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
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


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """The URL of a server that answers all requests with `answer`."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


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
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
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
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
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
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            with pytest.raises(ServerError, match="upstream") as caught:
                await anext(adapter.generate_stream("x"))
            assert caught.value.details["status"] == 502

    asyncio.run(run())


def test_a_release_whose_answer_was_lost_does_not_spare_the_next_release_its_pause() -> None:
    """Memory is released only when no request runs and generation is paused."""
    released: set[str] = set()
    paths: list[str] = []
    lost = [False, True]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/server_info":
            state = {RELEASED_MEMORY: sorted(released)}
            return web.json_response({"model_path": "none", "device": "cpu", "internal_states": [state]})
        paths.append(request.path)
        if request.path == "/v1/loads":
            return web.json_response({"loads": []})
        if request.path == "/resume_memory_occupation":
            released.difference_update(orjson.loads(body)["tags"])
        if request.path == "/release_memory_occupation":
            released.update(orjson.loads(body)["tags"])
            if lost.pop():
                assert request.transport is not None
                request.transport.abort()
        return web.json_response({"success": True})

    async def run() -> None:
        config = AdapterConfig(max_retries=0)
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url, config=config) as adapter:
            with pytest.raises(ServerError):
                await adapter.release_memory_occupation()
            await adapter.resume_memory_occupation()
            paths.clear()
            await adapter.release_memory_occupation()
            assert paths == ["/v1/loads", "/pause_generation", "/release_memory_occupation"]

    asyncio.run(run())


def test_another_client_may_have_continued_after_a_release_whose_answer_was_lost() -> None:
    """A request runs again when the first client releases for the second time."""
    released: set[str] = set()
    loads: list[Json] = []
    lost = [True]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/server_info":
            state = {RELEASED_MEMORY: sorted(released)}
            return web.json_response({"model_path": "none", "device": "cpu", "internal_states": [state]})
        if request.path == "/v1/loads":
            return web.json_response({"loads": loads})
        if request.path == "/resume_memory_occupation":
            released.difference_update(orjson.loads(body)["tags"])
        if request.path == "/release_memory_occupation":
            assert lost.pop(), "the memory of a running request was released"
            released.update(orjson.loads(body)["tags"])
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"success": True})

    async def run() -> None:
        config = AdapterConfig(max_retries=0)
        async with serving(answer) as url:
            attach = AsyncHttpServerEngineAdapter.attach
            async with attach(url, config=config) as one, attach(url, config=config) as other:
                with pytest.raises(ServerError):
                    await one.release_memory_occupation()
                await other.resume_memory_occupation()
                loads.append({"num_running_reqs": 1})
                with pytest.raises(ServerBusyError):
                    await one.release_memory_occupation()

    asyncio.run(run())


@pytest.mark.parametrize("fails", ["/flush_cache", "/continue_generation"])
def test_a_resume_that_failed_before_generation_continued_can_be_repeated(fails: str) -> None:
    released: set[str] = set()
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/server_info":
            state = {RELEASED_MEMORY: sorted(released)}
            return web.json_response({"model_path": "none", "device": "cpu", "internal_states": [state]})
        paths.append(request.path)
        if request.path == "/release_memory_occupation":
            released.update(orjson.loads(body)["tags"])
        if request.path == "/resume_memory_occupation":
            released.difference_update(orjson.loads(body)["tags"])
        is_first = paths.count(request.path) == 1
        return web.json_response({"loads": []}, status=500 if request.path == fails and is_first else 200)

    async def run() -> None:
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            await adapter.release_memory_occupation()
            with pytest.raises(ServerError):
                await adapter.resume_memory_occupation()
            await adapter.resume_memory_occupation()
            assert paths[-1] == "/continue_generation"
            with pytest.raises(BadInputError, match="nothing is released"):
                await adapter.resume_memory_occupation()

    asyncio.run(run())


def test_a_release_after_a_short_failure_of_the_network_pauses_first() -> None:
    """The answers to the pause and to the call that undoes it were lost. Requests may run."""
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path == "/server_info":
            return web.json_response({"device": "cpu", "internal_states": [{RELEASED_MEMORY: []}]})
        paths.append(request.path)
        if paths.count(request.path) == 1 and request.path in ("/pause_generation", "/continue_generation"):
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"loads": []})

    async def run() -> None:
        config = AdapterConfig(max_retries=0)
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url, config=config) as adapter:
            with pytest.raises(ServerError):
                await adapter.release_memory_occupation()
            assert paths == ["/v1/loads", "/pause_generation", "/continue_generation"]
            paths[:] = ["/continue_generation", "/pause_generation"]
            await adapter.release_memory_occupation()
            assert paths[2:] == ["/v1/loads", "/pause_generation", "/release_memory_occupation"]

    asyncio.run(run())


@pytest.mark.parametrize("step", ["/pause_generation", "/release_memory_occupation"])
def test_a_caller_that_leaves_a_release_leaves_no_paused_server(step: str) -> None:
    """The server pauses, or releases nothing, and then the answer does not arrive in time."""
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path == "/server_info":
            return web.json_response({"device": "cpu", "internal_states": [{RELEASED_MEMORY: []}]})
        paths.append(request.path)
        if request.path == step:
            await asyncio.sleep(1.0)
        return web.json_response({"loads": []})

    async def run() -> None:
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await adapter.release_memory_occupation()
            if step == "/release_memory_occupation":
                await adapter.resume_memory_occupation()
            assert paths[-1] == "/continue_generation"

    asyncio.run(run())


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_the_load_still_counts_may_have_ended(ends: bool) -> None:
    loads = [1, 1, 0] if ends else [1]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path == "/v1/loads":
            return web.json_response({"loads": [{"num_running_reqs": loads.pop(0) if len(loads) > 1 else loads[0]}]})
        return web.json_response({"model_path": "none", "device": "cpu", "success": True})

    async def run() -> None:
        async with serving(answer) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            if ends:
                await adapter.release_memory_occupation()
            else:
                with pytest.raises(ServerBusyError, match="1 requests run"):
                    await adapter.release_memory_occupation()

    asyncio.run(run())


@pytest.mark.parametrize("first", [True, False])
def test_a_router_learns_the_arguments_of_a_server_that_was_replaced(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with another `incremental_streaming_output` answers at the same address."""
    monkeypatch.setattr("verl_server.router.process.static_replicas.PROBE_INTERVAL_S", 0.05)
    tokens = list(range(1, 65))

    def server(is_incremental: bool) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            await request.read()
            if request.path != "/generate":
                info = {"weight_version": "0", "incremental_streaming_output": is_incremental}
                return web.json_response({"model_path": "none", **info})
            finish = {"type": "length", "length": 64}
            return stream_of(
                {"output_ids": tokens[:32], "text": "", "meta_info": {"completion_tokens": 32, "weight_version": "0"}},
                {
                    "output_ids": tokens[32 if is_incremental else 0 :],
                    "text": "",
                    "meta_info": {"completion_tokens": 64, "weight_version": "0", "finish_reason": finish},
                },
            )

        return answer

    async def run() -> None:
        dispatcher = Dispatcher()
        request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 64}}
        async with serving(server(first)) as url:
            replicas = StaticReplicas([RemoteServer(url)])
            await replicas.start(dispatcher)
            assert (await dispatcher.generate(request))["output_ids"] == tokens
        (replica,) = dispatcher.snapshot().replicas
        while replica.admitted:
            await asyncio.sleep(0.05)
            (replica,) = dispatcher.snapshot().replicas
        async with serving(server(not first), int(url.rpartition(":")[2])):
            assert (await dispatcher.generate(request))["output_ids"] == tokens
        await replicas.close()
        await dispatcher.close()

    asyncio.run(asyncio.wait_for(run(), 30.0))
