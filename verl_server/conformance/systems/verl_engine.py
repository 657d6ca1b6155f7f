"""The systems `verl_server` and `verl_server_vllm`: a `VerlEngine` with its own server or with a running server."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import EngineKind, PauseMode, RemoteServer
from verl_server.conformance.systems.base import NotOfferedError, Reply
from verl_server.conformance.systems.http import FINISH_PATH, LOAD_PATH, as_reply, read_tensor, sampling
from verl_server.engine.verl_engine import VerlEngine
from verl_server.server.warden.process_tree import list_descendants


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
