"""Fleets without SGLang: one member that fails blocks neither updates nor calls of the others, and comes back.

The servers are objects that load weights with the real loader of this package. Fleet, recovery, calls, updates and the
update protocol are real.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import pickle
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import wait_until

from verl_server.adapter.blocking import EventLoopThread
from verl_server.config import AdapterConfig, PauseMode, RecoveryConfig, RolloutMode
from verl_server.engine.verl_engine import RankGeneration
from verl_server.errors import (
    BadInputError,
    ServerBusyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    StartupError,
    TornWeightsError,
    VerlServerError,
)
from verl_server.rollout.fleet import Fleet, Replica, ReplicaState
from verl_server.rollout.manager import RolloutManager
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.updates import FleetCalls, FleetLoras, FleetMemory, FleetUpdates, ManagedBackend
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import RoutingTargets
from verl_server.types import TensorSpec
from verl_server.weights.arena import Arena, compute_checksum, plan_arena
from verl_server.weights.loader import load_weights
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports import shared_memory
from verl_server.weights.transports.base import SenderSettings
from verl_server.weights.update.options import ReplayFn, Servers, ValidatedUpdate
from verl_server.weights.update.staged import StagedUpdate
from verl_server.weights.update.updater import resume_twice

RECOVERY = RecoveryConfig(backoff_s=0.0, max_backoff_s=0.0, max_restarts=2)
SPEC = TensorSpec((4,), "float32")
_mapping = threading.Lock()
"""The receivers of one process share one mapping of the arena. Real servers are processes of their own."""


class Model(torch.nn.Module):
    """A model that loads its only parameter as models of SGLang do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


class Server:
    """A server as its fleet sees it: adapter and process. `faults` are calls that fail, by the name of the method."""

    asynchronous = None
    base_url = "http://server"
    log_path = "/tmp/server.log"

    def __init__(self, name: str) -> None:
        self.name, self.model = name, Model()
        self.faults: dict[str, Exception] = {}
        self.loader_fails = False
        self.calls: list[str] = []
        self.released_memory: frozenset[str] = frozenset()
        self.paused = self.is_held = self.needs_continue = self.has_ended = False
        self.loras: set[str] = set()
        self.process: Any = self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("begin_weight_update", "end_weight_update", "flush_cache"):
            raise AttributeError(name)
        return lambda *_: self.call(name)

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.has_ended:
            raise ServerDiedError("ended")
        if name in self.faults:
            raise self.faults[name]

    def pause_generation(self, mode: str) -> None:
        self.call("pause_generation")
        self.paused = True

    def continue_generation(self) -> None:
        self.call("continue_generation")
        self.paused = False

    def end_update_pause(self) -> None:
        if self.released_memory:
            self.paused = False
        else:
            self.continue_generation()

    def update_weights_from_tensor(self, payloads: list[str], **_: Any) -> None:
        self.call("update_weights_from_tensor")
        message = json.loads(pickle.loads(base64.b64decode(payloads[0]))[0][0])
        if self.loader_fails:
            return  # without a report
        with _mapping:
            receiver = shared_memory.Receiver(message, 0)
            receiver.send_report(*load_weights(receiver, self.model, message["update_id"], message["verify"]))

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Any) -> None:
        self.call("load_lora_adapter")
        if name in self.loras:
            raise BadInputError(f"{name} is loaded already")
        self.loras.add(name)

    def unload_lora_adapter(self, name: str) -> None:
        self.call("unload_lora_adapter")
        self.loras.remove(name)

    def prepare_release(self) -> None:
        self.call("prepare_release")
        self.is_held = self.needs_continue = True

    def cancel_release(self) -> None:
        self.call("cancel_release")
        self.is_held = False
        self.needs_continue = bool(self.released_memory) or self.paused

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.call("release_memory_occupation")
        self.released_memory |= set(tags)

    def ask_schedulers(self) -> Future[Any]:
        return Future()

    def shutdown(self) -> None:
        self.has_ended = True

    # -- its process

    def wait_exit(self, timeout_s: float) -> None:
        return None

    def on_exit(self, listener: Any) -> None:
        return None

    def keep_log(self) -> None:
        self.calls.append("keep_log")


class ServerLauncher:
    """Starts servers. `faults`: errors of the next starts, in turn. Starts wait until `is_free` is set."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.started: list[Server] = []
        self.is_free = threading.Event()
        self.is_free.set()

    def start_server(self, name: str, *_: Any) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        assert self.is_free.wait(30.0)
        server = Server(name)
        self.started.append(server)
        return server

    def forget_replica(self, name: str) -> None:
        return None


class TestFleet:
    """The parts of a fleet, as `RolloutManager` puts them together."""

    __test__ = False

    def __init__(self, replicas: int, mode: RolloutMode = RolloutMode.HYBRID) -> None:
        self.launcher: Any = ServerLauncher()
        targets = RoutingTargets([])
        self.events: list[Any] = []
        self.fleet = Fleet(
            lambda name: Replica(name, self.launcher, {}, AdapterConfig(), {}), 0, targets, self.events.append
        )
        self.loras = FleetLoras(None)
        self.recovery = RecoveryLoop(self.fleet, targets, RECOVERY, self.loras.prepare_server)
        self.calls = FleetCalls(self.fleet, self.recovery)
        self.updates = FleetUpdates(self.fleet, self.recovery, self.calls, targets, 10.0)
        self.memory = FleetMemory(self.fleet, self.calls, targets, mode, "model", self.recovery.replay_lock)
        for _ in range(replicas):
            self.fleet.create_replica().start(self.recovery.add_server)

    @property
    def servers(self) -> list[Server]:
        """The servers of the replicas, in order."""
        return [replica.adapter for replica in self.fleet.replicas]  # type: ignore[misc]

    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.fleet.replicas]

    def call_all(self, call: Callable[[Any], object]) -> None:
        self.calls.call_all(self.fleet.require_servers(), call)

    def close(self) -> None:
        self.fleet.closed.set()
        for replica in self.fleet.replicas:
            self.fleet.stop_replica(replica)
        self.recovery.join()
        self.fleet.executor.shutdown()
        self.fleet.close()


@pytest.fixture
def make_fleet() -> Iterator[Callable[..., TestFleet]]:
    made: list[TestFleet] = []

    def make(*args: Any) -> TestFleet:
        made.append(TestFleet(*args))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def sender() -> Iterator[shared_memory.Sender]:
    """The trainer's end of the transport, with one staged tensor."""
    layout = plan_arena({"weight": SPEC})
    arena = Arena.create(layout)
    arena.write_table(["weight"])
    yield shared_memory.Sender(SenderSettings(arena, layout, timeout_s=10.0))
    arena.close()


def push(fleet: TestFleet, sender: shared_memory.Sender, version: int, replay: ReplayFn | None = None) -> None:
    """One update, as trainer rank 0 makes it. `replay`: how the trainer loads it into other servers later."""
    sender.arena.tensor("weight").fill_(version)
    validated = ValidatedUpdate(version, True, PauseMode.RETRACT, True)
    servers: Any = fleet.updates

    checksums = [compute_checksum(sender.arena.tensor("weight"))]
    update = StagedUpdate(servers, sender, validated, ["weight"], checksums, Manifest({"weight": SPEC}))
    update.commit(fleet.fleet.update_incomplete, may_serve=True)
    servers.published(version, True, replay)
    assert resume_twice(servers, "after the update") is None


# -- updates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", ["pause_generation", "begin_weight_update", "load", "report", "end_weight_update", "continue_generation"]
)
def test_a_server_that_answers_with_errors_does_not_block_updates(
    step: str,
    make_fleet: Callable[..., TestFleet],
    sender: shared_memory.Sender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is started again after its second failure. The update is published on the others in the same call."""
    fleet = make_fleet(3)
    bad = fleet.servers[1]
    if step == "report":
        bad.loader_fails = True
    else:
        bad.faults["update_weights_from_tensor" if step == "load" else step] = ServerError("broken", status=500)
    fleet.launcher.is_free.clear()
    push(fleet, sender, 7)
    assert fleet.fleet.weight_version == 7
    for number in (0, 2):
        server = fleet.servers[number]
        assert server.model.weight.tolist() == [7.0] * 4
        assert not server.paused
    wait_until(lambda: bad.has_ended, 10.0, "it was not ended")
    assert "keep_log" in bad.calls, "the log has the reason"
    fleet.launcher.is_free.set()
    assert bad.calls.count("update_weights_from_tensor" if step in ("load", "report") else step) == 2
    wait_until(lambda: fleet.states()[1] is ReplicaState.STALE, 10.0, "it was not started again")
    push(fleet, sender, 8)
    assert fleet.states() == 3 * [ReplicaState.HEALTHY]
    assert [server.model.weight.tolist() for server in fleet.servers] == 3 * [[8.0] * 4]
    loss = fleet.fleet.replicas[1].last_loss
    assert loss is not None, "the reason stays when the new server serves"
    assert re.fullmatch(r"20\S+: .*\(http://server, its log: /tmp/server.log\)", loss)
    assert f"replica {bad.name} has lost its server, {loss}" in [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]


@pytest.mark.parametrize("failing", ["report", "reply"])
def test_an_update_that_fails_on_all_servers_restarts_none(
    failing: str, make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    fleet = make_fleet(2)

    def refuse(number: int) -> None:
        time.sleep(0.1 * number)  # the first server is always the first to answer
        raise ServerError("wrong shape", status=400)

    for number, server in enumerate(fleet.servers):
        if failing == "report":
            server.loader_fails = True
        else:
            server.update_weights_from_tensor = lambda *_, n=number, **__: refuse(n)  # type: ignore[method-assign]
    for version in (1, 2):
        with pytest.raises(TornWeightsError, match=r"did not report|wrong shape") as caught:
            push(fleet, sender, version)
        assert len(caught.value.details["servers"]) == 2
    for server in fleet.servers:
        server.loader_fails = False
        server.__dict__.pop("update_weights_from_tensor", None)
    push(fleet, sender, 3)
    assert len(fleet.launcher.started) == 2


def test_a_server_that_fails_once_is_not_started_again(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """Its failures are forgotten when an update is published."""
    fleet = make_fleet(2)
    bad = fleet.servers[0]
    load = bad.update_weights_from_tensor

    def fail_once(*args: Any, **kwargs: Any) -> None:
        bad.update_weights_from_tensor = load  # type: ignore[method-assign]
        raise ServerError("once", status=500)

    for version in (1, 2, 3):
        bad.update_weights_from_tensor = fail_once  # type: ignore[method-assign]
        push(fleet, sender, version)
    assert len(fleet.launcher.started) == 2
    assert fleet.states() == 2 * [ReplicaState.HEALTHY]


# -- calls to all servers ----------------------------------------------------------------------------


def test_all_servers_are_called_at_the_same_time(make_fleet: Callable[..., TestFleet]) -> None:
    """A broadcast of weights begins when all servers load: 100 calls wait for each other."""
    fleet, barrier = make_fleet(100), threading.Barrier(100)
    fleet.call_all(lambda _: barrier.wait(30.0))
    assert not barrier.broken


def test_a_partly_failed_lora_adapter_leaves_equal_replicas(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(3)
    bad = fleet.servers[2]
    bad.faults["load_lora_adapter"] = BadInputError("no memory", status=400)
    fleet.loras.load(fleet.call_all, "a", {}, {})
    wait_until(lambda: fleet.states() == 3 * [ReplicaState.HEALTHY], 10.0, "not restarted")
    assert [server.loras for server in fleet.servers] == 3 * [{"a"}]
    fleet.servers[0].faults["unload_lora_adapter"] = BadInputError("not loaded", status=400)
    fleet.loras.unload(fleet.call_all, "a")
    wait_until(lambda: fleet.states() == 3 * [ReplicaState.HEALTHY], 10.0, "not restarted")
    assert [server.loras for server in fleet.servers] == 3 * [set()]
    for server in fleet.servers:
        server.faults["load_lora_adapter"] = BadInputError("rank too large", status=400)
    with pytest.raises(BadInputError, match="rank too large"):
        fleet.loras.load(fleet.call_all, "b", {}, {})
    assert len(fleet.launcher.started) == 5, "an error of all servers is the caller's"


def test_a_busy_server_is_not_started_again(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(2)
    fleet.servers[1].faults["flush_cache"] = ServerBusyError("requests run", status=409)
    with pytest.raises(ServerBusyError):
        fleet.call_all(lambda server: server.flush_cache())
    assert fleet.states() == 2 * [ReplicaState.HEALTHY]


def test_a_server_that_is_busy_at_the_second_call_is_not_started_again(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(2)
    errors = [ServerError("once", status=500), ServerBusyError("requests run", status=409)]

    def call(server: Any) -> None:
        if server is fleet.servers[1]:
            raise errors.pop(0)

    with pytest.raises(ServerBusyError):
        fleet.call_all(call)
    assert fleet.states() == 2 * [ReplicaState.HEALTHY]
    assert not errors


@pytest.mark.parametrize("step", ["prepare_release", "release_memory_occupation"])
def test_memory_is_released_on_all_servers_or_on_none(step: str, make_fleet: Callable[..., TestFleet]) -> None:
    """A request that the routers do not know runs on one server: nothing is released, and no server is ended."""
    fleet = make_fleet(3)
    fleet.servers[2].faults["prepare_release"] = ServerBusyError("a request runs", status=409)
    with pytest.raises(ServerBusyError):
        fleet.memory.release(None)
    assert fleet.fleet.is_open
    assert not any(server.released_memory or server.is_held or server.has_ended for server in fleet.servers)
    del fleet.servers[2].faults["prepare_release"]
    bad = fleet.servers[2]
    bad.faults[step] = ServerError("broken", status=500)
    fleet.memory.release(None)
    assert bad.has_ended, "its memory is free"
    assert all(server.released_memory for server in fleet.servers[:2])
    assert not fleet.fleet.is_open


def test_a_release_that_fails_ends_no_server_that_sleeps_or_was_paused(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(3)
    asleep = fleet.servers
    fleet.memory.release(["kv_cache"])
    for server in asleep:
        server.faults["prepare_release"] = ServerError("broken", status=500)
    with pytest.raises(ServerError, match="broken"):
        fleet.memory.release(["weights"])
    assert fleet.servers == asleep
    assert fleet.fleet.released_memory == {"kv_cache"}

    fleet = make_fleet(2)
    paused = fleet.servers
    paused[0].paused = True  # as a failed update leaves it
    paused[1].faults["prepare_release"] = ServerBusyError("a request runs", status=409)
    with pytest.raises(ServerBusyError):
        fleet.memory.release(None)
    assert fleet.servers == paused


def test_a_server_that_does_not_continue_at_the_end_of_the_trainer_is_started_again(
    make_fleet: Callable[..., TestFleet],
) -> None:
    """Its requests would wait for ever."""
    fleet = make_fleet(1)
    (server,) = fleet.servers
    assert fleet.updates.members
    fleet.updates.pause(PauseMode.RETRACT)
    server.faults["continue_generation"] = VerlServerError("not now")
    fleet.updates.detach()
    wait_until(lambda: fleet.servers[0] not in (None, server), 10.0, "not started again")


def test_a_second_release_does_not_undo_the_first(
    make_fleet: Callable[..., TestFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads release at the same time, while a router process confirms statuses."""
    fleet = make_fleet(2)
    monkeypatch.setattr(RoutingTargets, "wait_until_applied", lambda _: time.sleep(0.05))
    outcomes: list[str] = []

    def release() -> None:
        try:
            fleet.memory.release(None)
            outcomes.append("released first")
        except BadInputError as error:
            outcomes.append(error.message)

    threads = [threading.Thread(target=release) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] == "released first"
    assert "released already" in outcomes[1]
    assert all(server.released_memory and not server.has_ended for server in fleet.servers)
    assert not fleet.fleet.is_open


def test_a_server_whose_resume_failed_half_way_serves_again(make_fleet: Callable[..., TestFleet]) -> None:
    """Its memory is resumed, and its cache could not be flushed: the repeated call continues generation."""
    fleet = make_fleet(2)
    half, well = fleet.servers

    def resume(server: Server, tags: list[str] | None = None) -> None:
        server.calls.append("resume_memory_occupation")
        if tags is not None:
            server.released_memory -= set(tags)
        if server is half and server.calls.count("resume_memory_occupation") == 1:
            server.needs_continue = True
            raise ServerError("the cache was not flushed", status=500)
        server.calls.append("continue_generation")
        server.needs_continue = False

    for server in (half, well):
        bound: Any = functools.partial(resume, server)
        server.resume_memory_occupation = bound  # type: ignore[attr-defined]
    fleet.memory.release(None)
    fleet.memory.resume(None)
    assert "continue_generation" in half.calls
    assert fleet.states() == 2 * [ReplicaState.HEALTHY]
    assert len(fleet.launcher.started) == 2


def test_a_replica_that_is_being_removed_is_not_started_again(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(2)
    replica, adapter = fleet.fleet.servers()[0]
    with fleet.fleet.lock:
        fleet.fleet.change_state(replica, ReplicaState.DRAINING)
    fleet.recovery.recover(replica, adapter, ServerError("has lost its server"))
    wait_until(lambda: replica.adapter is None, 10.0, "it still has a server")
    time.sleep(0.3)
    assert (replica.state, replica.adapter) == (ReplicaState.DRAINING, None)
    assert len(fleet.launcher.started) == 2


def test_a_replica_that_did_not_start_is_forgotten_by_the_routers(
    make_fleet: Callable[..., TestFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routers have learned of it from a status that all replicas got. They would wait for it for ever."""
    known: dict[str, Any] = {}

    def record(_: RoutingTargets, statuses: Sequence[ReplicaStatus]) -> None:
        known.update({status.name: status for status in statuses})

    monkeypatch.setattr(RoutingTargets, "update_statuses", record)
    fleet = make_fleet(1).fleet
    replica = fleet.create_replica()
    fleet.set_admission_paused(True)
    fleet.set_admission_paused(False)
    wait_until(lambda: replica.name in known, 10.0, "no status")
    fleet.drop_replica(replica)
    wait_until(lambda: known[replica.name].removed, 10.0, "the routers know it")


def test_a_replica_beside_those_that_are_being_removed_is_the_last(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(2).fleet
    first, second = fleet.replicas
    with fleet.lock:
        fleet.change_state(first, ReplicaState.DRAINING)
    manager: Any = SimpleNamespace(_fleet=fleet, _targets=RoutingTargets([]))
    with pytest.raises(BadInputError, match="is the last replica"):
        RolloutManager.remove_replica(manager, second.name, drain_s=0.0)
    assert second.adapter is not None


# -- generation --------------------------------------------------------------------------------------


def backend_with(route: Callable[[Any], Any], loop: EventLoopThread) -> ManagedBackend:
    """A backend whose requests are `route(request)`, without servers."""
    fleet: Any = SimpleNamespace(closed=threading.Event())
    dispatcher: Any = SimpleNamespace(generate_request=route)
    nothing: Any = None
    backend = ManagedBackend(
        fleet, nothing, nothing, nothing, 10.0, nothing, nothing, dispatcher, loop, nothing, RolloutMode.HYBRID
    )
    backend.attach()
    return backend


def test_asynchronous_generations_run_at_the_same_time_and_can_be_cancelled() -> None:
    loop, arrived, cancelled = EventLoopThread(), [], []
    all_arrived = threading.Event()

    async def route(request: Any) -> Any:
        arrived.append(request["number"])
        if len(arrived) == 100:
            all_arrived.set()
        try:
            while not all_arrived.is_set():
                await asyncio.sleep(0.01)
            if request["number"] == 0:
                await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            cancelled.append(request["number"])
            raise
        return request["number"]

    backend = backend_with(route, loop)

    async def run() -> list[Any]:
        calls = [asyncio.ensure_future(backend.async_generate(number=number)) for number in range(100)]
        replies = await asyncio.wait_for(asyncio.gather(*calls[1:]), 30.0)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        while not cancelled:
            await asyncio.sleep(0.01)
        again = asyncio.ensure_future(backend.async_generate(number=0))
        await asyncio.sleep(0.1)
        backend.fail(ServerDiedError("the server died"))
        with pytest.raises(ServerDiedError, match="the server died"):
            await again
        return list(replies)

    assert asyncio.run(run()) == list(range(1, 100))
    assert cancelled[0] == 0
    with pytest.raises(ServerDiedError):
        backend.generate(number=1)
    loop.close()


def test_streams_on_another_rank_wait_at_the_same_time_and_leave_no_thread() -> None:
    """Of 100 streams, the last one gets its events first. A cancelled stream ends its wait."""

    class OtherRank:
        """The part of the coordinator of rank 1 that streams need."""

        rank = 1

        def __init__(self) -> None:
            self.streams: dict[str, queue.SimpleQueue[Any]] = {}

        def next_call_id(self, operation: str) -> str:
            return f"{operation}#{len(self.streams)}"

        def open_stream(self, call_id: str) -> queue.SimpleQueue[Any]:
            return self.streams.setdefault(call_id, queue.SimpleQueue())

        def close_stream(self, call_id: str) -> None:
            return None

        async def agree_async(self, *_: Any, **__: Any) -> None:
            return None

    async def run() -> None:
        group, unused = OtherRank(), None
        coordinator: Any = group
        no_backend: Any = unused
        generation = RankGeneration(coordinator, no_backend, lambda: None, None)

        async def read() -> list[Any]:
            return [event async for event in generation.async_stream({})]

        readers = [asyncio.ensure_future(read()) for _ in range(100)]
        while len(group.streams) < 100:
            await asyncio.sleep(0.01)
        for events in reversed(list(group.streams.values())[1:]):
            events.put({"text": "a"})
            events.put({"end": None})
        assert await asyncio.wait_for(asyncio.gather(*readers[1:]), 30.0) == 99 * [[{"text": "a"}]]
        readers[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await readers[0]

    before = set(threading.enumerate())
    asyncio.run(run())
    wait_until(
        lambda: not [each for each in set(threading.enumerate()) - before if "verl-server-call" in each.name],
        10.0,
        "a thread waits for an event of a stream that has ended",
    )


def test_the_event_loop_runs_while_the_servers_are_asked_for_their_lora_adapters() -> None:
    class OnlyRank:
        """The part of the coordinator of rank 0 that asynchronous calls need."""

        rank = 0

        def next_call_id(self, operation: str) -> str:
            return operation

        async def agree_async(self, _id: str, action: Callable[[Any], Any], *, contribution: Any, **_: object) -> Any:
            return await action([contribution])

    async def reply(**request: Any) -> Any:
        return request

    asked, may_answer = threading.Event(), threading.Event()
    backend: Any = SimpleNamespace(async_generate=reply)

    def backend_for(request: Any) -> Any:
        asked.set()
        assert may_answer.wait(30.0), "the event loop was blocked"
        return backend

    async def run() -> None:
        coordinator: Any = OnlyRank()
        generation = RankGeneration(coordinator, backend_for, lambda: None, None)
        call = asyncio.ensure_future(generation.async_generate({"lora_path": "a"}))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        may_answer.set()
        assert await call == {"lora_path": "a"}

    asyncio.run(run())


# -- failed replicas ---------------------------------------------------------------------------------


def test_failed_replicas_come_back_when_the_cause_is_gone(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    fleet = make_fleet(2)
    push(fleet, sender, 1)
    replica, adapter = fleet.fleet.servers()[0]
    fleet.launcher.faults = [StartupError("no memory") for _ in range(RECOVERY.max_restarts)]
    assert fleet.recovery.restart_failed() == []
    name_before = replica.member.name
    fleet.recovery.recover(replica, adapter, VerlServerError("crashed"))
    wait_until(lambda: replica.state is ReplicaState.FAILED, 10.0, "not given up")
    push(fleet, sender, 2)
    assert fleet.recovery.restart_failed() == [replica.name]
    wait_until(lambda: replica.state is ReplicaState.STALE, 10.0, "not started")
    assert replica.member.name != name_before
    push(fleet, sender, 3)
    assert fleet.states() == 2 * [ReplicaState.HEALTHY]
    again = replica.adapter
    fleet.launcher.faults = [StartupError("no memory") for _ in range(RECOVERY.max_restarts - 1)]
    fleet.recovery.recover(replica, again, VerlServerError("crashed again"))
    wait_until(lambda: replica.state is ReplicaState.STALE, 10.0, "the earlier failures count")


def test_a_fleet_that_ends_restarts_nothing(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.fleet.replicas
    fleet.launcher.faults = [StartupError("no memory") for _ in range(RECOVERY.max_restarts)]
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    wait_until(lambda: replica.state is ReplicaState.FAILED, 10.0, "not given up")
    fleet.fleet.closed.set()
    with pytest.raises(ShutDownError):
        fleet.recovery.restart_failed()


# -- updates while no server runs ----------------------------------------------------------------------


def test_an_update_without_a_running_server_is_loaded_later(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """All servers are started again when the trainer pushes. New requests do not stay paused."""
    fleet = make_fleet(2)
    push(fleet, sender, 1)
    fleet.launcher.is_free.clear()
    for replica, adapter in fleet.fleet.servers():
        fleet.recovery.recover(replica, adapter, VerlServerError("crashed"))
    fleet.fleet.set_admission_paused(True)  # as an update with the pause mode `wait` that has failed leaves it
    replayed: list[str] = []

    def replay(servers: Servers) -> None:
        replayed.extend(member.name for member in servers.members)

    with pytest.raises(ServerDiedError, match="the trainer does not keep the weights"):
        push(fleet, sender, 2)
    assert fleet.fleet.weight_version == 1
    push(fleet, sender, 2, replay)
    assert fleet.fleet.weight_version == 2
    assert not fleet.fleet.admission_paused
    fleet.launcher.is_free.set()
    wait_until(lambda: fleet.states() == 2 * [ReplicaState.HEALTHY], 10.0, "the new servers have no weights")
    assert len(replayed) == 2


def test_an_adapter_without_a_running_server_is_loaded_later(make_fleet: Callable[..., TestFleet]) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.fleet.replicas
    fleet.launcher.is_free.clear()
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    fleet.loras.load(lambda call: fleet.calls.call_all(fleet.updates.running_servers(), call), "policy", {}, {})
    fleet.launcher.is_free.set()
    wait_until(lambda: fleet.states() == [ReplicaState.HEALTHY], 10.0, "not started")
    assert fleet.servers[0].loras == {"policy"}


def test_servers_that_die_before_they_have_the_weights_count_as_failed_starts(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """However long each of them needs until it is ready."""
    fleet = make_fleet(1)
    push(fleet, sender, 1)
    (replica,) = fleet.fleet.replicas
    for _ in range(RECOVERY.max_restarts + 1):
        before = replica.adapter
        fleet.recovery.recover(replica, before, VerlServerError("crashed"))
        wait_until(lambda: replica.adapter not in (before, None), 10.0, "not started")  # noqa: B023
        replica.deaths.clear()  # as if each server had needed longer than the window
        assert replica.state is ReplicaState.STALE
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    wait_until(lambda: replica.state is ReplicaState.FAILED, 10.0, "started without end")


def test_generation_continues_after_an_update_that_loaded_nothing(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """The first call that continues generation fails, too."""
    fleet = make_fleet(1)
    push(fleet, sender, 1)
    (server,) = fleet.servers
    server.faults = {"begin_weight_update": VerlServerError("refused")}
    continue_generation, errors = server.continue_generation, [VerlServerError("not now")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()
        continue_generation()

    server.continue_generation = fail_once  # type: ignore[method-assign]
    with pytest.raises(VerlServerError, match="refused"):
        push(fleet, sender, 2)
    assert (fleet.states(), server.paused) == ([ReplicaState.HEALTHY], False)


# -- published weights that cannot be loaded -----------------------------------------------------------


@pytest.mark.parametrize(("num_failures", "state"), [(2, ReplicaState.HEALTHY), (3, ReplicaState.STALE)])
def test_published_weights_are_loaded_again_after_an_error(
    num_failures: int,
    state: ReplicaState,
    make_fleet: Callable[..., TestFleet],
    sender: shared_memory.Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three failures, requests are told that the server waits for an update. A new server is tried again."""
    monkeypatch.setattr("verl_server.rollout.recovery.REPLAY_DELAY_S", 0.05)
    fleet = make_fleet(1)
    (replica,) = fleet.fleet.replicas
    fleet.recovery.start()
    replays: list[str] = []

    def replay(servers: Servers) -> None:
        replays.extend(member.name for member in servers.members)
        if len(replays) <= num_failures:
            raise VerlServerError("the trainer did not take the job")

    push(fleet, sender, 1, replay)
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    wait_until(lambda: len(replays) == 3, 10.0, f"{len(replays)} attempts")
    wait_until(lambda: replica.state is state, 10.0, "wrong state")
    if state is ReplicaState.STALE:
        wait_until(lambda: replica.needs_update, 10.0, "the router lets requests wait")
        assert "waits for the next update of all weights; the last error: the trainer did not" in str(replica.error)
        fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed again"))
        wait_until(lambda: replica.state is ReplicaState.HEALTHY, 10.0, "the new server has no weights")


def test_an_interrupted_load_of_published_weights_is_no_failure(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """The trainer releases the memory of the servers meanwhile, and resumes it later."""
    fleet = make_fleet(1)
    (replica,) = fleet.fleet.replicas
    replays: list[frozenset[str]] = []

    def replay(servers: Servers) -> None:
        if not replays:
            fleet.fleet.released_memory = frozenset({"kv_cache"})
        replays.append(fleet.fleet.released_memory)
        assert servers.members

    push(fleet, sender, 1, replay)
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    wait_until(lambda: len(replays) == 1, 10.0, "not loaded")
    fleet.recovery.wait_for_replay()
    assert (replica.state, replica.needs_update, replica.failed_replays) == (ReplicaState.STALE, False, 0)
    fleet.fleet.released_memory = frozenset()
    fleet.recovery.load_published_weights(replica)
    assert replica.state is ReplicaState.HEALTHY


def test_a_release_waits_for_a_server_that_gets_the_published_weights(
    make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender
) -> None:
    """Both pause the server. In the middle of a load, the release would be the last to end, and would not continue."""
    fleet = make_fleet(2)
    begun, may_end = threading.Event(), threading.Event()

    def replay(servers: Servers) -> None:
        assert servers.members
        servers.pause(PauseMode.RETRACT)
        begun.set()
        assert may_end.wait(10.0)
        servers.resume()

    push(fleet, sender, 1, replay)
    (replica, adapter), _ = fleet.fleet.servers()
    fleet.recovery.recover(replica, adapter, VerlServerError("crashed"))
    assert begun.wait(10.0)
    with ThreadPoolExecutor(1) as pool:
        release = pool.submit(fleet.memory.release, None)
        time.sleep(0.2)
        assert not fleet.fleet.released_memory
        may_end.set()
        release.result(10.0)
    assert fleet.fleet.released_memory
    assert [server.released_memory == fleet.fleet.released_memory for server in fleet.servers] == [True, True]
    assert not any(server.paused for server in fleet.servers), "nobody continues generation at the resume"


def test_a_server_without_weights_tells_why(make_fleet: Callable[..., TestFleet], sender: shared_memory.Sender) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.fleet.replicas
    push(fleet, sender, 1)
    fleet.recovery.recover(replica, replica.adapter, VerlServerError("crashed"))
    wait_until(lambda: replica.state is ReplicaState.STALE, 10.0, "not started")
    assert "the trainer does not keep the published ones" in str(replica.error)
