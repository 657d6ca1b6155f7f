"""`RolloutManager`: N replicas that behave as one engine, and stay so when their servers die.

It is a `Backend` (engine/backend.py), so a `VerlEngine(fleet=manager)` pushes weights into all replicas in one
update: what cannot take part is left behind and catches up from what is still staged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.blocking import LoopThread
from verl_server.adapter.launch import checked_server_args
from verl_server.adapter.sglang import memory_tags
from verl_server.config import AdapterConfig, PauseMode
from verl_server.engine.backend import CatchUp, load_over
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ShutDownError,
    StartupError,
    VerlServerError,
)
from verl_server.rollout.core import RouterConfig, RouterCore, together
from verl_server.rollout.health import Recovery, ReplicaState, judged, restart_after
from verl_server.rollout.replica import Replica
from verl_server.rollout.router import RolloutRouter
from verl_server.rollout.sample import one_by_one
from verl_server.types import Member

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Event = dict[str, Any]

WATCH_S = 0.25
SERVING = frozenset({ReplicaState.HEALTHY, ReplicaState.SUSPECT})


class RolloutManager:
    """A fleet of `replicas` servers with the same arguments (SGLang's, passed on verbatim).

    Starts them in parallel and returns when all are ready. `on_event` is called with every change of a state, from
    a thread of the manager's.
    """

    def __init__(
        self,
        replicas: int,
        *,
        config: AdapterConfig | None = None,
        recovery: Recovery | None = None,
        router: RouterConfig | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        **server_args: Any,
    ) -> None:
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise BadInputError(f"a fleet has 1 or more replicas, got {replicas!r}")
        self._server_args = {**checked_server_args(server_args), "port": None}
        self._config, self._recovery = config or AdapterConfig(), recovery or Recovery()
        self._on_event = on_event
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._lock = threading.RLock()
        self._catching_up = threading.Lock()
        """One replica catches up at a time."""
        self._members: list[tuple[Replica, HttpServerEngineAdapter]] = []
        """Of the update under way, with the servers that they had when it began."""
        self._mode = PauseMode.RETRACT
        self._threads: list[threading.Thread] = []
        self._version = int(str(server_args.get("weight_version", "0")))
        self._catch_up: CatchUp | None = None
        self._closed = threading.Event()
        self._fatal: VerlServerError | None = None
        self._asleep: frozenset[str] = frozenset()
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="verl-server-fleet")
        self._loop = LoopThread()
        self._core = self._loop.run(_made(lambda: RouterCore(router)))
        self.router = RolloutRouter(self._core, self._loop)
        try:
            for started in [self._pool.submit(self._start_first, self._new()) for _ in range(replicas)]:
                started.result()
        except BaseException:
            self.shutdown()
            raise
        watch = threading.Thread(target=self._watch, name="verl-server-fleet-watch", daemon=True)
        self._threads.append(watch)
        watch.start()

    # -- replicas -----------------------------------------------------------------------------------

    def _new(self) -> Replica:
        with self._lock:
            replica = Replica(f"verl_server_{next(self._numbers)}_0", self._server_args, self._config)
            replica.version = self._version
            self._replicas[replica.name] = replica
        return replica

    def _start_first(self, replica: Replica) -> None:
        self._begin(replica, replica.start(), self._version)

    def _begin(self, replica: Replica, adapter: HttpServerEngineAdapter, version: int) -> None:
        """A server of the replica is ready, with the weights of its checkpoint."""
        with self._lock:
            if self._closed.is_set() or replica.name not in self._replicas:
                adapter.shutdown()
                raise ShutDownError("the fleet was shut down")
            replica.adapter = adapter
            current = self._version == version and self._catch_up is None
            replica.version = version
            self._turn(replica, ReplicaState.HEALTHY if current else ReplicaState.STALE)
        process = adapter.asynchronous.process
        assert process is not None
        process.on_exit(lambda _: self._on_exit(replica, adapter))

    def _turn(self, replica: Replica, state: ReplicaState, error: VerlServerError | None = None) -> None:
        """Change a state, and tell the router and whoever listens. Under the lock."""
        before, replica.state = replica.state, state
        replica.error = error
        event = {
            "time": time.time(),
            "replica": replica.name,
            "before": before.value,
            "after": state.value,
            "version": replica.version,
            "error": None if error is None else error.message,
        }
        logger.info("replica %s: %s -> %s%s", replica.name, before, state, f" ({error.message})" if error else "")
        self._tell_router(replica)
        try:
            self._on_event(event)
        except Exception:  # the listener's own mistake must not end a recovery
            logger.exception("on_event failed")

    def _tell_router(self, replica: Replica) -> None:
        adapter, state, version, name = replica.adapter, replica.state, replica.version, replica.name
        gone = state in (ReplicaState.REMOVED, ReplicaState.FAILED)
        admitted = state in SERVING
        waits = state is ReplicaState.STALE and (self._catch_up is None or replica.needs_update)
        expected = state is not ReplicaState.DRAINING and not waits

        async def tell() -> None:
            known = self._core.replicas.get(name)
            if gone:
                self._core.drop(name)
            elif known is None or (adapter is not None and known.engine is not adapter.asynchronous):
                if adapter is not None:
                    self._core.put(name, adapter.asynchronous, version, admitted=admitted)
            else:
                suspect = state is ReplicaState.SUSPECT
                self._core.update(name, version=version, admitted=admitted, suspect=suspect, expected=expected)

        with contextlib.suppress(ShutDownError):
            self._loop.run(tell())

    def _on_exit(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        if replica.adapter is adapter and not self._closed.is_set():
            self._dead(replica, adapter, replica.died("has lost its server"))

    def _dead(self, replica: Replica, adapter: HttpServerEngineAdapter | None, error: VerlServerError) -> None:
        """Reap a replica's server and start it again."""
        with self._lock:
            known = self._replicas.get(replica.name) is replica
            if not known or replica.adapter is not adapter:
                return
            if replica.state in (ReplicaState.DEAD, ReplicaState.RESTARTING):
                return
            replica.deaths.append(time.monotonic())
            self._turn(replica, ReplicaState.DEAD, error)
        thread = threading.Thread(
            target=self._restart, args=(replica,), name=f"verl-server-{replica.name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _restart(self, replica: Replica) -> None:
        """Until it serves again, is given up, or the fleet ends. In a thread of its own."""
        error = replica.error
        while not self._closed.is_set():
            replica.end()
            wait_s = restart_after(replica.deaths, time.monotonic(), self._recovery)
            with self._lock:
                if replica.name not in self._replicas:
                    return
                if wait_s is None:
                    words = "" if error is None else f" The last time: {error.message}"
                    tail = None if error is None else error.details.get("log_tail")
                    failed = ServerDiedError(
                        f"replica {replica.name} was given up: it died {len(replica.deaths)} times.{words}",
                        log_tail=tail,
                    )
                    self._turn(replica, ReplicaState.FAILED, failed)
                    return
                self._turn(replica, ReplicaState.RESTARTING, error)
            if self._closed.wait(wait_s):
                return
            while self._asleep:  # its memory is the trainer's now
                if self._closed.wait(WATCH_S):
                    return
            try:
                self._begin(replica, replica.start(), _first(self._server_args))
            except ShutDownError:
                return
            except Exception as failure:  # noqa: BLE001 - whatever it is, it counts as a death
                own = isinstance(failure, VerlServerError)
                error = failure if own else StartupError(f"{type(failure).__name__}: {failure}")  # type: ignore[assignment]
                replica.deaths.append(time.monotonic())
                continue
            self._bring_up_to_date(replica)
            return

    def _bring_up_to_date(self, replica: Replica) -> None:
        """Load what is published into a replica that has just started; else the next update takes it along."""
        with self._catching_up:
            with self._lock:
                catch_up, version, adapter = self._catch_up, self._version, replica.adapter
            if catch_up is None or adapter is None or replica.needs_update:
                return

            def may() -> bool:
                """Asked when no update can be under way."""
                stale = replica.state is ReplicaState.STALE and replica.adapter is adapter
                return stale and self._catch_up is catch_up and not self._asleep

            try:
                if not may():
                    return
                catch_up(OneReplica(Member(_name(replica), replica.tp_size), adapter, may))
            except VerlServerError as error:
                logger.info("replica %s waits for the next update: %s", replica.name, error.message)
                with self._lock:
                    if replica.state is ReplicaState.STALE and self._catch_up is catch_up:
                        replica.needs_update = True
                        self._tell_router(replica)
                return
            with self._lock:
                if may():
                    replica.version = version
                    self._turn(replica, ReplicaState.HEALTHY)

    def _watch(self) -> None:
        """Look at every replica again and again."""
        while not self._closed.wait(WATCH_S):
            for replica in self.replicas:
                try:
                    self._look_at(replica)
                except Exception:  # a replica that cannot be looked at must not end the watch of the others
                    logger.exception("watching replica %s", replica.name)

    def _look_at(self, replica: Replica) -> None:
        adapter = replica.adapter
        if adapter is None or replica.state not in SERVING | {ReplicaState.STALE}:
            return
        if replica.state is ReplicaState.STALE:
            if not self._catching_up.locked():
                self._pool.submit(self._bring_up_to_date, replica)
            return
        known = self._core.replicas.get(replica.name)
        requests, progress_at = (0, 0.0) if known is None else (len(known.tokens), known.progress_at)
        state = judged(replica.observe(requests, progress_at), self._recovery)
        if state in SERVING and known is not None and not known.load.admitted:
            with self._lock:
                if replica.state in SERVING:
                    self._tell_router(replica)  # which lost a connection to it
        if state is ReplicaState.DEAD:
            self._dead(replica, adapter, replica.died("made no progress: it is wedged"))
        elif state is not replica.state:
            with self._lock:
                if replica.state in SERVING:
                    self._turn(replica, state)

    @property
    def replicas(self) -> list[Replica]:
        with self._lock:
            return list(self._replicas.values())

    def add_replica(self) -> str:
        """Start one more; returns its name when it serves (or waits for the next update)."""
        replica = self._new()
        try:
            self._begin(replica, replica.start(), _first(self._server_args))
        except BaseException:
            with self._lock:
                self._replicas.pop(replica.name, None)
            replica.stop()
            raise
        self._bring_up_to_date(replica)
        return replica.name

    def remove_replica(self, name: str, drain_s: float = 60.0) -> None:
        """Give it no more requests, let it finish for up to `drain_s` seconds, and end it; the rest goes elsewhere."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None:
                raise BadInputError(f"there is no replica {name!r}; there are {sorted(self._replicas)}")
            if len(self._replicas) == 1:
                raise BadInputError(f"{name} is the last replica of this fleet: shut the fleet down instead")
            self._turn(replica, ReplicaState.DRAINING)
        deadline = time.monotonic() + drain_s
        while time.monotonic() < deadline and (known := self._core.replicas.get(name)) is not None and known.tokens:
            time.sleep(0.02)
        with self._lock:
            self._replicas.pop(name, None)
            self._turn(replica, ReplicaState.REMOVED)
        replica.stop()

    # -- a backend of VerlEngine --------------------------------------------------------------------

    nearest_transport, trainer_host = "shared_memory", "127.0.0.1"

    @property
    def adapter(self) -> HttpServerEngineAdapter:
        """Of a replica that serves."""
        return self._one()

    def _serving(self) -> list[Replica]:
        with self._lock:
            up = SERVING | {ReplicaState.STALE}
            return [one for one in self._replicas.values() if one.adapter is not None and one.state in up]

    def _one(self) -> HttpServerEngineAdapter:
        for one in self.replicas:
            if one.adapter is not None and one.state in SERVING:
                return one.adapter
        raise self._fatal or ServerDiedError("no replica of the fleet is up")

    @property
    def members(self) -> Sequence[Member]:
        """The replicas that the next attempt at an update goes to."""
        self._take_members()
        return [Member(_name(one), one.tp_size) for one, _ in self._members]

    def _take_members(self) -> None:
        """Those that are up now. Raises ServerDiedError when none is."""
        self._members = [(one, one.adapter) for one in self._serving() if one.adapter is not None]
        if not self._members:
            raise ServerDiedError("no replica of the fleet is up")

    def _each(self, call: Callable[[HttpServerEngineAdapter], Any]) -> None:
        """On all members at once; a failure is raised when all are done. Who has died needs no call."""
        calls = [(one, adapter, self._pool.submit(call, adapter)) for one, adapter in self._members]
        errors = [(one, adapter, error) for one, adapter, done in calls if (error := done.exception()) is not None]
        for one, adapter, error in errors:
            if isinstance(error, DeadlineError):
                self._dead(one, adapter, error)  # it answers nobody
            elif not isinstance(error, (ServerDiedError, ShutDownError)):
                raise error

    def _every(self, call: Callable[[HttpServerEngineAdapter], Any]) -> None:
        """`_each` outside of an update."""
        self._take_members()
        self._each(call)

    def hold(self, mode: PauseMode) -> None:
        self._mode = mode
        self._each(lambda adapter: adapter.asynchronous.asleep or adapter.pause_generation(mode))

    def go_on(self) -> None:
        self._each(lambda adapter: adapter.asynchronous.asleep or adapter.continue_generation())

    def begin_weight_update(self) -> None:
        def begin(adapter: HttpServerEngineAdapter) -> None:
            if not adapter.asynchronous.asleep and not adapter.asynchronous.paused:  # it joins a second attempt
                adapter.pause_generation(self._mode)
            adapter.begin_weight_update()

        self._each(begin)

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        """Raises as soon as one server fails: a transport may have to tell the others. Who died is left out next."""
        loads: dict[Future[None], tuple[Replica, HttpServerEngineAdapter]] = {}
        for (one, adapter), wire in zip(self._members, wires, strict=True):
            load = self._pool.submit(load_over, adapter, one.tp_size, wire, weight_version, flush_cache)
            loads[load] = one, adapter
        for load in as_completed(loads):
            error = load.exception()
            if isinstance(error, DeadlineError):
                self._dead(*loads[load], error)
            if isinstance(error, (ServerDiedError, ShutDownError)):
                raise VerlServerError(error.message, **error.details)  # not the death of the fleet
            if error is not None:
                raise error

    def end_weight_update(self) -> None:
        self._each(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, catch_up: CatchUp | None) -> None:
        """All members have verified that version, and nothing goes on yet. `catch_up` brings others to it."""
        with self._lock:
            self._version, self._catch_up = version, catch_up
            loaded = {adapter for _, adapter in self._members}
            for replica in self._replicas.values():
                replica.needs_update = False
                if replica.adapter in loaded and replica.state in SERVING | {ReplicaState.STALE}:
                    replica.version = version
                    if replica.state is ReplicaState.HEALTHY:
                        self._tell_router(replica)
                    else:
                        self._turn(replica, ReplicaState.HEALTHY)
                elif replica.state in SERVING:
                    self._turn(replica, ReplicaState.STALE)

    def generate(self, **request: Any) -> Any:
        bodies = one_by_one(request)
        if bodies is None:
            return self._loop.run(self._core.generate(request))
        return self._loop.run(_all(self._core, bodies))

    async def async_generate(self, **request: Any) -> Any:
        return await asyncio.to_thread(self.generate, **request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        return self._one().generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return self._one().asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self._every(lambda adapter: adapter.flush_cache())

    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self._every(lambda adapter: adapter.load_lora_adapter_from_tensors(name, tensors, config))

    def unload_lora(self, name: str) -> None:
        self._every(lambda adapter: adapter.unload_lora_adapter(name))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        wanted = frozenset(memory_tags(tags))
        if again := sorted(self._asleep & wanted):
            raise BadInputError(f"{again} is released already")
        try:
            self._every(lambda adapter: adapter.release_memory_occupation(tags))
        except VerlServerError:
            self._each(lambda adapter: _wake(adapter, wanted))  # all of them or none
            raise
        self._asleep |= wanted

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        wanted = self._asleep if tags is None else frozenset(memory_tags(tags))
        if not wanted or wanted - self._asleep:
            raise BadInputError(f"{sorted(wanted - self._asleep) or 'nothing'} is released; released: {self._asleep}")
        self._every(lambda adapter: _wake(adapter, wanted))
        self._asleep -= wanted

    @property
    def asleep(self) -> frozenset[str]:
        return self._asleep

    def fail(self, error: VerlServerError) -> None:
        self._fatal = self._fatal or error
        for one in self.replicas:
            if one.adapter is not None:
                one.adapter.asynchronous.fail(error)

    # -- the end ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all servers. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(ShutDownError):
            self._loop.run(self._core.close())
        stops = [threading.Thread(target=one.stop) for one in self.replicas]
        for stop in stops:
            stop.start()
        for thread in [*stops, *self._threads]:
            thread.join()  # every start asks whether it is to be given up
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._loop.close()


class OneReplica:
    """The servers of one replica as a backend of their own, for catching up; `may` says whether it still is to."""

    def __init__(self, member: Member, adapter: HttpServerEngineAdapter, may: Callable[[], bool]) -> None:
        self._member, self._adapter, self._may = member, adapter, may

    @property
    def members(self) -> Sequence[Member]:
        if not self._may():
            raise VerlServerError(f"{self._member.name} need not or cannot catch up any more")
        return [self._member]

    def hold(self, mode: PauseMode) -> None:
        self._adapter.pause_generation(mode)

    def go_on(self) -> None:
        self._adapter.continue_generation()

    def begin_weight_update(self) -> None:
        self._adapter.begin_weight_update()

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        (wire,) = wires
        load_over(self._adapter, self._member.tp_size, wire, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self._adapter.end_weight_update()


def _name(replica: Replica) -> str:
    """Another one for each of its servers."""
    return f"{replica.name}/{len(replica.deaths)}"


def _wake(adapter: HttpServerEngineAdapter, tags: frozenset[str]) -> None:
    """Resume those of `tags` that this server has released."""
    if mine := sorted(tags & adapter.asynchronous.asleep):
        adapter.resume_memory_occupation(mine)


async def _made(make: Callable[[], RouterCore]) -> RouterCore:
    return make()


async def _all(core: RouterCore, bodies: Sequence[Json]) -> list[Json]:
    return await together(core.generate(body) for body in bodies)


def _first(server_args: Mapping[str, Any]) -> int:
    return int(str(server_args.get("weight_version", "0")))
