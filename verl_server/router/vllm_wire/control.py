"""`ReplicaControl`: pauses, weights and LoRA adapters of all servers of a router that knows their admin keys.

While the router is paused, all requests wait in it: new ones, and those that have lost their server. After an update
that failed half-way they wait until another update has succeeded, so no token comes from weights that are not whole.

A server that does not answer misses an operation. `check`, which the probe of a server calls, lets it receive requests
again when it has what it has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import EngineKind, PauseMode
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.vllm_wire.calls import (
    ANSWER_TIMEOUT_S,
    AwaitedError,
    Servers,
    call_each,
    find_answering,
    folder_signature,
    in_thread,
    is_lost,
    is_lost_or_silent,
    read_lora_adapter,
    read_served_manifest,
    require_checkpoint_folder,
    require_whole_checkpoint,
)
from verl_server.router.vllm_wire.lora import LoraControl
from verl_server.types import Json, parse_weight_version
from verl_server.validation import is_whole_number

if TYPE_CHECKING:
    from verl_server.weights.manifest import Manifest

logger = logging.getLogger(__name__)


# -- Pauses -----------------------------------------------------------------------------------------
# `ServerPauses`: pauses a router and its servers, and continues them.

WAIT_TIMEOUT_S = 240.0
"""Maximum number of seconds that a pause with mode `wait` waits for running requests. prime-rl waits for 300."""
IDLE_POLL_INTERVAL_S = 0.02
CONTINUE_TIMEOUT_S = 30.0
"""Seconds within which a server must continue generation. A server that does not is continued by its probe."""


class ServerPauses:
    """Which servers of a router are paused. While the pool is held, all requests wait in the router."""

    def __init__(self, pool: ReplicaPool, servers: Servers) -> None:
        """`servers`: the servers as they are at each time."""
        self._pool, self._servers = pool, servers
        self.paused: set[str] = set()
        """Names of the servers that were paused and have not confirmed that they continue."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold the pool and pause all servers that answer.

        Raises NotReadyError at once for mode `wait` if running requests cannot end, because the servers are paused.
        """
        was_held, paused_before = self._pool.is_held, set(self.paused)
        if mode is PauseMode.WAIT and was_held and self.paused and self._pool.running_requests:
            raise NotReadyError(
                f"the servers are paused already, and {self._pool.running_requests} running requests cannot end before "
                "/resume: call /resume before a pause with mode wait, or use mode keep or abort"
            )
        self._pool.hold(True)

        async def pause_one(name: str, server: AsyncHttpServerEngineAdapter) -> None:
            self.paused.add(name)  # also if the answer is lost
            try:
                await server.pause_generation(mode)
            except VerlServerError as error:
                if "status" in error.details and name not in paused_before:
                    self.paused.discard(name)  # the server has refused
                raise

        try:
            if mode is PauseMode.WAIT:
                await self._until_idle()
                mode = PauseMode.RETRACT
            await call_each(await find_answering(self._servers), pause_one)
        except VerlServerError:
            if not was_held:
                with contextlib.suppress(VerlServerError):
                    await self._continue_servers(self.paused)
                leave_out(self._pool, self.paused)
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

    async def continue_all(self) -> None:
        """Continue generation on all servers, and then in the router. If it fails, requests still wait.

        A server that does not answer receives no requests until its probe has continued it.
        """
        await self._continue_servers(self._servers)
        leave_out(self._pool, self.paused)
        self._pool.hold(False)

    async def continue_missed(self, name: str) -> None:
        """Continue a server that has missed `/resume`. Does nothing for another one."""
        if name in self.paused:
            await self._servers[name].continue_generation()
            self.paused.discard(name)

    async def _continue_servers(self, names: Iterable[str]) -> None:
        """Continue generation on these servers. Those that do not answer stay in `paused`."""
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
                if "status" in error.details and name not in self.paused:
                    missed.discard(name)  # the server has refused, and this router has not paused it
                raise
            missed.discard(name)
            self.paused.discard(name)

        try:
            if servers:
                await call_each(await find_answering(servers), continue_one, is_lost_or_silent)
        finally:
            self.paused |= missed


def leave_out(pool: ReplicaPool, names: Iterable[str]) -> None:
    """Send no requests to these servers until their probes admit them."""
    for name in list(names):
        if name in pool.replicas:
            pool.update_replica(name, admitted=False)


# -- Weight record ----------------------------------------------------------------------------------
# `WeightRecord`: the weights that the servers of a router must have, and which servers have them.


class WeightRecord:
    """The updates of the weights through one router.

    After an update, only the servers that have loaded it may receive requests. Before the first one, a server may not
    receive requests if another server has a higher weight version: the router may have been started after an update.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the last update through this router. None before the first one."""
        self.torn: str | None = None
        """Why the served weights are not whole."""
        self._folder: tuple[Any, Any] | None = None
        """Folder of the last update, and its signature."""
        self._servers: frozenset[str] | None = None
        """Names of the servers that load the weights now, or have loaded the last ones. None: all servers may serve."""
        self._versions: dict[str, int] = {}
        """Version of each server at its last answer, without those of lost servers."""

    def begin(self, servers: Iterable[str]) -> None:
        """An update begins on these servers."""
        self.torn = "an update of the weights has not come to its end"
        self._servers = frozenset(servers)

    def end(self, folder: tuple[Any, Any], version: int, outcomes: Mapping[str, Any]) -> set[str]:
        """The update has ended; returns the servers that have loaded the weights.

        `folder`: the folder and its signature. `outcomes`: exceptions by server.

        Servers that were lost meanwhile are left out, if another one has loaded the weights. Raises TornWeightsError
        if no server has, or if one has refused. Then all requests wait, and each server may take part in the next one.
        """
        failed = {name: error for name, error in outcomes.items() if isinstance(error, BaseException)}
        refused = {name: error for name, error in failed.items() if not is_lost(error)}
        if refused or len(failed) == len(outcomes):
            name, error = next(iter((refused or failed).items()))
            self.torn = f"the last update of the weights failed on {len(failed)} of {len(outcomes)} servers"
            self._servers = None
            raise TornWeightsError(f"{self.torn}; {name}: {error}", cause=type(error).__name__) from error
        for name in failed:
            logger.warning("replica %s was lost during the update to weight version %d", name, version)
        self.torn, self._servers = None, frozenset(outcomes.keys() - failed.keys())
        self.version, self._folder = version, folder
        return set(self._servers)

    def is_repeated(self, folder: Any, signature: Any, version: Any) -> bool:
        """Whether an update with these arguments has succeeded already, and no other one has begun since.

        `signature`: that of the folder now. None if it cannot be read any more.
        """
        if self.torn or self._folder is None or version is None or (folder, version) != (self._folder[0], self.version):
            return False
        return signature in (None, self._folder[1])

    def next_version(self, given: Any, largest: int) -> int:
        """The version of the next update; `largest`: that of all servers. Raises BadInputError.

        An update after a failed one may have the same version again.
        """
        largest = max(self.version or 0, largest)
        if given is None:
            return largest + 1
        if not (is_whole_number(given) and given >= (largest if self.torn else largest + 1)):
            raise BadInputError(f"weight_version must be a whole number above {largest}, got {given!r:.100}")
        return int(given)

    def note_version(self, pool: ReplicaPool, server: str, version: int) -> None:
        """Note the version of a server. Servers with a lower one receive no requests until they are checked again.

        The version of a server that does not answer counts until it is lost: others may have missed its update.
        """
        before, self._versions[server] = self._highest, version
        if self.version is None and not self.torn and version > before:
            leave_out(pool, [name for name, replica in pool.replicas.items() if replica.weight_version < version])

    def forget_version(self, server: str) -> None:
        """A server is lost: nobody waits for it any more. It may be started again with other weights."""
        self._versions.pop(server, None)

    @property
    def _highest(self) -> int:
        return max(self._versions.values(), default=0)

    def require_current(self, server: str, version: int) -> None:
        """Raise NotReadyError for a server that does not have the weights of the last update."""
        cure = "it receives requests again after an update that it takes part in"
        if self._servers is not None and server not in self._servers:
            raise NotReadyError(f"the server has not taken part in the last update of the weights: {cure}")
        if self.torn:
            return  # all requests wait
        if self.version is not None and version != self.version:
            raise NotReadyError(
                f"the server has weight version {version}, and the last update through this router was version "
                f"{self.version}: {cure}"
            )
        if self.version is None and version < self._highest:
            raise NotReadyError(
                f"the server has weight version {version}, and another server has version {self._highest}: {cure}"
            )


# -- Replica control --------------------------------------------------------------------------------

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
        self._manifest: Manifest | None = None
        """The tensors that the servers accept. All of them serve the same model."""
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
                await self._require_loadable(folder, servers)
                largest = max((each.weight_version for each in self._pool.replicas.values()), default=0)
                version = self._weights.next_version(weight_version, largest)
                await self._load_weights(folder, signature, version, servers)
            if self._pool.is_held and not self._caller_has_paused:
                await self._continue_with(version)
            return version

    async def _require_loadable(self, folder: Any, servers: Servers) -> None:
        """Raise BadInputError for a folder that does not fit the model, and UnsupportedError for a vLLM server.

        The headers of the served model are read once, and those of each checkpoint.
        """
        await in_thread(lambda: require_checkpoint_folder(folder), folder)
        for name, server in servers.items():
            args = await server.connection.get_resolved_args()
            if args.get("engine_kind") == EngineKind.VLLM:
                raise UnsupportedError(
                    f"{name} is a vLLM server, which loads no folder while it runs: push the weights with "
                    "VerlEngine(servers=[...]).update_weights_from_tensor, or use SGLang servers behind this router"
                )
            if self._manifest is None:  # later, SGLang names the folder of the last update as its model
                try:
                    read = functools.partial(read_served_manifest, args)
                    self._manifest = await in_thread(read, args.get("model_path"))
                except (BadInputError, UnsupportedError) as error:
                    logger.warning("the folder %s is not compared with the served model: %s", folder, error)
        if (manifest := self._manifest) is not None:
            await in_thread(lambda: require_whole_checkpoint(folder, manifest), folder)

    @contextlib.asynccontextmanager
    async def _reads(self, folder: Any) -> AsyncIterator[Any]:
        """The body of the `with` statement is an operation that reads a folder; returns the signature of the folder."""
        async with self._lock:
            self._reading = folder, await in_thread(lambda: folder_signature(folder), folder)
            try:
                yield self._reading[1]
            finally:
                self._reading = None

    async def has_changed(self, folder: Any) -> bool:
        """Whether the folder of the operation that runs now has other files than when the operation began."""
        reading = self._reading
        if reading is None or reading[0] != folder:
            return False
        return bool(await in_thread(lambda: folder_signature(folder), folder) != reading[1])

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
