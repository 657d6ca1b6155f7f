"""`ServerApp`: the ASGI class that vLLM puts in front of its own application (`--middleware`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from verl_server.adapter.json_body import without_half_characters
from verl_server.adapter.sglang import endpoints as sglang
from verl_server.adapter.sglang.endpoints import Endpoint
from verl_server.adapter.vllm import endpoints as vllm
from verl_server.adapter.vllm.payloads import weight_version_payload
from verl_server.adapter.vllm.request_fields import REQUEST_FIELDS
from verl_server.errors import BadInputError, NotReadyError, UnsupportedError, VerlServerError
from verl_server.server.process_header import ProcessHeader
from verl_server.types import Json
from verl_server.vllm_server.keys import App, KeyMiddleware, Message, Receive, Send
from verl_server.vllm_server.wire import abort, control, generation, information, lora, memory, weights
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.replies import error_reply, json_reply
from verl_server.vllm_server.wire.state import Disconnected, ServerFacts, ServerState

Handler = Callable[[ServerState, InnerCalls, Json], Awaitable[Any]]

CLIENT_CLOSED = 499
_HANDLERS: tuple[tuple[Endpoint, Handler], ...] = (
    (sglang.GENERATE, generation.generate),
    (sglang.ABORT, abort.abort_request),
    (sglang.PAUSE, control.pause),
    (sglang.CONTINUE, control.resume),
    (sglang.FLUSH, control.flush),
    (sglang.BEGIN_UPDATE, weights.begin),
    (sglang.END_UPDATE, weights.end),
    (sglang.UPDATE_FROM_TENSOR, weights.update),
    (sglang.WEIGHT_VERSION, weights.set_version),
    (sglang.LOAD_LORA, lora.load),
    (sglang.UNLOAD_LORA, lora.unload),
    (sglang.RELEASE_MEMORY, memory.release),
    (sglang.RESUME_MEMORY, memory.resume),
    (sglang.ADMIN_STATUS, information.admin_status),
    (sglang.MODEL_INFO, information.model_info),
    (sglang.SERVER_INFO, information.server_info),
    (sglang.LOADS, information.loads),
    (sglang.READY, information.ready),
    (sglang.HEALTH, information.health),
    (sglang.PING, information.ping),
)
#: Routes of SGLang that have no counterpart, and what to use instead.
UNSUPPORTED: dict[str, str] = {
    sglang.UPDATE_FROM_DISTRIBUTED.path: "push weights with VerlEngine",
    sglang.UPDATE_FROM_DISK.path: "push weights with VerlEngine, or start another server with model_path",
    sglang.INIT_UPDATE_GROUP.path: "push weights with VerlEngine",
    sglang.DESTROY_UPDATE_GROUP.path: "push weights with VerlEngine",
    sglang.WEIGHTS_CHECKER.path: "on a CPU vLLM's own checker reads empty weights; VerlEngine verifies every update",
}
#: Handlers whose work is of no use when the client has gone.
_ENDS_WITH_CLIENT = (generation.generate, information.health)
_NOT_ALLOWED = json_reply({"error": {"message": "Method Not Allowed", "code": 405}}, 405)
_NOT_FOUND = json_reply({"error": {"message": "Not Found", "code": 404}}, 404)
#: vLLM's own POST routes that compute nothing with the weights. All others are refused while the weights are undefined.
PATHS_WITHOUT_WEIGHTS = frozenset({
    *(each.path for each in vars(vllm).values() if isinstance(each, vllm.Endpoint) and each is not vllm.GENERATE),
    "/detokenize", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_draft_weight_update",
    "/reset_mm_cache", "/start_profile", "/stop_profile", "/v1/messages/count_tokens",
})  # fmt: skip
_facts: list[ServerFacts] = []


def set_facts(facts: ServerFacts) -> None:
    """Set the settings of this process's server."""
    _facts[:] = [facts]


class ServerApp:
    """Answers the routes of this folder, and passes all other requests on to vLLM.

    Raises RuntimeError without `set_facts`.
    """

    def __init__(self, app: App) -> None:
        if not _facts:
            raise RuntimeError("the server was not started with verl_server.vllm_server.server_main")
        self._vllm, self._state = app, ServerState(_facts[0])
        self._version_lock = asyncio.Lock()
        self._keys = ProcessHeader(KeyMiddleware(self._dispatch, API_PATHS))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "OPTIONS" else ""
        if path in ROUTES:  # SGLang, too, tells without a key whether a route exists
            await (_NOT_FOUND if path in UNSUPPORTED else _NOT_ALLOWED)(scope, receive, send)
        else:
            await self._keys(scope, receive, send)

    async def _dispatch(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in ROUTES:
            try:
                self._require_weights_for(scope, path)
            except NotReadyError as error:
                await error_reply(error)(scope, receive, send)
            else:
                await self._vllm(scope, receive, send)
            return
        request = Request(scope, receive)
        reply = await self._answer(request, *ROUTES[path])
        await reply(scope, request.receive, send)

    def _require_weights_for(self, scope: Message, path: str) -> None:
        """Raise NotReadyError if a request of vLLM's own routes needs the weights, and they are undefined.

        During a pause, also that of an update, vLLM holds such requests, and the end of the pause decides.
        """
        if path and scope["method"] == "POST" and path not in PATHS_WITHOUT_WEIGHTS and not self._state.is_paused:
            self._state.require_weights()

    async def _answer(self, request: Request, method: str, handler: Handler) -> Response:
        if request.method not in (method, "HEAD" if method == "GET" else method):
            return _NOT_ALLOWED
        gone = asyncio.Event()
        ends_with_client = handler in _ENDS_WITH_CLIENT
        calls = InnerCalls(self._vllm, request.scope, gone, ends_with_client=ends_with_client)
        watch: asyncio.Task[None] | None = None
        try:
            body = await _read_body(request)
            watch = asyncio.create_task(_watch(request, gone))
            await self._set_first_version(calls)
            reply = await handler(self._state, calls, body)
            return reply if isinstance(reply, Response) else json_reply(reply)
        except VerlServerError as error:
            return error_reply(error)
        except Disconnected:
            return json_reply({"error": {"message": "the client has gone", "code": CLIENT_CLOSED}}, CLIENT_CLOSED)
        finally:
            if watch is not None:
                watch.cancel()  # Starlette watches the connection of a stream itself

    async def _set_first_version(self, calls: InnerCalls) -> None:
        """Give the weights of the checkpoint the version of the server arguments, before the first reply."""
        if not self._state.is_version_set:
            async with self._version_lock:
                if not self._state.is_version_set:
                    version = self._state.facts.weight_version
                    await calls.call(vllm.SET_WEIGHT_VERSION, weight_version_payload(version))
                    self._state.is_version_set = True


async def _read_body(request: Request) -> Json:
    """The JSON object of the request. An empty body is an empty object."""
    raw = without_half_characters(await request.body())
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInputError("the body must be a JSON object")
    return body


async def _watch(request: Request, gone: asyncio.Event) -> None:
    """Set `gone` when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _describe(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """vLLM's OpenAPI document with the routes of this folder.

    The fields of `/generate` stand where SGLang's document has them.
    """
    document: Json = dict(await calls.call(vllm.OPENAPI))
    fields = ("text", "input_ids", "sampling_params", "rid", "stream", *sorted(REQUEST_FIELDS))
    components = dict(document.get("components") or {})
    schema = {"type": "object", "properties": {name: {} for name in fields}}
    components["schemas"] = {**(components.get("schemas") or {}), "GenerateReqInput": schema}
    paths: Json = {path: {method.lower(): {}} for path, (method, _) in ROUTES.items() if path not in UNSUPPORTED}
    return {**document, "components": components, "paths": {**document["paths"], **paths}}


def _refuse(path: str) -> Handler:
    """A handler for a route that vLLM servers do not have."""

    async def refuse(state: ServerState, calls: InnerCalls, body: Json) -> Json:
        raise UnsupportedError(f"a vLLM server has no {path}: {UNSUPPORTED[path]}")

    return refuse


_OWN = (*_HANDLERS, (sglang.OPENAPI, _describe))
#: Method and handler of each path that this folder answers.
ROUTES: dict[str, tuple[str, Handler]] = {
    **{endpoint.path: (endpoint.method, handler) for endpoint, handler in _OWN},
    **{path: ("POST", _refuse(path)) for path in UNSUPPORTED},
}
#: Paths of this folder for which the API key suffices. The other paths need the admin key.
API_PATHS = frozenset(endpoint.path for endpoint, _ in _OWN if not endpoint.needs_admin_key)
