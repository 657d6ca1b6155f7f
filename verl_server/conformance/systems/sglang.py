"""The systems with SGLang: `VerlEngine`, and SGLang's own `HttpServerEngineAdapter`.

The adapter is called as its users call it. Methods that it lacks (pause, LoRA adapters) go to the endpoints of its
server. On a machine without an accelerator, SGLang runs with the platform plugin of this library, because it cannot run
there without a plugin.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import EngineKind, PauseMode, RemoteServer
from verl_server.conformance.systems import (
    FINISH_PATH,
    LOAD_PATH,
    NotOfferedError,
    Reply,
    as_reply,
    post,
    read_tensor,
    remove_processes,
    sampling,
    tree_of,
)
from verl_server.engine.verl_engine import VerlEngine
from verl_server.server.launch import PortReservation
from verl_server.server.warden.processes import find_shared_memory, list_descendants, remove_shared_memory


class SglangSystem:
    """SGLang's adapter for `model`. Starts a server, or uses the running server at the port `port` of this machine."""

    name = "sglang"
    load_path, finish_path = LOAD_PATH, FINISH_PATH
    num_load_requests = 1
    owns_server = True

    def __init__(self, model: Path, port: int | None = None, **server_args: Any) -> None:
        from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter
        from sglang.srt.server_args import ServerArgs

        # SGLang's server ends when tensors of a CPU arrive with torch's default strategy.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        self._model, self._server_args, self._loras = model, server_args, set[str]()
        self.owns_server = port is None
        arguments = {"model_path": str(model), "dtype": "float32", **server_args}
        if port is None:
            reservation = PortReservation("127.0.0.1")
            self._adapter = HttpServerEngineAdapter(**arguments, port=reservation.port)
            reservation.release()
            self._tree = tree_of(self._adapter.process.pid)
        else:
            # The constructor always starts a server. The other methods need the arguments only.
            self._adapter = HttpServerEngineAdapter.__new__(HttpServerEngineAdapter)
            self._adapter.server_args = ServerArgs(**arguments, port=port)
            self._tree = set()
        self._files = find_shared_memory([process.pid for process in self._tree])
        """Files of the processes at the start. When a case has killed the server, nothing else names them."""
        self.url = str(self._adapter.server_args.url())

    def update(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        pause_mode: str | None = None,
        flush_cache: bool = True,
        check_finite: bool = False,
    ) -> None:
        """One update session with all tensors in one call: a tiny model is smaller than one bucket of a trainer."""
        if check_finite:
            raise NotOfferedError("SGLang's adapter has no check for NaN and infinity")
        if pause_mode is not None:
            post(f"{self.url}/pause_generation", {"mode": pause_mode})
        try:
            self._adapter.begin_weight_update()
            try:
                self._adapter.update_weights_from_tensor(list(tensors.items()), flush_cache=flush_cache)
            finally:
                self._adapter.end_weight_update()
        finally:
            if pause_mode is not None:
                post(f"{self.url}/continue_generation", {})

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        reply = self._adapter.generate(
            input_ids=prompt, sampling_params=sampling(max_new_tokens), return_logprob=True, lora_path=lora
        )
        return as_reply(reply)

    def read_tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self.url, name)

    @property
    def weight_version(self) -> str:
        raise NotOfferedError("SGLang's adapter does not pass a weight version")

    def load_lora(self, name: str, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        if name in self._loras:
            post(f"{self.url}/unload_lora_adapter", {"lora_name": name})
        serialized = MultiprocessingSerializer.serialize(dict(tensors), output_str=True)
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": [serialized]}
        post(f"{self.url}/load_lora_adapter_from_tensors", body)
        self._loras.add(name)

    def release_memory(self) -> None:
        self._adapter.release_memory_occupation()

    def resume_memory(self) -> None:
        self._adapter.resume_memory_occupation()

    def connect(self, url: str) -> Callable[[], SglangSystem]:
        return functools.partial(SglangSystem, self._model, urlsplit(url).port, **self._server_args)

    def server_pids(self) -> list[int]:
        return [process.pid for process in self._tree if process.is_running()]

    def kill_server(self) -> None:
        os.kill(self._adapter.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes of the server, also those that survive the main process, and remove their files."""
        with remove_processes(self._tree), contextlib.suppress(Exception):  # its own deadline; what is left is killed
            if self._tree:
                self._adapter.shutdown()
        remove_shared_memory(self._files)


# -- Verl engine ------------------------------------------------------------------------------------
# The systems `verl_server` and `verl_server_vllm`: a `VerlEngine` with its own server or with a running server.


class VerlEngineSystem:
    """A `VerlEngine` of one trainer rank. Starts a server for `model`, or connects to the running server `remote`."""

    name = "verl_server"
    load_path, finish_path = LOAD_PATH, FINISH_PATH
    num_load_requests = 2

    def __init__(
        self,
        model: Path,
        remote: RemoteServer | None = None,
        *,
        vllm_python: Path | None = None,
        **server_args: Any,
    ) -> None:
        """`vllm_python`: interpreter of a vLLM server; None: an SGLang server.

        `server_args` are ignored for a running server.
        """
        engine: dict[str, Any] = {}
        if vllm_python is not None:
            engine = {"engine_kind": EngineKind.VLLM, "server_python": vllm_python}
        self._model, self.owns_server = model, remote is None
        common: dict[str, Any] = {"model_path": str(model), "dtype": "float32"}
        if remote is None:
            self._engine = VerlEngine(one_rank_mesh(), **common, **engine, **server_args)
        else:
            self._engine = VerlEngine(one_rank_mesh(), servers=[remote], **common)
        self.url = self._adapter.base_url

    @property
    def _adapter(self) -> HttpServerEngineAdapter:
        adapter = self._engine.adapter
        assert adapter is not None
        return adapter

    def update(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        pause_mode: str | None = None,
        flush_cache: bool = True,
        check_finite: bool = False,
    ) -> None:
        self._engine.update_weights_from_tensor(
            tensors,
            pause_mode=pause_mode or PauseMode.RETRACT,
            flush_cache=flush_cache,
            check_finite=check_finite,
        )

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        reply = self._engine.generate(
            input_ids=prompt, sampling_params=sampling(max_new_tokens), return_logprob=True, lora_path=lora
        )
        return as_reply(reply)

    def read_tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self.url, name, self._adapter.admin_api_key)

    @property
    def weight_version(self) -> str:
        return str(self._engine.weight_version)

    def load_lora(self, name: str, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        if not self._adapter.get_server_info().get("enable_lora"):
            raise NotOfferedError("the server was started without enable_lora")
        self._engine.load_lora_adapter(name, tensors.items(), config)

    def release_memory(self) -> None:
        self._engine.release_memory_occupation()

    def resume_memory(self) -> None:
        self._engine.resume_memory_occupation()

    def connect(self, url: str) -> Callable[[], VerlEngineSystem]:
        keys = self._adapter.api_key, self._adapter.admin_api_key
        return functools.partial(VerlEngineSystem, self._model, RemoteServer(url, *keys))

    def server_pids(self) -> list[int]:
        if not self.owns_server:
            return []
        main = self._adapter.pids.main
        return [main, *list_descendants(main)]

    def kill_server(self) -> None:
        if not self.owns_server:
            raise NotOfferedError("the suite does not kill a server that it has not started")
        os.kill(self._adapter.pids.main, signal.SIGKILL)

    def close(self) -> None:
        self._engine.shutdown()


def one_rank_mesh() -> DeviceMesh:
    """The device mesh of a trainer with one rank. Creates the process group of this process if there is none."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
