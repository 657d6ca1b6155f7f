"""Weight updates of a fleet: each step runs on all replicas at the same time. A replica that dies is left out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from typing import Any, TypeVar

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.client import tags_to_release, tags_to_resume, undefined_weights_reason
from verl_server.adapter.model_files import lora_paths_by_name
from verl_server.adapter.sglang.replies import parameter_dtypes
from verl_server.config import MemoryTag, PauseMode, RolloutMode
from verl_server.engine.servers import load_weights
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerBusyError,
    ServerDiedError,
    ShutDownError,
    VerlServerError,
)
from verl_server.rollout.fleet import KEEPS_NO_WEIGHTS, RUNNING, SERVING, Fleet, Replica, ReplicaState, Server
from verl_server.rollout.launchers.local import Launcher
from verl_server.rollout.modes import capabilities_of
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.targets import RoutingTargets
from verl_server.types import Json, ServerInfo
from verl_server.weights.update.options import ReplayFn, Servers

logger = logging.getLogger(__name__)


# -- Calls ------------------------------------------------------------------------------------------
# `FleetCalls`: calls to all servers of a fleet at the same time. No server can block the others.

Call = Callable[[HttpServerEngineAdapter], object]

MAX_FAILED_UPDATES = 2
"""A server that has failed this number of attempts at updates, while other servers did not fail, is started again."""


class FleetCalls:
    """Calls the servers of a fleet, and starts those again that fail although others succeed."""

    def __init__(self, fleet: Fleet, recovery: RecoveryLoop) -> None:
        self._fleet, self._recovery = fleet, recovery

    def call_all(
        self, servers: Sequence[Server], call: Call, restart_on: type[VerlServerError] = DeadlineError
    ) -> None:
        """Call `call` for all `servers` at the same time. Returns when all calls have ended.

        A server that has died or is being ended needs no call. A server whose error is of type `restart_on` is started
        again; by default that is a server that does not answer. The call of any other server that fails, although it
        succeeded on another one, is repeated once; then that server is started again. Raises the first error when the
        call succeeded on no server, and ServerBusyError in any case: the server is well.
        """
        num_succeeded, errors = self._call_each([server for server in servers if self._fleet.is_used(server)], call)
        answers: list[tuple[Server, VerlServerError]] = []
        for server, error in errors:
            if isinstance(error, restart_on):
                self._recovery.recover(*server, error)
            else:
                answers.append((server, error))
        for _, error in answers:
            if not num_succeeded or isinstance(error, ServerBusyError):
                raise error
        repeated = self._call_each([server for server, _ in answers], call)[1]
        for server, error in repeated:
            if not isinstance(error, ServerBusyError):
                self._recovery.recover(*server, error)
        for _, error in repeated:
            if isinstance(error, ServerBusyError):
                raise error

    def _call_each(self, servers: Sequence[Server], call: Call) -> tuple[int, list[tuple[Server, VerlServerError]]]:
        """The number of servers on which a call has succeeded, and the errors of the others that have not died."""
        calls = [(server, self._fleet.executor.submit(call, server[1])) for server in servers]
        num_succeeded = 0
        errors: list[tuple[Server, VerlServerError]] = []
        for server, future in calls:
            try:
                future.result()
                num_succeeded += 1
            except (ServerDiedError, ShutDownError):
                continue
            except VerlServerError as error:
                errors.append((server, error))
        return num_succeeded, errors

    def restart(self, replica: Replica, adapter: HttpServerEngineAdapter, error: VerlServerError) -> None:
        """Start the server of a replica again. Does nothing when `adapter` is not its server any more."""
        self._recovery.recover(replica, adapter, error)

    def leave_out_failed(self, members: Mapping[str, Server], failed: Collection[str], error: VerlServerError) -> bool:
        """Start the servers again that fail updates repeatedly, while other members of the update do not fail.

        `members` are the servers of the attempt that failed with `error`, by their names as members. `failed` are the
        names of those that caused the error. Returns whether a server is left out of the next attempt.
        """
        if len(failed) == len(members):
            return False  # the fault is in the update
        left_out = False
        for name in failed:
            replica, adapter = members[name]
            with self._fleet.lock:
                replica.failed_updates += 1
                is_broken = replica.failed_updates >= MAX_FAILED_UPDATES
            if is_broken:
                self._recovery.recover(replica, adapter, error)
                left_out = True
        return left_out


# -- Updates ----------------------------------------------------------------------------------------

STARTING_AGAIN = (ReplicaState.DEAD, ReplicaState.RESTARTING)
"""States of a replica whose server is started again, now or when memory is resumed."""
IDLE_POLL_INTERVAL_S = 0.02
OTHERS_FAIL_S = 1.0
"""Seconds within which the other servers fail, too, if a failure is the fault of the update."""


class FleetUpdates(Servers):
    """The replicas of a fleet as the servers of weight updates."""

    can_leave_out = True

    def __init__(
        self,
        fleet: Fleet,
        recovery: RecoveryLoop,
        calls: FleetCalls,
        targets: RoutingTargets,
        weights_timeout_s: float,
    ) -> None:
        """`weights_timeout_s`: seconds that a pause with mode `wait` waits for running requests."""
        self._fleet, self._recovery, self._calls, self._targets = fleet, recovery, calls, targets
        self._weights_timeout_s = weights_timeout_s
        self._servers: dict[str, Server] = {}
        """Servers of the update in progress by their names as members, as they were when the attempt began."""
        self._pause_mode = PauseMode.RETRACT
        self._is_paused = False
        """Whether `pause` was called and `resume` was not."""

    @property
    def members(self) -> Sequence[ServerInfo]:
        """See `Servers.members`. Empty while all servers are started again: they get the weights by replay."""
        with self._fleet.lock:
            members = [(replica.member, (replica, adapter)) for replica, adapter in self.running_servers()]
        self._servers = {member.name: server for member, server in members}
        return [member for member, _ in members]

    def running_servers(self) -> list[Server]:
        """The replicas with a running server. Empty only while servers are started again; else raises ServerDiedError.

        Without a server, new requests do not wait for an update: they wait for a server.
        """
        with self._fleet.lock:  # a server that starts meanwhile has left the states STARTING_AGAIN
            servers = self._fleet.servers()
            if not servers:
                self._fleet.set_admission_paused(False)
                if not any(replica.state in STARTING_AGAIN for replica in self._fleet.replicas):
                    raise ServerDiedError("no replica of the fleet has a running server")
            return servers

    def _call_members(self, call: Callable[[HttpServerEngineAdapter], object]) -> None:
        self._calls.call_all(list(self._servers.values()), call)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the body to the fleet's counters."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._fleet.add_phase_seconds(phase, time.monotonic() - started)

    def pause(self, mode: PauseMode) -> None:
        self._pause_mode = PauseMode.RETRACT if mode is PauseMode.WAIT else mode
        with self._timed("pause"):
            if mode is PauseMode.WAIT:
                try:
                    self._wait_until_idle()
                except BaseException:
                    self._fleet.set_admission_paused(False)
                    raise
            self._is_paused = True
            self._call_members(lambda adapter: adapter.released_memory or adapter.pause_generation(self._pause_mode))

    def _wait_until_idle(self) -> None:
        """Hold new requests in the routers until no request runs. Raises DeadlineError; nothing was changed then."""
        timeout_s = self._weights_timeout_s
        deadline = time.monotonic() + timeout_s
        self._fleet.set_admission_paused(True)
        self._targets.wait_until_applied()
        while any(self._targets.replica_stats(replica.name).running_requests for replica in self._fleet.replicas):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"requests still run after {timeout_s:g} s (timeouts.weights_s); the weights were not changed",
                    operation="wait",
                    seconds=timeout_s,
                )
            time.sleep(IDLE_POLL_INTERVAL_S)

    def resume(self) -> None:
        with self._timed("continue"):
            try:
                self._call_members(lambda adapter: adapter.end_update_pause())
                self._is_paused = False
            finally:
                self._fleet.set_admission_paused(False)

    def find_lost(self) -> Collection[str]:
        return [name for name, server in self._servers.items() if not self._fleet.is_used(server)]

    def begin_weight_update(self) -> None:
        def begin(adapter: HttpServerEngineAdapter) -> None:
            if not adapter.released_memory and not adapter.paused:  # a server that takes part since the second attempt
                adapter.pause_generation(self._pause_mode)
            adapter.begin_weight_update()

        with self._timed("begin"):
            self._call_members(begin)

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        """See `Servers.load`.

        Raises at most `OTHERS_FAIL_S` seconds after the first server has failed, because a transport may have to stop
        the others. A replica whose server has died, is being ended or does not answer is left out of the next attempt.
        """
        loads: dict[Future[None], str] = {}
        if ended := [name for name, server in self._servers.items() if not self._fleet.is_used(server)]:
            raise VerlServerError(f"the servers {ended} are started again")  # the next attempt is without them
        if weight_version is not None:
            self._fleet.begin_load()
        with self._timed("load"):
            for (name, (replica, adapter)), message in zip(self._servers.items(), messages, strict=True):
                tp_size = replica.member.tp_size
                load = self._fleet.executor.submit(load_weights, adapter, tp_size, message, weight_version, flush_cache)
                loads[load] = name
            for load in as_completed(loads):
                error = load.exception()
                if isinstance(error, (DeadlineError, ServerDiedError)):
                    self._recovery.recover(*self._servers[loads[load]], error)
                if isinstance(error, (ServerDiedError, ShutDownError)):
                    # Only one replica has died. ServerDiedError would mean that no server is left.
                    raise VerlServerError(error.message, **error.details)
                if isinstance(error, VerlServerError):
                    wait(loads, timeout=OTHERS_FAIL_S)
                    error.details["servers"] = [
                        name for other, name in loads.items() if other.done() and _is_refusal(other.exception())
                    ]
                if error is not None:
                    raise error

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        return self._calls.leave_out_failed(self._servers, failed, error)

    def end_weight_update(self) -> None:
        with self._timed("end"):
            self._call_members(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """See `Servers.published`. Stale replicas become current only with `whole`, or later by `replay`.

        Raises ServerDiedError if no server has the new weights and the trainer does not keep them.
        """
        fleet = self._fleet
        with fleet.lock:
            if replay is None and not any(
                replica.state in (RUNNING if whole else SERVING) for replica in self._loaded()
            ):
                raise ServerDiedError(
                    "no server of the fleet has all weights, and the trainer does not keep the weights for later: "
                    "push all weights"
                )
            fleet.weight_version, fleet.replay = version, replay
            fleet.counters.updates += 1
            loaded = self._loaded()
            states: dict[Replica, ReplicaState] = {}
            for replica in fleet.replicas:
                replica.forget_failed_replays()
                if replica in loaded:
                    replica.failed_updates = 0
                if replica in loaded and replica.state in (RUNNING if whole else SERVING):
                    replica.weight_version = version
                    states[replica] = ReplicaState.HEALTHY
                elif replica.state in SERVING:
                    states[replica] = ReplicaState.STALE
                if replica.state is ReplicaState.STALE and replica not in states and replay is None:
                    logger.warning(
                        "replica %s stays without requests after the update: it has its checkpoint, and %s",
                        replica.name,
                        KEEPS_NO_WEIGHTS,
                    )
            fleet.change_states(states)
            fleet.finish_update(whole)

    def _loaded(self) -> list[Replica]:
        """The replicas whose servers have taken part in the update and are still in use."""
        return [replica for replica, adapter in self._servers.values() if replica.adapter is adapter]

    def detach(self) -> None:
        """End the trainer's use of the fleet.

        Generation continues. When the weights are torn, it waits for a whole update.
        """
        is_torn = self._fleet.abandon_update()
        self._recovery.wait_for_replay()
        if self._is_paused and not is_torn:
            self._calls.call_all(  # a server that does not continue is started again
                self._fleet.servers(),
                lambda adapter: not adapter.paused or adapter.end_update_pause(),
                restart_on=VerlServerError,
            )
            self._is_paused = False


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a server has answered with an error. A server that has died did not."""
    return isinstance(error, VerlServerError) and not isinstance(error, (ServerDiedError, ShutDownError))


# -- Memory -----------------------------------------------------------------------------------------
# `FleetMemory`: releases the memory of all replicas of a fleet, and takes it back.


class FleetMemory:
    """The memory of a fleet. Either all replicas release a memory tag, or none."""

    def __init__(
        self,
        fleet: Fleet,
        calls: FleetCalls,
        targets: RoutingTargets,
        mode: RolloutMode,
        model_path: str,
        replay_lock: threading.Lock,
    ) -> None:
        """`replay_lock`: see `RecoveryLoop`. A release waits until no server loads published weights."""
        self._fleet, self._calls, self._targets = fleet, calls, targets
        self._mode, self._model_path, self._replay_lock = mode, model_path, replay_lock
        self._lock = threading.Lock()
        """Held during a release or a resume: a second call sees the memory as the first call has left it."""

    def release(self, tags: Sequence[str] | None) -> None:
        """Release the memory of `tags`. None: all memory.

        Raises BadInputError for a standalone fleet and for tags that are released, ServerBusyError while requests run.
        """
        with self._lock, self._replay_lock:
            self._release(tags)

    def _release(self, tags: Sequence[str] | None) -> None:
        if not capabilities_of(self._mode).releases_memory:
            raise BadInputError(
                f"a {self._mode} fleet has its devices for itself, so it does not release memory; use the mode hybrid "
                "or colocated"
            )
        fleet = self._fleet
        requested = frozenset(tags_to_release(tags, fleet.released_memory))
        released_before, undefined_before = fleet.released_memory, fleet.weights_undefined
        try:
            fleet.set_admission_paused(True)
            self._targets.wait_until_applied()
            running = sum(self._targets.replica_stats(replica.name).running_requests for replica in fleet.replicas)
            if running:
                raise ServerBusyError(
                    f"{running} requests run in the fleet: wait until they have ended or abort them, then release"
                )
            fleet.set_released_memory(released_before | requested)  # from now on no server is taken into use
            try:
                self._release_all(requested)
            except BaseException:
                fleet.undo_release(released_before, undefined_before)
                raise
        finally:
            fleet.set_admission_paused(False)

    def _release_all(self, requested: frozenset[str]) -> None:
        """Pause all servers if none has requests, also requests that the routers do not know; then release."""
        for replica in self._fleet.replicas:
            if replica.adapter is None:
                replica.preempt_start()
        try:
            self._calls.call_all(self._fleet.servers(), lambda adapter: adapter.prepare_release())
            self._calls.call_all(
                self._fleet.servers(), lambda adapter: adapter.release_memory_occupation(sorted(requested))
            )
        except BaseException as failure:
            error = VerlServerError(f"the fleet did not release its memory: {failure}")
            for replica, adapter in self._fleet.servers():
                if adapter.released_memory & requested:  # what the server has released is lost
                    self._calls.restart(replica, adapter, error)
            with contextlib.suppress(VerlServerError):
                self._calls.call_all(self._fleet.servers(), lambda adapter: adapter.cancel_release())
            for replica, adapter in self._fleet.servers():
                if adapter.needs_continue and not adapter.released_memory and not adapter.paused:  # not continued
                    self._calls.restart(replica, adapter, error)
            raise
        for replica in self._fleet.replicas:
            if replica.state not in RUNNING:
                self._fleet.end_server(replica)  # the memory of a server that is being ended is not free yet

    def resume(self, tags: Sequence[str] | None) -> None:
        """Take the memory of `tags` back. None: all released memory.

        The weights are undefined afterwards and must be pushed. A fleet that takes no pushed weights loads its
        checkpoint again. Raises BadInputError for tags that are not released.
        """
        with self._lock:
            self._resume(tags)

    def _resume(self, tags: Sequence[str] | None) -> None:
        fleet = self._fleet
        requested = frozenset(tags_to_resume(tags, fleet.released_memory))
        servers = fleet.servers()  # servers that ended meanwhile are started when all memory is resumed
        if capabilities_of(self._mode).takes_weights:
            self._calls.call_all(servers, lambda adapter: _resume_server(adapter, requested, None))
        else:
            # A server whose checkpoint cannot be loaded has undefined weights: it is started again.
            self._calls.call_all(
                servers,
                lambda adapter: _resume_server(adapter, requested, self._model_path),
                restart_on=VerlServerError,
            )
            if MemoryTag.WEIGHTS in requested:
                fleet.finish_update(whole=True)
        fleet.set_released_memory(fleet.released_memory - requested)


def _resume_server(adapter: HttpServerEngineAdapter, tags: frozenset[str], model_path: str | None) -> None:
    """Resume those of `tags` that this server has released.

    If an earlier call has failed after the memory was resumed, generation continues now. With `model_path`, resumed
    weights are loaded from that checkpoint before generation continues.
    """
    released = tags & adapter.released_memory
    if not released:
        if adapter.needs_continue and not adapter.released_memory:
            adapter.resume_memory_occupation()
        return
    if model_path is None or MemoryTag.WEIGHTS not in released:
        adapter.resume_memory_occupation(sorted(released))
        return
    continues_generation = released == adapter.released_memory and not adapter.paused
    if continues_generation:
        adapter.pause_generation()
    adapter.resume_memory_occupation(sorted(released))
    adapter.update_weights_from_disk(model_path)
    if continues_generation:
        adapter.continue_generation()


# -- Loras ------------------------------------------------------------------------------------------
# `FleetLoras`: the LoRA adapters of a fleet, which all of its servers have.

CallAll = Callable[[Callable[[HttpServerEngineAdapter], object]], None]
"""Calls a function for every running server of a fleet."""


class FleetLoras:
    """The LoRA adapters of a fleet. A server that is started later gets the adapters of the others."""

    def __init__(self, lora_paths: Any) -> None:
        """`lora_paths`: SGLang's server argument with the LoRA adapters that each server loads when it starts."""
        self._loaded_at_start = set(lora_paths_by_name(lora_paths))
        self._removed: set[str] = set()
        """Those of them that were removed or replaced."""
        self._adapters: dict[str, tuple[dict[str, Any], Json]] = {}
        """Tensors and config of each adapter that all servers have."""
        self._lock = threading.RLock()

    @property
    def names(self) -> frozenset[str]:
        """Names of the adapters that all servers have."""
        return frozenset(self._adapters) | (self._loaded_at_start - self._removed)

    def load(self, call_all: CallAll, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        """Load an adapter into all servers. It replaces an adapter of that name, for example of an earlier engine.

        When no server has loaded it, no server has an adapter of that name. A server that fails while others succeed is
        started again by `call_all`, and then gets the adapters of the others.
        """
        with self._lock:
            if name in self.names:
                self.unload(call_all, name)
            call_all(lambda adapter: adapter.load_lora_adapter(name, tensors, config))
            self._adapters[name] = dict(tensors), config

    def unload(self, call_all: CallAll, name: str) -> None:
        with self._lock:
            self._adapters.pop(name, None)
            self._removed |= {name} & self._loaded_at_start
            call_all(lambda adapter: adapter.unload_lora_adapter(name))

    def prepare_server(self, adapter: HttpServerEngineAdapter, begin: Callable[[], None]) -> None:
        """Give a new server the adapters of the others, then call `begin`, before another adapter can be loaded."""
        with self._lock:
            for name in sorted(self._removed):
                adapter.unload_lora_adapter(name)
            for name, (tensors, config) in self._adapters.items():
                adapter.load_lora_adapter(name, tensors, config)
            begin()


# -- Backend ----------------------------------------------------------------------------------------
# `ManagedBackend`: a fleet of a `RolloutManager` as the servers of one `VerlEngine` at a time.

R = TypeVar("R")


class ManagedBackend(FleetUpdates):
    """A fleet as the servers of an engine.

    `shutdown` only ends the use by the engine: the fleet belongs to its `RolloutManager`.
    """

    def __init__(
        self,
        fleet: Fleet,
        recovery: RecoveryLoop,
        calls: FleetCalls,
        targets: RoutingTargets,
        weights_timeout_s: float,
        memory: FleetMemory,
        loras: FleetLoras,
        dispatcher: Dispatcher,
        loop: EventLoopThread,
        launcher: Launcher,
        mode: RolloutMode,
    ) -> None:
        """`weights_timeout_s`: see `FleetUpdates`."""
        super().__init__(fleet, recovery, calls, targets, weights_timeout_s)
        self._memory, self._loras, self._dispatcher, self._loop = memory, loras, dispatcher, loop
        self._launcher, self._mode = launcher, mode
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
            self.detach()
        with self._lock:
            self._is_attached, self._failure = False, None

    @property
    def weight_version(self) -> int:
        return self._fleet.weight_version

    def parameter_dtypes(self) -> Sequence[Json | None]:
        """See `Servers.parameter_dtypes`. Servers that start later have the same arguments."""
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
        self._calls.call_all(self.running_servers(), call)

    # -- weights, adapters and memory -----------------------------------------------------------------

    @property
    def undefined_weights(self) -> str | None:
        cause = "their memory was released, or the update of an earlier VerlEngine failed half-way"
        return undefined_weights_reason(self._fleet.weights_undefined, self._fleet.released_memory, cause)

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
