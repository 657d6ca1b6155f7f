"""The servers of an engine: servers behind HTTP adapters as one backend, or SGLang in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.client import tags_to_release, tags_to_resume, undefined_weights_reason
from verl_server.adapter.model_files import read_model_configs
from verl_server.adapter.sglang.replies import parameter_dtypes, prompt_limits, require_logprobs
from verl_server.adapter.sglang.requests import explain_refusal, generate_payload, require_known_fields
from verl_server.adapter.sglang.server_arguments import (
    WEIGHT_LOADER,
    loses_weights,
    require_generating_server,
    require_lora,
    require_memory_saver,
    require_pushable,
    require_unpacked_experts,
)
from verl_server.config import AdapterConfig, EngineKind, PauseMode, RemoteServer
from verl_server.errors import BadInputError, NotReadyError, ServerError, ShutDownError, StartupError, VerlServerError
from verl_server.ranks.placement import is_loopback, own_address
from verl_server.server.process import AbortCheck
from verl_server.server.server_main import REFUSAL, find_refusal
from verl_server.server.warden.processes import find_shared_memory, list_descendants, remove_shared_memory
from verl_server.types import Json, ServerInfo, parse_weight_version
from verl_server.weights.transports.base import message_as_named_tensors, owner_fields, serialize_message
from verl_server.weights.update.options import ReplayFn, Servers

R = TypeVar("R")

# -- Servers over HTTP ------------------------------------------------------------------------------

_updated_by: dict[str, int] = {}
"""For each server process, by its id: the id of the `HttpServers` of this process that has updated it last."""


class HttpServers(Servers):
    """One or more servers, each driven over HTTP by an adapter.

    `shutdown` shuts down the adapters: it ends a server that its adapter started, and leaves other servers running.
    """

    weight_version = 0
    """Version of the weights that were published last. At the start, the highest version of the servers."""

    def __init__(
        self,
        adapters: Sequence[HttpServerEngineAdapter],
        members: Sequence[ServerInfo],
        *,
        weight_version: int = 0,
        remote_hosts: Sequence[str] = (),
    ) -> None:
        """`members` describes the servers of `adapters` in the same order.

        `remote_hosts`: the hosts of servers on other machines.
        """
        self._adapters, self._members = list(adapters), list(members)
        self.weight_version = weight_version
        self._base: int | None = weight_version
        """`weight_version` until the first update of this trainer is published, see `owner_fields`."""
        self._remote_hosts = list(remote_hosts)
        self._pool = ThreadPoolExecutor(2 * len(self._adapters), thread_name_prefix="verl-server-http-servers")
        self._round_robin = itertools.cycle(self._adapters)

    def _call_all(self, call: Callable[[HttpServerEngineAdapter], Any]) -> None:
        """Call `call` for all servers at the same time. The first error is raised when all calls have ended."""
        if len(self._adapters) == 1:
            call(self._adapters[0])
            return
        errors = [future.exception() for future in [self._pool.submit(call, adapter) for adapter in self._adapters]]
        for error in errors:
            if error is not None:
                raise error

    @property
    def adapter(self) -> HttpServerEngineAdapter:
        """The adapter of the first server."""
        return self._adapters[0]

    def parameter_dtypes(self) -> Sequence[Json | None]:
        return [parameter_dtypes(adapter.get_server_info()) for adapter in self._adapters]

    def nearest_transport(self) -> str:
        return "distributed" if self._remote_hosts else "shared_memory"

    @property
    def trainer_host(self) -> str:
        return own_address(self._remote_hosts[0]) if self._remote_hosts else "127.0.0.1"

    # -- generation -----------------------------------------------------------------------------------

    def _server_for(self, request: Json) -> HttpServerEngineAdapter:
        """The next server in turn. Requests with the same `session_id` go to the same server, for its prefix cache."""
        session_id = request.get("session_id")
        if isinstance(session_id, str):
            return self._adapters[zlib.crc32(session_id.encode()) % len(self._adapters)]
        return next(self._round_robin)

    def generate(self, **request: Any) -> Any:
        return self._server_for(request).generate(**request)

    async def async_generate(self, **request: Any) -> Any:
        return await self._server_for(request).asynchronous.generate(**request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        return self._server_for(request).generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return self._server_for(request).asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self._call_all(lambda adapter: adapter.flush_cache())

    # -- weight updates -------------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[ServerInfo]:
        return self._members

    @property
    def undefined_weights(self) -> str | None:
        lost = [adapter.base_url for adapter in self._adapters if adapter.asynchronous.connection.weights_undefined]
        causes = "was started again or updated by another client, or its memory was released and resumed"
        return undefined_weights_reason(bool(lost), self.released_memory, f"{', '.join(lost)} {causes}")

    def watch_restarts(self) -> None:
        """Notice from now on that a server at one of the addresses was started again by its owner."""
        for adapter in self._adapters:
            adapter.asynchronous.connection.http.on_restart = functools.partial(self._note_restart, adapter)

    def _note_restart(self, adapter: HttpServerEngineAdapter) -> bool:
        """Returns whether weights were lost: version 0 are those of the checkpoint."""
        connection = adapter.asynchronous.connection
        connection.note_restart()
        connection.weights_undefined |= self.weight_version > 0
        return connection.weights_undefined

    def check_weights(self) -> int:
        versions = list(self._pool.map(_served_version, self._adapters))
        for adapter, version in zip(self._adapters, versions, strict=True):
            connection = adapter.asynchronous.connection
            known = connection.known_versions or {version}
            if version in known or connection.weights_undefined:
                continue
            if version < min(known) and connection.http.on_restart is not None:  # a proxy hides which process answers
                self._note_restart(adapter)
                continue
            given, connection.known_versions, connection.weights_undefined = max(known), {version}, True
            self._base = self.weight_version = max(self.weight_version, version)
            who, cure = "another client", "Stop the other trainer"
            if _updated_by.get(connection.http.process or "", id(self)) != id(self):
                who, cure = "another VerlEngine of this process", "Use one of the two, and shut the other one down"
            raise ServerError(
                f"{who} has changed the weights of {adapter.base_url}: the server has weight version {version}, and "
                f"this engine has given it version {given}. {cure}. The next update of all tensors takes over",
                url=adapter.base_url,
            )
        return self.weight_version

    def find_lost(self) -> Collection[str]:
        servers = zip(self._adapters, self._members, strict=True)
        return [member.name for adapter, member in servers if adapter.asynchronous.connection.http.has_failed]

    def pause(self, mode: PauseMode) -> None:
        """Pause all servers. A server with released memory is not paused: it runs no requests."""
        self._call_all(lambda adapter: adapter.released_memory or adapter.pause_generation(mode))

    def resume(self) -> None:
        self._call_all(lambda adapter: adapter.end_update_pause())

    def begin_weight_update(self) -> None:
        self._call_all(lambda adapter: adapter.begin_weight_update())

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        """See `Servers.load`. Raises as soon as one server fails: a transport may have to stop the others."""
        base = self._base
        if len(self._adapters) == 1:
            load_weights(self._adapters[0], self._members[0].tp_size, messages[0], weight_version, flush_cache, base)
            return
        loads = [
            self._pool.submit(load_weights, adapter, member.tp_size, message, weight_version, flush_cache, base)
            for adapter, member, message in zip(self._adapters, self._members, messages, strict=True)
        ]
        for load in as_completed(loads):
            load.result()

    def end_weight_update(self) -> None:
        self._call_all(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Record that lost weights are defined again. The servers are not replaced, so nothing is replayed."""
        self.weight_version, self._base = version, None
        for adapter in self._adapters:
            connection = adapter.asynchronous.connection
            connection.known_versions = {version}
            connection.weights_undefined &= not whole
            if connection.http.process is not None:
                _updated_by[connection.http.process] = id(self)

    # -- adapters and memory --------------------------------------------------------------------------

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        """Load an adapter into all servers. When one of them fails, no server has an adapter of that name."""

        def load(adapter: HttpServerEngineAdapter) -> None:
            _unload_lora(adapter, name)  # another client may have loaded it
            adapter.load_lora_adapter(name, tensors, config)

        try:
            self._call_all(load)
        except Exception:
            with contextlib.suppress(VerlServerError):
                self.unload_lora_adapter(name)
            raise

    def unload_lora_adapter(self, name: str) -> None:
        self._call_all(lambda adapter: _unload_lora(adapter, name))

    def list_lora_adapters(self) -> frozenset[str]:
        lists: list[frozenset[str]] = []
        self._call_all(lambda adapter: lists.append(frozenset(adapter.list_lora_adapters())))
        return frozenset.intersection(*lists)

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self._call_all(lambda adapter: adapter.update_released_memory())
        requested = tags_to_release(tags, self.released_memory)
        self._call_all(lambda adapter: adapter.release_memory_occupation(requested))

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        """Resume those of the tags that each server has released: a release may have failed on some servers."""
        self._call_all(lambda adapter: adapter.update_released_memory())
        paused = [adapter for adapter in self._adapters if adapter.needs_continue and not adapter.released_memory]
        # An earlier resume of these has failed after it has resumed the memory.
        self._call_all(lambda adapter: adapter in paused and adapter.resume_memory_occupation())
        if paused and not self.released_memory:
            return
        requested = frozenset(tags_to_resume(tags, self.released_memory))

        def resume(adapter: HttpServerEngineAdapter) -> None:
            if released := adapter.released_memory & requested:
                adapter.resume_memory_occupation(sorted(released))

        self._call_all(resume)

    @property
    def released_memory(self) -> frozenset[str]:
        """Memory tags that at least one server has released."""
        return frozenset[str]().union(*(adapter.released_memory for adapter in self._adapters))

    # -- end ------------------------------------------------------------------------------------------

    def fail(self, error: VerlServerError) -> None:
        for adapter in self._adapters:
            adapter.fail(error)

    def shutdown(self) -> None:
        for adapter in self._adapters:
            adapter.shutdown()
        self._pool.shutdown(wait=False)


def launch_one_server(
    server_args: Mapping[str, Any], config: AdapterConfig, env: Mapping[str, str], check_abort: AbortCheck
) -> HttpServers:
    """Start one server process on this machine and wait until the server is ready. `shutdown` ends the process.

    Raises StartupError, BadInputError, DeadlineError and the error that `check_abort` returns.
    """
    adapter = HttpServerEngineAdapter(config=config, env=env, check_abort=check_abort, **server_args)
    try:
        # SGLang servers of several nodes answer on their first node only, and fuse nothing.
        fused = adapter.fused_modules() if config.engine_kind == EngineKind.VLLM else None
    except BaseException:
        adapter.shutdown()
        raise
    member = ServerInfo("the server", int(server_args.get("tp_size") or 1), fused)
    version = parse_weight_version(server_args.get("weight_version"))
    adapter.asynchronous.connection.known_versions = {version}
    return HttpServers([adapter], [member], weight_version=version)


def connect_servers(servers: Sequence[RemoteServer], config: AdapterConfig, weight_version: int) -> HttpServers:
    """Connect to running servers, on this machine or others. `shutdown` leaves them running.

    The weight version is the highest of `weight_version` and of the servers, so that no version names two sets of
    weights.

    Raises BadInputError for a server that was started without our weight loader, and for two addresses of one server.
    """
    adapters: list[HttpServerEngineAdapter] = []
    try:
        for server in servers:
            adapters.append(
                HttpServerEngineAdapter.attach(
                    server.base_url, api_key=server.api_key, admin_api_key=server.admin_api_key, config=config
                )
            )
        with ThreadPoolExecutor(len(adapters), thread_name_prefix="verl-server-connect") as pool:
            members = list(pool.map(_describe_server, adapters))
            _require_different_servers(adapters)
            versions = list(pool.map(_weight_version_of, adapters))
    except BaseException:
        for adapter in adapters:
            adapter.shutdown()
        raise
    hosts = [str(urlsplit(adapter.base_url).hostname) for adapter in adapters]
    remote_hosts = [host for host in hosts if not is_loopback(host)]
    for adapter, version in zip(adapters, versions, strict=True):
        adapter.asynchronous.connection.known_versions = {version}
        adapter.asynchronous.connection.weights_undefined = version < max(versions)
    backend = HttpServers(adapters, members, weight_version=max(weight_version, *versions), remote_hosts=remote_hosts)
    backend.watch_restarts()
    return backend


def load_weights(
    adapter: HttpServerEngineAdapter,
    tp_size: int,
    message: Json,
    weight_version: int | None,
    flush_cache: bool,
    base: int | None = None,
) -> None:
    """Make every TP rank of one server call our weight loader with `message`. `base`: see `owner_fields`."""
    if weight_version is not None:
        message = {**message, **owner_fields(weight_version, base)}
    adapter.update_weights_from_tensor(
        [serialize_message(message)] * tp_size,
        load_format=WEIGHT_LOADER,
        weight_version=weight_version,
        flush_cache=flush_cache,
    )


def _unload_lora(adapter: HttpServerEngineAdapter, name: str) -> None:
    """Unload a LoRA adapter from a server that has it."""
    if name in adapter.list_lora_adapters():
        adapter.unload_lora_adapter(name)


def _weight_version_of(adapter: HttpServerEngineAdapter) -> int:
    return int(adapter.get_model_info()["weight_version"])


def _served_version(adapter: HttpServerEngineAdapter) -> int:
    """The weight version of a server. The first reply of a server that was started again raises ServerError."""
    try:
        return _weight_version_of(adapter)
    except ServerError:
        return _weight_version_of(adapter)


def _require_different_servers(adapters: Sequence[HttpServerEngineAdapter]) -> None:
    """Raise BadInputError for a server that is listed twice, also under two addresses."""
    urls: dict[str, str] = {}
    for adapter in adapters:
        url, process = adapter.base_url, adapter.asynchronous.connection.http.process
        if (other := urls.get(process or url)) is not None:
            raise BadInputError(f"one server answers at {other} and at {url}: list it once", argument="servers")
        urls[process or url] = url


def _describe_server(adapter: HttpServerEngineAdapter) -> ServerInfo:
    """Ask a running server for its size.

    Raises ServerError when the server refuses a key, here and not only at the first weight update, and BadInputError
    when the server does not have our weight loader, or spans several nodes behind a loopback address. Raises
    UnsupportedError for a server that cannot take pushed weights.
    """
    adapter.check_keys()
    info = adapter.get_server_info()
    if WEIGHT_LOADER not in (info.get("custom_weight_loader") or ()):
        raise BadInputError(
            f"the server at {adapter.base_url} was started without --custom-weight-loader {WEIGHT_LOADER}; "
            "start it with `verl-server launch`"
        )
    require_generating_server(info)
    require_pushable(info)
    if int(info.get("nnodes") or 1) > 1 and is_loopback(str(urlsplit(adapter.base_url).hostname)):
        raise BadInputError(
            f"the server at {adapter.base_url} spans several nodes: pass the URL with an address that the other nodes "
            "reach"
        )
    return ServerInfo(adapter.base_url, int(info.get("tp_size") or 1), adapter.fused_modules())


# -- SGLang in this process -------------------------------------------------------------------------
# SGLang's `Engine` binds its sockets to the event loop of the thread that creates it. Therefore one thread creates the
# engine and runs every call, one call after the other; a batch within one call still runs as a batch. When the engine's
# scheduler fails, SGLang ends this process. `launch_server=True` avoids both limits.


class InProcessBackend(Servers):
    """One `sglang.Engine`, created and used by one thread."""

    members: Sequence[ServerInfo] = ()
    weight_version = 0

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="verl-server-engine")
        self.members = [ServerInfo("the engine", int(server_args.get("tp_size") or 1))]
        self._released_memory: set[str] = set()
        self._weights_undefined = False
        """Whether the weights were released, and not all pushed since."""
        self._failure: VerlServerError | None = None
        self.weight_version = parse_weight_version(server_args.get("weight_version"))
        # Without this variable, SGLang's `Engine` on the nodes after the first never returns from its constructor.
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        self._engine = self._executor.submit(_make_engine, dict(server_args)).result()
        self._has_update_sessions = hasattr(self._engine, "begin_weight_update")
        self._server_info: Json = self._run(self._engine.get_server_info)
        """Arguments of the engine with the values that SGLang has chosen."""
        model_path = str(server_args["model_path"])
        configs = read_model_configs(model_path, str(server_args.get("tokenizer_path") or model_path))
        self._limits = prompt_limits(self._server_info, *configs)

    def _run(self, call: Callable[[], R]) -> R:
        return self._executor.submit(self._call, call).result()

    def _call(self, call: Callable[[], R]) -> R:
        """In the engine's thread: `call()`, with SGLang's ValueError as BadInputError."""
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except VerlServerError:
            raise
        except ValueError as error:
            raise BadInputError(f"SGLang refused the request: {error}") from error

    def parameter_dtypes(self) -> Sequence[Json | None]:
        return [parameter_dtypes(self._server_info)]

    # -- generation -----------------------------------------------------------------------------------

    def generate(self, **request: Any) -> Any:
        return self._run(lambda: self._generate(request))

    def _generate(self, request: Json) -> Any:
        arguments = self._engine_arguments(request)
        try:
            reply = self._engine.generate(**arguments)
        except (TypeError, ValueError) as error:
            refusal = BadInputError(f"SGLang refused the request: {error}")
            raise explain_refusal(refusal, request.get("sampling_params")) from error
        for item in reply if isinstance(reply, list) else [reply]:
            meta_info = item["meta_info"]
            meta_info["weight_version"] = self.weight_version
            require_logprobs(item)
            for span in meta_info.get("weight_versions") or ():  # SGLang's `Engine` keeps the label of its start
                span["version"] = self.weight_version
        # All trainer ranks get what a server sends: no tuples, no infinity.
        return orjson.loads(orjson.dumps(reply, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))

    def _engine_arguments(self, request: Json) -> Json:
        """Keyword arguments of `sglang.Engine.generate`. Raises BadInputError and NotReadyError."""
        if self._released_memory:
            raise NotReadyError(f"{sorted(self._released_memory)} is released; call resume_memory_occupation first")
        given = {name: value for name, value in request.items() if value is not None}
        require_known_fields(given, inspect.signature(self._engine.generate).parameters)
        body = generate_payload(self._limits, given)
        if "text" in body:
            body["prompt"] = body.pop("text")
        return body

    async def async_generate(self, **request: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._call, lambda: self._generate(request))

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        """The engine runs one call at a time, so the stream has one event: the finished reply."""
        yield self.generate(**request)

    async def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        yield await self.async_generate(**request)

    def flush_cache(self) -> None:
        self._run(lambda: self._engine.flush_cache())

    # -- weight updates -------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Nothing to pause: the engine runs one call at a time, so no request runs during an update."""

    def resume(self) -> None:
        """Nothing to resume: `pause` does nothing."""

    @property
    def undefined_weights(self) -> str | None:
        return undefined_weights_reason(self._weights_undefined, self._released_memory)

    def begin_weight_update(self) -> None:
        if self._has_update_sessions:
            self._run(lambda: _require_success(self._engine.begin_weight_update()))
        else:
            require_unpacked_experts(self._server_info)

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        (message,) = messages
        tensors = message_as_named_tensors(message)
        self._run(
            lambda: _require_success(
                self._engine.update_weights_from_tensor(tensors, load_format=WEIGHT_LOADER, flush_cache=flush_cache)
            )
        )
        if weight_version is not None:
            self.weight_version = weight_version

    def end_weight_update(self) -> None:
        if self._has_update_sessions:
            self._run(lambda: _require_success(self._engine.end_weight_update()))

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Record that released weights are defined again. The engine is not replaced, so nothing is replayed."""
        self._weights_undefined = self._weights_undefined and not whole

    # -- adapters and memory --------------------------------------------------------------------------

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        require_lora(self._server_info)
        self._run(
            lambda: _require_lora_success(self._engine.load_lora_adapter_from_tensors(name, dict(tensors), config))
        )

    def unload_lora_adapter(self, name: str) -> None:
        require_lora(self._server_info)
        self._run(lambda: _require_lora_success(self._engine.unload_lora_adapter(name)))

    def list_lora_adapters(self) -> frozenset[str]:
        if not self._server_info.get("enable_lora"):
            return frozenset()
        return frozenset(self._run(lambda: self._engine.tokenizer_manager.lora_registry.get_all_adapters()))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        requested = tags_to_release(tags, self._released_memory)
        require_memory_saver(self._server_info)
        self._run(lambda: self._engine.release_memory_occupation(tags=requested))
        self._released_memory.update(requested)
        self._weights_undefined = self._weights_undefined or loses_weights(requested, self._server_info)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        requested = tags_to_resume(tags, self._released_memory)
        self._run(lambda: self._engine.resume_memory_occupation(tags=requested))
        self._released_memory.difference_update(requested)

    @property
    def released_memory(self) -> frozenset[str]:
        return frozenset(self._released_memory)

    # -- end ------------------------------------------------------------------------------------------

    def fail(self, error: VerlServerError) -> None:
        self._failure = self._failure or error

    def shutdown(self) -> None:
        self.fail(ShutDownError("the engine was shut down"))
        engine, self._engine = self._engine, None
        if engine is not None:
            # SGLang ends its workers with SIGKILL, so their shared memory must be removed afterwards.
            owned = find_shared_memory(list_descendants(os.getpid()))
            self._executor.submit(engine.shutdown).result()
            self._executor.shutdown()
            remove_shared_memory(owned, reader=os.getpid())


def _make_engine(server_args: Json) -> Any:
    try:
        import sglang
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise StartupError(
            "launch_server=False runs SGLang in this process, but SGLang is not installed in its environment: run "
            "`pip install 'verl-server[sglang]'`, or use a server process with server_python=PATH of an environment "
            "that has SGLang"
        ) from error
    loaders = server_args.get("custom_weight_loader") or []
    try:
        return sglang.Engine(**{**server_args, "custom_weight_loader": [*loaders, WEIGHT_LOADER]})
    except TypeError as error:
        raise BadInputError(f"{REFUSAL}{find_refusal(server_args) or error}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(f"the in-process engine did not start: {type(error).__name__}: {error}") from error


def _require_lora_success(reply: Any) -> None:
    if not reply.success:
        raise BadInputError(f"the in-process engine refused the LoRA adapter: {reply.error_message}")


def _require_success(reply: Any) -> None:
    """Raise ServerError for a failed control call. SGLang's control calls return `(success, message)`."""
    success, message = reply[0], reply[1]
    if not success:
        raise ServerError(f"the in-process engine reports a failure: {message}")
