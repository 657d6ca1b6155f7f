"""The systems with vLLM: a bare server with vLLM's own routes, and vLLM's own reload.

The trainer writes the tensors of an update into a safetensors file, which the server reads through a minimal weight
transfer backend (`vllm_backend.py`). Around each update the trainer pauses and resumes generation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from safetensors.torch import save_file

from verl_server.adapter.vllm.replies import parse_generation
from verl_server.conformance.systems import NotOfferedError, Reply, as_reply, post, remove_processes, tree_of
from verl_server.server.environment import ServerPython
from verl_server.server.launch import PortReservation

# -- Vllm process -----------------------------------------------------------------------------------
# The process of a bare vLLM server, with the weight transfer backend of `vllm_backend.py` as its plugin.

BACKEND_FILE = Path(__file__).with_name("vllm_backend.py")
BACKEND = "safetensors_file"
"""Name of the backend in `vllm_backend.py`, which cannot be imported here."""
MODULE = "vllm.entrypoints.launchers.api_server.entry"
START_S, STOP_S, POLL_S = 380.0, 20.0, 0.2
#: Environment variables of the server: the routes for weights are development routes, and on a CPU vLLM would take a
#: part of the machine's memory for its KV cache (GiB).
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}
SWITCHES = ("--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager")


class VllmProcess:
    """One running server of the model in the folder `model`, and its processes."""

    def __init__(self, python: Path, model: Path, options: Mapping[str, Any]) -> None:
        """Start the server and wait until it is ready. `options`: further options of its command line."""
        self.folder = Path(tempfile.mkdtemp(prefix="vllm-", dir=model.parent))
        """Folder for the plugin, temporary files and the files of updates, removed by `close`."""
        self._tree = set[psutil.Process]()
        """The server's processes. Those below the main process outlive it when it is killed."""
        reservation = PortReservation("127.0.0.1")
        self.url = f"http://127.0.0.1:{reservation.port}"
        variables = {**VARIABLES, "PYTHONPATH": str(_write_plugin(self.folder)), "TMPDIR": str(self.folder)}
        environment = ServerPython(str(python)).environment(variables)
        command = [str(python), "-m", MODULE, *_options(model, reservation.port, options)]
        self._popen = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        reservation.release()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            self._tree |= tree_of(self._popen.pid)
            if self._popen.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with exit code {self._popen.returncode} at its start")
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM's server was not ready after {START_S:g} s")
            time.sleep(POLL_S)
        self._tree |= tree_of(self._popen.pid)

    def _is_ready(self) -> bool:
        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except requests.RequestException:
            return False

    @property
    def pids(self) -> list[int]:
        """Process ids of the server that still run."""
        return [process.pid for process in self._tree if process.is_running()]

    def kill(self) -> None:
        """Kill the main process with SIGKILL."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """End all processes, also those that outlive the main process, and remove their files."""
        self._tree |= tree_of(self._popen.pid)
        with remove_processes(self._tree), contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.terminate()
            self._popen.wait(STOP_S)
        self._popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _options(model: Path, port: int, options: Mapping[str, Any]) -> list[str]:
    fixed = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "weight_transfer_config": json.dumps({"backend": BACKEND}),
        **options,
    }
    plain = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in fixed.items()]
    return [*plain, *SWITCHES]


def _write_plugin(folder: Path) -> Path:
    """A folder with the backend and the entry point of an installed distribution, for the server's `PYTHONPATH`."""
    plugin = folder / "plugin"
    info = plugin / "file_backend-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copyfile(BACKEND_FILE, plugin / "file_backend.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfile_backend = file_backend:register\n")
    return plugin


# -- Vllm reload ------------------------------------------------------------------------------------

#: Values of `mode` of `/pause` for SGLang's pause modes. `keep` holds running requests.
PAUSE_MODES = {"retract": "keep", "in_place": "keep", "abort": "abort"}
#: Options of all servers. The maximum number of running requests limits the memory that vLLM plans for.
OPTIONS: Mapping[str, Any] = {"max_num_seqs": 16}
#: Server arguments of cases that vLLM has, too. It needs no list of the modules that have LoRA adapters.
SAME_OPTIONS, UNUSED_ARGUMENTS = ("enable_lora", "max_lora_rank"), ("lora_target_modules",)


class VllmSystem:
    """vLLM's own reload for `model`. Starts a server with the interpreter `python`, or uses the server at `url`."""

    name = "vllm"
    load_path, finish_path = "/update_weights", "/finish_weight_update"
    num_load_requests = 1

    def __init__(
        self,
        model: Path,
        python: Path,
        url: str | None = None,
        options: Mapping[str, Any] | None = None,
        **server_args: Any,
    ) -> None:
        """`options`: further options of vLLM's command line. `server_args`: arguments of a case."""
        all_options = {**OPTIONS, **(options or {}), **as_options(server_args)}
        self._model, self._python, self._server_args, self._version = model, python, server_args, 0
        self.owns_server = url is None
        self._process = None if url is not None else VllmProcess(python, model, all_options)
        self.url = url or self._server.url
        if url is None:
            self._post("/init_weight_transfer_engine", {"init_info": {}})

    @property
    def _server(self) -> VllmProcess:
        assert self._process is not None
        return self._process

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return post(self.url + path, dict(body or {}))

    def update(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        pause_mode: str | None = None,
        flush_cache: bool = True,
        check_finite: bool = False,
    ) -> None:
        """One update with all tensors in one file. Without a pause mode, vLLM's default, which aborts requests."""
        if check_finite:
            raise NotOfferedError("vLLM's reload has no check for NaN and infinity")
        query = "" if pause_mode is None else f"&mode={PAUSE_MODES[pause_mode]}"
        file = self._model.parent / f"update-{uuid.uuid4().hex}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            self.update_from_file(file, f"?clear_cache={json.dumps(flush_cache)}{query}")
        finally:
            file.unlink(missing_ok=True)

    def update_from_file(self, file: Path, pause_query: str) -> None:
        """The requests of one update with the tensors of a safetensors file."""
        self._post(f"/pause{pause_query}")
        try:
            self._post("/start_weight_update")
            self._post("/update_weights", {"update_info": {"path": str(file)}})
            self._version += 1
            self._post("/finish_weight_update", {"weight_version": str(self._version)})
        finally:
            self._post("/resume")

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        """`/inference/v1/generate`. An id of its own for each request: vLLM does not refuse an id that is in use."""
        params = {"temperature": 0.0, "max_tokens": max_new_tokens, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": prompt, "request_id": uuid.uuid4().hex, "sampling_params": params}
        reply = self._post("/inference/v1/generate", {**body, **({} if lora is None else {"model": lora})})
        return as_reply(parse_generation(reply, return_logprob=True))

    def read_tensor(self, name: str) -> torch.Tensor:
        raise NotOfferedError("vLLM has no request that returns weights")

    @property
    def weight_version(self) -> str:
        return str(self._version)

    def load_lora(self, name: str, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Write PEFT's files into a folder and let the server load it, in the place of an adapter of that name."""
        folder = self._server.folder / f"lora-{uuid.uuid4().hex}"
        folder.mkdir()
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        post(f"{self.url}/v1/load_lora_adapter", body, is_json=False)

    def release_memory(self) -> None:
        self._post("/sleep?level=2")

    def resume_memory(self) -> None:
        self._post("/wake_up")

    def connect(self, url: str) -> Callable[[], VllmSystem]:
        return functools.partial(VllmSystem, self._model, self._python, url, **self._server_args)

    def server_pids(self) -> list[int]:
        return self._server.pids if self.owns_server else []

    def kill_server(self) -> None:
        self._server.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def as_options(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Server arguments of a case as options of vLLM. Raises NotOfferedError for an argument that vLLM lacks."""
    unknown = server_args.keys() - {*SAME_OPTIONS, *UNUSED_ARGUMENTS, "enable_memory_saver"}
    if unknown:
        raise NotOfferedError(f"vLLM has no server argument {', '.join(sorted(unknown))}")
    options = {name: server_args[name] for name in SAME_OPTIONS if name in server_args}
    return options | ({"enable_sleep_mode": True} if server_args.get("enable_memory_saver") else {})
