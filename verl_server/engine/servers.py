"""Servers that run already, on this machine or others, as one backend: weights go to all, prompts to one of them."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlsplit

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.config import AdapterConfig, PauseMode, RemoteServer
from verl_server.engine.backend import load_over
from verl_server.errors import BadInputError, VerlServerError
from verl_server.types import Member
from verl_server.weights.transports.group import own_address
from verl_server.weights.update.servers import ReplayFn

Json = dict[str, Any]


class RemoteBackend:
    """Connections to `servers`. Shutting down leaves them running."""

    def __init__(self, servers: Sequence[RemoteServer], config: AdapterConfig) -> None:
        self._adapters = [
            HttpServerEngineAdapter.attach(
                one.base_url, api_key=one.api_key, admin_api_key=one.admin_api_key, config=config
            )
            for one in servers
        ]
        self._pool = ThreadPoolExecutor(2 * len(servers), thread_name_prefix="verl-server-remote")
        self._turn = itertools.cycle(self._adapters)
        try:
            self.members = [
                Member(adapter.base_url, _tp_size(adapter, info))
                for adapter, info in self._each(lambda adapter: adapter.get_server_info())
            ]
        except BaseException:
            self.shutdown()
            raise

    def _each(self, call: Callable[[HttpServerEngineAdapter], Any]) -> list[tuple[HttpServerEngineAdapter, Any]]:
        """On all servers at once. When one fails the others are waited for, then its error is raised."""
        calls = [(adapter, self._pool.submit(call, adapter)) for adapter in self._adapters]
        errors = [error for _, future in calls if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [(adapter, future.result()) for adapter, future in calls]

    @property
    def adapter(self) -> HttpServerEngineAdapter:
        """The first server's."""
        return self._adapters[0]

    @property
    def nearest_transport(self) -> str:
        return "shared_memory" if all(_is_loopback(one.base_url) for one in self._adapters) else "distributed"

    @property
    def trainer_host(self) -> str:
        far = [one.base_url for one in self._adapters if not _is_loopback(one.base_url)]
        return own_address(str(urlsplit(far[0]).hostname)) if far else "127.0.0.1"

    def generate(self, **request: Any) -> Any:
        return next(self._turn).generate(**request)

    async def async_generate(self, **request: Any) -> Any:
        return await next(self._turn).asynchronous.generate(**request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        return next(self._turn).generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return next(self._turn).asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self._each(lambda adapter: adapter.flush_cache())

    def pause(self, mode: PauseMode) -> None:
        self._each(lambda adapter: adapter.asynchronous.asleep or adapter.pause_generation(mode))

    def resume(self) -> None:
        self._each(lambda adapter: adapter.asynchronous.asleep or adapter.continue_generation())

    def begin_weight_update(self) -> None:
        self._each(lambda adapter: adapter.begin_weight_update())

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        """Raises as soon as one server fails: a transport may have to tell the others."""
        loads = [
            self._pool.submit(load_over, adapter, member.tp_size, wire, weight_version, flush_cache)
            for adapter, member, wire in zip(self._adapters, self.members, wires, strict=True)
        ]
        for load in as_completed(loads):
            load.result()

    def end_weight_update(self) -> None:
        self._each(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Nobody else is to catch up."""

    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        self._each(lambda adapter: adapter.load_lora_adapter_from_tensors(name, tensors, config))

    def unload_lora(self, name: str) -> None:
        self._each(lambda adapter: adapter.unload_lora_adapter(name))

    def release_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self._each(lambda adapter: adapter.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None) -> None:
        self._each(lambda adapter: adapter.resume_memory_occupation(tags))

    @property
    def asleep(self) -> frozenset[str]:
        return self.adapter.asynchronous.asleep

    def fail(self, error: VerlServerError) -> None:
        for adapter in self._adapters:
            adapter.asynchronous.fail(error)

    def shutdown(self) -> None:
        for adapter in self._adapters:
            adapter.shutdown()
        self._pool.shutdown(wait=False)


def _tp_size(adapter: HttpServerEngineAdapter, info: Json) -> int:
    """Of a server that has our weight loader. Raises BadInputError for one that has not."""
    if WEIGHT_LOADER not in (info.get("custom_weight_loader") or ()):
        raise BadInputError(
            f"the server at {adapter.base_url} was started without --custom-weight-loader {WEIGHT_LOADER}; "
            "start it with `verl-server launch`"
        )
    return int(info.get("tp_size") or 1)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
