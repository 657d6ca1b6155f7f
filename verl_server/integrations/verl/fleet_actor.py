"""`FleetActor`: the Ray actor that owns a fleet. It is the only owner of the servers' sleep and wake.

verl's replicas, trainer ranks and agent loops all call this actor, so it always knows which memory is released and
which weights the servers have. It imports no verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from verl_server.config import RolloutMode
from verl_server.errors import BadInputError, ServerBusyError, StartupError, VerlServerError, from_wire, to_wire
from verl_server.integrations.verl.generation import (
    Generations,
    TokenOutput,
    make_output,
    make_request,
    require_no_other_media,
    step_fields,
)
from verl_server.integrations.verl.settings import FleetSpec
from verl_server.rollout.fleet import Event, ReplicaState
from verl_server.rollout.launchers.ray_launcher import NodePlace, PlacedLauncher
from verl_server.rollout.manager import RolloutManager
from verl_server.types import Json
from verl_server.validation import require_key
from verl_server.weights.update.options import Servers

logger = logging.getLogger(__name__)


# -- Replay jobs ------------------------------------------------------------------------------------
# `ReplayJobs`: asks the trainer to load the published weights into a server that was started again.
#
# The trainer has the weights in its staging memory, and the actor of the fleet has the servers. A recovery thread of
# the fleet adds a job and waits. A thread of trainer rank 0 takes the job, loads the weights, and reports the outcome.

OFFER_AGAIN_S = 15.0
"""Seconds until a job is offered again whose offer has not reached the trainer."""
TAKE_TIMEOUT_S = 120.0
"""Seconds until the trainer takes a job. It asks for jobs all the time, also while it computes."""


@dataclass
class _Job:
    publication: str
    """Id of the published weights."""
    servers: Servers
    offered_at: float = -math.inf
    """Time of the last offer to the trainer (`time.monotonic`)."""
    taken: threading.Event = field(default_factory=threading.Event)
    """Set by the first call of the trainer for this job."""
    done: threading.Event = field(default_factory=threading.Event)
    error: VerlServerError | None = None


class ReplayJobs:
    """Jobs between the threads of the fleet and the trainer. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: seconds until a job that the trainer has not finished fails."""
        self._timeout_s = timeout_s
        self._jobs: dict[str, _Job] = {}
        self._added = threading.Condition()

    def run(self, publication: str, servers: Servers) -> None:
        """Load the weights of `publication` into `servers`. Raises the error of the trainer.

        Raises VerlServerError, not DeadlineError, if the trainer does not answer: the server is well.
        """
        job_id, job = uuid.uuid4().hex, _Job(publication, servers)
        with self._added:
            self._jobs[job_id] = job
            self._added.notify()
        try:
            if not job.taken.wait(TAKE_TIMEOUT_S):
                raise VerlServerError(f"the trainer did not take the job to load weights within {TAKE_TIMEOUT_S:g} s")
            if not job.done.wait(self._timeout_s):
                raise VerlServerError(f"the trainer did not load the published weights within {self._timeout_s:g} s")
            if job.error is not None:
                raise job.error
        finally:
            with self._added:
                del self._jobs[job_id]

    def next(self, wait_s: float) -> tuple[str, str] | None:
        """The id and the publication of the next job. None if there is none within `wait_s` seconds.

        The answer may get lost. So a job is offered again until the trainer makes a call for it.
        """
        deadline = time.monotonic() + wait_s
        with self._added:
            while True:
                now = time.monotonic()
                for job_id, job in self._jobs.items():
                    if not job.taken.is_set() and now >= job.offered_at + OFFER_AGAIN_S:
                        job.offered_at = now
                        return job_id, job.publication
                if now >= deadline:
                    return None
                self._added.wait(min(1.0, deadline - now))

    def servers_of(self, job_id: str) -> Servers:
        """The servers of a job. Raises VerlServerError if the job has ended."""
        job = self._jobs.get(job_id)
        if job is None:
            raise VerlServerError("the job has ended: its server is not waiting for weights any more")
        job.taken.set()
        return job.servers

    def finish(self, job_id: str, error: Json | None) -> None:
        """Record the outcome of a job; `error` as `to_wire` converts it."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.error = None if error is None else from_wire(error)
            job.taken.set()
            job.done.set()


# -- Replicas ---------------------------------------------------------------------------------------
# `FleetReplicas`: starts the manager of a fleet and its replicas, one at a time or together.

T = TypeVar("T")

KEY_VARIABLE = "VERL_SERVER_API_KEY"
"""Environment variable with the key for requests to a reward model."""
OTHER_ENVIRONMENT = (
    "Do not install an engine into the environment of verl, which needs other versions of its packages: set the "
    "environment variable VERL_SERVER_PYTHON, or engine_kwargs.verl_server.server_python, to the interpreter of an "
    "environment with the engine"
)
MAX_THREADS = 64
"""Maximum number of blocking calls at the same time."""


class Threads:
    """Runs blocking calls of an event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="verl-server-actor")

    def run(self, call: Callable[..., T], *args: Any) -> Coroutine[Any, Any, T]:
        async def wait() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args))

        return wait()


class FleetReplicas:
    """The manager of the fleet, which is made with the first replica. Must be used in one event loop."""

    def __init__(self, spec: FleetSpec, threads: Threads) -> None:
        self._spec, self._threads = spec, threads
        self._launcher = PlacedLauncher()
        self._manager: asyncio.Future[RolloutManager] | None = None

    async def manager(self) -> RolloutManager:
        """The manager, which has no replicas at first. Raises the error of its start."""
        if self._manager is None:
            self._manager = asyncio.ensure_future(self._threads.run(self._make_manager))
        return await asyncio.shield(self._manager)

    def _make_manager(self) -> RolloutManager:
        spec = self._spec
        # The fleet's own mode `standalone` always broadcasts. With `hybrid`, servers on the machine of the trainer read
        # the weights in place, also when they have devices of their own.
        mode = RolloutMode.HYBRID if spec.mode is RolloutMode.STANDALONE else spec.mode
        key = {"api_key": _require_key()} if spec.serves_http else {}
        return RolloutManager(
            0,
            mode=mode,
            launcher=self._launcher,
            config=spec.own.adapter_config,
            router_process=spec.serves_http,
            on_event=_log_event,
            env=spec.own.env,
            **spec.server_args | key,
        )

    async def add(self, name: str, places: Sequence[NodePlace]) -> str:
        """Start the replica `name` at `places`. Returns the address at which it is known to verl, as HOST:PORT."""
        manager = await self.manager()
        if any(view.name == name for view in manager.replicas):
            raise BadInputError(f"there is a replica {name!r} already; the name of a replica contains its rank")
        self._launcher.assign(name, places)
        try:
            await self._threads.run(manager.add_replica, name)
        except StartupError as error:
            if self._spec.own.adapter_config.server_python is None:
                raise StartupError(f"{error.message}. {OTHER_ENVIRONMENT}", **error.details) from error
            raise
        if self._spec.serves_http:
            return urlsplit(manager.router_url).netloc
        view = next(view for view in manager.replicas if view.name == name)
        return urlsplit(view.base_url or f"//{name}").netloc

    @property
    def machines(self) -> frozenset[str]:
        """Machine ids of the nodes of all servers."""
        return self._launcher.machines

    async def shutdown(self) -> None:
        """End all servers."""
        if self._manager is not None:
            with contextlib.suppress(VerlServerError):
                await self._threads.run((await self._manager).shutdown)


def _require_key() -> str:
    """The key for requests over HTTP. Raises BadInputError if the environment has none."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise BadInputError(
            "verl asks a reward model over HTTP, and a server of this library answers only requests with a key: set "
            f"the environment variable {KEY_VARIABLE} in all processes of the run to a random text, and let the reward "
            f"function send it as the header `Authorization: Bearer KEY`"
        )
    return require_key(KEY_VARIABLE, key)


def _log_event(event: Event) -> None:
    """Write changes that a user must know into the log of the actor, which Ray shows in the log of the trainer."""
    change = f"{event['replica']}: {event['before']} -> {event['after']}"
    if event["error"]:
        logger.warning("verl_server: %s: %s", change, event["error"])
    elif event["after"] == "healthy":
        logger.warning("verl_server: %s, weight version %s", change, event["version"])


# -- Fleet actor ------------------------------------------------------------------------------------

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
        """See `Servers.published`.

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
