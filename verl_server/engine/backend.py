"""What `VerlEngine` needs of an inference engine, and the server behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.config import AdapterConfig, PauseMode
from verl_server.errors import VerlServerError
from verl_server.server.process import AbortCheck
from verl_server.types import Member
from verl_server.weights.loader import payload
from verl_server.weights.update.servers import ReplayFn, UpdatableServers

Json = dict[str, Any]


class Backend(UpdatableServers, Protocol):
    """One or more inference engines, in servers or in this process."""

    @property
    def nearest_transport(self) -> str:
        """The cheapest weight transport that reaches all of them."""

    @property
    def trainer_host(self) -> str:
        """This machine's address as they reach it."""

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """All members have verified that version, nothing goes on yet. `replay` brings others to it.

        `whole`: it had all parameters, so a member serves it whatever it had before.
        """

    def generate(self, **request: Any) -> Any: ...
    async def async_generate(self, **request: Any) -> Any: ...
    def generate_stream(self, **request: Any) -> Iterator[Json]: ...
    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]: ...
    def flush_cache(self) -> None: ...
    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None: ...
    def unload_lora(self, name: str) -> None: ...
    def release_memory_occupation(self, tags: Sequence[str] | None) -> None: ...
    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None: ...
    @property
    def asleep(self) -> frozenset[str]:
        """Memory tags that are released."""

    def fail(self, error: VerlServerError) -> None: ...
    def shutdown(self) -> None: ...


class ServerBackend:
    """A separately spawned server behind the HTTP adapter."""

    nearest_transport, trainer_host = "shared_memory", "127.0.0.1"

    def __init__(
        self, server_args: Mapping[str, Any], config: AdapterConfig, env: Mapping[str, str], check_abort: AbortCheck
    ) -> None:
        self.adapter = HttpServerEngineAdapter(config=config, env=env, check_abort=check_abort, **server_args)
        self.members = [Member("the server", int(server_args.get("tp_size") or 1))]

    def generate(self, **request: Any) -> Any:
        return self.adapter.generate(**request)

    async def async_generate(self, **request: Any) -> Any:
        return await self.adapter.asynchronous.generate(**request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        return self.adapter.generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return self.adapter.asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self.adapter.flush_cache()

    def pause(self, mode: PauseMode) -> None:
        if not self.asleep:
            self.adapter.pause_generation(mode)

    def resume(self) -> None:
        if not self.asleep:
            self.adapter.continue_generation()

    def begin_weight_update(self) -> None:
        self.adapter.begin_weight_update()

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        (wire,) = wires
        load_over(self.adapter, self.members[0].tp_size, wire, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self.adapter.end_weight_update()

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Nobody else is to catch up."""

    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self.adapter.load_lora_adapter_from_tensors(name, tensors, config)

    def unload_lora(self, name: str) -> None:
        self.adapter.unload_lora_adapter(name)

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self.adapter.release_memory_occupation(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self.adapter.resume_memory_occupation(tags)

    @property
    def asleep(self) -> frozenset[str]:
        return self.adapter.asynchronous.asleep

    def fail(self, error: VerlServerError) -> None:
        self.adapter.asynchronous.fail(error)

    def shutdown(self) -> None:
        self.adapter.shutdown()


def load_over(
    adapter: HttpServerEngineAdapter, tp_size: int, wire: Json, weight_version: str, flush_cache: bool
) -> None:
    """Make one server's TP ranks call the loader with `wire`."""
    adapter.update_weights_from_tensor(
        [payload(wire)] * tp_size, load_format=WEIGHT_LOADER, weight_version=weight_version, flush_cache=flush_cache
    )
