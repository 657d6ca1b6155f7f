"""SGLang's in-process `Engine` behind the same protocol, for `launch_server=False`.

SGLang's `Engine` binds its sockets to the event loop of the thread that makes it. Here one thread makes it
and runs every call, so the loop can never be another one; the price is that calls run one after the other
(a batch in one call still runs as a batch). The engine's scheduler failing ends this process: SGLang's
choice, and a reason to prefer `launch_server=True`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from verl_server.adapter import sglang as api
from verl_server.adapter.model_files import read_model_config
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, NotReadyError, ServerError, ShutDownError, StartupError, VerlServerError
from verl_server.server.warden import descendants, remove_shared_memory, shared_memory_of
from verl_server.types import Member
from verl_server.weights.loader import named_tensors_of
from verl_server.weights.update.servers import ReplayFn

Json = dict[str, Any]
R = TypeVar("R")


class InProcessBackend:
    """One `sglang.Engine`, made and used by one thread."""

    nearest_transport, trainer_host = "shared_memory", "127.0.0.1"

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="verl-server-engine")
        self.members = [Member("the engine", int(server_args.get("tp_size") or 1))]
        self._asleep: set[str] = set()
        self._fatal: VerlServerError | None = None
        self._version = str(server_args.get("weight_version", "default"))
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # or the nodes after the first never return
        self._engine = self._executor.submit(_make, dict(server_args)).result()
        self._sessions = hasattr(self._engine, "begin_weight_update")
        self._limits = self._run(lambda: _limits(self._engine, str(server_args["model_path"])))

    def _run(self, call: Callable[[], R]) -> R:
        return self._executor.submit(self._checked, call).result()

    def _checked(self, call: Callable[[], R]) -> R:
        if self._fatal is not None:
            raise self._fatal
        try:
            return call()
        except VerlServerError:
            raise
        except ValueError as error:
            raise BadInputError(f"SGLang refused the request: {error}") from error

    def generate(self, **request: Any) -> Any:
        return self._run(lambda: self._generate(request))

    def _generate(self, request: Json) -> Any:
        body = self._body(request)
        reply = self._engine.generate(**body)
        for item in reply if isinstance(reply, list) else [reply]:
            item["meta_info"]["weight_version"] = self._version
        return reply

    def _body(self, request: Json) -> Json:
        if self._asleep:
            raise NotReadyError(f"{sorted(self._asleep)} is released; call resume_memory_occupation first")
        known = ("prompt", "sampling_params", "input_ids", "rid")
        fields = {name: value for name, value in request.items() if name not in known}
        given = {name: request.get(name) for name in known}
        body = api.generate_payload(self._limits, stream=False, fields=fields, **given)
        if "text" in body:
            body["prompt"] = body.pop("text")
        return body

    async def async_generate(self, **request: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._checked, lambda: self._generate(request))

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        """The in-process engine runs one call at a time, so a stream is the finished reply in one piece."""
        yield self.generate(**request)

    async def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        yield await self.async_generate(**request)

    def flush_cache(self) -> None:
        self._run(lambda: self._engine.flush_cache())

    def pause(self, mode: PauseMode) -> None:
        """Nothing to hold: no other call can be under way."""

    def resume(self) -> None:
        """See `hold`."""

    def begin_weight_update(self) -> None:
        if self._sessions:
            self._run(lambda: _require(self._engine.begin_weight_update()))

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        (wire,) = wires
        tensors = named_tensors_of(wire)
        self._run(
            lambda: _require(
                self._engine.update_weights_from_tensor(tensors, load_format=WEIGHT_LOADER, flush_cache=flush_cache)
            )
        )
        self._version = weight_version

    def end_weight_update(self) -> None:
        if self._sessions:
            self._run(lambda: _require(self._engine.end_weight_update()))

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Nobody else is to catch up."""

    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self._run(lambda: _require_lora(self._engine.load_lora_adapter_from_tensors(name, dict(tensors), config)))

    def unload_lora(self, name: str) -> None:
        self._run(lambda: _require_lora(self._engine.unload_lora_adapter(name)))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        wanted = api.memory_tags(tags)
        if self._asleep.intersection(wanted):
            raise BadInputError(f"{sorted(self._asleep.intersection(wanted))} is released already")
        self._run(lambda: self._engine.release_memory_occupation(tags=wanted))
        self._asleep.update(wanted)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        wanted = api.memory_tags(tags) if tags is not None else sorted(self._asleep)
        if not wanted or set(wanted) - self._asleep:
            raise BadInputError(f"{wanted} is not released; released: {sorted(self._asleep)}")
        self._run(lambda: self._engine.resume_memory_occupation(tags=wanted))
        self._asleep.difference_update(wanted)

    @property
    def asleep(self) -> frozenset[str]:
        return frozenset(self._asleep)

    def fail(self, error: VerlServerError) -> None:
        self._fatal = self._fatal or error

    def shutdown(self) -> None:
        self.fail(ShutDownError("the engine was shut down"))
        engine, self._engine = self._engine, None
        if engine is not None:
            owned = shared_memory_of(descendants(os.getpid()))  # SGLang ends its workers with SIGKILL
            self._executor.submit(engine.shutdown).result()
            self._executor.shutdown()
            remove_shared_memory(owned, set(), reader=os.getpid())


def _make(server_args: Json) -> Any:
    import sglang

    loaders = server_args.get("custom_weight_loader") or []
    try:
        return sglang.Engine(**{**server_args, "custom_weight_loader": [*loaders, WEIGHT_LOADER]})
    except TypeError as error:
        raise BadInputError(f"SGLang does not take these server arguments: {error}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(f"the in-process engine did not start: {type(error).__name__}: {error}") from error


def _limits(engine: Any, model_path: str) -> api.Limits:
    return api.limits_of(engine.get_server_info(), read_model_config(model_path))


def _require_lora(reply: Any) -> None:
    if not reply.success:
        raise BadInputError(f"the in-process engine refused the adapter: {reply.error_message}")


def _require(reply: Any) -> None:
    """SGLang's control calls return `(success, message)`."""
    success, message = reply[0], reply[1]
    if not success:
        raise ServerError(f"the in-process engine reports failure: {message}")
