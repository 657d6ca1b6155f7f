"""`FleetLoras`: the LoRA adapters of a fleet, which all of its servers have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.lora_config import lora_paths_by_name
from verl_server.types import Json

CallAll = Callable[[Callable[[HttpServerEngineAdapter], object]], None]
"""Calls a function for every running server of a fleet."""


class FleetLoras:
    """The LoRA adapters of a fleet. A server that is started later gets the adapters of the others."""

    def __init__(self, lora_paths: Any) -> None:
        """`lora_paths`: SGLang's server argument with the LoRA adapters that each server loads when it starts."""
        self._loaded_at_start = set(lora_paths_by_name(lora_paths))
        self._removed: set[str] = set()
        """Those of them that were removed or replaced."""
        self._adapters: dict[str, tuple[dict[str, Any], Json]] = {}
        """Tensors and config of each adapter that all servers have."""
        self._lock = threading.RLock()

    @property
    def names(self) -> frozenset[str]:
        """Names of the adapters that all servers have."""
        return frozenset(self._adapters) | (self._loaded_at_start - self._removed)

    def load(self, call_all: CallAll, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        """Load an adapter into all servers. It replaces an adapter of that name, for example of an earlier engine.

        When no server has loaded it, no server has an adapter of that name. A server that fails while others succeed is
        started again by `call_all`, and then gets the adapters of the others.
        """
        with self._lock:
            if name in self.names:
                self.unload(call_all, name)
            call_all(lambda adapter: adapter.load_lora_adapter(name, tensors, config))
            self._adapters[name] = dict(tensors), config

    def unload(self, call_all: CallAll, name: str) -> None:
        with self._lock:
            self._adapters.pop(name, None)
            self._removed |= {name} & self._loaded_at_start
            call_all(lambda adapter: adapter.unload_lora_adapter(name))

    def prepare_server(self, adapter: HttpServerEngineAdapter, begin: Callable[[], None]) -> None:
        """Give a new server the adapters of the others, then call `begin`, before another adapter can be loaded."""
        with self._lock:
            for name in sorted(self._removed):
                adapter.unload_lora_adapter(name)
            for name, (tensors, config) in self._adapters.items():
                adapter.load_lora_adapter(name, tensors, config)
            begin()
