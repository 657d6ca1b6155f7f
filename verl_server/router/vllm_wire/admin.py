"""`AdminRoutes`: the routes with which a trainer pauses a router and updates the weights. They need the admin key."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Collection, Mapping

from aiohttp import web

from verl_server.errors import BadInputError, ServerError, UnsupportedError, VerlServerError
from verl_server.router.request_checks import error_status, json_response, parse_object, read_body
from verl_server.router.vllm_wire.calls import USE_FILES
from verl_server.router.vllm_wire.control import ReplicaControl
from verl_server.router.vllm_wire.models import ServedModels
from verl_server.types import Json
from verl_server.validation import did_you_mean

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 60.0
"""Maximum number of seconds that a router which ends waits for running operations."""
IS_PAUSED_PATH = "/is_paused"
"""This route changes nothing, so it needs no admin key."""
#: Methods and paths of the routes. The LoRA routes have a second path, which is vLLM's. The last path is prime-rl's.
ADMIN_ROUTES = (
    ("POST", "/pause"), ("POST", "/resume"), ("GET", IS_PAUSED_PATH), ("POST", "/update_weights"),
    ("POST", "/load_lora_adapter"), ("POST", "/v1/load_lora_adapter"), ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"), ("POST", "/init_broadcaster"),
)  # fmt: skip
#: Fields of the body of each route. `clear_cache`, `load_inplace` and `lora_int_id` are vLLM's, and have no effect.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "/pause": ("mode", "clear_cache"), "/resume": (), "/update_weights": ("weight_dir", "weight_version"),
    "/load_lora_adapter": ("lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"),
    "/unload_lora_adapter": ("lora_name", "lora_int_id"),
}  # fmt: skip


class AdminRoutes:
    """Handlers of `ADMIN_ROUTES`. An operation continues when its caller leaves.

    A call with the same arguments as the last operation waits for it while it runs, if the files of its folder have not
    changed: trainers repeat a call whose answer they did not wait for, and the weights must not be loaded twice.
    """

    def __init__(self, control: ReplicaControl | None, models: ServedModels) -> None:
        """`control` None: the router cannot control its servers, and every route raises UnsupportedError."""
        self._control, self._models = control, models
        self._last: tuple[str, asyncio.Task[Json]] | None = None
        """The operation that was created last, with its path and arguments."""
        self._running: dict[asyncio.Task[Json], str] = {}
        """Operations that have not ended, with their paths."""

    async def handle(self, request: web.BaseRequest, has_admin_key: bool) -> web.StreamResponse:
        """Answer a request, which has the API key at least. Failed operations are logged."""
        task: asyncio.Task[Json] | None = None
        try:
            if request.path == IS_PAUSED_PATH:
                return json_response({"is_paused": self._control_for(request.path).is_paused})
            if not has_admin_key:
                raise _admin_key_error(request)
            task = await self._task_of(request)
            return json_response(await asyncio.shield(task))
        except VerlServerError as error:
            if task is None:  # otherwise the task logs its error, once for all of its callers
                logger.warning("%s was refused with status %d: %s", request.path, error_status(error), error.message)
            raise

    def _control_for(self, path: str) -> ReplicaControl:
        if self._control is None:
            raise UnsupportedError(
                f"this router does not offer {path}. The router of a fleet follows its fleet: push weights with "
                "VerlEngine(fleet=...). A router of `verl-server router` offers the route when "
                "VERL_SERVER_ADMIN_API_KEY is set"
            )
        return self._control

    async def _task_of(self, request: web.BaseRequest) -> asyncio.Task[Json]:
        """The operation of a request: a running one with the same arguments, or a new one."""
        control, path = self._control_for(request.path), request.path.removeprefix("/v1")
        if path not in _FIELDS:
            raise UnsupportedError(f"this router takes no weights by NCCL or NIXL ({path}): {USE_FILES}")
        raw = await read_body(request)
        arguments = _read_arguments(request, path, parse_object(raw) if raw else {})
        if path in ("/update_weights", "/load_lora_adapter"):
            await self._models.learn_name()  # an update may change it
        if path == "/load_lora_adapter":
            _check_load(arguments, self._models.base_names)
        return await self._join(control, path, arguments) or self._start(control, path, arguments)

    async def _join(self, control: ReplicaControl, path: str, arguments: Json) -> asyncio.Task[Json] | None:
        """The last operation, if it runs and does what a call with these arguments asks for.

        A trainer may write other weights into the same folder. Then the call is an operation of its own.
        """
        last, key = self._last, _key_of(path, arguments)
        if last is None or last[0] != key or last[1].done():
            return None
        folder = arguments.get("weight_dir") or arguments.get("lora_path")
        if folder is None or not await control.has_changed(folder):
            return last[1]
        if self._last is not last and self._last is not None and self._last[0] == key:
            return self._last[1]  # the same call, which was repeated meanwhile, has started it
        return None

    def _start(self, control: ReplicaControl, path: str, arguments: Json) -> asyncio.Task[Json]:
        task = asyncio.create_task(_run(control, path, arguments))
        task.add_done_callback(functools.partial(_log_end, path, arguments, time.monotonic()))
        self._last = _key_of(path, arguments), task
        self._running[task] = path
        task.add_done_callback(self._running.pop)
        return task

    async def close(self) -> None:
        """Wait at most `END_TIMEOUT_S` for the running operations, which may have paused servers. Cancel pauses."""
        for task, path in self._running.items():
            if path == "/pause":
                task.cancel()
        if not self._running:
            return
        names = ", ".join(sorted(set(self._running.values())))
        logger.warning("the router ends after the running operations (%s), in at most %g s", names, END_TIMEOUT_S)
        _, late = await asyncio.wait(list(self._running), timeout=END_TIMEOUT_S)
        for task in late:
            logger.warning("%s has not come to its end: the servers may be paused", self._running.get(task))
            task.cancel()


def _key_of(path: str, arguments: Json) -> str:
    return f"{path} {sorted(arguments.items())!r}"


def _read_arguments(request: web.BaseRequest, path: str, body: Json) -> Json:
    """The arguments of a request, from its query and its body. Raises BadInputError for unknown and repeated ones."""
    for name in (*request.query, *body):
        if name not in _FIELDS[path]:
            raise BadInputError(f"{path} has no argument {name!r:.100}{did_you_mean(name, _FIELDS[path])}")
        if len(request.query.getall(name, [])) + (name in body) > 1:
            raise BadInputError(f"{name} was passed more than once; pass it in the query or in the body")
    return {**request.query, **body}


def _check_load(arguments: Json, base_names: Collection[str]) -> None:
    """Raise BadInputError for an adapter that would hide the base model, and for a form that no engine loads here."""
    if (name := arguments.get("lora_name")) in list(base_names):
        raise BadInputError(
            f"The lora adapter {name!r:.200} conflicts with a served base model: requests with this name could not say "
            "which of both they mean. Choose another lora_name"
        )
    if arguments.get("is_3d_lora_weight"):
        raise BadInputError("is_3d_lora_weight is not supported by this router; leave it out")


def _log_end(path: str, arguments: Json, started_at: float, task: asyncio.Task[Json]) -> None:
    """Log how an operation has ended. The caller may have left, or may show its user only the status of the reply."""
    if task.cancelled():
        return
    call = " ".join([path, *(f"{name}={value!r:.300}" for name, value in arguments.items())])
    error, seconds = task.exception(), time.monotonic() - started_at
    if error is None:
        reply = " ".join(f"{name}={value}" for name, value in task.result().items())
        logger.info("%s: %s after %.1f s", call, reply, seconds)
    else:
        status, message = 500, repr(error)
        if isinstance(error, VerlServerError):
            status, message = error_status(error), error.message
        logger.warning("%s failed with status %d after %.1f s: %s", call, status, seconds, message)


async def _run(control: ReplicaControl, path: str, arguments: Json) -> Json:
    """Do what a request asks for. The result is the reply, in vLLM's and prime-rl's form."""
    get = arguments.get
    try:
        match path:
            case "/pause":
                await control.pause(get("mode", "abort"))
                return {"status": "paused"}
            case "/resume":
                await control.resume()
                return {"status": "resumed"}
            case "/update_weights":
                version = await control.update_weights(get("weight_dir"), get("weight_version"))
                return {"status": "ok", "weight_version": version}
            case "/load_lora_adapter":
                await control.load_lora_adapter(get("lora_name"), get("lora_path"))
                return {"status": "ok"}
            case _:
                await control.unload_lora_adapter(get("lora_name"))
                return {"status": "ok"}
    except VerlServerError as error:
        if error.details.get("status") not in (401, 403):
            raise
        raise ServerError(  # without the status, which is about the caller's key
            f"a server refused the admin key that the router sends ({error.details.get('url')}): start the router with "
            "the admin key of the servers in the environment variable VERL_SERVER_REPLICA_ADMIN_API_KEY",
            url=error.details.get("url"),
            key="replica_admin_api_key",
        ) from error


def _admin_key_error(request: web.BaseRequest) -> ServerError:
    """The error for a request to an admin route with the API key only."""
    return ServerError(
        f"{request.path} changes what the router serves, so it needs the admin key (403): the environment variable "
        "VERL_SERVER_ADMIN_API_KEY of `verl-server router`",
        status=403,
        url=f"http://{request.host}{request.path}",
        key="admin_api_key",
    )
