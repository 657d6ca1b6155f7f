"""`ServerApp`: the ASGI class that vLLM puts in front of its own application (`--middleware`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from verl_server.adapter.sglang import replies
from verl_server.adapter.sglang.replies import Endpoint
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm import requests
from verl_server.adapter.vllm.requests import (
    GENERATE,
    HEALTH,
    REQUEST_FIELDS,
    SERVER_INFO,
    WEIGHT_INFO,
    generate_payload,
    weight_version_payload,
)
from verl_server.errors import BadInputError, NotReadyError, ServerError, UnsupportedError, VerlServerError
from verl_server.platforms.server_report import PARAMETER_DTYPES, RELEASED_MEMORY
from verl_server.server.server_main import ProcessHeader
from verl_server.types import Json, without_half_characters
from verl_server.vllm_plugin.start import App, KeyMiddleware, Message, Receive, Send
from verl_server.vllm_plugin.wire import control, generation
from verl_server.vllm_plugin.wire.control import is_cpu
from verl_server.vllm_plugin.wire.state import (
    Disconnected,
    InnerCalls,
    ServerFacts,
    ServerState,
    call_workers,
    error_reply,
    json_reply,
)

# -- Information ------------------------------------------------------------------------------------
# What the server says about itself, with the names of SGLang's routes.

HEALTH_TIMEOUT_S = 20.0
"""Seconds in which a healthy server generates one token. SGLang has the same deadline."""


async def ready(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 while the server accepts requests. Raises NotReadyError while generation is paused."""
    await calls.call(HEALTH)
    if state.is_paused:
        raise NotReadyError("generation is paused")
    return {"status": "ready"}


async def ping(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 when the HTTP loop answers."""
    return {"status": "ok"}


async def health(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 when the server generates one token. Raises NotReadyError when it does not.

    While generation is paused, only vLLM's own answer is asked, which does not compute.
    """
    await calls.call(HEALTH)
    if state.fault is not None:
        raise NotReadyError(state.fault)
    if not state.may_generate():
        return {"status": "healthy"}
    async with calls.ended_together() as together:
        probe = generate_payload([1], {"max_new_tokens": 1, "temperature": 0.0})
        generation = asyncio.create_task(together.call(GENERATE, probe))
        done, _ = await asyncio.wait([generation], timeout=HEALTH_TIMEOUT_S)
    error = generation.exception() if done else None
    if not state.may_generate():
        generation.add_done_callback(lambda task: task.exception())
        return {"status": "healthy"}  # vLLM has held the token for a pause that began meanwhile
    if not done or error is not None:
        generation.add_done_callback(lambda task: task.exception())
        raise NotReadyError(f"the engine does not generate: {error or f'no token came in {HEALTH_TIMEOUT_S:g} s'}")
    return {"status": "healthy"}


async def model_info(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Model, tokenizer and version of the weights, which vLLM's engine keeps."""
    version = (await calls.call(WEIGHT_INFO))["weight_version"]
    args = state.facts.server_args
    return {
        "model_path": args["model"],
        "tokenizer_path": args.get("tokenizer") or args["model"],
        "is_generation": True,
        "weight_version": version,
    }


async def server_info(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """The arguments of the server by SGLang's names, with the values that vLLM has chosen.

    The workers are asked, too: their answer is a sign of life, and tells which memory is released.
    """
    args = state.facts.server_args
    reports = await call_workers(state, calls, "verl_server_memory")
    if state.resolved is None:
        state.resolved = await _resolve(calls)
    on_cpu, resolved = is_cpu(), state.resolved
    max_running = resolved["max_running_requests"]
    return {
        **resolved,
        "engine_kind": "vllm",
        "model_path": args["model"],
        "tokenizer_path": args.get("tokenizer") or args["model"],
        "trust_remote_code": bool(args.get("trust_remote_code")),
        "revision": args.get("revision"),
        "tp_size": len(reports),
        "dp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0,
        "device": "cpu" if on_cpu else "cuda",
        "custom_weight_loader": [WEIGHT_LOADER],
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "enable_memory_saver": on_cpu or bool(args.get("enable_memory_saver") or args.get("enable_sleep_mode")),
        "quantization": args.get("quantization"),
        "load_format": args.get("load_format"),
        "enable_lora": bool(args.get("enable_lora")),
        "fused_modules": reports[0]["fused_modules"],
        "resident_bytes": [report["rss_bytes"] for report in reports],
        "internal_states": [
            {
                RELEASED_MEMORY: sorted(state.released),
                "effective_max_running_requests_per_dp": max_running,
                PARAMETER_DTYPES: reports[0][PARAMETER_DTYPES],
            }
        ],
    }  # fmt: skip


async def _resolve(calls: InnerCalls) -> Json:
    """The values that vLLM has chosen. A prompt as long as the context is the shortest that is refused."""
    config = (await calls.call(SERVER_INFO, query="config_format=json"))["vllm_config"]
    try:
        max_model_len = int(config["model_config"]["max_model_len"])
        return {
            "context_length": max_model_len,
            "max_req_input_len": max_model_len,
            "dtype": str(config["model_config"]["dtype"]).removeprefix("torch."),
            "max_running_requests": int(config["scheduler_config"]["max_num_seqs"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"vLLM's /server_info has an unknown form: {type(error).__name__}: {error}") from error


async def loads(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Running and waiting requests. Counted here: vLLM's gauges stand still during a pause."""
    load = {"dp_rank": 0, "num_running_reqs": state.num_in_vllm, "num_waiting_reqs": state.num_held}
    return {"loads": [load]}


async def admin_status(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Nothing: the route tells whether the admin key is right."""
    return {}


# -- App --------------------------------------------------------------------------------------------

Handler = Callable[[ServerState, InnerCalls, Json], Awaitable[Any]]

CLIENT_CLOSED = 499
_HANDLERS: tuple[tuple[Endpoint, Handler], ...] = (
    (replies.GENERATE, generation.generate),
    (replies.ABORT, control.abort_request),
    (replies.PAUSE, control.pause),
    (replies.CONTINUE, control.resume),
    (replies.FLUSH, control.flush),
    (replies.BEGIN_UPDATE, control.begin),
    (replies.END_UPDATE, control.end),
    (replies.UPDATE_FROM_TENSOR, control.update),
    (replies.WEIGHT_VERSION, control.set_version),
    (replies.LOAD_LORA, control.load),
    (replies.UNLOAD_LORA, control.unload),
    (replies.RELEASE_MEMORY, control.release_memory),
    (replies.RESUME_MEMORY, control.resume_memory),
    (replies.ADMIN_STATUS, admin_status),
    (replies.MODEL_INFO, model_info),
    (replies.SERVER_INFO, server_info),
    (replies.LOADS, loads),
    (replies.READY, ready),
    (replies.HEALTH, health),
    (replies.PING, ping),
)
#: Routes of SGLang that have no counterpart, and what to use instead.
UNSUPPORTED: dict[str, str] = {
    replies.UPDATE_FROM_DISTRIBUTED.path: "push weights with VerlEngine",
    replies.UPDATE_FROM_DISK.path: "push weights with VerlEngine, or start another server with model_path",
    replies.INIT_UPDATE_GROUP.path: "push weights with VerlEngine",
    replies.DESTROY_UPDATE_GROUP.path: "push weights with VerlEngine",
    replies.WEIGHTS_CHECKER.path: "on a CPU vLLM's own checker reads empty weights; VerlEngine verifies every update",
}
#: Handlers whose work is of no use when the client has gone.
_ENDS_WITH_CLIENT = (generation.generate, health)
_NOT_ALLOWED = json_reply({"error": {"message": "Method Not Allowed", "code": 405}}, 405)
_NOT_FOUND = json_reply({"error": {"message": "Not Found", "code": 404}}, 404)
#: vLLM's own POST routes that compute nothing with the weights. All others are refused while the weights are undefined.
PATHS_WITHOUT_WEIGHTS = frozenset({
    *(
        each.path
        for each in vars(requests).values()
        if isinstance(each, Endpoint) and each is not requests.GENERATE
    ),
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
            raise RuntimeError("the server was not started with verl_server.vllm_plugin.server_main")
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
                    await calls.call(requests.SET_WEIGHT_VERSION, weight_version_payload(version))
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
    document: Json = dict(await calls.call(requests.OPENAPI))
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


_OWN = (*_HANDLERS, (replies.OPENAPI, _describe))
#: Method and handler of each path that this folder answers.
ROUTES: dict[str, tuple[str, Handler]] = {
    **{endpoint.path: (endpoint.method, handler) for endpoint, handler in _OWN},
    **{path: ("POST", _refuse(path)) for path in UNSUPPORTED},
}
#: Paths of this folder for which the API key suffices. The other paths need the admin key.
API_PATHS = frozenset(endpoint.path for endpoint, _ in _OWN if not endpoint.needs_admin_key)
