"""The dispatcher of a router and its HTTP server, with servers that record requests instead of running a model."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gzip
import math
import re
import sys
import time
from collections import UserList
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from verl_server import AsyncHttpServerEngineAdapter, RouterClient, RouterConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    to_wire,
)
from verl_server.router import placement
from verl_server.router import replica as error_history
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer, router_metrics
from verl_server.router.placement import LoadIndex, VersionRequirement
from verl_server.router.replica_status import ReplicaStatus

REQUEST: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
API_KEY = "callers-key"


class RecordingServer:
    """A `GenerationServer` that answers with token ids 0, 1, 2 and so on, as long as `may_finish` is set."""

    base_url = "http://recording"
    api_key: str | None = None

    def __init__(self, weight_version: int = 0) -> None:
        self.weight_version = weight_version
        self.requests: list[dict[str, Any]] = []
        """All requests, in order of arrival."""
        self.running_requests = 0
        self.stream_events = 0
        """Number of events of all streams."""
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    def _reply(self, count: int, finished: bool) -> dict[str, Any]:
        meta = {
            "weight_version": self.weight_version,
            "completion_tokens": count,
            "finish_reason": {"type": "length", "length": count} if finished else None,
        }
        return {"output_ids": list(range(count)), "meta_info": meta}

    @contextlib.asynccontextmanager
    async def _record(self, request: dict[str, Any]) -> AsyncIterator[int]:
        """Records the request and waits for `may_finish`. Yields the number of tokens to generate."""
        self.requests.append(request)
        self.running_requests += 1
        try:
            await self.may_finish.wait()
            yield request["sampling_params"]["max_new_tokens"]
        finally:
            self.running_requests -= 1

    async def generate(self, **request: Any) -> Any:
        async with self._record(request) as count:
            return self._reply(count, finished=True)

    async def generate_stream(self, **request: Any) -> Any:
        async with self._record(request) as count:
            interval = request["sampling_params"]["stream_interval"]
            for tokens in range(interval, count + interval, interval):
                self.stream_events += 1
                yield self._reply(min(tokens, count), finished=tokens >= count)


async def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Seconds until `condition` is true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        await asyncio.sleep(0.01)
    return time.monotonic() - started


@contextlib.asynccontextmanager
async def http_router(dispatcher: Dispatcher) -> AsyncIterator[str]:
    """URL of an HTTP server over the dispatcher."""
    http_server = RouterHttpServer(dispatcher, API_KEY)
    runner = web.ServerRunner(await http_server.create_server(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await dispatcher.close()
        await runner.cleanup()
        await http_server.close()


# -- stream events -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_new_tokens", "interval"), [(10, None), (64, None), (500, 64), (32_000, 500)])
def test_stream_has_at_most_64_events_of_at_least_64_tokens(max_new_tokens: int, interval: int | None) -> None:
    """A request whose stream would have one event is not streamed."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        reply = await dispatcher.generate({**REQUEST, "sampling_params": {"max_new_tokens": max_new_tokens}})
        assert reply["output_ids"] == list(range(max_new_tokens))
        (request,) = server.requests
        assert request["sampling_params"].get("stream_interval") == interval
        assert server.stream_events == (0 if interval is None else math.ceil(max_new_tokens / interval))
        assert server.stream_events <= 64

    asyncio.run(run())


# -- request ids -------------------------------------------------------------------------------------


def test_call_with_a_known_rid_is_counted_once() -> None:
    """Each call counts as a request or as attached. Each request that has ended is finished or failed."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        server.may_finish.clear()
        running = [asyncio.ensure_future(dispatcher.generate(REQUEST, rid="same")) for _ in range(2)]
        await wait_for(lambda: server.running_requests == 1)
        server.may_finish.set()
        replies = [*await asyncio.gather(*running), await dispatcher.generate(REQUEST, rid="same")]
        assert replies[0] == replies[1] == replies[2]
        assert len(server.requests) == 1
        counters = dispatcher.snapshot().counters
        assert (counters.requests, counters.attached, counters.finished, counters.failed) == (1, 2, 1, 0)
        assert dispatcher.snapshot().stored_results == 1
        assert "verl_router_stored_results 1.0" in router_metrics(dispatcher).decode()

    asyncio.run(run())


def test_evicted_rid_generates_again() -> None:
    """A generation runs once per rid while its result is stored. Each result takes more than 4096 bytes."""

    async def run() -> None:
        dispatcher, server = Dispatcher(RouterConfig(result_cache_bytes=9000)), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        for _ in range(3):
            await dispatcher.generate(REQUEST, rid="first")
        assert len(server.requests) == 1
        for number in range(2):  # two further results fill the cache
            await dispatcher.generate(REQUEST, rid=f"later {number}")
        assert len(server.requests) == 3
        await dispatcher.generate(REQUEST, rid="first")
        assert len(server.requests) == 4

    asyncio.run(run())


REFUSED = [VersionRequirement(weight_version=7), VersionRequirement(min_weight_version=7)]
ACCEPTED = [VersionRequirement(weight_version=3), VersionRequirement(min_weight_version=2), VersionRequirement()]


def test_stored_result_needs_the_required_weight_version() -> None:
    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer(weight_version=3)
        dispatcher.pool.add_replica("a", server, 3)
        first = await dispatcher.generate(REQUEST, rid="same")
        server.weight_version = 7
        dispatcher.pool.update_replica("a", weight_version=7)
        for requirement in REFUSED:
            with pytest.raises(NotReadyError, match=r"weight version 7.*is required, but the tokens have .* \[3\]"):
                await dispatcher.generate(REQUEST, rid="same", requirement=requirement)
        for requirement in ACCEPTED:
            assert await dispatcher.generate(REQUEST, rid="same", requirement=requirement) == first
        assert len(server.requests) == 1

    asyncio.run(run())


def test_running_generation_needs_the_required_weight_version() -> None:
    """The requirement of a call that attaches is checked at the end. The other callers receive the reply."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer(weight_version=3)
        dispatcher.pool.add_replica("a", server, 3)
        server.may_finish.clear()
        first = asyncio.ensure_future(dispatcher.generate(REQUEST, rid="same"))
        await wait_for(lambda: server.running_requests == 1)
        refused = [
            asyncio.ensure_future(dispatcher.generate(REQUEST, rid="same", requirement=requirement))
            for requirement in REFUSED
        ]
        accepted = [
            asyncio.ensure_future(dispatcher.generate(REQUEST, rid="same", requirement=requirement))
            for requirement in ACCEPTED
        ]
        await asyncio.sleep(0)
        server.may_finish.set()
        for call in refused:
            with pytest.raises(NotReadyError, match="choose a new rid"):
                await call
        assert [reply["output_ids"] for reply in await asyncio.gather(first, *accepted)] == [[0, 1, 2, 3]] * 4
        assert len(server.requests) == 1

    asyncio.run(run())


# -- sessions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["full", "suspect", "not admitted"])
def test_session_leaves_a_replica_that_cannot_serve_it(reason: str) -> None:
    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=1))
        servers = {name: RecordingServer() for name in ("a", "b")}
        for name, server in servers.items():
            dispatcher.pool.add_replica(name, server, 0)
        for _ in range(2):
            await dispatcher.generate(REQUEST, session_id="conversation")
        assert [len(server.requests) for server in servers.values()] == [2, 0], "the session stays on a"
        async with contextlib.AsyncExitStack() as stack:
            if reason == "full":
                assert (await stack.enter_async_context(dispatcher.lease_slot("conversation", 0))).replica.name == "a"
            elif reason == "suspect":
                dispatcher.pool.update_replica("a", suspect=True)
            else:
                dispatcher.pool.update_replica("a", admitted=False)
            await dispatcher.generate(REQUEST, session_id="conversation")
        assert [len(server.requests) for server in servers.values()] == [2, 1]

    asyncio.run(run())


# -- HTTP --------------------------------------------------------------------------------------------


def test_details_of_an_error_reach_the_client() -> None:
    """The third request finds one running and one queued request; the maximum is one queued request."""

    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=1, max_queued_requests=1))
        server = RecordingServer()
        server.may_finish.clear()
        dispatcher.pool.add_replica("a", server, 0)
        async with http_router(dispatcher) as url, RouterClient(url, API_KEY) as client:
            calls = [asyncio.ensure_future(client.generate(**REQUEST)) for _ in range(2)]
            await wait_for(lambda: server.running_requests == 1 and dispatcher.snapshot().queued_requests == 1)
            with pytest.raises(ServerBusyError) as caught:
                await client.generate(**REQUEST)
            assert caught.value.details == {"queued_requests": 1}
            server.may_finish.set()
            assert [reply["output_ids"] for reply in await asyncio.gather(*calls)] == [[0, 1, 2, 3]] * 2

    asyncio.run(run())


@pytest.mark.parametrize(("rid", "got"), [("one id", "str"), (["a"], "a list of 1"), ([], "a list of 0"), (7, "int")])
def test_several_prompts_need_a_list_of_rids(rid: Any, got: str) -> None:
    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        body = {**REQUEST, "input_ids": [[1], [2]], "rid": rid}
        async with http_router(dispatcher) as url, aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {API_KEY}"}
            async with session.post(f"{url}/generate", json=body, headers=headers) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["type"], error["retryable"]) == (400, "BadInputError", False)
            assert error["message"] == f"2 prompts need a list of 2 request ids as rid, got {got}"
        assert not server.requests

    asyncio.run(run())


def test_the_prompts_of_a_batch_have_different_rids() -> None:
    """Two samples of the same prompt would be one sample. Prompts without an id get one each."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        group = {**REQUEST, "input_ids": [[1, 2], [1, 2], [1, 2], [1, 2]]}
        with pytest.raises(BadInputError, match="'q' is the request id of several prompts"):
            await dispatcher.generate_request({**group, "rid": ["q", None, "p", "q"]})
        assert not server.requests
        assert len(await dispatcher.generate_request({**group, "rid": ["q", None, "p", None]})) == 4
        assert len(server.requests) == 4

    asyncio.run(run())


PROMPTS_IN_LISTS = [
    ("input_ids", [[1, 2], [3, 4]]), ("input_ids", [(1, 2), (3, 4)]), ("input_ids", ([1, 2], [3, 4])),
    ("input_ids", UserList([UserList([1, 2]), [3, 4]])), ("prompt", ["a", "b"]), ("prompt", ("a", "b")),
    ("prompt", UserList(["a", "b"])),
]  # fmt: skip


@pytest.mark.parametrize(("field", "prompts"), PROMPTS_IN_LISTS)
def test_each_prompt_of_a_batch_gets_its_own_values(field: str, prompts: Any) -> None:
    values: dict[str, Any] = {
        "sampling_params": ({"max_new_tokens": 2}, {"max_new_tokens": 3}),
        "return_logprob": [True, False],
        "logprob_start_len": [0, -1],
        "top_logprobs_num": (1, 0),
        "token_ids_logprob": [[5], [6, 7]],
        "lora_path": ["a", None],
        "image_data": UserList(["x", ["y", "z"]]),
        "return_hidden_states": [False, True],
        "custom_logit_processor": ["", None],
    }

    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        replies = await dispatcher.generate_request({field: prompts, **values, "priority": 7})
        assert [len(reply["output_ids"]) for reply in replies] == [2, 3]
        for index, request in enumerate(server.requests):
            prompt = prompts[index] if field == "prompt" else list(prompts[index])
            expected = {name: value[index] for name, value in values.items()}
            expected |= ({"image_data": ["x"], "modalities": ["image"]}, {"modalities": ["multi-images"]})[index]
            assert {**request, "rid": None} == {field: prompt, **expected, "priority": 7, "rid": None}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": ["a", "b"], "lora_path": ["x"]}, "1 lora_path for 2 prompts"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
        ({"input_ids": [[1], [2]], "token_ids_logprob": [[1], [2], [3]]}, "3 token_ids_logprob for 2 prompts"),
        ({"input_ids": [1, 2], "logprob_start_len": [0, -1]}, "logprob_start_len is a list with one value for each"),
        ({"prompt": []}, "prompt is empty"),
    ],
)
def test_values_that_do_not_fit_the_prompts_are_refused(request_: dict[str, Any], message: str) -> None:
    async def run() -> None:
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        with pytest.raises(BadInputError, match=message):
            await dispatcher.generate_request(request_)
        assert not server.requests

    asyncio.run(run())


class DyingServer(RecordingServer):
    """A `GenerationServer` whose connections break as `cause` says."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause

    async def generate(self, **request: Any) -> Any:
        self.requests.append(request)
        raise ServerDiedError("the server ended", log_tail="Scheduler hit an exception") from self.cause


def test_a_request_that_ends_every_server_is_tried_on_two_servers_only() -> None:
    """The error names the fields of the request and has the end of the server's log."""

    async def run() -> None:
        dispatcher = Dispatcher()
        servers = [DyingServer(aiohttp.ServerDisconnectedError()) for _ in range(4)]
        for index, server in enumerate(servers):
            dispatcher.pool.add_replica(f"r{index}", server, 0)
        with pytest.raises(ServerDiedError, match=r"request are the likely cause: .*'session_params'") as raised:
            await dispatcher.generate({**REQUEST, "session_params": {"offset": -50}})
        assert not raised.value.retryable
        assert raised.value.details["log_tail"] == "Scheduler hit an exception"
        assert sum(len(server.requests) for server in servers) == 2
        assert sum(replica.admitted for replica in dispatcher.snapshot().replicas) == 2

    asyncio.run(run())


def test_requests_that_run_beside_a_harmful_request_are_finished_elsewhere() -> None:
    """Two servers end under three requests. None of them is blamed: each may be the harmless one."""

    dispatcher = Dispatcher()

    class DyingTogether(DyingServer):
        """Ends when three requests run, after the next replica has been added."""

        async def generate(self, **request: Any) -> Any:
            self.arrived = getattr(self, "arrived", 0) + 1
            if self.arrived == 3:
                dispatcher.pool.add_replica(f"r{len(servers)}", servers.pop(), 0)
            while self.arrived < 3:
                await asyncio.sleep(0.001)
            return await super().generate(**request)

    servers = [RecordingServer(), DyingTogether(aiohttp.ServerDisconnectedError())]

    async def run() -> None:
        dispatcher.pool.add_replica("first", DyingTogether(aiohttp.ServerDisconnectedError()), 0)
        replies = await asyncio.wait_for(asyncio.gather(*(dispatcher.generate(REQUEST) for _ in range(3))), 5.0)
        assert {reply["meta_info"]["attempts"] for reply in replies} == {3}

    asyncio.run(run())


def test_a_request_that_did_not_reach_ended_servers_is_tried_on_the_others() -> None:
    async def run() -> None:
        dispatcher = Dispatcher()
        key = ConnectionKey("h", 1, False, True, None, None, None)
        refused = aiohttp.ClientConnectorError(key, OSError("refused"))
        for index in range(4):
            dispatcher.pool.add_replica(f"r{index}", DyingServer(refused), 0)
        dispatcher.pool.add_replica("r9", RecordingServer(), 0)
        assert (await dispatcher.generate(REQUEST))["meta_info"]["attempts"] == 5

    asyncio.run(run())


@pytest.mark.parametrize(
    "arguments", [{"prompt": ["a", "b"]}, {"prompt": ("a", "b")}, {"input_ids": ((1,), (2,))}, {"prompt": ["a"]}]
)
def test_client_refuses_several_prompts(arguments: dict[str, Any]) -> None:
    async def run() -> None:
        async with RouterClient("http://127.0.0.1:1", None) as client:
            with pytest.raises(BadInputError, match="a generation has one prompt"):
                await client.generate(**arguments)

    asyncio.run(run())


def test_client_sends_one_prompt_for_each_call() -> None:
    async def run() -> None:
        async with RouterClient("http://127.0.0.1:1", None) as client:
            with pytest.raises(BadInputError, match="a generation has one prompt"):
                await client.generate(prompt=["a", "b"])
        async with RouterClient("http://127.0.0.1:1", None, reconnect_timeout_s=0) as client:
            with pytest.raises(ServerError, match="cannot be reached"):
                await asyncio.wait_for(client.generate(input_ids=[1]), 1.0)

    asyncio.run(run())


def test_client_may_be_made_outside_of_the_event_loop() -> None:
    client, unused = (RouterClient("http://127.0.0.1:1", None, reconnect_timeout_s=0) for _ in range(2))

    async def run() -> None:
        async with client:
            with pytest.raises(ServerError, match="cannot be reached"):
                await client.generate(input_ids=[1])
        await unused.close()
        for closed in (client, unused):
            with pytest.raises(ShutDownError, match="the RouterClient is closed"):
                await closed.generate(input_ids=[1])

    asyncio.run(run())


MANY_CALLS = """
import asyncio, os, resource, sys
from verl_server import RouterClient, ServerError

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


async def run(url):
    async with RouterClient(url, sys.argv[2], reconnect_timeout_s=2.0) as client:  # less than the calls take together
        calls = (client.generate(input_ids=[1], sampling_params={"max_new_tokens": 4}) for _ in range(250))
        print(len(await asyncio.gather(*calls)))
    await asyncio.sleep(0.2)  # the connections are closed
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass
    async with RouterClient(url, sys.argv[2], reconnect_timeout_s=0.1) as other:
        try:
            await other.generate(input_ids=[1], sampling_params={"max_new_tokens": 4})
        except ServerError as error:
            print("cannot be reached" in error.message)


asyncio.run(run(sys.argv[1]))
"""


def test_calls_of_a_client_wait_for_open_files() -> None:
    """A process that may open 100 files makes 250 calls. Then it has no files, and no call whose end would free one."""

    class SlowServer(RecordingServer):
        async def generate(self, **request: Any) -> Any:
            await asyncio.sleep(1.0)
            return await super().generate(**request)

    async def run() -> None:
        dispatcher = Dispatcher()
        dispatcher.pool.add_replica("a", SlowServer(), 0)
        async with http_router(dispatcher) as url:
            command = (sys.executable, "-c", MANY_CALLS, url, API_KEY)
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
        assert output == b"250\nTrue\n"

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_cancelled_call_of_the_client_ends_the_generation() -> None:
    """The generation continues for `orphan_timeout_s` seconds, because the client could connect again."""
    orphan_timeout_s = 0.5

    async def run() -> None:
        dispatcher, server = Dispatcher(RouterConfig(orphan_timeout_s=orphan_timeout_s)), RecordingServer()
        server.may_finish.clear()
        dispatcher.pool.add_replica("a", server, 0)
        async with http_router(dispatcher) as url, RouterClient(url, API_KEY) as client:
            call = asyncio.ensure_future(client.generate(rid="left", **REQUEST))
            await wait_for(lambda: server.running_requests == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await wait_for(lambda: server.running_requests == 0) > orphan_timeout_s / 2
            assert dispatcher.snapshot().replica("a").running_requests == 0  # type: ignore[union-attr]

    asyncio.run(run())


def test_requests_do_not_wait_for_a_replica_that_needs_an_update() -> None:
    """A new server with old weights, which only the trainer's next update brings up to date, is not waited for."""

    async def run() -> None:
        dispatcher = Dispatcher()
        server: Any = RecordingServer()
        status = ReplicaStatus("a", server, 0, admitted=False, suspect=False, will_serve=False, removed=False)
        dispatcher.pool.apply_statuses([status])
        async with asyncio.timeout(5.0):
            with pytest.raises(NotReadyError, match="no replica serves"):
                await dispatcher.generate(REQUEST)
        dispatcher.pool.apply_statuses([replace(status, admitted=True, will_serve=True)])
        assert (await dispatcher.generate(REQUEST))["output_ids"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_the_reason_why_no_replica_serves() -> None:
    """A fleet whose replicas have all failed raises an error that is not retryable, with the last server's error."""

    async def run() -> None:
        dispatcher = Dispatcher()
        server: Any = RecordingServer()
        status = ReplicaStatus(
            "a", server, 0, admitted=False, suspect=False, will_serve=False, removed=False, reason="is being removed"
        )
        failure = to_wire(ServerDiedError("replica b is not started again", log_tail="out of memory"))
        failed = replace(status, name="b", adapter=None, reason="has failed", failure=failure)
        dispatcher.pool.apply_statuses([status])
        dispatcher.pool.apply_statuses([failed])
        with pytest.raises(NotReadyError, match=r"at the moment: a is being removed; b has failed$"):
            await dispatcher.generate(REQUEST)
        dispatcher.pool.apply_statuses([replace(failed, name="a")])
        with pytest.raises(ServerDiedError, match=r"every replica has failed.*b is not started again") as raised:
            await dispatcher.generate(REQUEST)
        assert (raised.value.retryable, raised.value.details) == (False, {"log_tail": "out of memory"})
        dispatcher.pool.apply_statuses([replace(status, name="c", admitted=True, will_serve=True, reason="")])
        assert (await dispatcher.generate(REQUEST))["output_ids"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_a_failed_replica_beside_one_that_waits_for_weights() -> None:
    """A replica without a server that waits for an action of the user has not failed: the error is retryable."""

    async def run() -> None:
        dispatcher = Dispatcher()
        reason = "has no whole weights: send an update of all weights"
        waiting = ReplicaStatus(
            "a", None, 0, admitted=False, suspect=False, will_serve=False, removed=False, reason=reason
        )
        failure = to_wire(ServerDiedError("replica b is not started again"))
        dispatcher.pool.apply_statuses([waiting])
        dispatcher.pool.apply_statuses([replace(waiting, name="b", reason="has failed", failure=failure)])
        with pytest.raises(NotReadyError, match=f"at the moment: a {reason}; b has failed$"):
            await dispatcher.generate(REQUEST)
        dispatcher.pool.apply_statuses([replace(waiting, name="a", removed=True)])
        with pytest.raises(ServerDiedError, match="every replica has failed"):
            await dispatcher.generate(REQUEST)

    asyncio.run(run())


def test_a_server_behind_a_path_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter, the router, its client and `verl-server status` keep the path prefix of a reverse proxy.

    None of them uses the proxy variables, which name a closed port.
    """
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        """A server and a router at once, under the prefix `/a/b`."""
        paths.append(request.path_qs)
        name = request.path.removeprefix("/a/b")
        reply = {"output_ids": [7], "meta_info": {"weight_version": "3"}}
        if name == "/generate" and orjson.loads(await request.read()).get("stream"):
            return web.Response(body=b"data: " + orjson.dumps(reply) + b"\n\n", content_type="text/event-stream")
        replies: dict[str, Any] = {
            "/generate": reply, "/server_info": {"model_path": "none"}, "/model_info": {"weight_version": "3"},
            "/v1/models": {"data": []}, "/replicas": [{"name": "a"}],
        }  # fmt: skip
        return web.json_response(replies[name])

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/a/b"
        try:
            async with AsyncHttpServerEngineAdapter.attach(f"{url}/v1/") as adapter, RouterClient(url, None) as client:
                assert (await adapter.get_model_info())["weight_version"] == 3
                assert (await adapter.generate("x"))["output_ids"] == [7]
                assert [event["output_ids"] async for event in adapter.generate_stream("x")] == [[7]]
                assert (await client.generate(prompt="x"))["output_ids"] == [7]
                assert await client.replicas() == [{"name": "a"}]
                dispatcher = Dispatcher()
                dispatcher.pool.add_replica("a", adapter, 0)
                async with http_router(dispatcher) as router_url, aiohttp.ClientSession() as session:
                    headers = {"Authorization": f"Bearer {API_KEY}"}
                    async with session.get(f"{router_url}/v1/models", headers=headers) as response:
                        assert (response.status, (await response.json())["data"]) == (200, [])
        finally:
            await runner.cleanup()
        assert set(paths) == {
            f"/a/b{path}" for path in ("/generate", "/server_info", "/model_info", "/replicas", "/v1/models")
        }

    asyncio.run(asyncio.wait_for(run(), 30.0))


# -- replicas that fail ------------------------------------------------------------------------------


class FailingServer(RecordingServer):
    """A `GenerationServer` that fails at once, as long as `fails` is set."""

    def __init__(self, **details: Any) -> None:
        super().__init__()
        self.fails = True
        self.details = details

    async def generate(self, **request: Any) -> Any:
        if self.fails:
            self.requests.append(request)
            raise ServerError("the server fails", **self.details)
        return await super().generate(**request)

    async def generate_stream(self, **request: Any) -> Any:
        yield await self.generate(**request)


async def generate_many(dispatcher: Dispatcher, count: int) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*(dispatcher.generate(REQUEST) for _ in range(count))), 30.0)


def test_a_replica_that_fails_at_once_loses_no_request() -> None:
    """It always has the fewest tokens in flight. No request is sent to it twice while others have capacity."""

    async def run() -> None:
        dispatcher, failing = Dispatcher(), FailingServer(status=500)
        dispatcher.pool.add_replica("a", failing, 0)
        servers = [RecordingServer() for _ in range(3)]
        for name, server in zip("bcd", servers, strict=True):
            dispatcher.pool.add_replica(name, server, 0)
        replies = await generate_many(dispatcher, 50)
        assert [reply["output_ids"] for reply in replies] == [[0, 1, 2, 3]] * 50
        first_failures = len(failing.requests)
        assert all(reply["meta_info"]["attempts"] <= 2 for reply in replies)
        for _ in range(50):
            await dispatcher.generate(REQUEST)
        assert len(failing.requests) == first_failures, "a suspect replica receives no requests before its probe"
        assert dispatcher.snapshot().replica("a").suspect  # type: ignore[union-attr]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "text/html", "<html>maintenance</html>"),
        (502, "application/json", "<html>"),
        (404, "text/plain", "404 page not found"),
    ],
)
def test_requests_leave_a_replica_that_a_proxy_answers_for(status: int, content_type: str, body: str) -> None:
    """Every request finishes on the other replica, and the replica becomes suspect."""
    proxied = 0

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal proxied
        proxied += 1
        return web.Response(status=status, body=body.encode(), content_type=content_type)

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with AsyncHttpServerEngineAdapter.attach(url) as adapter:
            dispatcher = Dispatcher()
            dispatcher.pool.add_replica("a", adapter, 0)
            dispatcher.pool.add_replica("b", RecordingServer(), 0)
            for _ in range(5):
                assert all(reply["output_ids"] for reply in await generate_many(dispatcher, 4))
        await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 60.0))
    assert 0 < proxied < 12, "the replica did not become suspect"


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, '{"detail": "Not Found"}'), (500, "null"), (400, '["x"]'), (200, "[]"), (200, "{}"), (502, "<html>")],
)
def test_the_client_reports_replies_that_do_not_come_from_a_router(status: int, body: str) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, body=body.encode(), content_type="application/json")

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with RouterClient(f"http://127.0.0.1:{runner.addresses[0][1]}", None) as client:
            with pytest.raises(ServerError, match=re.escape(f"does not send: {body}")) as caught:
                await client.generate(prompt="x")
            assert caught.value.details["status"] == status
        await runner.cleanup()

    asyncio.run(run())


def test_a_suspect_replica_returns_by_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time probes the replica. When the probe succeeds, the replica is used as before."""
    monkeypatch.setattr(error_history, "FIRST_PROBE_DELAY_S", 0.02)

    async def run() -> None:
        dispatcher, failing, server = Dispatcher(), FailingServer(status=503), RecordingServer()
        dispatcher.pool.add_replica("a", failing, 0)
        dispatcher.pool.add_replica("b", server, 0)
        for number in range(1, 4):
            await dispatcher.generate(REQUEST)
            assert len(failing.requests) == number
        for number in (4, 5):
            await wait_for(lambda: not dispatcher.snapshot().replica("a").suspect)  # type: ignore[union-attr]
            await generate_many(dispatcher, 20)
            assert len(failing.requests) == number, "one probe, which fails"
        failing.fails = False
        failing.may_finish.clear()
        await wait_for(lambda: not dispatcher.snapshot().replica("a").suspect)  # type: ignore[union-attr]
        calls = asyncio.ensure_future(generate_many(dispatcher, 20))
        await wait_for(lambda: len(server.requests) == 3 + 40 + 19)
        assert failing.running_requests == 1, "the other requests do not wait for the probe"
        failing.may_finish.set()
        await calls
        for one in (failing, server):
            one.may_finish.clear()
        calls = asyncio.ensure_future(generate_many(dispatcher, 20))
        await wait_for(lambda: failing.running_requests + server.running_requests == 20)
        assert failing.running_requests == 10
        for one in (failing, server):
            one.may_finish.set()
        await calls

    asyncio.run(run())


def test_probes_are_no_failed_attempts_of_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for a full replica is the probe of the failing one again and again. It survives that."""
    monkeypatch.setattr(error_history, "MAX_PROBE_DELAY_S", 0.01)

    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_attempts=4, max_running_requests_per_dp_rank=1))
        server, failing = RecordingServer(), FailingServer(status=500)
        server.may_finish.clear()
        dispatcher.pool.add_replica("a", server, 0)
        running = asyncio.ensure_future(dispatcher.generate(REQUEST))
        await wait_for(lambda: server.running_requests == 1)
        dispatcher.pool.add_replica("b", failing, 0)
        call = asyncio.ensure_future(dispatcher.generate(REQUEST))
        await wait_for(lambda: len(failing.requests) > 8)
        server.may_finish.set()
        assert [len((await one)["output_ids"]) for one in (running, call)] == [4, 4]

    asyncio.run(run())


def test_requests_are_tried_on_suspect_replicas_when_no_other_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that every replica returns are raised after `max_attempts` attempts. The delays between them grow."""
    monkeypatch.setattr(error_history, "FIRST_PROBE_DELAY_S", 60.0)

    async def run() -> None:
        dispatcher, failing = Dispatcher(RouterConfig(max_attempts=5)), FailingServer(status=500)
        dispatcher.pool.add_replica("a", failing, 0)
        started = time.monotonic()
        with pytest.raises(ServerError, match="the server fails"):
            await dispatcher.generate(REQUEST)
        assert time.monotonic() - started > 0.05 + 0.1 + 0.2 + 0.4
        assert len(failing.requests) == 5
        failing.fails = False
        await generate_many(dispatcher, 10)
        assert not dispatcher.snapshot().replica("a").suspect  # type: ignore[union-attr]

    asyncio.run(run())


@pytest.mark.parametrize(("status", "error_type"), [(400, BadInputError), (500, None), (503, None)])
def test_an_abort_with_a_status_is_no_finished_generation(status: int, error_type: type[Exception] | None) -> None:
    """SGLang's streams report a full queue, too little KV cache or a bad grammar as an abort with a status."""
    abort = {"type": "abort", "message": "no memory", "status_code": status, "err_type": None}

    async def answer(request: web.BaseRequest, reason: Any) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({"model_path": "none"})
        event = {"output_ids": [7], "meta_info": {"weight_version": "3", "finish_reason": reason}}
        return web.Response(body=b"data: " + orjson.dumps(event) + b"\n\ndata: [DONE]\n\n")

    async def run() -> None:
        dispatcher = Dispatcher()
        async with contextlib.AsyncExitStack() as stack:
            for name, reason in (("a", abort), ("b", {"type": "stop"})):
                runner = web.ServerRunner(web.Server(functools.partial(answer, reason=reason)))
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                adapter = await stack.enter_async_context(AsyncHttpServerEngineAdapter.attach(url))
                dispatcher.pool.add_replica(name, adapter, 3)
            request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 100}}
            if error_type is not None:
                with pytest.raises(error_type, match="no memory"):
                    await dispatcher.generate(request)
                return
            reply = await dispatcher.generate(request)
            assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == ([7], {"type": "stop"})
            assert reply["meta_info"]["attempts"] == 2
            assert all(replica.admitted for replica in dispatcher.snapshot().replicas)

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_requests_that_end_servers_beside_others_are_found() -> None:
    """Harmless requests run beside it. After two servers, it runs where no other request of this kind runs."""
    request = {"input_ids": [6, 6, 6], "sampling_params": {"max_new_tokens": 4}}

    class FragileServer(RecordingServer):
        """Ends when it runs the harmful request beside another one. The other requests on it fail, too."""

        has_ended = False

        async def generate(self, **request: Any) -> Any:
            self.requests.append(request)
            await asyncio.sleep(0.01)
            self.has_ended = self.has_ended or request["input_ids"] == [6, 6, 6]
            if self.has_ended:
                raise ServerError("the connection broke") from aiohttp.ServerDisconnectedError()
            return self._reply(4, finished=True)

    async def run() -> None:
        dispatcher = Dispatcher()
        servers = [FragileServer() for _ in range(8)]
        for index, server in enumerate(servers):
            dispatcher.pool.add_replica(f"r{index}", server, 0)
        harmless = [asyncio.ensure_future(dispatcher.generate(REQUEST)) for _ in range(40)]
        with pytest.raises(ServerDiedError, match="the request was given up"):
            await dispatcher.generate(request)
        assert {tuple((await call)["output_ids"]) for call in harmless} == {(0, 1, 2, 3)}
        assert sum(server.has_ended for server in servers) <= 4

    asyncio.run(asyncio.wait_for(run(), 30.0))


class MortalServer(RecordingServer):
    """A `GenerationServer` that answers when `may_finish` is set, unless `end` is set before."""

    def __init__(self) -> None:
        super().__init__()
        self.may_finish.clear()
        self.end = asyncio.Event()

    async def generate(self, **request: Any) -> Any:
        ends = asyncio.ensure_future(self.end.wait())
        answers = asyncio.ensure_future(super().generate(**request))
        await asyncio.wait((ends, answers), return_when=asyncio.FIRST_COMPLETED)
        ends.cancel()
        if self.end.is_set():
            answers.cancel()
            raise ServerError("the connection broke") from aiohttp.ServerDisconnectedError()
        return await answers


async def lose_two_servers(dispatcher: Dispatcher, requirements: list[VersionRequirement]) -> list[asyncio.Task[Any]]:
    """Calls, one for each requirement, that were on two servers which ended. The replica "old" has no server now."""
    first, second = MortalServer(), MortalServer()
    dispatcher.pool.add_replica("old", first, 0)
    calls = [asyncio.create_task(dispatcher.generate(REQUEST, requirement=one)) for one in requirements]
    await wait_for(lambda: first.running_requests == len(calls))
    dispatcher.pool.add_replica("old", second, 0)
    first.end.set()
    await wait_for(lambda: second.running_requests == len(calls))
    dispatcher.pool.update_replica("old", admitted=False)
    second.end.set()
    await wait_for(lambda: not second.running_requests)
    return calls


def test_requests_that_may_have_ended_servers_run_on_half_of_the_replicas() -> None:
    """Each of these replicas has one of them, until that one has returned a token. Other requests do not wait."""

    async def run() -> None:
        dispatcher = Dispatcher()
        calls = await lose_two_servers(dispatcher, [VersionRequirement()] * 12)
        servers = [MortalServer() for _ in range(4)]
        servers[2].may_finish.set()
        for number, server in enumerate(servers):
            dispatcher.pool.add_replica(f"r{number}", server, 0)
            dispatcher.pool.add_replica(f"restarting-{number}", MortalServer(), 0, admitted=False)
        await wait_for(lambda: sum(server.running_requests for server in servers) == 2)
        assert (await dispatcher.generate(REQUEST))["meta_info"]["attempts"] == 1
        assert [len(server.requests) for server in servers] == [1, 1, 1, 0]
        servers[0].may_finish.set()
        await wait_for(lambda: sum(call.done() for call in calls) == 11)
        servers[1].may_finish.set()
        assert {(await call)["meta_info"]["attempts"] for call in calls} == {3}

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_machine_that_is_lost_again_ends_no_harmless_request() -> None:
    """Its replicas run several of the requests that may have ended servers."""

    async def run() -> None:
        dispatcher = Dispatcher()
        calls = await lose_two_servers(dispatcher, [VersionRequirement()] * 2)
        servers = [MortalServer() for _ in range(4)]
        for number, server in enumerate(servers):
            dispatcher.pool.add_replica(f"r{number}", server, 0)
        await wait_for(lambda: [server.running_requests for server in servers] == [1, 1, 0, 0])
        for server in servers[2:]:
            server.may_finish.set()
        for server in servers[:2]:
            server.end.set()
        assert [(await call)["meta_info"]["attempts"] for call in calls] == [4, 4]

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_request_that_waits_for_its_weights_holds_no_other_request_that_may_have_ended_servers() -> None:
    async def run() -> None:
        dispatcher = Dispatcher()
        needs_old = VersionRequirement(weight_version=0)
        first, *others = await lose_two_servers(dispatcher, [needs_old, *[VersionRequirement()] * 4])
        dispatcher.pool.add_replica("new", RecordingServer(1), 1)
        assert {(await call)["meta_info"]["weight_version"] for call in others} == {1}
        assert not first.done()
        dispatcher.pool.add_replica("old", RecordingServer(), 0)
        assert (await first)["meta_info"]["weight_version"] == 0

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_too_many_open_files_are_no_fault_of_a_replica() -> None:
    """Requests that cannot be sent wait until others have ended."""

    class Connections(RecordingServer):
        """A server to which this process can open five connections."""

        async def generate(self, **request: Any) -> Any:
            if self.running_requests == 5:
                key = ConnectionKey("h", 1, False, True, None, None, None)
                error = aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "too many open files"))
                raise ServerError("nothing answers") from error
            async with self._record(request) as count:
                await asyncio.sleep(0.005)
                return self._reply(count, finished=True)

    async def run() -> None:
        dispatcher, server = Dispatcher(), Connections()
        dispatcher.pool.add_replica("a", server, 0)
        await generate_many(dispatcher, 100)
        (replica,) = dispatcher.snapshot().replicas
        assert (replica.admitted, replica.suspect, len(server.requests)) == (True, False, 100)

    asyncio.run(run())


def test_a_short_lack_of_open_files_limits_no_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program had all files of the machine for a moment."""
    monkeypatch.setattr("verl_server.router.replica.OPEN_FILES_RETRY_S", 0.1)

    class Connections(RecordingServer):
        peak = 0

        async def generate(self, **request: Any) -> Any:
            if len(self.requests) == 1:
                self.requests.append({})
                key = ConnectionKey("h", 1, False, True, None, None, None)
                error = aiohttp.ClientConnectorError(key, OSError(errno.ENFILE, "file table overflow"))
                raise ServerError("nothing answers") from error
            async with self._record(request) as count:
                self.peak = max(self.peak, self.running_requests)
                await asyncio.sleep(0.05)
                return self._reply(count, finished=True)

    async def run() -> None:
        dispatcher, server = Dispatcher(), Connections()
        dispatcher.pool.add_replica("a", server, 0)
        await generate_many(dispatcher, 2)
        await asyncio.sleep(0.2)
        await generate_many(dispatcher, 20)
        assert server.peak == 20

    asyncio.run(run())


def test_requests_wait_as_long_as_files_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router tries again and again to run more requests. That is no failed attempt of hundreds of requests."""
    monkeypatch.setattr("verl_server.router.replica.OPEN_FILES_RETRY_S", 0.05)

    class Connections(RecordingServer):
        async def generate(self, **request: Any) -> Any:
            if self.running_requests >= 10:
                key = ConnectionKey("h", 1, False, True, None, None, None)
                error = aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "too many open files"))
                raise ServerError("nothing answers") from error
            async with self._record(request) as count:
                await asyncio.sleep(0.02)
                return self._reply(count, finished=True)

    async def run() -> None:
        dispatcher, server = Dispatcher(), Connections()
        dispatcher.pool.add_replica("a", server, 0)
        await generate_many(dispatcher, 400)
        assert len(server.requests) == 400

    asyncio.run(run())


def test_callers_that_leave_a_forwarded_stream_are_no_errors_of_the_replica() -> None:
    """They close their sending side and read on for a moment."""

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(3000):
                await response.write(2000 * b"data: x" + b"\n\n")
        return response

    async def leave_early(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1000)
        writer.write_eof()
        for _ in range(50):
            if not await reader.read(100_000):
                break
        writer.close()

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:

            async def serve(server: web.Server) -> int:
                runner = web.ServerRunner(server, shutdown_timeout=1.0)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                return int(runner.addresses[0][1])

            dispatcher = Dispatcher()
            stack.push_async_callback(dispatcher.close)
            replica: Any = SimpleNamespace(base_url=f"http://127.0.0.1:{await serve(web.Server(stream))}", api_key=None)
            dispatcher.pool.add_replica("a", replica, 0)
            router = RouterHttpServer(dispatcher, None)
            stack.push_async_callback(router.close)
            port = await serve(await router.create_server())
            await asyncio.gather(*(leave_early(port) for _ in range(20)))
            await asyncio.sleep(0.1)
            (status,) = dispatcher.snapshot().replicas
            assert not status.suspect

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("fails", [False, True])
def test_first_requests_share_one_request_for_the_limits(fails: bool) -> None:
    """The requests of a burst need the limits of the server at the same time. An error is raised by all of them."""
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.path)
        await asyncio.sleep(0.05)
        if request.path == "/server_info":
            return web.json_response({"model_path": "none"}, status=500 if fails and len(paths) == 1 else 200)
        return web.json_response({"output_ids": [7], "meta_info": {"weight_version": "3"}})

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with AsyncHttpServerEngineAdapter.attach(f"http://127.0.0.1:{runner.addresses[0][1]}") as adapter:
                calls = [asyncio.ensure_future(adapter.generate("x")) for _ in range(50)]
                await asyncio.sleep(0)
                calls[0].cancel()
                results = await asyncio.gather(*calls[1:], return_exceptions=True)
                assert {type(result) for result in results} == {ServerError if fails else dict}
                assert paths.count("/server_info") == 1
                assert (await adapter.generate("x"))["output_ids"] == [7]
                assert paths.count("/server_info") == 1 + fails
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 30.0))


# -- generations that are continued ------------------------------------------------------------------


class PausingServer(RecordingServer):
    """A `GenerationServer` that aborts each stream after ten tokens, as long as `pauses` is set."""

    pauses = True

    async def generate_stream(self, **request: Any) -> Any:
        async with self._record(request) as count:
            if self.pauses:
                reply = self._reply(10, finished=True)
                reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
                yield reply
            else:
                yield self._reply(count, finished=True)

    async def generate(self, **request: Any) -> Any:
        async for reply in self.generate_stream(**request):
            return reply


LONG_REQUEST: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 200}}


@pytest.mark.parametrize("reason", ["refused", "cancelled"])
def test_returned_tokens_survive_a_call_that_does_not_finish(reason: str) -> None:
    """A caller has received the first tokens of an aborted generation. It is never sampled anew."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), PausingServer()
        dispatcher.pool.add_replica("a", server, 0)
        first = await dispatcher.generate(LONG_REQUEST, rid="same")
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        for _ in range(2):
            dispatcher.pool.update_replica("a", admitted=False, will_serve=reason == "cancelled")
            with pytest.raises(NotReadyError if reason == "refused" else DeadlineError):
                await dispatcher.generate(LONG_REQUEST, rid="same", timeout_s=0.01)
        server.pauses = False
        dispatcher.pool.update_replica("a", admitted=True)
        reply = await dispatcher.generate(LONG_REQUEST, rid="same")
        assert server.requests[-1]["input_ids"] == [1, 2, *range(10)]
        assert reply["output_ids"] == [*range(10), *range(190)]
        assert await dispatcher.generate(LONG_REQUEST, rid="same") == reply
        assert len(server.requests) == 2

    asyncio.run(run())


@pytest.mark.parametrize("other", [{"prompt": "hi"}, {"input_ids": [1], "sampling_params": {"regex": "a+"}}])
def test_an_aborted_generation_that_cannot_continue_starts_again(other: dict[str, Any]) -> None:
    """`abort` returns its tokens, and the next call with its id does not begin with them."""

    class SlowServer(PausingServer):
        async def generate_stream(self, **request: Any) -> Any:
            async with self._record(request) as count:
                reply = self._reply(10, finished=self.pauses)
                if self.pauses:
                    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
                yield reply
                await asyncio.sleep(0.0 if self.pauses else 60.0)
                yield self._reply(count, finished=True)

    async def run() -> None:
        dispatcher, server = Dispatcher(), SlowServer()
        dispatcher.pool.add_replica("a", server, 0)
        request = {**other, "sampling_params": {"max_new_tokens": 200, **other.get("sampling_params", {})}}
        await dispatcher.generate(request, rid="same")  # its caller has the tokens, so that the id is kept
        server.pauses = False
        call = asyncio.ensure_future(dispatcher.generate(request, rid="same"))
        await wait_for(lambda: len(server.requests) == 2 and dispatcher.snapshot().replicas[0].tokens_in_flight >= 10)
        aborted = dispatcher.abort(["same"])["same"]
        assert aborted is not None
        assert aborted["output_ids"] == list(range(10))
        await asyncio.gather(call, return_exceptions=True)
        server.pauses = True
        assert (await dispatcher.generate(request, rid="same"))["output_ids"] == list(range(10))
        assert server.requests[-1].get("input_ids") == other.get("input_ids")
        assert server.requests[-1]["sampling_params"]["max_new_tokens"] == 200

    asyncio.run(run())


@pytest.mark.parametrize("loses_more", [False, True])
def test_returned_tokens_survive_a_refusal_of_the_server(loses_more: bool) -> None:
    """For example, the LoRA adapter of the request is not loaded for a moment. Tokens that came later may be lost."""

    class RefusingServer(PausingServer):
        refusals = 0

        async def generate_stream(self, **request: Any) -> Any:
            if self.refusals and (not loses_more or len(self.requests) > 1):
                self.refusals -= 1
                raise BadInputError("the adapter is not loaded")
            async for reply in super().generate_stream(**request):
                if self.refusals:
                    yield {**reply, "output_ids": [7] * 20, "meta_info": {"weight_version": 0, "completion_tokens": 20}}
                    raise ServerError("an error", status=500)
                yield reply

    async def run() -> None:
        dispatcher, server = Dispatcher(), RefusingServer()
        dispatcher.pool.add_replica("a", server, 0)
        first = await dispatcher.generate(LONG_REQUEST, rid="same")
        assert first["output_ids"] == [*range(10)]
        server.pauses, server.refusals = False, 2 if loses_more else 1
        with pytest.raises(BadInputError, match="not loaded"):
            await dispatcher.generate(LONG_REQUEST, rid="same")
        reply = await dispatcher.generate(LONG_REQUEST, rid="same")
        assert server.requests[-1]["input_ids"] == [1, 2, *range(10)]
        assert reply["output_ids"] == [*range(10), *range(190)]

    asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("field", ["input_ids", "sampling_params", "token_ids_logprob"])
def test_a_request_that_its_caller_changes_is_another_request(field: str) -> None:
    """The caller changes its list or dict in place and sends it again with the same request id."""

    async def run() -> None:
        dispatcher = Dispatcher()
        dispatcher.pool.add_replica("a", RecordingServer(), 0)
        values: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "token_ids_logprob": [3]}
        first = await dispatcher.generate(values, rid="same")
        if isinstance(values[field], list):
            values[field].extend(first["output_ids"])
        else:
            values[field]["max_new_tokens"] = 2
        with pytest.raises(BadInputError, match="belongs to another request"):
            await dispatcher.generate(values, rid="same")

    asyncio.run(run())


def test_a_continuation_has_the_prompt_of_the_first_call() -> None:
    """The caller has appended the tokens of the aborted reply to its own list."""

    async def run() -> None:
        dispatcher, server = Dispatcher(), PausingServer()
        dispatcher.pool.add_replica("a", server, 0)
        prompt = [1, 2]
        reply = await dispatcher.generate({**LONG_REQUEST, "input_ids": prompt}, rid="same")
        prompt += reply["output_ids"]
        server.pauses = False
        await dispatcher.generate(LONG_REQUEST, rid="same")
        assert server.requests[-1]["input_ids"] == [1, 2, *range(10)]

    asyncio.run(run())


def test_each_call_receives_a_reply_of_its_own() -> None:
    """A caller may change its reply: neither a concurrent call nor a later call with the same id sees the change."""

    class LogprobServer(RecordingServer):
        def _reply(self, count: int, finished: bool) -> dict[str, Any]:
            reply = super()._reply(count, finished)
            reply["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in range(count)]
            return reply

    async def run() -> None:
        dispatcher = Dispatcher()
        dispatcher.pool.add_replica("a", LogprobServer(), 0)
        replies = await asyncio.gather(*(dispatcher.generate(REQUEST, rid="same") for _ in range(2)))
        for reply in replies:
            assert (len(reply["output_ids"]), len(reply["meta_info"]["output_token_logprobs"])) == (4, 4)
            reply["output_ids"].clear()
            reply["meta_info"]["output_token_logprobs"].clear()
            reply["meta_info"]["finish_reason"].clear()
        later = await dispatcher.generate(REQUEST, rid="same")
        assert later["output_ids"] == [0, 1, 2, 3]
        assert len(later["meta_info"]["output_token_logprobs"]) == 4
        assert later["meta_info"]["finish_reason"] == {"type": "length", "length": 4}

    asyncio.run(run())


def test_pauses_are_no_failed_attempts() -> None:
    async def run() -> None:
        dispatcher, server = Dispatcher(RouterConfig(max_attempts=3)), PausingServer()
        dispatcher.pool.add_replica("a", server, 0)
        for _ in range(10):
            await dispatcher.generate(LONG_REQUEST, rid="same")
        dispatcher.pool.update_replica("a", admitted=False)
        failing = FailingServer()
        dispatcher.pool.add_replica("b", failing, 0)
        call = asyncio.ensure_future(dispatcher.generate(LONG_REQUEST, rid="same"))
        await wait_for(lambda: bool(dispatcher.snapshot().queued_requests))
        server.pauses = False
        dispatcher.pool.update_replica("a", admitted=True)
        reply = await call
        assert len(reply["output_ids"]) == 200
        assert reply["meta_info"]["attempts"] == 2, "the failed one and the last one"

    asyncio.run(run())


def test_a_generation_that_is_lost_at_the_end_of_the_context_starts_again() -> None:
    """The continued prompt is too long for the server, although the prompt of the caller is not."""

    class ShortContext(RecordingServer):
        async def generate_stream(self, **request: Any) -> Any:
            if len(request["input_ids"]) >= 100:
                raise BadInputError("the server accepts at most 99 tokens")
            async with self._record(request) as count:
                yield self._reply(98, finished=False)
                if len(self.requests) == 1:
                    raise ServerError("the connection broke")
                yield self._reply(count, finished=True)

    async def run() -> None:
        dispatcher = Dispatcher()
        server = ShortContext()
        dispatcher.pool.add_replica("a", server, 0)
        call = asyncio.ensure_future(dispatcher.generate({**LONG_REQUEST, "sampling_params": {"max_new_tokens": 250}}))
        await wait_for(lambda: bool(dispatcher.snapshot().queued_requests))
        dispatcher.pool.update_replica("a", admitted=True)
        assert (await call)["output_ids"] == list(range(250))
        with pytest.raises(BadInputError, match="at most 99"):
            await dispatcher.generate({"input_ids": [1] * 100, "sampling_params": {"max_new_tokens": 250}})

    asyncio.run(run())


# -- waiting requests --------------------------------------------------------------------------------


def test_waiting_requests_are_distributed_over_all_replicas_that_open_together() -> None:
    async def run() -> None:
        dispatcher = Dispatcher()
        servers: list[Any] = [RecordingServer() for _ in range(4)]
        statuses = [
            ReplicaStatus(name, server, 0, admitted=False, suspect=False, will_serve=True, removed=False)
            for name, server in zip("abcd", servers, strict=True)
        ]
        dispatcher.pool.apply_statuses(statuses)
        for server in servers:
            server.may_finish.clear()
        calls = asyncio.ensure_future(generate_many(dispatcher, 120))
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 120)
        dispatcher.pool.apply_statuses(replace(status, admitted=True) for status in statuses)
        await wait_for(lambda: sum(server.running_requests for server in servers) == 120)
        assert [server.running_requests for server in servers] == [30] * 4
        for server in servers:
            server.may_finish.set()
        await calls

    asyncio.run(run())


def test_a_request_that_was_lost_comes_first_and_is_not_refused() -> None:
    """The queue is full and all replicas are full. The request goes before all requests that were not tried."""

    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=1, max_queued_requests=1))
        first, second = RecordingServer(), RecordingServer()
        lost = asyncio.Event()

        async def lose(**request: Any) -> Any:
            await lost.wait()
            raise ServerError("the connection broke")

        first.generate = lose  # type: ignore[method-assign]
        second.may_finish.clear()
        dispatcher.pool.add_replica("a", first, 0)
        call = asyncio.ensure_future(dispatcher.generate({**REQUEST, "input_ids": [7]}, is_remote=True))
        await wait_for(lambda: dispatcher.snapshot().replica("a").running_requests == 1)  # type: ignore[union-attr]
        dispatcher.pool.add_replica("b", second, 0)
        others = [asyncio.ensure_future(dispatcher.generate(REQUEST, is_remote=True)) for _ in range(2)]
        await wait_for(lambda: second.running_requests == 1 and dispatcher.snapshot().queued_requests == 1)
        with pytest.raises(ServerBusyError):
            await dispatcher.generate(REQUEST, is_remote=True)
        lost.set()
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 2)
        second.may_finish.set()
        assert (await call)["meta_info"]["attempts"] == 2
        await asyncio.gather(*others)
        assert [request["input_ids"] for request in second.requests] == [[1, 2], [7], [1, 2]]

    asyncio.run(run())


def test_a_batch_of_this_process_waits_in_a_full_queue() -> None:
    """Over HTTP, requests beyond the maximum are refused."""

    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=2, max_queued_requests=3))
        server = RecordingServer()
        server.may_finish.clear()
        dispatcher.pool.add_replica("a", server, 0)
        batch = {**REQUEST, "input_ids": [[number] for number in range(50)]}
        call = asyncio.ensure_future(dispatcher.generate_request(batch))
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 48)
        server.may_finish.set()
        assert len(await asyncio.wait_for(call, 30.0)) == 50
        server.may_finish.clear()
        with pytest.raises(ServerBusyError, match="the maximum is 3"):
            await dispatcher.generate_request(batch, is_remote=True)

    asyncio.run(run())


def test_a_replica_runs_the_maximum_for_each_of_its_data_parallel_ranks() -> None:
    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=2))
        server: Any = RecordingServer()
        server.may_finish.clear()
        status = ReplicaStatus("a", server, 0, admitted=True, suspect=False, will_serve=True, removed=False, dp_size=8)
        dispatcher.pool.apply_statuses([status])
        calls = asyncio.ensure_future(generate_many(dispatcher, 20))
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 4)
        assert server.running_requests == 16
        server.may_finish.set()
        await calls

    asyncio.run(run())


def test_cancelled_waiting_requests_leave_no_trace() -> None:
    """Also a request that is cancelled after it was placed and before it could begin."""

    async def run() -> None:
        dispatcher, server = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=1)), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0, admitted=False)
        calls = [asyncio.ensure_future(dispatcher.generate(REQUEST)) for _ in range(10)]
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 10)
        for call in calls[:9]:
            call.cancel()
        await asyncio.gather(*calls[:9], return_exceptions=True)
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 1)
        dispatcher.pool.update_replica("a", admitted=True)  # places the last request
        calls[9].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[9]
        await wait_for(lambda: dispatcher.snapshot().replica("a").running_requests == 0)  # type: ignore[union-attr]
        assert (await dispatcher.generate(REQUEST))["output_ids"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_requests_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with DeadlineError when no request of their queue was placed for `MAX_STANDSTILL_S` seconds."""
    monkeypatch.setattr(placement, "MAX_STANDSTILL_S", 0.2)

    async def run() -> None:
        dispatcher, server = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=1)), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        server.may_finish.clear()
        running = asyncio.ensure_future(dispatcher.generate(REQUEST))
        waiting = [asyncio.ensure_future(dispatcher.generate(REQUEST)) for _ in range(3)]
        for call in waiting:
            with pytest.raises(
                DeadlineError, match=r"no request that needs any weight version was placed .* for 0.2 s"
            ):
                await asyncio.wait_for(call, 10.0)
        server.may_finish.set()
        assert (await running)["output_ids"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_requests_that_wait_for_a_version_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = 0
    choose = LoadIndex.choose

    def counted(self: LoadIndex, *arguments: Any) -> Any:
        nonlocal choices
        choices += 1
        return choose(self, *arguments)

    async def run() -> None:
        nonlocal choices
        dispatcher, server = Dispatcher(), RecordingServer()
        dispatcher.pool.add_replica("a", server, 0)
        dispatcher.pool.add_replica("b", RecordingServer(), 1, admitted=False)
        needs_update = VersionRequirement(weight_version=1)
        waiting = [asyncio.ensure_future(dispatcher.generate(REQUEST, requirement=needs_update)) for _ in range(1000)]
        await wait_for(lambda: dispatcher.snapshot().queued_requests == 1000)
        monkeypatch.setattr(LoadIndex, "choose", counted)
        for _ in range(10):
            await dispatcher.generate(REQUEST)
        assert choices == 10
        for call in waiting:
            call.cancel()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def forwarding_router(answer: Callable[[web.BaseRequest], Any]) -> AsyncIterator[str]:
    """URL of a router over one HTTP server, whose handler is `answer`."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with AsyncHttpServerEngineAdapter.attach(f"http://127.0.0.1:{runner.addresses[0][1]}") as adapter:
            dispatcher = Dispatcher()
            dispatcher.pool.add_replica("a", adapter, 0)
            async with http_router(dispatcher) as url:
                yield url
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("accepted", ["gzip", "identity", None])
def test_compressed_answers_are_forwarded(accepted: str | None) -> None:
    """With their header, and only if the caller accepts one. Compressed requests are refused: they may grow."""
    requests: list[bytes] = []
    text = orjson.dumps({"text": "answer " * 1000})

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(await request.read())
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=text, content_type="application/json")
        return web.Response(
            body=gzip.compress(text), content_type="application/json", headers={"Content-Encoding": "gzip"}
        )

    async def run() -> None:
        body = orjson.dumps({"messages": []})
        headers = {"Authorization": f"Bearer {API_KEY}"}
        if accepted is not None:
            headers["Accept-Encoding"] = accepted
        skipped = () if accepted else ("Accept-Encoding",)
        async with (
            forwarding_router(answer) as url,
            aiohttp.ClientSession(auto_decompress=False, headers=headers, skip_auto_headers=skipped) as session,
            session.post(f"{url}/v1/messages", data=body) as response,
            session.post(
                f"{url}/v1/messages", data=gzip.compress(body), headers={"Content-Encoding": "gzip"}
            ) as refused,
        ):
            assert refused.status == 415
            raw = await response.read()
            assert response.headers.get("Content-Encoding") == ("gzip" if accepted == "gzip" else None)
            assert (gzip.decompress(raw) if accepted == "gzip" else raw) == text
        assert requests == [body]

    asyncio.run(asyncio.wait_for(run(), 30.0))


PNG = "data:image/png;base64,aaaa"
LOCAL_MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "image_data": "/etc/passwd"}),
    ("/generate", {"text": ["a", "b"], "image_data": [[PNG], [PNG, "file:///etc/passwd"]]}),
    ("/generate", {"text": "a", "audio_data": ["notes.wav"]}),
    ("/generate", {"text": "a", "video_data": {"url": "/etc/passwd"}}),
    ("/v1/chat/completions", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "/a.png"}}]}]}),
    ("/v1/chat/completions", {"messages": [{"content": [{"type": "audio_url", "audio_url": {"url": "a.wav"}}]}]}),
    ("/v1/responses", {"input": [{"content": [{"type": "input_image", "image_url": "file:///a.png"}]}]}),
    ("/v1/messages", {"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "/a.png"}}]}]}),
    ("/v1/embeddings", {"input": [{"text": "a", "image": "/a.png"}]}),
]
REMOTE_MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": PNG}}]}]}),
    ("/v1/chat/completions", {"messages": [{"content": [{"image_url": {"url": "https://a/b.png"}}]}]}),
    ("/v1/messages", {"messages": [{"content": [{"type": "image", "source": {"type": "base64", "data": "aa"}}]}]}),
    ("/v1/messages", {"messages": [{"content": [{"type": "tool_use", "input": {"url": "/a", "image_url": "b"}}]}]}),
    ("/v1/responses", {"input": "/what/is/this"}),
    ("/v1/embeddings", {"input": ["/a", "b"]}),
]


def test_media_of_the_servers_files_are_refused() -> None:
    """A caller on another machine must not read files through a server. URLs are limited by SGLang itself."""
    requests: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(request.path)
        return web.json_response({})

    async def run() -> None:
        async with forwarding_router(answer) as url, aiohttp.ClientSession() as session:
            session.headers["Authorization"] = f"Bearer {API_KEY}"
            for path, body in LOCAL_MEDIA:
                async with session.post(url + path, json=body) as response:
                    assert (response.status, requests) == (400, []), body
                    assert "must be a data URL or an HTTP URL" in (await response.json())["error"]["message"]
            body = {"messages": [], "session_params": {"id": "a"}}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                assert (response.status, requests) == (400, [])
                assert "session_params is refused" in (await response.json())["error"]["message"]
            for path, body in REMOTE_MEDIA:
                async with session.post(url + path, json=body) as response:
                    assert response.status == 200, body
        assert requests == [path for path, _ in REMOTE_MEDIA]

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_server_that_only_closes_connections_is_not_retried_forever() -> None:
    """The router client raises after its reconnect timeout, also without a deadline of the caller."""

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with RouterClient(f"http://127.0.0.1:{port}", None, reconnect_timeout_s=0.5) as client:
                with pytest.raises(ServerError, match="cannot be reached"):
                    await client.generate(**REQUEST)

    asyncio.run(asyncio.wait_for(run(), 30.0))
