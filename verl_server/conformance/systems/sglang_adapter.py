"""The system `sglang`: SGLang's own `HttpServerEngineAdapter` with the server that it starts.

The adapter is called as its users call it. Methods that it lacks (pause, LoRA adapters) go to the endpoints of its
server. On a machine without an accelerator, SGLang runs with the platform plugin of this library, because it cannot run
there without a plugin.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.multiprocessing

from verl_server.conformance.other_processes import kill_processes
from verl_server.conformance.systems.base import NotOfferedError, Reply
from verl_server.conformance.systems.http import FINISH_PATH, LOAD_PATH, as_reply, post, read_tensor, sampling
from verl_server.server.ports import PortReservation
from verl_server.server.warden.shared_memory_files import find_shared_memory, remove_shared_memory


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
            main = psutil.Process(self._adapter.process.pid)
            self._processes = [main, *main.children(recursive=True)]
        else:
            # The constructor always starts a server. The other methods need the arguments only.
            self._adapter = HttpServerEngineAdapter.__new__(HttpServerEngineAdapter)
            self._adapter.server_args = ServerArgs(**arguments, port=port)
            self._processes = []
        self._files = find_shared_memory([process.pid for process in self._processes])
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
        return [process.pid for process in self._processes if process.is_running()]

    def kill_server(self) -> None:
        self._processes[0].kill()

    def close(self) -> None:
        """End all processes of the server, also those that survive the main process, and remove their files."""
        pids = [process.pid for process in self._processes]
        self._files |= find_shared_memory(pids)
        with contextlib.suppress(Exception):  # its own deadline; what is left is killed below
            if self._processes:
                self._adapter.shutdown()
        kill_processes(self._processes)
        remove_shared_memory(self._files)
