"""`AdminRoutes`: the routes with which a trainer pauses a router and updates the weights. They need the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from aiohttp import web

from verl_server.errors import BadInputError, ServerError, UnsupportedError, VerlServerError
from verl_server.router.http.bodies import json_response, parse_object
from verl_server.router.rl_wire.replica_control import ReplicaControl
from verl_server.types import Json
from verl_server.validation import did_you_mean

#: Methods and paths of the routes. The LoRA routes have a second path, which is vLLM's own.
ADMIN_ROUTES = (
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/update_weights"),
    ("POST", "/load_lora_adapter"), ("POST", "/v1/load_lora_adapter"), ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)  # fmt: skip
#: Fields of the body of each route. `clear_cache`, `load_inplace` and `lora_int_id` are vLLM's, and have no effect.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "/pause": ("mode", "clear_cache"), "/resume": (), "/update_weights": ("weight_dir", "weight_version"),
    "/load_lora_adapter": ("lora_name", "lora_path", "load_inplace"),
    "/unload_lora_adapter": ("lora_name", "lora_int_id"),
}  # fmt: skip
_QUERY_PATH = "/pause"
"""The route whose fields may be parameters of the query, as in vLLM."""


class AdminRoutes:
    """Handlers of `ADMIN_ROUTES`. An operation continues when its caller leaves.

    A call with the same arguments as the last operation waits for it while it runs: trainers repeat a call whose answer
    they did not wait for, and the weights must not be loaded twice.
    """

    def __init__(self, control: ReplicaControl | None) -> None:
        """`control` None: the router cannot control its servers, and every route raises UnsupportedError."""
        self._control = control
        self._last: tuple[str, asyncio.Task[Json]] | None = None
        """The operation that was created last, with its path and arguments."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request whose key has been checked."""
        control = self._control
        if control is None:
            raise UnsupportedError(
                f"this router does not offer {request.path}. The router of a fleet follows its fleet: push weights "
                "with VerlEngine(fleet=...). A router of `verl-server router` offers the route when "
                "VERL_SERVER_ADMIN_API_KEY is set"
            )
        if request.path == "/is_paused":
            return json_response({"is_paused": control.is_paused})
        raw = await request.read()
        path = request.path.removeprefix("/v1")
        arguments = _read_arguments(request, path, parse_object(raw) if raw else {})
        key = f"{path} {sorted(arguments.items())!r}"
        if self._last is None or self._last[0] != key or self._last[1].done():
            self._last = key, asyncio.create_task(_operation(control, path, arguments))
            self._last[1].add_done_callback(_note_error)
        try:
            return json_response(await asyncio.shield(self._last[1]))
        except VerlServerError as error:
            if error.details.get("status") in (401, 403):
                raise _replica_key_error(error) from error
            raise


def _read_arguments(request: web.BaseRequest, path: str, body: Json) -> Json:
    """The arguments of a request, from its query and its body. Raises BadInputError for unknown and repeated ones."""
    fields, query = _FIELDS[path], request.query
    for name in (*query, *body):
        known = fields if name in body or path == _QUERY_PATH else ()
        if name not in known:
            raise BadInputError(f"{path} has no argument {name!r:.100}{did_you_mean(name, fields)}")
        if len(query.getall(name, [])) + (name in body) > 1:
            raise BadInputError(f"{name} was passed more than once; pass it in the query or in the body")
    return {**query, **body}


def _note_error(task: asyncio.Task[Json]) -> None:
    """The caller may have left: without this, asyncio would log an error that was never retrieved."""
    if not task.cancelled():
        task.exception()


def _operation(control: ReplicaControl, path: str, arguments: Json) -> Coroutine[Any, Any, Json]:
    """The operation of a request. Its result is the reply, in vLLM's and prime-rl's form."""
    match path:
        case "/pause":
            return _answer(control.pause(arguments.get("mode", "abort")), {"status": "paused"})
        case "/resume":
            return _answer(control.resume(), {"status": "resumed"})
        case "/update_weights":
            return _update(control, arguments)
        case "/load_lora_adapter":
            name, folder = arguments.get("lora_name"), arguments.get("lora_path")
            return _answer(control.load_lora_adapter(name, folder), {"status": "ok"})
        case _:
            return _answer(control.unload_lora_adapter(arguments.get("lora_name")), {"status": "ok"})


async def _answer(operation: Coroutine[Any, Any, None], reply: Json) -> Json:
    await operation
    return reply


async def _update(control: ReplicaControl, arguments: Json) -> Json:
    version = await control.update_weights(arguments.get("weight_dir"), arguments.get("weight_version"))
    return {"status": "ok", "weight_version": version}


def _replica_key_error(error: VerlServerError) -> ServerError:
    """The error for a server that has refused the router's key. Without the status, which is about the caller's key."""
    return ServerError(
        "a server refused the admin key that the router sends: start the router with the admin key of the servers in "
        f"the environment variable VERL_SERVER_REPLICA_ADMIN_API_KEY: {error.message}",
        url=error.details.get("url"),
        key="replica_admin_api_key",
    )


def admin_key_error(request: web.BaseRequest) -> ServerError:
    """The error for a request to an admin route with the API key only."""
    return ServerError(
        f"{request.path} changes what the router serves, so it needs the admin key (403): the environment variable "
        "VERL_SERVER_ADMIN_API_KEY of `verl-server router`",
        status=403,
        url=f"http://{request.host}{request.path}",
        key="admin_api_key",
    )
