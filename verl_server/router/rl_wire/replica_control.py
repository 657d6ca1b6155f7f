"""`ReplicaControl`: pauses, weights and LoRA adapters of all servers of a router that knows their admin keys.

While the router is paused, all requests wait in it: new ones, and those that have lost their server. After an update
that failed half-way they wait until another update has succeeded, so no token comes from weights that are not whole.

A server that does not answer misses an operation. `check`, which the probe of a server calls, lets it receive requests
again when it has what it has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import PauseMode
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    TornWeightsError,
    VerlServerError,
)
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.rl_wire.checkpoint_check import CheckpointCheck
from verl_server.router.rl_wire.folders import in_thread, read_lora_adapter
from verl_server.router.rl_wire.lora_control import LoraControl
from verl_server.router.rl_wire.server_calls import Servers, call_all, find_answering, is_lost_or_silent
from verl_server.router.rl_wire.weight_record import WeightRecord
from verl_server.types import Json, parse_weight_version

WAIT_TIMEOUT_S = 240.0
"""Maximum number of seconds that a pause with mode `wait` waits for running requests. prime-rl waits for 300."""
IDLE_POLL_INTERVAL_S = 0.02
CONTINUE_TIMEOUT_S = 30.0
"""Seconds within which a server must continue generation. A server that does not is continued by its probe."""
REPAIR_TIMEOUT_S = 30.0
"""Seconds within which a server must do what it has missed. Its probe tries again afterwards."""
#: vLLM's pause modes. With `keep`, the servers compute running requests again after the pause, from their tokens.
PAUSE_MODES: Mapping[str, PauseMode] = {
    "keep": PauseMode.RETRACT, "wait": PauseMode.WAIT, "abort": PauseMode.ABORT
}  # fmt: skip


class ReplicaControl:
    """Operations on all servers of a router. They run one after the other, in the event loop of the dispatcher."""

    def __init__(self, pool: ReplicaPool, servers: Servers) -> None:
        """`servers`: adapters of the servers by the names of their replicas, as they are at each time."""
        self._pool, self._servers = pool, servers
        self._lock = asyncio.Lock()
        self._weights = WeightRecord()
        self._lora = LoraControl(servers)
        self._paused: set[str] = set()
        """Names of the servers that were paused and have not confirmed that they continue."""
        self._checkpoints = CheckpointCheck()
        self._caller_has_paused = False
        """Whether `pause` was called and `resume` was not."""
        self._answering_since: dict[str, float] = {}
        """Time since which each server has answered each probe."""

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

        `model_info`: SGLang's `/model_info`. `answering_since`: see `ServerCheck`.
        """
        if self._answering_since.get(name) != answering_since:
            self._answering_since[name] = answering_since
            self._lora.forget(name)
        version = parse_weight_version(model_info.get("weight_version"))
        if self._weights.note_version(version):
            self._leave_out(other for other, each in self._pool.replicas.items() if each.weight_version < version)
        self._weights.require_current(name, version)
        if not self._has_missed(name):
            return
        if self._lock.locked():
            raise NotReadyError("the server has missed an operation, and is brought up to date after the next one")
        async with self._lock:
            self._weights.require_current(name, version)
            async with asyncio.timeout(REPAIR_TIMEOUT_S):
                await self._repair(name)

    def _has_missed(self, name: str) -> bool:
        return (name in self._paused and not self._pool.is_held) or not self._lora.is_complete(name)

    async def _repair(self, name: str) -> None:
        if self._pool.is_held:
            raise NotReadyError("the server has missed an operation, and is brought up to date after the pause")
        if name in self._paused:
            await self._servers[name].continue_generation()
            self._paused.discard(name)
        await self._lora.complete(name, self._servers[name])

    def _leave_out(self, names: Iterable[str]) -> None:
        """Send no requests to these servers until `check` accepts them."""
        for name in list(names):
            if name in self._pool.replicas:
                self._pool.update_replica(name, admitted=False)

    # -- pauses -------------------------------------------------------------------------------------

    async def pause(self, mode: Any) -> None:
        """Let new requests wait, and do with the running ones what vLLM's pause mode says. A second pause is allowed.

        Raises BadInputError for an unknown mode, DeadlineError if running requests did not end; then nothing is paused.
        """
        if not (isinstance(mode, str) and mode in PAUSE_MODES):
            raise BadInputError(f"mode must be one of {sorted(PAUSE_MODES)}, got {mode!r:.100}")
        async with self._lock:
            await self._pause(PAUSE_MODES[mode])
            self._caller_has_paused = True

    async def _pause(self, mode: PauseMode) -> None:
        was_held, paused_before = self._pool.is_held, set(self._paused)
        self._pool.hold(True)

        async def pause_one(name: str, server: AsyncHttpServerEngineAdapter) -> None:
            self._paused.add(name)  # also if the answer is lost
            try:
                await server.pause_generation(mode)
            except VerlServerError as error:
                if "status" in error.details and name not in paused_before:
                    self._paused.discard(name)  # the server has refused
                raise

        try:
            if mode is PauseMode.WAIT:
                await self._until_idle()
                mode = PauseMode.RETRACT
            await call_all(self._servers, pause_one)
        except VerlServerError:
            if not was_held:
                with contextlib.suppress(VerlServerError):
                    await self._continue_servers(self._paused)
                self._leave_out(self._paused)
                self._pool.hold(False)
            raise

    async def _until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while self._pool.running_requests:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self._pool.running_requests} requests still run {WAIT_TIMEOUT_S:g} s after the pause: use mode "
                    "keep or abort",
                    operation="pause",
                    seconds=WAIT_TIMEOUT_S,
                )
            await asyncio.sleep(IDLE_POLL_INTERVAL_S)

    async def resume(self) -> None:
        """Continue generation on all servers, also if another router has paused them, which was stopped since.

        Raises TornWeightsError after a failed update.
        """
        async with self._lock:
            if self._weights.torn:
                raise TornWeightsError(f"{self._weights.torn}: requests wait until another /update_weights succeeds")
            await self._continue()
            self._caller_has_paused = False

    async def _continue(self) -> None:
        """Continue generation on all servers, and then in the router. If it fails, requests still wait.

        A server that does not answer receives no requests until its probe has continued it.
        """
        await self._continue_servers(self._servers)
        self._leave_out(self._paused)
        self._pool.hold(False)

    async def _continue_servers(self, names: Iterable[str]) -> None:
        """Continue generation on these servers. Those that do not answer stay in `_paused`."""
        servers = {name: self._servers[name] for name in names if name in self._servers}
        missed = set(servers)

        async def continue_one(name: str, server: AsyncHttpServerEngineAdapter) -> None:
            try:
                async with asyncio.timeout(CONTINUE_TIMEOUT_S):
                    await server.continue_generation()
            except TimeoutError as error:
                raise DeadlineError(
                    f"{name} did not continue", operation="continue_generation", seconds=CONTINUE_TIMEOUT_S
                ) from error
            except VerlServerError as error:
                if "status" in error.details and name not in self._paused:
                    missed.discard(name)  # the server has refused, and this router has not paused it
                raise
            missed.discard(name)
            self._paused.discard(name)

        try:
            if servers:
                await call_all(servers, continue_one, is_lost_or_silent)
        finally:
            self._paused |= missed

    # -- weights ------------------------------------------------------------------------------------

    async def update_weights(self, folder: Any, weight_version: Any = None) -> int:
        """Load a checkpoint folder into all servers; returns the version of the weights.

        A router that is not paused is paused meanwhile. `weight_version` None: one more than the largest known one.
        With the folder and the version of the last update, the router only continues. Raises BadInputError and
        UnsupportedError before anything changes, TornWeightsError when a server has failed.
        """
        async with self._lock:
            if self._weights.is_repeated(folder, weight_version):
                version = int(weight_version)
            else:
                servers = await find_answering(self._servers)
                await self._checkpoints.require_loadable(folder, servers)
                largest = max((each.weight_version for each in self._pool.replicas.values()), default=0)
                version = self._weights.next_version(weight_version, largest)
                await self._load_weights(folder, version, servers)
            if self._pool.is_held and not self._caller_has_paused:
                await self._continue_with(version)
            return version

    async def _load_weights(self, folder: str, version: int, servers: Servers) -> None:
        """Load the weights into these servers. Servers that were lost meanwhile, and all others, are left out."""
        if not self._pool.is_held or not servers.keys() <= self._paused:
            await self._pause(PauseMode.RETRACT)
        self._weights.begin(servers)
        outcomes = await asyncio.gather(
            *(
                server.update_weights_from_disk(folder, flush_cache=True, weight_version=version)
                for server in servers.values()
            ),
            return_exceptions=True,
        )
        loaded = self._weights.end(folder, version, dict(zip(servers, outcomes, strict=True)))
        self._leave_out(self._pool.replicas.keys() - loaded)
        for name in loaded & self._pool.replicas.keys():
            self._pool.update_replica(name, weight_version=version, will_serve=True)  # its probe admits it

    async def _continue_with(self, version: int) -> None:
        try:
            await self._continue()
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
        async with self._lock:
            self._require_not_paused()
            files = await in_thread(lambda: read_lora_adapter(folder), folder)  # here, so that the last call wins
            self._pool.hold(True)
            try:
                await self._lora.load(name, folder, files)
            finally:
                self._leave_out(each for each in self._pool.replicas if not self._lora.is_complete(each))
                self._pool.hold(False)

    async def unload_lora_adapter(self, name: Any) -> None:
        """Unload a LoRA adapter from all servers when its requests have ended. Does nothing for an unknown name."""
        _require_lora_name(name)
        async with self._lock:
            self._require_not_paused()
            await self._lora.unload(name)
            self._leave_out(each for each in self._pool.replicas if not self._lora.is_complete(each))

    def _require_not_paused(self) -> None:
        """Raise NotReadyError while the router is paused: paused requests of an adapter would never end."""
        if self._pool.is_held:
            raise NotReadyError("the router is paused: call /resume before a LoRA adapter is loaded or unloaded")


def _require_lora_name(name: Any) -> None:
    if not (isinstance(name, str) and name):
        raise BadInputError(f"lora_name must be a non-empty string, got {name!r:.100}")
