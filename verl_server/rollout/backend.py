"""`ManagedBackend`: a fleet of a `RolloutManager` as the backend of one `VerlEngine` at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.adapter.memory_tags import undefined_weights_reason
from verl_server.adapter.sglang.replies import parameter_dtypes
from verl_server.config import PauseMode, RolloutMode
from verl_server.errors import BadInputError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.calls import FleetCalls
from verl_server.rollout.fleet import Fleet
from verl_server.rollout.launchers.base import Launcher
from verl_server.rollout.loras import FleetLoras
from verl_server.rollout.memory import FleetMemory
from verl_server.rollout.modes import capabilities_of
from verl_server.rollout.updates import FleetUpdates
from verl_server.router.dispatcher import Dispatcher
from verl_server.types import Json, ServerInfo
from verl_server.weights.update.servers import ReplayFn

R = TypeVar("R")


class ManagedBackend:
    """Implements `verl_server.engine.backend.FleetBackend` with the parts of a fleet.

    `shutdown` only ends the use by the engine: the fleet belongs to its `RolloutManager`.
    """

    can_leave_out = True

    def __init__(
        self,
        fleet: Fleet,
        updates: FleetUpdates,
        memory: FleetMemory,
        calls: FleetCalls,
        loras: FleetLoras,
        dispatcher: Dispatcher,
        loop: EventLoopThread,
        launcher: Launcher,
        mode: RolloutMode,
    ) -> None:
        self._fleet, self._updates, self._memory, self._calls, self._loras = fleet, updates, memory, calls, loras
        self._dispatcher, self._loop, self._launcher, self._mode = dispatcher, loop, launcher, mode
        self._lock = threading.Lock()
        self._is_attached = False
        self._failure: VerlServerError | None = None
        """Error of all calls of the attached engine, after `fail`."""
        self._generations: set[concurrent.futures.Future[Any]] = set()
        """Generation calls in flight."""

    # -- attachment -----------------------------------------------------------------------------------

    def attach(self) -> None:
        with self._lock:
            if self._fleet.closed.is_set():
                raise ShutDownError("the fleet was shut down")
            if self._is_attached:
                raise BadInputError("another VerlEngine uses this fleet: shut that engine down first")
            self._is_attached, self._failure = True, None

    def fail(self, error: VerlServerError) -> None:
        """Make the generation calls of the attached engine raise `error`. The servers are not affected."""
        with self._lock:
            self._failure = self._failure or error
            calls = list(self._generations)
        for call in calls:
            call.cancel()

    def shutdown(self) -> None:
        with self._lock:
            if not self._is_attached:
                return
        if not self._fleet.closed.is_set():
            self._updates.detach()
        with self._lock:
            self._is_attached, self._failure = False, None

    @property
    def weight_version(self) -> int:
        return self._fleet.weight_version

    def parameter_dtypes(self) -> Sequence[Json | None]:
        """See `Backend.parameter_dtypes`. Servers that start later have the same arguments."""
        return [parameter_dtypes(adapter.get_server_info()) for adapter in self._fleet.serving_adapters()]

    def nearest_transport(self) -> str:
        """The transport of the fleet's mode, or shared memory when all servers run on this machine.

        With shared memory, later servers are started on this machine only. Raises BadInputError for a fleet that takes
        no weights.
        """
        capabilities = capabilities_of(self._mode)
        if not capabilities.takes_weights:
            raise BadInputError(
                f"a {self._mode} fleet keeps the weights of its checkpoint: use it without a VerlEngine, through "
                "`RolloutManager.generate` or `RolloutManager.router`"
            )
        return capabilities.transport or ("shared_memory" if self._launcher.pin_to_local_machine() else "distributed")

    @property
    def trainer_host(self) -> str:
        return self._launcher.trainer_host

    @property
    def adapter(self) -> HttpServerEngineAdapter:
        """The adapter of a replica that serves. Raises ServerDiedError when there is none."""
        for adapter in self._fleet.serving_adapters():
            return adapter
        raise self._failure or ServerDiedError("no replica of the fleet serves requests")

    # -- generation -----------------------------------------------------------------------------------

    def generate(self, **request: Any) -> Any:
        """Generate through the router of this process. Prompts of a batch are distributed over the replicas."""
        with self._call(self.route(request)) as call:
            try:
                return call.result()
            except concurrent.futures.CancelledError:
                raise self._cancelled_error() from None

    def route(self, request: Json) -> Coroutine[Any, Any, Any]:
        """The coroutine of `generate`, for the event loop of the router."""
        return self._dispatcher.generate_request(request)

    @contextlib.contextmanager
    def _call(self, coroutine: Coroutine[Any, Any, R]) -> Iterator[concurrent.futures.Future[R]]:
        """A call that runs in the router's event loop. An interrupt of the caller also ends the generation."""
        with self._lock:
            if self._failure is not None:
                coroutine.close()
                raise self._failure
            call = self._loop.submit(coroutine)
            self._generations.add(call)
        try:
            yield call
        finally:
            call.cancel()
            with self._lock:
                self._generations.discard(call)

    def _cancelled_error(self) -> VerlServerError:
        """The error of a call that the caller has not cancelled: `fail` did, or the end of the router."""
        return self._failure or ShutDownError("the fleet was shut down")

    async def async_generate(self, **request: Any) -> Any:
        """`generate` for an event loop. The number of calls in flight has no limit, and a call can be cancelled."""
        with self._call(self.route(request)) as call:
            try:
                return await asyncio.wrap_future(call)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise self._cancelled_error() from None

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        """Stream from one replica. A stream is not continued on another replica."""
        return self.adapter.generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return self.adapter.asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self._call_all(lambda adapter: adapter.flush_cache())

    def _call_all(self, call: Callable[[HttpServerEngineAdapter], object]) -> None:
        self._calls.call_all(self._fleet.require_servers(), call)

    def _call_running(self, call: Callable[[HttpServerEngineAdapter], object]) -> None:
        """`_call_all` for adapters, which a server that is started again gets later."""
        self._calls.call_all(self._updates.running_servers(), call)

    # -- weight updates, adapters and memory ----------------------------------------------------------

    @property
    def members(self) -> Sequence[ServerInfo]:
        return self._updates.members

    @property
    def undefined_weights(self) -> str | None:
        cause = "their memory was released, or the update of an earlier VerlEngine failed half-way"
        return undefined_weights_reason(self._fleet.weights_undefined, self._fleet.released_memory, cause)

    def check_weights(self) -> int:
        """0: the fleet has started its servers, and loads the weights into those that it starts again."""
        return 0

    def pause(self, mode: PauseMode) -> None:
        self._updates.pause(mode)

    def resume(self) -> None:
        self._updates.resume()

    def begin_weight_update(self) -> None:
        self._updates.begin_weight_update()

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        self._updates.load(messages, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self._updates.end_weight_update()

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        return self._updates.leave_out(failed, error)

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        self._updates.published(version, whole, replay)

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self._loras.load(self._call_running, name, tensors, config)

    def unload_lora_adapter(self, name: str) -> None:
        self._loras.unload(self._call_running, name)

    def list_lora_adapters(self) -> frozenset[str]:
        return self._loras.names

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self._memory.release(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self._memory.resume(tags)

    @property
    def released_memory(self) -> frozenset[str]:
        return self._fleet.released_memory
