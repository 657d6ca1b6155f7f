"""`AdminRoutes`: the routes with which a trainer pauses a router and updates the weights. They need the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from verl_server.errors import ServerError, UnsupportedError
from verl_server.router.http.bodies import json_response, parse_object
from verl_server.router.rl_wire.replica_control import ReplicaControl
from verl_server.types import Json

#: Methods and paths of the routes. The LoRA routes have a second path, which is vLLM's own.
ADMIN_ROUTES = (
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/update_weights"),
    ("POST", "/load_lora_adapter"), ("POST", "/v1/load_lora_adapter"), ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)  # fmt: skip


class AdminRoutes:
    """Handlers of `ADMIN_ROUTES`. An operation continues when its caller leaves.

    A call with the same arguments as a running operation waits for this operation: trainers repeat a call whose answer
    they did not wait for, and the weights must not be loaded twice.
    """

    def __init__(self, control: ReplicaControl | None) -> None:
        """`control` None: the router cannot control its servers, and every route raises UnsupportedError."""
        self._control = control
        self._running: dict[str, asyncio.Task[Json]] = {}

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
        body = parse_object(raw) if raw else {}
        key = f"{request.path_qs} {body!r}"
        if key not in self._running:
            self._running[key] = task = asyncio.create_task(_operation(control, request, body))
            task.add_done_callback(lambda _: self._running.pop(key, None))
            task.add_done_callback(_note_error)
        return json_response(await asyncio.shield(self._running[key]))


def _note_error(task: asyncio.Task[Json]) -> None:
    """The caller may have left: without this, asyncio would log an error that was never retrieved."""
    if not task.cancelled():
        task.exception()


def _operation(control: ReplicaControl, request: web.BaseRequest, body: Json) -> Coroutine[Any, Any, Json]:
    """The operation of a request. Its result is the reply, in vLLM's and prime-rl's form."""
    match request.path.removeprefix("/v1"):
        case "/pause":
            return _answer(control.pause(request.query.get("mode", "abort")), {"status": "paused"})
        case "/resume":
            return _answer(control.resume(), {"status": "resumed"})
        case "/update_weights":
            return _update(control, body)
        case "/load_lora_adapter":
            return _answer(control.load_lora_adapter(body.get("lora_name"), body.get("lora_path")), {"status": "ok"})
        case _:
            return _answer(control.unload_lora_adapter(body.get("lora_name")), {"status": "ok"})


async def _answer(operation: Coroutine[Any, Any, None], reply: Json) -> Json:
    await operation
    return reply


async def _update(control: ReplicaControl, body: Json) -> Json:
    version = await control.update_weights(body.get("weight_dir"), body.get("weight_version"))
    return {"status": "ok", "weight_version": version}


def admin_key_error(request: web.BaseRequest) -> ServerError:
    """The error for a request to an admin route with the API key only."""
    return ServerError(
        f"{request.path} changes what the router serves, so it needs the admin key (403): the environment variable "
        "VERL_SERVER_ADMIN_API_KEY of `verl-server router`",
        status=403,
        url=f"http://{request.host}{request.path}",
        key="admin_api_key",
    )
