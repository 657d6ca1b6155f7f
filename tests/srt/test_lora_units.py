"""Names of LoRA adapters: which are loaded, replaced and refused. Without servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_server.engine.lora import LoraAdapters, names_in_lora_paths
from verl_server.errors import BadInputError
from verl_server.rollout.backend import FleetLoras


class RecordingServer:
    """Records the calls that load and unload LoRA adapters, as `("load", name)` and `("unload", name)`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def load_lora_adapter(self, name: str, tensors: Any, config: Any) -> None:
        self.calls.append(("load", name))

    def unload_lora_adapter(self, name: str) -> None:
        self.calls.append(("unload", name))


@pytest.mark.parametrize(
    ("lora_paths", "names"),
    [
        (None, set()),
        ({"a": "/models/a"}, {"a"}),
        (["a=/models/a", "/models/b"], {"a", "/models/b"}),
        ([{"lora_name": "a", "lora_path": "/models/a"}], {"a"}),
    ],
)
def test_names_in_the_server_argument_lora_paths(lora_paths: Any, names: set[str]) -> None:
    assert names_in_lora_paths(lora_paths) == names


def test_load_replaces_an_adapter_that_the_servers_loaded_at_the_start() -> None:
    loras, server = LoraAdapters(["a=/models/a"]), RecordingServer()
    backend: Any = server
    loras.require(["a", None])
    for name in ("a", "a", "b"):
        loras.load(backend, name, {}, {})
    assert server.calls == [("unload", "a"), ("load", "a"), ("unload", "a"), ("load", "a"), ("load", "b")]
    loras.unload(backend, "a")
    with pytest.raises(BadInputError, match=r"no LoRA adapter 'a'; loaded are \['b'\]"):
        loras.require("a")


def test_new_server_of_a_fleet_has_the_adapters_of_the_others() -> None:
    """A server loads the adapters of `lora_paths` when it starts. The fleet has replaced `a` and removed `b`."""
    loras, server, new_server = FleetLoras({"a": "/models/a", "b": "/models/b"}), RecordingServer(), RecordingServer()

    def call_all(call: Callable[[Any], object]) -> None:
        call(server)

    loras.load(call_all, "a", {}, {})
    loras.unload(call_all, "b")
    assert server.calls == [("unload", "a"), ("load", "a"), ("unload", "b")]
    begun: list[bool] = []
    adapter: Any = new_server
    loras.prepare_server(adapter, lambda: begun.append(True))
    assert new_server.calls == [("unload", "a"), ("unload", "b"), ("load", "a")]
    assert begun == [True]
