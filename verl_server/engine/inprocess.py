"""SGLang's in-process `Engine` as a backend, for `launch_server=False`.

SGLang's `Engine` binds its sockets to the event loop of the thread that creates it. Therefore one thread creates the
engine and runs every call, one call after the other; a batch within one call still runs as a batch. When the engine's
scheduler fails, SGLang ends this process. `launch_server=True` avoids both limits.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson

from verl_server.adapter.client import tags_to_release, tags_to_resume, undefined_weights_reason
from verl_server.adapter.model_files import read_model_configs
from verl_server.adapter.sglang.replies import parameter_dtypes, prompt_limits, require_logprobs
from verl_server.adapter.sglang.requests import explain_refusal, generate_payload, require_known_fields
from verl_server.adapter.sglang.server_arguments import (
    WEIGHT_LOADER,
    loses_weights,
    require_lora,
    require_memory_saver,
    require_unpacked_experts,
)
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, NotReadyError, ServerError, ShutDownError, StartupError, VerlServerError
from verl_server.server.server_main import REFUSAL, find_refusal
from verl_server.server.warden.processes import find_shared_memory, list_descendants, remove_shared_memory
from verl_server.types import Json, ServerInfo, parse_weight_version
from verl_server.weights.transports.base import message_as_named_tensors
from verl_server.weights.update.options import ReplayFn, Servers

R = TypeVar("R")


class InProcessBackend(Servers):
    """One `sglang.Engine`, created and used by one thread."""

    members: Sequence[ServerInfo] = ()
    weight_version = 0

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="verl-server-engine")
        self.members = [ServerInfo("the engine", int(server_args.get("tp_size") or 1))]
        self._released_memory: set[str] = set()
        self._weights_undefined = False
        """Whether the weights were released, and not all pushed since."""
        self._failure: VerlServerError | None = None
        self.weight_version = parse_weight_version(server_args.get("weight_version"))
        # Without this variable, SGLang's `Engine` on the nodes after the first never returns from its constructor.
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        self._engine = self._executor.submit(_make_engine, dict(server_args)).result()
        self._has_update_sessions = hasattr(self._engine, "begin_weight_update")
        self._server_info: Json = self._run(self._engine.get_server_info)
        """Arguments of the engine with the values that SGLang has chosen."""
        model_path = str(server_args["model_path"])
        configs = read_model_configs(model_path, str(server_args.get("tokenizer_path") or model_path))
        self._limits = prompt_limits(self._server_info, *configs)

    def _run(self, call: Callable[[], R]) -> R:
        return self._executor.submit(self._call, call).result()

    def _call(self, call: Callable[[], R]) -> R:
        """In the engine's thread: `call()`, with SGLang's ValueError as BadInputError."""
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except VerlServerError:
            raise
        except ValueError as error:
            raise BadInputError(f"SGLang refused the request: {error}") from error

    def parameter_dtypes(self) -> Sequence[Json | None]:
        return [parameter_dtypes(self._server_info)]

    # -- generation -----------------------------------------------------------------------------------

    def generate(self, **request: Any) -> Any:
        return self._run(lambda: self._generate(request))

    def _generate(self, request: Json) -> Any:
        arguments = self._engine_arguments(request)
        try:
            reply = self._engine.generate(**arguments)
        except (TypeError, ValueError) as error:
            refusal = BadInputError(f"SGLang refused the request: {error}")
            raise explain_refusal(refusal, request.get("sampling_params")) from error
        for item in reply if isinstance(reply, list) else [reply]:
            meta_info = item["meta_info"]
            meta_info["weight_version"] = self.weight_version
            for span in meta_info.get("weight_versions") or ():  # SGLang's `Engine` keeps the label of its start
                span["version"] = self.weight_version
        require_logprobs(reply)
        # All trainer ranks get what a server sends: no tuples, no infinity.
        return orjson.loads(orjson.dumps(reply, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))

    def _engine_arguments(self, request: Json) -> Json:
        """Keyword arguments of `sglang.Engine.generate`. Raises BadInputError and NotReadyError."""
        if self._released_memory:
            raise NotReadyError(f"{sorted(self._released_memory)} is released; call resume_memory_occupation first")
        given = {name: value for name, value in request.items() if value is not None}
        require_known_fields(given, inspect.signature(self._engine.generate).parameters)
        body = generate_payload(self._limits, given)
        if "text" in body:
            body["prompt"] = body.pop("text")
        return body

    async def async_generate(self, **request: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._call, lambda: self._generate(request))

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        """The engine runs one call at a time, so the stream has one event: the finished reply."""
        yield self.generate(**request)

    async def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        yield await self.async_generate(**request)

    def flush_cache(self) -> None:
        self._run(lambda: self._engine.flush_cache())

    # -- weight updates -------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Nothing to pause: the engine runs one call at a time, so no request runs during an update."""

    def resume(self) -> None:
        """Nothing to resume: `pause` does nothing."""

    @property
    def undefined_weights(self) -> str | None:
        return undefined_weights_reason(self._weights_undefined, self._released_memory)

    def begin_weight_update(self) -> None:
        if self._has_update_sessions:
            self._run(lambda: _require_success(self._engine.begin_weight_update()))
        else:
            require_unpacked_experts(self._server_info)

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        (message,) = messages
        tensors = message_as_named_tensors(message)
        self._run(
            lambda: _require_success(
                self._engine.update_weights_from_tensor(tensors, load_format=WEIGHT_LOADER, flush_cache=flush_cache)
            )
        )
        if weight_version is not None:
            self.weight_version = weight_version

    def end_weight_update(self) -> None:
        if self._has_update_sessions:
            self._run(lambda: _require_success(self._engine.end_weight_update()))

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Record that released weights are defined again. The engine is not replaced, so nothing is replayed."""
        self._weights_undefined = self._weights_undefined and not whole

    # -- adapters and memory --------------------------------------------------------------------------

    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        require_lora(self._server_info)
        self._run(
            lambda: _require_lora_success(self._engine.load_lora_adapter_from_tensors(name, dict(tensors), config))
        )

    def unload_lora_adapter(self, name: str) -> None:
        require_lora(self._server_info)
        self._run(lambda: _require_lora_success(self._engine.unload_lora_adapter(name)))

    def list_lora_adapters(self) -> frozenset[str]:
        if not self._server_info.get("enable_lora"):
            return frozenset()
        return frozenset(self._run(lambda: self._engine.tokenizer_manager.lora_registry.get_all_adapters()))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        requested = tags_to_release(tags, self._released_memory)
        require_memory_saver(self._server_info)
        self._run(lambda: self._engine.release_memory_occupation(tags=requested))
        self._released_memory.update(requested)
        self._weights_undefined = self._weights_undefined or loses_weights(requested, self._server_info)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        requested = tags_to_resume(tags, self._released_memory)
        self._run(lambda: self._engine.resume_memory_occupation(tags=requested))
        self._released_memory.difference_update(requested)

    @property
    def released_memory(self) -> frozenset[str]:
        return frozenset(self._released_memory)

    # -- end ------------------------------------------------------------------------------------------

    def fail(self, error: VerlServerError) -> None:
        self._failure = self._failure or error

    def shutdown(self) -> None:
        self.fail(ShutDownError("the engine was shut down"))
        engine, self._engine = self._engine, None
        if engine is not None:
            # SGLang ends its workers with SIGKILL, so their shared memory must be removed afterwards.
            owned = find_shared_memory(list_descendants(os.getpid()))
            self._executor.submit(engine.shutdown).result()
            self._executor.shutdown()
            remove_shared_memory(owned, reader=os.getpid())


def _make_engine(server_args: Json) -> Any:
    try:
        import sglang
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise StartupError(
            "launch_server=False runs SGLang in this process, but SGLang is not installed in its environment: run "
            "`pip install 'verl-server[sglang]'`, or use a server process with server_python=PATH of an environment "
            "that has SGLang"
        ) from error
    loaders = server_args.get("custom_weight_loader") or []
    try:
        return sglang.Engine(**{**server_args, "custom_weight_loader": [*loaders, WEIGHT_LOADER]})
    except TypeError as error:
        raise BadInputError(f"{REFUSAL}{find_refusal(server_args) or error}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(f"the in-process engine did not start: {type(error).__name__}: {error}") from error


def _require_lora_success(reply: Any) -> None:
    if not reply.success:
        raise BadInputError(f"the in-process engine refused the LoRA adapter: {reply.error_message}")


def _require_success(reply: Any) -> None:
    """Raise ServerError for a failed control call. SGLang's control calls return `(success, message)`."""
    success, message = reply[0], reply[1]
    if not success:
        raise ServerError(f"the in-process engine reports a failure: {message}")
