"""A real vLLM server for tests: calls of its routes, pushes of weights, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from helpers import (
    MARK,
    PROMPTS,
    greedy_with_logprobs,
    marked_processes,
    no_new_shared_memory,
    reference_model,
    wait_until,
)
from safetensors.torch import load_file, save_file

from verl_server.adapter.sglang.replies import Endpoint
from verl_server.adapter.vllm.replies import error_from_reply, parse_generation
from verl_server.adapter.vllm.requests import (
    FINISH_UPDATE,
    GENERATE,
    METRICS,
    PAUSE,
    RESUME,
    SET_WEIGHT_VERSION,
    START_UPDATE,
    UPDATE_WEIGHTS,
    WORKER_CALL,
    generate_payload,
    memory_payload,
    pause_query,
    update_payload,
    weight_version_payload,
)
from verl_server.adapter.vllm.server_arguments import launch_vllm_server
from verl_server.config import AdapterConfig, PauseMode, Timeouts
from verl_server.server.launch import LaunchedServer
from verl_server.tiny import make_model
from verl_server.types import Json, ServerInfo, TensorSpec
from verl_server.weights.arena import Arena, compute_checksum, plan_arena
from verl_server.weights.manifest import read_manifest
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt
from verl_server.weights.transports.shared_memory import Sender
from verl_server.weights.update.staged import verify_reports

VLLM_VENV = Path(__file__).parents[2] / ".venv-vllm"
VLLM_PYTHON = VLLM_VENV / "bin" / "python"
CALL_TIMEOUT_S = 60.0


def _why_missing() -> str:
    """Why there is no environment with vLLM. `make setup-vllm` writes the file if it finds no wheel of torch."""
    reason = VLLM_VENV / ".no-torch"
    return reason.read_text().strip() if reason.exists() else "there is no .venv-vllm; `make setup-vllm` makes it"


#: For all tests that need vLLM.
needs_vllm = pytest.mark.skipif(not (VLLM_VENV / ".ready").exists(), reason=_why_missing())
#: Sizes of tiny models whose heads vLLM computes on a CPU.
SIZES: dict[str, Any] = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "context_length": 32768}
#: Arguments of tiny servers. `max_running_requests` limits the memory that vLLM plans for.
TINY_SERVER = {"dtype": "float32", "context_length": 32768, "max_running_requests": 16, "enforce_eager": True}


#: Greedy tokens and their log probabilities.
Expected = tuple[list[int], list[float]]


class Checkpoints:
    """Two checkpoints of one architecture, with Hugging Face's answers."""

    def __init__(self, root: Path, architecture: str, **sizes: Any) -> None:
        sizes = {**SIZES, **sizes}
        self.folders = [make_model(root / str(seed), architecture, seed=seed, **sizes) for seed in (0, 1)]
        self.weights = [weights_of(folder) for folder in self.folders]
        self.expected = [expected_of(reference_model(folder)) for folder in self.folders]

    def mixed(self, names: Iterable[str]) -> list[Expected]:
        """The answers of the first checkpoint with some tensors of the second one."""
        tensors = {**self.weights[0], **{name: self.weights[1][name] for name in names}}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(shutil.copytree(self.folders[0], temporary, dirs_exist_ok=True))
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            return expected_of(reference_model(folder))


def expected_of(model: Any) -> list[Expected]:
    """Hugging Face's answer to each of `PROMPTS`."""
    return [greedy_with_logprobs(model, prompt) for prompt in PROMPTS]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's checkpoint."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def start_config(**settings: Any) -> AdapterConfig:
    return AdapterConfig(server_python=VLLM_PYTHON, timeouts=Timeouts(start_s=180.0), **settings)


class VllmServer:
    """A started server of a model, and an arena for its weights. `arguments`: further arguments of the server."""

    def __init__(self, model: Path, env: Mapping[str, str], use_forkserver: bool = True, **arguments: Any) -> None:
        # A server has its own folder for temporary files in that of this process.
        variables = {name: value for name, value in env.items() if name != "TMPDIR"}
        args = {"model_path": model, **TINY_SERVER, **arguments}
        config = start_config(use_forkserver=use_forkserver)
        self.launched: LaunchedServer = launch_vllm_server(args, config, variables)
        self._server_info = ServerInfo("vLLM", arguments.get("tp_size", 1))
        self.process = self.launched.process
        self._specs = read_manifest({"model_path": str(model), "dtype": "float32"}).tensors
        self._stage(self._specs)
        self._session = requests.Session()
        self._session.trust_env = False

    def _stage(self, specs: Mapping[str, TensorSpec]) -> None:
        self._layout = plan_arena(specs)
        self._arena = Arena.create(self._layout)
        self._sender = Sender(SenderSettings(self._arena, self._layout, CALL_TIMEOUT_S))

    @contextlib.contextmanager
    def wrong_shapes(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """In the body, these tensors can be pushed, although the model has other shapes."""
        self._arena.close()
        self._stage({**self._specs, **{name: TensorSpec.of(tensor) for name, tensor in tensors.items()}})
        try:
            yield
        finally:
            self._arena.close()
            self._stage(self._specs)

    def send(self, method: str, path: str, body: Any = None, key: str = "") -> requests.Response:
        """One request with any key. A broken JSON body, which no route reads to its end, for `body="{"`."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": key} if key else {})
        data = body if isinstance(body, str) else None if body is None else json.dumps(body)
        url = self.launched.base_url + path
        return self._session.request(method, url, data=data, headers=headers, timeout=CALL_TIMEOUT_S)

    def call(self, endpoint: Endpoint, body: Any = None, query: str = "") -> Any:
        """The JSON of a successful reply. Raises the typed error of another reply."""
        key = self.launched.admin_api_key if endpoint.needs_admin_key else self.launched.api_key
        path = endpoint.path + (f"?{query}" if query else "")
        reply = self.send(endpoint.method, path, body, f"Bearer {key}")
        parsed: Any = reply.text
        with contextlib.suppress(ValueError):
            parsed = reply.json()
        if not reply.ok:
            raise error_from_reply(reply.status_code, self.launched.base_url + path, parsed)
        return parsed

    def generate(self, input_ids: list[int], sampling_params: Mapping[str, Any], **fields: Any) -> Json:
        body = generate_payload(input_ids, sampling_params, return_logprob=True, **fields)
        return parse_generation(self.call(GENERATE, body), return_logprob=True)

    def push(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        *,
        is_whole: bool = True,
        before_pause: Callable[[], object] = bool,
    ) -> None:
        """Push tensors through the arena and verify the report of every rank.

        `before_pause` is called when the tensors are staged. Raises VerlServerError for an update that the server has
        refused; generation goes on then, too.
        """
        names = self._layout.in_order(list(tensors))
        for name in names:
            self._arena.tensor(name).copy_(tensors[name])
        attempt = UpdateAttempt(uuid.uuid4().hex, names, True, [self._server_info])
        self._arena.write_table(names)
        self._sender.prepare(attempt)
        common = {"transport": self._sender.name, "update_id": attempt.id, "verify": True, "checksum": "xxh3"}
        message = self._sender.loader_message(attempt, 0) | common
        before_pause()
        self.call(PAUSE, query=pause_query(PauseMode.RETRACT))
        try:
            self.call(START_UPDATE)
            self.call(UPDATE_WEIGHTS, update_payload(message))
            self.call(FINISH_UPDATE, {})
            checksums = [compute_checksum(tensors[name]) for name in names]
            verify_reports(self._sender.reports(attempt), attempt, checksums, is_whole=is_whole)
            self.call(SET_WEIGHT_VERSION, weight_version_payload(version))
        finally:
            self.call(RESUME)

    def generated_tokens(self) -> float:
        """Number of tokens that the server has generated since its start. (Its gauges of requests stand still.)"""
        (count,) = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", self.call(METRICS), re.MULTILINE)
        return float(count)

    def worker_call(self, body: Json) -> Json:
        """The report of the worker on one of its methods."""
        report: Json = self.call(WORKER_CALL, body)["results"][0]
        return report

    def memory(self, method: str, tags: list[str]) -> Json:
        return self.worker_call(memory_payload(method, tags))

    def largest_gap(self, expected: Sequence[Expected]) -> float:
        """The largest difference of log probabilities to Hugging Face's, whose greedy tokens must be the same."""
        gap = 0.0
        for prompt, (tokens, logprobs) in zip(PROMPTS, expected, strict=True):
            greedy = {"temperature": 0, "max_new_tokens": len(tokens), "ignore_eos": True}
            reply = self.generate(prompt, greedy, cache_salt=uuid.uuid4().hex)
            assert reply["output_ids"] == tokens
            got = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            gap = max(gap, *(abs(a - b) for a, b in zip(got, logprobs, strict=True)))
        return gap

    def in_background(self, *args: Any, **kwargs: Any) -> tuple[threading.Thread, list[Any]]:
        """A generation in a thread, which has begun. Its reply, or its error, is appended to the list."""
        results: list[Any] = []
        tokens = self.generated_tokens()

        def run() -> None:
            try:
                results.append(self.generate(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                results.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_until(lambda: self.generated_tokens() > tokens + 5, 60.0, "the request does not run")
        return thread, results

    def close(self) -> None:
        self.process.stop()
        self._session.close()
        self._arena.close()


#: Names of folders that all servers of a user share, so that they stay.
SHARED_FOLDERS = ("verl_server_packages_", "torchinductor_")
#: Value of the variable `MARK` in all servers of this process. Their forkserver has it, too.
PROCESS_MARK = uuid.uuid4().hex


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for temporary files of all servers of this process. A forkserver imports this package from there."""
    return tempfile.TemporaryDirectory(prefix="vt-")


def server_processes() -> dict[int, str]:
    """Living processes of the servers of this process, with their command lines."""
    return {pid: text for pid, text in marked_processes(PROCESS_MARK).items() if "forkserver_main" not in text}


@contextlib.contextmanager
def leaves_nothing() -> Iterator[dict[str, str]]:
    """The body starts and ends one server with the environment variables of the result. It must leave nothing.

    The log of a server that has ended by itself, or whose trainer has, stays in a folder of its own.
    """
    before, folder = tempfile.tempdir, _temporary_folder().name
    tempfile.tempdir = folder
    files = set(Path(folder).iterdir())
    try:
        with no_new_shared_memory():
            yield {MARK: PROCESS_MARK, "TMPDIR": folder}
            wait_until(lambda: not server_processes(), 15.0, "processes of the server live")
    finally:
        tempfile.tempdir = before
    left = [path for path in Path(folder).iterdir() if path not in files and not path.name.startswith(SHARED_FOLDERS)]
    assert all(os.listdir(path) == ["server.log"] for path in left), left
