"""The trainer's side of a fleet: `RayFleet`, the actor's fleet on rank 0, and `TrainerEngine`, the engine of all ranks.

It imports no verl.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from verl_server.config import PauseMode
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import (
    DeadlineError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    UnsupportedError,
    VerlServerError,
    from_wire,
    to_wire,
)
from verl_server.integrations.verl.fleet_actor import FLEET
from verl_server.integrations.verl.settings import LORA_NAME, FleetSpec
from verl_server.ranks.placement import machine_id
from verl_server.rollout.launchers.ray_server import first_line
from verl_server.types import Json, ServerInfo
from verl_server.weights.device import accelerator, as_current
from verl_server.weights.update.options import ReplayFn, Servers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


# -- Ray target -------------------------------------------------------------------------------------
# `RayTarget`: calls of trainer rank 0 to the servers that the actor of a fleet has.

POLL_S = 0.5


class RayTarget(Servers):
    """Servers of the actor: those of the fleet, or the server of a replay job.

    `timeout_s`: seconds for one call. The actor's own calls have shorter deadlines, so it is reached only if the actor
    itself does not answer. `get_failure` returns an error that ends calls in flight.
    """

    def __init__(
        self,
        actor: Any,
        target: str,
        timeout_s: float,
        get_failure: Callable[[], VerlServerError | None] = lambda: None,
    ) -> None:
        self._actor, self._target, self._timeout_s, self._get_failure = actor, target, timeout_s, get_failure

    def call(self, method: str, *args: Any) -> Any:
        """The value of a method or a property in the actor. Raises its error."""
        return unwrap(self.wait(self._actor.call.remote(self._target, method, args), method))

    def wait(self, reference: Any, operation: str) -> Any:
        """The value of a Ray reference. Raises the actor's error; DeadlineError; ServerDiedError if it has ended."""
        deadline = time.monotonic() + self._timeout_s
        future = reference.future()  # `ray.get` warns in an asynchronous actor, also in its threads
        while not concurrent.futures.wait([future], POLL_S).done:
            if (failure := self._get_failure()) is not None:
                raise failure
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the actor of the fleet did not answer {operation} within {self._timeout_s:g} s",
                    operation=operation,
                    seconds=self._timeout_s,
                )
        try:
            return future.result()
        except RayTaskError as error:  # the actor's method has raised
            raise from_wire(to_wire(error.cause)) from error
        except ActorUnavailableError as error:
            raise ServerError(f"the actor of the fleet cannot be reached now: {first_line(error)}") from error
        except RayError as error:
            raise ServerDiedError(f"the actor of the fleet has ended: {first_line(error)}") from error

    @property
    def members(self) -> Sequence[ServerInfo]:
        members: Sequence[ServerInfo] = self.call("members")
        return members

    @property
    def undefined_weights(self) -> str | None:
        reason: str | None = self.call("undefined_weights")
        return reason

    def pause(self, mode: PauseMode) -> None:
        self.call("pause", mode)

    def resume(self) -> None:
        self.call("resume")

    def find_lost(self) -> Collection[str]:
        lost: Collection[str] = self.call("find_lost")
        return lost

    def begin_weight_update(self) -> None:
        self.call("begin_weight_update")

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        self.call("load", messages, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self.call("end_weight_update")

    @property
    def can_leave_out(self) -> bool:
        return bool(self.call("can_leave_out"))

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        return bool(self.call("leave_out", list(failed), error))

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        self.call("published", version, whole, None)


def unwrap(reply: Json) -> Any:
    """The value of a reply of `FleetActor.call`. Raises its error."""
    if "error" in reply:
        raise from_wire(reply["error"])
    return reply["value"]


# -- Ray fleet --------------------------------------------------------------------------------------

JOB_WAIT_S = 5.0
"""Seconds that one request for a job waits in the actor."""
JOB_TIMEOUT_S = 60.0
"""Seconds for one call about jobs."""
JOIN_TIMEOUT_S = 10.0


class RayFleet(RayTarget):
    """The fleet of an actor. It is its own `RolloutFleet`."""

    def __init__(self, actor: Any, timeout_s: float) -> None:
        super().__init__(actor, FLEET, timeout_s, lambda: self._failure)
        self.step_of_update: int | None = None
        """Training step of the weights of the present or the next update."""
        self._failure: VerlServerError | None = None
        self._lock = threading.Lock()
        self._replay: ReplayFn | None = None
        self._publication: str | None = None
        self._closed = threading.Event()
        self._worker = threading.Thread(target=self._run_jobs, name="verl-server-replay", daemon=True)

    @property
    def backend(self) -> RayFleet:
        return self

    # -- use by the engine ------------------------------------------------------------------------------

    def attach(self) -> None:
        self.call("attach")
        self._worker.start()

    def shutdown(self) -> None:
        """End the use of the fleet, which keeps running."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(VerlServerError):  # the actor may have ended
            self.call("shutdown")
        if self._worker.is_alive():
            self._worker.join(JOIN_TIMEOUT_S)

    def fail(self, error: VerlServerError) -> None:
        self._failure = self._failure or error

    @property
    def weight_version(self) -> int:
        return int(self.call("weight_version"))

    def parameter_dtypes(self) -> Sequence[Json | None]:
        return list(self.call("parameter_dtypes"))

    def nearest_transport(self) -> str:
        """Shared memory if all servers run on the machine of this rank."""
        described = self.wait(self._actor.describe.remote(), "describe")
        if described["machines"] == [machine_id()]:
            return str(self.call("nearest_transport"))
        return "distributed"

    @property
    def trainer_host(self) -> str:
        described = self.wait(self._actor.describe.remote(), "describe")
        return "127.0.0.1" if described["machines"] == [machine_id()] else str(ray.util.get_node_ip_address())

    @property
    def released_memory(self) -> frozenset[str]:
        return frozenset(self.call("released_memory"))

    def flush_cache(self) -> None:
        self.call("flush_cache")

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self.call("release_memory_occupation", tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        """Resume those of `tags` that are released: `sleep` of an adapter's servers keeps the weights."""
        self.wait(self._actor.resume_memory.remote(("kv_cache", "weights") if tags is None else tuple(tags)), "resume")

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self.call("load_lora_adapter", name, dict(tensors), config)

    def unload_lora_adapter(self, name: str) -> None:
        self.call("unload_lora_adapter", name)

    def list_lora_adapters(self) -> frozenset[str]:
        return frozenset(self.call("list_lora_adapters"))

    def name_version(self, version: int, step: int) -> None:
        """Tell the actor the training step of a weight version."""
        self.wait(self._actor.name_version.remote(version, step), "name_version")

    # -- published weights ------------------------------------------------------------------------------

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        publication = None if replay is None else uuid.uuid4().hex
        with self._lock:
            before = self._replay, self._publication
            self._replay, self._publication = replay, publication
        try:
            step = self.step_of_update
            unwrap(self.wait(self._actor.published.remote(version, whole, publication, step), "published"))
        except BaseException:
            with self._lock:
                self._replay, self._publication = before
            raise

    def _run_jobs(self) -> None:
        """Load the published weights into servers that were started again, until the end of the engine or the actor."""
        with contextlib.suppress(ActorDiedError):
            while not self._closed.is_set():
                job = self._ask(lambda: self._actor.next_job.remote(JOB_WAIT_S))
                if job is not None:
                    self._finish(job[0], self._run_job(*job))

    def _finish(self, job_id: str, outcome: Json | None) -> None:
        self._ask(lambda: self._actor.finish_job.remote(job_id, outcome))

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The answer of the actor to `call`, which is repeated until the end of the engine. None: no answer.

        The actor may be unavailable for a moment. Raises ActorDiedError.
        """
        pending: Any = None
        while True:
            try:
                pending = pending or call().future()
                return pending.result(JOB_TIMEOUT_S)  # after a timeout, the same answer is awaited: it may have a job
            except ActorDiedError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of Ray
                if pending is not None and pending.done():
                    pending = None
                if self._closed.wait(JOB_WAIT_S):
                    return None
                logger.warning("the actor of the fleet does not answer, and is asked again: %s", error)

    def _run_job(self, job_id: str, publication: str) -> Json | None:
        """Load the published weights into the server of a job. Returns the error, or None."""
        with self._lock:
            replay = self._replay if publication == self._publication else None
        if self._closed.is_set():
            return to_wire(ShutDownError("the engine was shut down"))
        if replay is None:
            return to_wire(VerlServerError("other weights were published meanwhile"))
        try:
            replay(RayTarget(self._actor, job_id, self._timeout_s, lambda: self._failure))
        except Exception as error:  # noqa: BLE001 - the actor records it
            return to_wire(error)
        return None

    # -- generation: verl asks the actor ------------------------------------------------------------------

    def generate(self, **request: Any) -> NoReturn:
        raise UnsupportedError("verl's agent loops generate, not the trainer")

    async def async_generate(self, **request: Any) -> NoReturn:
        self.generate(**request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        self.generate(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        self.generate(**request)


# -- Trainer engine ---------------------------------------------------------------------------------
# `TrainerEngine`: the `VerlEngine` of all trainer ranks for one fleet, made at the first use.
#
# verl makes the ranks before the servers, so the fleet does not exist when a rank starts.

T = TypeVar("T")

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class TrainerEngine:
    """Pushes weights of the trainer into the servers of the fleet `actor_name`.

    Must be used by all ranks of the default process group, with the same calls in the same order. The methods do not
    block the event loop: verl's workers are asynchronous actors.
    """

    def __init__(self, actor_name: str, spec: FleetSpec) -> None:
        self._actor_name, self._spec = actor_name, spec
        self._engine: VerlEngine | None = None
        self._fleet: RayFleet | None = None

    async def resume(self, tags: Sequence[str]) -> None:
        """Resume memory of the servers. Does nothing if `sleep` releases nothing."""
        if self._spec.frees_memory:
            await self._run(lambda engine: engine.resume_memory_occupation(list(tags)))

    async def update_weights(self, weights: NamedTensors, global_steps: int | None) -> None:
        """Push `weights` as the weights of the training step `global_steps`. Consumes all of them on every rank."""

        def update(engine: VerlEngine) -> None:
            if self._fleet is not None:
                self._fleet.step_of_update = None if global_steps is None else int(global_steps)
            engine.update_weights_from_tensor(weights)

        await self._run(update)

    async def load_adapter(self, weights: NamedTensors, config: Mapping[str, Any], global_steps: int | None) -> None:
        """Push the policy's LoRA adapter."""

        def load(engine: VerlEngine) -> None:
            engine.load_lora_adapter(LORA_NAME, weights, plain_lora_config(config))
            if self._fleet is not None and global_steps is not None:
                self._fleet.name_version(engine.weight_version, int(global_steps))

        await self._run(load)

    @property
    def _timeout_s(self) -> float:
        return 5 * self._spec.own.adapter_config.timeouts.weights_s

    async def _run(self, call: Callable[[VerlEngine], T]) -> T:
        """Run a call in a thread that has the device of this thread as its current device."""
        device = accelerator()

        def run() -> T:
            with as_current(device):
                if self._engine is None:
                    self._engine = self._make_engine()
                return call(self._engine)

        return await asyncio.to_thread(run)

    def _make_engine(self) -> VerlEngine:
        """The engine of this rank. Collective over all ranks. Raises ServerDiedError if there is no fleet."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = self._spec.own
        if dist.get_rank() == 0:
            self._fleet = RayFleet(find_fleet(self._actor_name), self._timeout_s)
        config = own.adapter_config
        return VerlEngine(
            mesh,
            fleet=self._fleet,
            weights=own.weights_config,
            timeouts=config.timeouts,
            engine_kind=config.engine_kind,
            server_python=config.server_python,
            **self._spec.server_args,
        )

    def shutdown(self) -> None:
        """End the use of the fleet."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def find_fleet(actor_name: str) -> Any:
    """The actor of a fleet. Raises ServerDiedError if there is none."""
    try:
        return ray.get_actor(actor_name)
    except ValueError as error:
        raise ServerDiedError(
            f"the fleet {actor_name} does not run: its actor has ended or was never started; the log of the actor has "
            "the reason (ray logs actor)"
        ) from error


def plain_lora_config(config: Mapping[str, Any]) -> Json:
    """verl's configuration of an adapter with JSON values only, as in PEFT's `adapter_config.json`."""
    plain: Json = {}
    for key, value in config.items():
        value = getattr(value, "value", value)
        if isinstance(value, (set, tuple)):
            value = sorted(value)
        if value is None or isinstance(value, (str, int, float, bool, list, dict)):
            plain[key] = value
    return plain


# -- Watch ------------------------------------------------------------------------------------------
# Ends verl's task runner when the servers of a fleet are lost for ever.
#
# The asynchronous trainers of verl replace failed requests by new ones, without an end and without a pause
# (`ReplayBufferAsync`). So a run whose servers cannot be started any more would never end.

WAIT_S = 30.0
"""Seconds that one call waits in the actor."""
SILENT_S = 1800.0
"""Seconds without an answer of the actor, after which the fleet counts as lost."""
GRACE_S = 10.0
"""Seconds after the end of the actor: at the end of a job, Ray ends this process, too."""

_watched: set[Any] = set()
"""Ids of the actors that are watched."""
_lock = threading.Lock()


def watch(actor: Any, name: str) -> None:
    """Watch the fleet `name` in a thread of this process. Does nothing if it is watched already."""
    with _lock:
        if actor._actor_id in _watched:
            return
        _watched.add(actor._actor_id)
    threading.Thread(target=_watch, args=(actor, name), name=f"verl-server-watch-{name}", daemon=True).start()


def _watch(actor: Any, name: str) -> None:
    answered_at = time.monotonic()
    while True:
        try:
            reason = actor.wait_for_loss.remote(WAIT_S).future().result(2 * WAIT_S)
            answered_at = time.monotonic()
        except ActorDiedError as error:
            time.sleep(GRACE_S)
            reason = f"its actor has ended: {first_line(error)}"
        except Exception as error:  # noqa: BLE001 - Ray may only be busy
            silent_s = time.monotonic() - answered_at
            logger.warning("the actor of the fleet %s has not answered for %.0f s: %r", name, silent_s, error)
            if silent_s < SILENT_S:
                time.sleep(WAIT_S)
                continue
            reason = f"its actor has not answered for {silent_s:.0f} s"
        if reason is not None:
            _end(f"verl_server: the run cannot go on, because the fleet {name} is lost: {reason}")


def _end(message: str) -> None:
    """End this process. An exception of a thread would not end it."""
    logger.critical(message)
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)
