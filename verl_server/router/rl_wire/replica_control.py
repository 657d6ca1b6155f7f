"""`ReplicaControl`: pauses, weights and LoRA adapters of all servers of a router that knows their admin keys.

While the router is paused, all requests wait in it: new ones, and those that have lost their server. After an update
that failed half-way they wait until another update has succeeded, so no token comes from weights that are not whole.

A server that does not answer misses an operation. `check`, which the probe of a server calls, lets it receive requests
again when it has what it has missed. Pauses are in `pauses.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, NotReadyError, TornWeightsError, VerlServerError
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.rl_wire.checkpoint_check import CheckpointCheck
from verl_server.router.rl_wire.folders import folder_signature, in_thread, read_lora_adapter
from verl_server.router.rl_wire.lora_control import LoraControl
from verl_server.router.rl_wire.pauses import ServerPauses, leave_out
from verl_server.router.rl_wire.server_calls import ANSWER_TIMEOUT_S, AwaitedError, Servers, find_answering
from verl_server.router.rl_wire.weight_record import WeightRecord
from verl_server.types import Json, parse_weight_version

REPAIR_TIMEOUT_S = 30.0
"""Seconds within which a server must do what it has missed. Its probe tries again afterwards."""
#: vLLM's pause modes. With `keep`, the servers compute running requests again after the pause, from their tokens.
PAUSE_MODES: Mapping[str, PauseMode] = {
    "keep": PauseMode.RETRACT, "wait": PauseMode.WAIT, "abort": PauseMode.ABORT
}  # fmt: skip


class ReplicaControl:
    """Operations on all servers of a router. They run one after the other, in the event loop of the dispatcher."""

    def __init__(self, pool: ReplicaPool, servers: Servers, weights: WeightRecord) -> None:
        """`servers`: adapters of the servers by the names of their replicas, as they are at each time.

        `weights`: knows which servers are lost.
        """
        self._pool, self._servers = pool, servers
        self._lock = asyncio.Lock()
        self._weights = weights
        self._lora = LoraControl(servers)
        self._pauses = ServerPauses(pool, servers)
        self._checkpoints = CheckpointCheck()
        self._caller_has_paused = False
        """Whether `pause` was called and `resume` was not."""
        self._answering_since: dict[str, float] = {}
        """Time since which each server has answered each probe."""
        self._ready: set[str] = set()
        """Names of the servers that were not paused when they first answered, or that this router has paused."""
        self._found_paused: set[str] = set()
        """Names of the servers that were paused when they first answered."""
        self._reading: tuple[Any, Any] | None = None
        """The folder that an operation reads now, and its signature before."""

    @property
    def is_paused(self) -> bool:
        """Whether requests wait in the router."""
        return self._pool.is_held

    @property
    def lora_names(self) -> Collection[str]:
        """Names of the LoRA adapters that were loaded through this router."""
        return self._lora.names

    # -- servers that have missed an operation ------------------------------------------------------

    async def check(self, name: str, model_info: Json, answering_since: float) -> None:
        """Do on a server what it has missed. Raises an exception for a server that must receive no requests.

        The exception is AwaitedError if the router itself will let the server receive requests again.

        `model_info`: SGLang's `/model_info`. `answering_since`: see `ServerCheck`.
        """
        if self._answering_since.get(name) != answering_since:
            self._answering_since[name] = answering_since
            self._lora.forget(name)
        version = parse_weight_version(model_info.get("weight_version"))
        self._weights.note_version(self._pool, name, version)
        await self._require_ready(name)
        self._weights.require_current(name, version)
        if not self._has_missed(name):
            return
        if self._lock.locked():
            raise AwaitedError("the server has missed an operation, and is brought up to date after the next one")
        async with self._lock:
            self._weights.require_current(name, version)
            try:
                async with asyncio.timeout(REPAIR_TIMEOUT_S):
                    await self._repair(name)
            except TimeoutError as error:
                if isinstance(error, VerlServerError):
                    raise
                raise AwaitedError(
                    f"the server could not do within {REPAIR_TIMEOUT_S:g} s what it has missed, and does it again: an "
                    "adapter, for example, is replaced when its running requests have ended"
                ) from error

    async def _require_ready(self, name: str) -> None:
        """Raise NotReadyError for a server that was paused before this router began, until it continues.

        The first error is AwaitedError: requests wait for some time, because somebody may continue the server.
        """
        if name in self._ready:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                is_ready = await self._servers[name].is_ready()
        except VerlServerError as error:
            if error.details.get("status") != 404:  # SGLang 0.5.15 has no such route
                raise
            is_ready = True
        if not is_ready and name not in self._pauses.paused:
            kind = NotReadyError if name in self._found_paused else AwaitedError
            self._found_paused.add(name)
            raise kind(
                "the server is paused, and this router has not paused it: call /resume, or /update_weights if an "
                "update has not come to its end"
            )
        self._ready.add(name)

    def _has_missed(self, name: str) -> bool:
        return (name in self._pauses.paused and not self._pool.is_held) or not self._lora.is_complete(name)

    async def _repair(self, name: str) -> None:
        if self._pool.is_held:
            raise AwaitedError("the server has missed an operation, and is brought up to date after the pause")
        await self._pauses.continue_missed(name)
        await self._lora.complete(name, self._servers[name])

    # -- pauses -------------------------------------------------------------------------------------

    async def pause(self, mode: Any) -> None:
        """Let new requests wait, and do with the running ones what vLLM's pause mode says. A second pause is allowed.

        Raises BadInputError for an unknown mode, DeadlineError if running requests did not end; then nothing is paused.
        Raises NotReadyError for mode `wait` when the servers are paused already and requests run there.
        """
        if not (isinstance(mode, str) and mode in PAUSE_MODES):
            raise BadInputError(f"mode must be one of {sorted(PAUSE_MODES)}, got {mode!r:.100}")
        async with self._lock:
            await self._pauses.pause(PAUSE_MODES[mode])
            self._caller_has_paused = True

    async def resume(self) -> None:
        """Continue generation on all servers, also if another router has paused them, which was stopped since.

        Raises TornWeightsError after a failed update.
        """
        async with self._lock:
            if self._weights.torn:
                raise TornWeightsError(f"{self._weights.torn}: requests wait until another /update_weights succeeds")
            await self._pauses.continue_all()
            self._caller_has_paused = False

    # -- weights ------------------------------------------------------------------------------------

    async def update_weights(self, folder: Any, weight_version: Any = None) -> int:
        """Load a checkpoint folder into all servers; returns the version of the weights.

        A router that is not paused is paused meanwhile. `weight_version` None: one more than the largest known one.
        With the folder and the version of the last update, the router only continues. Raises BadInputError and
        UnsupportedError before anything changes, TornWeightsError when a server has failed.
        """
        async with self._reads(folder) as signature:
            if self._weights.is_repeated(folder, signature, weight_version):
                version = int(weight_version)
            else:
                servers = await find_answering(self._servers)
                await self._checkpoints.require_loadable(folder, servers)
                largest = max((each.weight_version for each in self._pool.replicas.values()), default=0)
                version = self._weights.next_version(weight_version, largest)
                await self._load_weights(folder, signature, version, servers)
            if self._pool.is_held and not self._caller_has_paused:
                await self._continue_with(version)
            return version

    @contextlib.asynccontextmanager
    async def _reads(self, folder: Any) -> AsyncIterator[Any]:
        """The body of the `with` statement is an operation that reads a folder; returns the signature of the folder."""
        async with self._lock:
            self._reading = folder, await in_thread(functools.partial(folder_signature, folder), folder)
            try:
                yield self._reading[1]
            finally:
                self._reading = None

    async def has_changed(self, folder: Any) -> bool:
        """Whether the folder of the operation that runs now has other files than when the operation began."""
        reading = self._reading
        if reading is None or reading[0] != folder:
            return False
        return bool(await in_thread(functools.partial(folder_signature, folder), folder) != reading[1])

    async def _load_weights(self, folder: str, signature: Any, version: int, servers: Servers) -> None:
        """Load the weights into these servers. Servers that were lost meanwhile, and all others, are left out."""
        if not self._pool.is_held or not servers.keys() <= self._pauses.paused:
            await self._pauses.pause(PauseMode.RETRACT)
        self._weights.begin(servers)
        outcomes = await asyncio.gather(
            *(
                server.update_weights_from_disk(folder, flush_cache=True, weight_version=version)
                for server in servers.values()
            ),
            return_exceptions=True,
        )
        loaded = self._weights.end((folder, signature), version, dict(zip(servers, outcomes, strict=True)))
        leave_out(self._pool, self._pool.replicas.keys() - loaded)
        for name in loaded & self._pool.replicas.keys():
            self._pool.update_replica(name, weight_version=version, will_serve=True)  # its probe admits it

    async def _continue_with(self, version: int) -> None:
        try:
            await self._pauses.continue_all()
        except VerlServerError as error:
            raise NotReadyError(
                f"weight version {version} is loaded, but the servers do not continue: {error}. Call /resume, not "
                "/update_weights"
            ) from error

    # -- LoRA adapters ------------------------------------------------------------------------------

    async def load_lora_adapter(self, name: Any, folder: Any) -> None:
        """Load a LoRA adapter from a folder into all servers. An adapter of the same name is replaced.

        While an adapter is replaced, new requests wait in the router, and those that use it are finished first. When a
        server fails, no server has an adapter of this name. Raises BadInputError for a folder that is no adapter.
        """
        _require_lora_name(name)
        async with self._reads(folder):
            self._require_not_paused()
            files = await in_thread(lambda: read_lora_adapter(folder), folder)  # here, so that the last call wins
            self._pool.hold(True)
            try:
                await self._lora.load(name, folder, files)
            finally:
                self._leave_out_incomplete()
                self._pool.hold(False)

    async def unload_lora_adapter(self, name: Any) -> None:
        """Unload an adapter from all servers when its requests have ended. Raises BadInputError for an unknown one."""
        _require_lora_name(name)
        async with self._lock:
            self._require_not_paused()
            try:
                await self._lora.unload(name)
            finally:
                self._leave_out_incomplete()

    def _leave_out_incomplete(self) -> None:
        leave_out(self._pool, [each for each in self._pool.replicas if not self._lora.is_complete(each)])

    def _require_not_paused(self) -> None:
        """Raise NotReadyError while the router is paused: paused requests of an adapter would never end."""
        if self._pool.is_held:
            raise NotReadyError("the router is paused: call /resume before a LoRA adapter is loaded or unloaded")


def _require_lora_name(name: Any) -> None:
    if not (isinstance(name, str) and name):
        raise BadInputError(f"lora_name must be a non-empty string, got {name!r:.100}")
