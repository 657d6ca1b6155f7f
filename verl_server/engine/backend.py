"""`Backend`: the interface between `VerlEngine` and the inference engines that it drives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.errors import VerlServerError
from verl_server.types import Json
from verl_server.weights.update.servers import UpdatableServers


class Backend(UpdatableServers, Protocol):
    """One or more inference engines, in server processes or in this process. Only trainer rank 0 generates with it."""

    @property
    def adapter(self) -> HttpServerEngineAdapter | None:
        """The adapter of one server of the backend. None when the engine runs in this process."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the inference engines have when the trainer starts to use them."""

    def parameter_dtypes(self) -> Sequence[Json | None]:
        """The report of each inference engine on the dtypes of its parameters. None for one that does not tell."""

    def nearest_transport(self) -> str:
        """Name of the cheapest weight transport that reaches all inference engines, for as long as they are used."""

    @property
    def trainer_host(self) -> str:
        """Address of this machine as the inference engines reach it."""

    def generate(self, **request: Any) -> Any:
        """Generate for one prompt or many. `request` holds the arguments of `HttpServerEngineAdapter.generate`."""

    async def async_generate(self, **request: Any) -> Any: ...
    def generate_stream(self, **request: Any) -> Iterator[Json]: ...
    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]: ...
    def flush_cache(self) -> None: ...
    def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Json) -> None: ...
    def unload_lora_adapter(self, name: str) -> None: ...
    def list_lora_adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters that all inference engines have, whoever loaded them."""

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None: ...
    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None: ...

    @property
    def released_memory(self) -> frozenset[str]:
        """Memory tags (`MemoryTag`) that are released."""

    def fail(self, error: VerlServerError) -> None:
        """Make calls of this trainer that are in flight, and all later calls, raise `error`."""

    def shutdown(self) -> None:
        """End the trainer's use of the backend. Ends servers that the backend started; other servers keep running."""


class FleetBackend(Backend, Protocol):
    """The backend of a fleet, which exists before a `VerlEngine` uses it and after."""

    def attach(self) -> None:
        """Begin to use the fleet. Raises BadInputError when another `VerlEngine` uses it."""


@runtime_checkable
class RolloutFleet(Protocol):
    """The part of `RolloutManager` that `VerlEngine` needs."""

    @property
    def backend(self) -> FleetBackend: ...
