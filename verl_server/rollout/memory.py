"""`FleetMemory`: releases the memory of all replicas of a fleet, and takes it back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.memory_tags import tags_to_release, tags_to_resume
from verl_server.config import MemoryTag, RolloutMode
from verl_server.errors import BadInputError, ServerBusyError, VerlServerError
from verl_server.rollout.calls import FleetCalls
from verl_server.rollout.fleet import RUNNING, Fleet
from verl_server.rollout.modes import capabilities_of
from verl_server.router.targets import RoutingTargets


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
