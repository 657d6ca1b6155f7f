"""The process of a bare vLLM server, with the weight transfer backend of `vllm_backend.py` as its plugin."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import requests

from verl_server.conformance.other_processes import kill_processes
from verl_server.server.interpreter.server_python import ServerPython
from verl_server.server.ports import PortReservation
from verl_server.server.warden.shared_memory_files import find_shared_memory, remove_shared_memory

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
        self._processes: list[psutil.Process] = []
        self._files: dict[str, int] = {}
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
            self._record_processes()
            if self._popen.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with exit code {self._popen.returncode} at its start")
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM's server was not ready after {START_S:g} s")
            time.sleep(POLL_S)
        self._record_processes()

    def _is_ready(self) -> bool:
        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except requests.RequestException:
            return False

    def _record_processes(self) -> None:
        """Record the server's processes. Those below the main process outlive it when it is killed."""
        try:
            main = psutil.Process(self._popen.pid)
            found = [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        self._processes += [process for process in found if process not in self._processes]

    @property
    def pids(self) -> list[int]:
        """Process ids of the server that still run."""
        return [process.pid for process in self._processes if process.is_running()]

    def kill(self) -> None:
        """Kill the main process with SIGKILL."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """End all processes, also those that outlive the main process, and remove their files."""
        self._record_processes()
        self._files = find_shared_memory([process.pid for process in self._processes])
        self._popen.terminate()
        try:
            self._popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        kill_processes(self._processes)
        self._popen.wait()
        remove_shared_memory(self._files)
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
