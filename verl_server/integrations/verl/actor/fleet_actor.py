"""`FleetActor`: the Ray actor that owns a fleet. It is the only owner of the servers' sleep and wake.

verl's replicas, trainer ranks and agent loops all call this actor, so it always knows which memory is released and
which weights the servers have. It imports no verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from verl_server.errors import ServerBusyError, VerlServerError, to_wire
from verl_server.integrations.verl.actor.generation import (
    Generations,
    make_output,
    make_request,
    require_no_other_media,
    step_fields,
)
from verl_server.integrations.verl.actor.replay_jobs import ReplayJobs
from verl_server.integrations.verl.actor.replicas import FleetReplicas, Threads
from verl_server.integrations.verl.actor.token_output import TokenOutput
from verl_server.integrations.verl.fleet_spec import FleetSpec
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.launchers.ray_placed_launcher import NodePlace
from verl_server.rollout.manager import RolloutManager
from verl_server.types import Json

logger = logging.getLogger(__name__)

FLEET = "fleet"
"""Target of `FleetActor.call`: the backend of the fleet. Other targets are the ids of replay jobs."""
IDLE_TIMEOUT_S = 60.0
"""Seconds that `sleep` waits for requests that end, for example after they were aborted."""
IDLE_POLL_S = 0.05
LOSS_POLL_S = 1.0
STALE_TIMEOUT_S = 3600.0
"""Seconds without a server that has the published weights, after which the fleet counts as lost. An asynchronous
trainer of verl waits for samples, and pushes no weights meanwhile. The limit is longer than a training step."""
MEMORY = "memory"
"""Reason for which requests are held while memory is released."""


class FleetActor:
    """See the module. The methods from `generate` to `stop_profile` are those that verl calls on a server."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec, self._threads = spec, Threads()
        self._replicas = FleetReplicas(spec, self._threads)
        self._jobs = ReplayJobs(2 * spec.own.adapter_config.timeouts.weights_s)
        self._generations: Generations | None = None
        self._memory_lock = asyncio.Lock()
        self._steps: dict[int, int] = {}
        """Training step of each weight version."""
        self._latest_step = 0
        self._served_at = time.monotonic()
        """Last time at which a server had the published weights, was being started again, or was asleep."""

    # -- replicas -------------------------------------------------------------------------------------

    async def add_replica(self, name: str, places: Sequence[NodePlace]) -> str:
        """Start one more replica and return its address. Raises the errors of `RolloutManager.add_replica`."""
        address = await self._replicas.add(name, places)
        if self._generations is None:
            self._generations = Generations((await self._replicas.manager()).router)
        return address

    async def describe(self) -> Json:
        """`machines`: machine ids of the servers. `status`: the state of each replica."""
        manager = await self._replicas.manager()
        status = [
            {
                "name": view.name, "state": str(view.state), "weight_version": view.weight_version,
                "restarts": view.restarts, "main_pid": view.pids.main if view.pids else None,
            }
            for view in manager.replicas
        ]  # fmt: skip
        return {"machines": sorted(self._replicas.machines), "status": status}

    async def wait_for_loss(self, wait_s: float) -> str | None:
        """Why no server of the fleet will serve again. None if there is no reason within `wait_s` seconds."""
        manager, deadline = await self._replicas.manager(), time.monotonic() + wait_s
        while time.monotonic() < deadline:
            replicas = manager.replicas
            states = {view.state for view in replicas}
            if states == {ReplicaState.FAILED}:
                return str(replicas[0].error)
            is_asleep = bool(manager.backend.released_memory)
            if is_asleep or not states or states - {ReplicaState.FAILED, ReplicaState.STALE}:
                self._served_at = time.monotonic()
            elif time.monotonic() - self._served_at > STALE_TIMEOUT_S:
                return f"its servers have waited for weights for {STALE_TIMEOUT_S:g} s"
            await asyncio.sleep(LOSS_POLL_S)
        return None

    async def get_spec(self) -> FleetSpec:
        """The settings of the fleet."""
        return self._spec

    async def shutdown(self) -> None:
        """End all servers."""
        await self._replicas.shutdown()

    # -- requests of agent loops ------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        replica: str | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Generate for one prompt. A lost server and a weight update do not end the generation.

        verl sends a new `request_id` with each call, so it is no id of the sample. `replica`: the replica that verl has
        chosen for the conversation; its prefix cache has the earlier turns. Raises BadInputError, UnsupportedError, and
        the error of the fleet if no server can be started any more.
        """
        media = {"video_data": video_data, "audio_data": audio_data, "mm_processor_kwargs": mm_processor_kwargs}
        require_no_other_media(media)
        request = make_request(self._spec, prompt_ids, sampling_params, image_data)
        if request["sampling_params"]["max_new_tokens"] == 0:
            return TokenOutput([], [] if request["return_logprob"] else None, "length", 0, self._step_fields())
        assert self._generations is not None
        try:
            reply = await self._generations.run(request, replica)
        except VerlServerError as error:
            logger.error("verl_server: a request of verl has failed: %s", error)  # noqa: TRY400 - verl shows it nowhere
            raise
        return make_output(request, reply, self._steps, self._latest_step)

    def _step_fields(self) -> Json:
        return step_fields([self._latest_step]) | {"num_cached_tokens": 0}

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort all requests; they return what they have. New requests wait for `resume_generation`."""
        assert self._generations is not None
        await self._generations.abort(reject_request)

    async def resume_generation(self) -> None:
        """Take requests again after `abort_all_requests`."""
        assert self._generations is not None
        self._generations.resume()

    # -- memory ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Release the memory that verl's trainer needs. Each replica of the fleet calls it; the first call counts."""
        await self._release(self._spec.sleep_tags)

    async def wake_up(self) -> None:
        """Resume all memory. A fleet without pushed weights loads its checkpoint again."""
        await self.resume_memory(("kv_cache", "weights"))

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV cache, if the servers share their devices."""
        await self._release(("kv_cache",) if self._spec.frees_memory else ())

    async def resume_kv_cache(self) -> None:
        """Resume the memory of the KV cache."""
        await self.resume_memory(("kv_cache",))

    async def clear_kv_cache(self) -> None:
        """Remove the prefix cache."""
        manager = await self._replicas.manager()
        await self._threads.run(manager.flush_cache)

    async def _release(self, tags: Sequence[str]) -> None:
        """Release those of `tags` that are not released. Waits until the last requests have ended.

        New requests wait until all memory is resumed. Raises ServerBusyError after IDLE_TIMEOUT_S seconds.
        """
        async with self._hold_for_memory() as manager:
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            while wanted := sorted(set(tags) - manager.backend.released_memory):
                try:
                    self._require_idle()
                    await self._threads.run(manager.release_memory_occupation, wanted)
                except ServerBusyError:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(IDLE_POLL_S)

    def _require_idle(self) -> None:
        """Raise ServerBusyError while the router has requests, also such that wait there for a server."""
        assert self._generations is not None
        if num_running := self._generations.num_running:
            raise ServerBusyError(f"{num_running} requests of verl have not ended; the memory is not released")

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Resume those of `tags` that are released."""
        async with self._hold_for_memory() as manager:
            if wanted := sorted(set(tags) & manager.backend.released_memory):
                await self._threads.run(manager.resume_memory_occupation, wanted)

    @contextlib.asynccontextmanager
    async def _hold_for_memory(self) -> AsyncIterator[RolloutManager]:
        """Hold new requests during the body, and after it while memory is released. One body at a time."""
        async with self._memory_lock:
            manager = await self._replicas.manager()
            assert self._generations is not None
            self._generations.hold(MEMORY)
            try:
                yield manager
            finally:
                if not manager.backend.released_memory:
                    self._generations.release(MEMORY)

    # -- the trainer ----------------------------------------------------------------------------------

    async def call(self, target: str, method: str, args: Sequence[Any]) -> Json:
        """Call a method, or read a property, of the fleet's backend or of the servers of a replay job.

        Returns `{"value": ...}`, or `{"error": ...}` for the trainer to raise.
        """
        try:
            manager = await self._replicas.manager()
            subject = manager.backend if target == FLEET else self._jobs.servers_of(target)
            return {"value": await self._threads.run(_call, subject, method, args)}
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            return {"error": to_wire(error)}

    async def published(self, version: int, whole: bool, publication: str | None, step: int | None) -> Json:
        """See `UpdatableServers.published`.

        `publication`: id of the weights if the trainer can replay them. `step`: training step of the weights.
        """
        replay: Callable[[Any], None] | None = None
        if publication is not None:
            replay = functools.partial(self._jobs.run, publication)
        reply = await self.call(FLEET, "published", (version, whole, replay))
        if step is not None and "error" not in reply:
            await self.name_version(version, step)
        return reply

    async def name_version(self, version: int, step: int) -> None:
        """Record the training step of a weight version, or of the adapter that is used with it."""
        self._steps[version] = self._latest_step = step

    async def next_job(self, wait_s: float) -> tuple[str, str] | None:
        """The next job for the trainer, see `ReplayJobs.next`."""
        return await self._threads.run(self._jobs.next, wait_s)

    async def finish_job(self, job_id: str, error: Json | None) -> None:
        self._jobs.finish(job_id, error)

    # -- profiles -------------------------------------------------------------------------------------

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: verl also calls it if only the trainer is profiled."""

    async def stop_profile(self) -> None:
        """Do nothing: no profile is running."""


def _call(subject: Any, method: str, args: Sequence[Any]) -> Any:
    value = getattr(subject, method)
    return value(*args) if callable(value) else value
