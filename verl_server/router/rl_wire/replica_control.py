"""`ReplicaControl`: pauses, weights and LoRA adapters of all servers of a router that knows their admin keys.

While the router is paused, all requests wait in it: new ones, and those that have lost their server. After an update
that failed half-way they wait until another update has succeeded, so no token comes from weights that are not whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import EngineKind, PauseMode
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.rl_wire.folders import (
    read_lora_adapter,
    read_served_manifest,
    require_checkpoint_folder,
    require_whole_checkpoint,
)
from verl_server.types import Json, parse_weight_version
from verl_server.validation import is_whole_number

if TYPE_CHECKING:
    from verl_server.weights.manifest import Manifest

logger = logging.getLogger(__name__)

WAIT_TIMEOUT_S = 240.0
"""Maximum number of seconds that a pause with mode `wait` waits for running requests. prime-rl waits for 300."""
IDLE_POLL_INTERVAL_S = 0.02
ANSWER_TIMEOUT_S = 5.0
"""Seconds within which a server must answer to take part in an operation."""
#: vLLM's pause modes. With `keep`, the servers compute running requests again after the pause, from their tokens.
PAUSE_MODES: Mapping[str, PauseMode] = {
    "keep": PauseMode.RETRACT, "wait": PauseMode.WAIT, "abort": PauseMode.ABORT
}  # fmt: skip
Call = Callable[[AsyncHttpServerEngineAdapter], Awaitable[Any]]


class ReplicaControl:
    """Operations on all servers of a router. They run one after the other, in the event loop of the dispatcher."""

    def __init__(self, pool: ReplicaPool, adapters: Mapping[str, AsyncHttpServerEngineAdapter]) -> None:
        """`adapters`: adapters of the servers by the names of their replicas, as they are at each time."""
        self._pool, self._adapters = pool, adapters
        self._lock = asyncio.Lock()
        self._weight_version: int | None = None
        """Version of the last update through this router. None before the first one."""
        self._torn: str | None = None
        """Why the served weights are not whole."""
        self._manifest: Manifest | None = None
        """The tensors that the servers accept. All of them serve the same model."""
        self._caller_has_paused = False
        """Whether `pause` was called and `resume` was not."""

    @property
    def is_paused(self) -> bool:
        """Whether requests wait in the router."""
        return self._pool.is_held

    def check(self, model_info: Json) -> None:
        """Raise NotReadyError for a server that has missed the last update. `model_info`: SGLang's `/model_info`."""
        version = parse_weight_version(model_info.get("weight_version"))
        if self._weight_version is not None and not self._torn and version < self._weight_version:
            raise NotReadyError(
                f"the server has weight version {version}, and the last update through this router was version "
                f"{self._weight_version}: it receives requests again after the next update"
            )

    # -- pauses -------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Let new requests wait, and do with the running ones what vLLM's pause mode says. A second pause is allowed.

        Raises BadInputError for an unknown mode, DeadlineError if running requests did not end; then nothing is paused.
        """
        if mode not in PAUSE_MODES:
            raise BadInputError(f"mode must be one of {sorted(PAUSE_MODES)}, got {mode!r}")
        async with self._lock:
            await self._pause(PAUSE_MODES[mode])
            self._caller_has_paused = True

    async def _pause(self, mode: PauseMode) -> None:
        was_held = self._pool.is_held
        self._pool.hold(True)
        try:
            if mode is PauseMode.WAIT:
                await self._until_idle()
                mode = PauseMode.RETRACT
            await self._call_all(lambda adapter: adapter.pause_generation(mode))
        except VerlServerError:
            if not was_held:
                with contextlib.suppress(VerlServerError):
                    await self._continue()
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
        """Continue generation. Does nothing without a pause. Raises TornWeightsError after a failed update."""
        async with self._lock:
            if self._torn:
                raise TornWeightsError(f"{self._torn}: requests wait until another /update_weights has succeeded")
            if self._pool.is_held:
                await self._continue()
            self._caller_has_paused = False

    async def _continue(self) -> None:
        """Continue generation on all servers, and then in the router. If it fails, requests still wait."""
        await self._call_all(lambda adapter: adapter.continue_generation())
        self._pool.hold(False)

    # -- weights ------------------------------------------------------------------------------------

    async def update_weights(self, folder: Any, weight_version: Any = None) -> int:
        """Load a checkpoint folder into all servers; returns the version of the weights.

        A router that is not paused is paused meanwhile. `weight_version` None: one more than the largest known one.
        Raises BadInputError and UnsupportedError before anything changes, TornWeightsError when a server has failed.
        """
        require_checkpoint_folder(folder)
        async with self._lock:
            adapters = await self._answering()
            await self._require_loadable(folder, adapters)
            version = self._next_version(weight_version)
            if not self._pool.is_held:
                await self._pause(PauseMode.RETRACT)
            self._torn = "an update of the weights has not come to its end"
            outcomes = await asyncio.gather(
                *(
                    adapter.update_weights_from_disk(folder, flush_cache=True, weight_version=version)
                    for adapter in adapters.values()
                ),
                return_exceptions=True,
            )
            self._take_outcomes(list(adapters), outcomes, version)
            if not self._caller_has_paused:
                await self._continue()
            return version

    def _next_version(self, given: Any) -> int:
        """The version of the next weights. An update after a failed one may have the same version again."""
        largest = max(self._weight_version or 0, *(each.weight_version for each in self._pool.replicas.values()))
        if given is None:
            return largest + 1
        if not (is_whole_number(given) and given >= (largest if self._torn else largest + 1)):
            raise BadInputError(f"weight_version must be a whole number above {largest}, got {given!r}")
        return int(given)

    def _take_outcomes(self, names: Sequence[str], outcomes: Sequence[Any], version: int) -> None:
        """Record the update. Servers that were lost meanwhile are left out, if another one has loaded the weights."""
        failed = {name: error for name, error in zip(names, outcomes, strict=True) if isinstance(error, BaseException)}
        refused = {name: error for name, error in failed.items() if not _is_lost(error)}
        if refused or len(failed) == len(names):
            name, error = next(iter((refused or failed).items()))
            self._torn = f"the last update of the weights failed on {len(failed)} of {len(names)} servers"
            raise TornWeightsError(f"{self._torn}; {name}: {error}", cause=type(error).__name__) from error
        self._torn, self._weight_version = None, version
        for name in names:
            if name in failed:
                logger.warning("replica %s was lost during the update to weight version %d", name, version)
            elif name in self._pool.replicas:
                self._pool.update_replica(name, weight_version=version, admitted=True)

    async def _require_loadable(self, folder: str, adapters: Mapping[str, AsyncHttpServerEngineAdapter]) -> None:
        """Raise BadInputError for a folder that does not fit the model, and UnsupportedError for a vLLM server."""
        for name, adapter in adapters.items():
            args = await adapter.connection.get_resolved_args()
            if args.get("engine_kind") == EngineKind.VLLM:
                raise UnsupportedError(
                    f"{name} is a vLLM server, which loads no folder while it runs: push the weights with "
                    "VerlEngine(servers=[...]).update_weights_from_tensor, or use SGLang servers behind this router"
                )
            if self._manifest is None:  # later, SGLang names the folder of the last update as its model
                try:
                    self._manifest = await asyncio.to_thread(read_served_manifest, args)
                except (BadInputError, UnsupportedError) as error:
                    logger.warning("the folder %s is not compared with the served model: %s", folder, error)
        if self._manifest is not None:
            await asyncio.to_thread(require_whole_checkpoint, folder, self._manifest)

    # -- LoRA adapters ------------------------------------------------------------------------------

    async def load_lora_adapter(self, name: Any, folder: Any) -> None:
        """Load a LoRA adapter from a folder into all servers. An adapter of the same name is replaced.

        While an adapter is replaced, new requests wait in the router, and those that use it are finished first. When a
        server fails, no server has an adapter of this name. Raises BadInputError for a folder that is no adapter.
        """
        if not (isinstance(name, str) and name):
            raise BadInputError(f"lora_name must be a non-empty string, got {name!r}")
        tensors, config = await asyncio.to_thread(read_lora_adapter, folder)
        async with self._lock:
            if self._pool.is_held:
                raise NotReadyError("the router is paused: call /resume before a LoRA adapter is loaded")
            self._pool.hold(True)
            try:
                await self._call_all(lambda adapter: _unload(adapter, name))
                await self._call_all(lambda adapter: adapter.load_lora_adapter(name, tensors, config))
            except BaseException:
                with contextlib.suppress(VerlServerError):
                    await self._call_all(lambda adapter: _unload(adapter, name))
                raise
            finally:
                self._pool.hold(False)

    async def unload_lora_adapter(self, name: Any) -> None:
        """Unload a LoRA adapter from all servers when its requests have ended. Does nothing for an unknown name."""
        async with self._lock:
            await self._call_all(lambda adapter: _unload(adapter, str(name)))

    # -- servers ------------------------------------------------------------------------------------

    async def _answering(self) -> dict[str, AsyncHttpServerEngineAdapter]:
        """The servers that answer now, which take part in the operation. Raises NotReadyError if none does.

        A server that answers again later has missed the operation; `check` keeps it from requests if it was an update.
        """
        adapters = dict(self._adapters)

        async def answers(adapter: AsyncHttpServerEngineAdapter) -> bool:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await adapter.get_model_info()
            except (VerlServerError, TimeoutError):
                return False
            return True

        answering = await asyncio.gather(*(answers(adapter) for adapter in adapters.values()))
        found = {
            name: adapter for (name, adapter), is_there in zip(adapters.items(), answering, strict=True) if is_there
        }
        if not found:
            raise NotReadyError("no server of this router answers")
        return found

    async def _call_all(self, call: Call) -> None:
        """Call all servers that answer. A server that is lost meanwhile is left out, unless it is the last one."""
        adapters = await self._answering()
        outcomes = await asyncio.gather(*(call(adapter) for adapter in adapters.values()), return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        if refusals := [error for error in errors if not _is_lost(error)]:
            raise refusals[0]
        if len(errors) == len(outcomes):
            raise errors[0]


def _is_lost(error: BaseException) -> bool:
    """Whether the error says that the server has ended. A server that refuses a call, or hangs, still runs."""
    return isinstance(error, ServerDiedError) or (isinstance(error, ServerError) and "status" not in error.details)


async def _unload(adapter: AsyncHttpServerEngineAdapter, name: str) -> None:
    if name in await adapter.list_lora_adapters():
        await adapter.unload_lora_adapter(name)
