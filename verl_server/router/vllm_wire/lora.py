"""`LoraControl`: the LoRA adapters that a trainer has loaded through a router, and which servers have them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.errors import BadInputError, NotReadyError, VerlServerError
from verl_server.router.vllm_wire.calls import (
    LoraFiles,
    Servers,
    call_each,
    find_answering,
    in_thread,
    read_lora_adapter,
)

INCOMPLETE_UNLOAD = "has an incomplete unload"
"""Part of SGLang's answer to a load, when an earlier load or unload of this name has succeeded on some TP ranks only.
SGLang refuses the name until it is unloaded, and does not list it."""


@dataclass(frozen=True)
class _Adapter:
    """What each server must have under one name."""

    generation: int
    """Number of the call that has loaded or unloaded the adapter."""
    files: tuple[str, Any] | None
    """Folder of the adapter, and `LoraFiles.signature`. None: servers must have no adapter of this name."""


class LoraControl:
    """Loads adapters into all servers of a router.

    A server that has missed a call is not complete: it must receive no requests until `complete` has succeeded.
    """

    def __init__(self, servers: Servers) -> None:
        """`servers`: the servers as they are at each time."""
        self._servers = servers
        self._adapters: dict[str, _Adapter] = {}
        self._loaded: dict[str, dict[str, int]] = {}
        """The generations of the adapters that each server has, by server and by name of the adapter."""
        self._unsure: set[str] = set()
        """Servers that may have been started again since, without their adapters."""
        self._generations = itertools.count(1)

    @property
    def names(self) -> Collection[str]:
        """Names of the adapters that all servers with requests have."""
        return {name for name, adapter in self._adapters.items() if adapter.files is not None}

    def is_complete(self, server: str) -> bool:
        """Whether a server has the current adapters, and none that was unloaded."""
        loaded = self._loaded.get(server, {})
        if server in self._unsure and self._adapters:
            return False
        return all(loaded.get(name) == adapter.generation for name, adapter in self._adapters.items())

    def forget(self, server: str) -> None:
        """A server may have been started again, without its adapters: `complete` asks it for them."""
        if self._adapters and self._loaded.get(server):
            self._unsure.add(server)
        else:
            self._loaded.pop(server, None)

    async def load(self, name: str, folder: str, files: LoraFiles) -> None:
        """Load an adapter into all servers that answer, instead of an adapter of the same name.

        When a server refuses, the adapter is unloaded from all servers. Raises NotReadyError, and changes nothing, if
        no server answers.
        """

        async def replace(_: str, server: AsyncHttpServerEngineAdapter) -> None:
            await _unload(server, name)
            await _load(server, name, files)

        servers = await find_answering(self._servers)
        try:
            done = await call_each(servers, replace)
        except BaseException:
            servers = {}
            with contextlib.suppress(NotReadyError):
                servers = await find_answering(self._servers)
            with contextlib.suppress(VerlServerError):
                await self._unload_from(servers, name)
            raise
        self._record(name, (folder, files.signature), done)

    async def unload(self, name: str) -> None:
        """Unload an adapter from all servers that answer, when its requests have ended.

        Raises NotReadyError, and changes nothing, if no server answers, and BadInputError (404) if neither the router
        nor a server knows the adapter. A server that fails is not complete.
        """
        servers = await find_answering(self._servers)
        if name not in self._adapters and not await _is_listed(servers, name):
            known = sorted(self.names)
            raise BadInputError(f"The lora adapter '{name:.200}' cannot be found. The adapters are {known}", status=404)
        await self._unload_from(servers, name)

    async def _unload_from(self, servers: Servers, name: str) -> None:
        done = set[str]()

        async def unload_one(server_name: str, server: AsyncHttpServerEngineAdapter) -> None:
            await _unload(server, name)
            done.add(server_name)

        try:
            await call_each(servers, unload_one)
        finally:
            self._record(name, None, done)

    def _record(self, name: str, files: tuple[str, Any] | None, done: Collection[str]) -> None:
        adapter = _Adapter(next(self._generations), files)
        for server in done:
            self._loaded.setdefault(server, {})[name] = adapter.generation
        if files is None and set(done) >= self._servers.keys():
            self._adapters.pop(name, None)
        else:
            self._adapters[name] = adapter

    async def complete(self, name: str, server: AsyncHttpServerEngineAdapter) -> None:
        """Load into a server what it has missed. Raises NotReadyError if a folder is not as it was any more."""
        listed = await server.list_lora_adapters()
        if name in self._unsure:
            await self._forget_unlisted(name, server, listed)
        loaded = self._loaded.setdefault(name, {})
        for lora_name, adapter in list(self._adapters.items()):
            if loaded.get(lora_name) == adapter.generation:
                continue
            files = None if adapter.files is None else await _read_again(lora_name, *adapter.files)
            if lora_name in listed:
                await server.unload_lora_adapter(lora_name)
            if files is not None:
                await _load(server, lora_name, files)
            loaded[lora_name] = adapter.generation

    async def _forget_unlisted(self, name: str, server: AsyncHttpServerEngineAdapter, listed: Collection[str]) -> None:
        """Keep what is known of the adapters that a server lists: a server that was started again lists none.

        With adapters of its command line, it may list other ones of the same names. Then nothing is kept.
        """
        kept = set[str]() if (await server.connection.get_resolved_args()).get("lora_paths") else set(listed)
        loaded = self._loaded.get(name, {})
        self._loaded[name] = {each: loaded[each] for each in loaded if each in kept and each in self.names}
        self._unsure.discard(name)


async def _read_again(name: str, folder: str, signature: Any) -> LoraFiles:
    cause: Exception | None = None
    try:
        files = await in_thread(lambda: read_lora_adapter(folder), folder)
        if files.signature == signature:
            return files
    except BadInputError as error:
        cause = error
    raise NotReadyError(
        f"the server lacks the LoRA adapter {name!r}, and {folder} is not as it was when the adapter was loaded: load "
        "the adapter again"
    ) from cause


async def _load(server: AsyncHttpServerEngineAdapter, name: str, files: LoraFiles) -> None:
    try:
        await server.load_lora_adapter(name, files.tensors, files.config)
    except VerlServerError as error:
        if INCOMPLETE_UNLOAD not in error.message:
            raise
        await server.unload_lora_adapter(name)
        await server.load_lora_adapter(name, files.tensors, files.config)


async def _is_listed(servers: Servers, name: str) -> bool:
    """Whether a server has an adapter of this name: another router, or its command line, may have loaded it."""

    async def is_listed(_: str, server: AsyncHttpServerEngineAdapter) -> None:
        found.append(name in await server.list_lora_adapters())

    found: list[bool] = []
    await call_each(servers, is_listed)
    return any(found)


async def _unload(server: AsyncHttpServerEngineAdapter, name: str) -> None:
    if name in await server.list_lora_adapters():
        await server.unload_lora_adapter(name)
