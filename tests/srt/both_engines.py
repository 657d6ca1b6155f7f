"""What the tests of both engines share: settings of their servers, and requests that run while a test goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import adapter_of, in_float64, wait_until
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import SIZES, TINY_SERVER, VLLM_PYTHON, needs_vllm

from verl_server import AdapterConfig, HttpServerEngineAdapter, VerlEngine
from verl_server.config import Timeouts
from verl_server.tiny import make_model

#: Values of a parameter for the kind of engine.
KINDS = [
    pytest.param("sglang"),
    pytest.param("vllm", marks=needs_vllm),
]
CONTEXT_LENGTH = 32768
LONG = {"temperature": 0.0, "max_new_tokens": 30_000, "ignore_eos": True}
"""Sampling parameters of a request that runs until a test ends it, also on a fast machine."""
RUN_S = 60.0
"""Maximum number of seconds until a request starts or ends on a busy machine."""


def server_settings(kind: str) -> dict[str, Any]:
    """Arguments of a server of a tiny model, without its folder."""
    memory: dict[str, Any] = {"max_total_tokens": 65536, "context_length": CONTEXT_LENGTH, "dtype": "float32"}
    return TINY_SERVER if kind == "vllm" else memory


def adapter_config(kind: str, **settings: Any) -> AdapterConfig:
    """The settings of an adapter for servers of this kind."""
    python = VLLM_PYTHON if kind == "vllm" else None
    return AdapterConfig(engine_kind=kind, server_python=python, timeouts=Timeouts(start_s=240.0), **settings)


def engine_settings(kind: str) -> dict[str, Any]:
    """Arguments of `VerlEngine` for one server of this kind, without the folder of the model."""
    python = VLLM_PYTHON if kind == "vllm" else None
    return {**server_settings(kind), "engine_kind": kind, "server_python": python, "timeouts": Timeouts(start_s=240.0)}


def model_of(root: Path, architecture: str = "qwen3", **sizes: Any) -> Path:
    """A checkpoint that both engines serve on a CPU."""
    # Small weights keep float32 within 1e-5 of float64 over the thousands of tokens of some tests.
    return make_model(root / architecture, architecture, weight_std=0.1, **SIZES, **sizes)


class SharedEngines:
    """Engines of each kind on one rank, each with a real server of the same model. They start when they are needed."""

    def __init__(self, mesh: DeviceMesh, model: Path) -> None:
        self.model = model
        self._mesh = mesh
        self._engines: dict[str, VerlEngine] = {}

    def of(self, kind: str) -> VerlEngine:
        if kind not in self._engines:
            self._engines[kind] = VerlEngine(self._mesh, model_path=str(self.model), **engine_settings(kind))
        return self._engines[kind]

    def shutdown(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


def load_of(adapter: HttpServerEngineAdapter) -> tuple[int, int]:
    """Numbers of running and of waiting requests of a server."""
    (load,) = adapter.get_loads()["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def until_idle(adapter: HttpServerEngineAdapter) -> None:
    wait_until(lambda: load_of(adapter) == (0, 0), RUN_S, f"requests run: {load_of(adapter)}")


class RunningStream:
    """A stream that a thread reads. `reply` is the last event, `error` what the stream has raised."""

    def __init__(self, adapter: HttpServerEngineAdapter, **request: Any) -> None:
        self.reply: Any = None
        self.error: Exception | None = None
        self._events = adapter.generate_stream(**{"sampling_params": LONG, "return_logprob": True, **request})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._events:
                self.reply = event
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_tokens(self) -> int:
        return 0 if self.reply is None else len(self.reply["output_ids"])

    def until_tokens(self, count: int) -> None:
        """Wait until the reply has `count` tokens."""
        wait_until(lambda: self.num_tokens >= count or not self.is_running, RUN_S, f"not {count} tokens")
        assert self.num_tokens >= count, self.error or self.reply["meta_info"]["finish_reason"]

    def result(self) -> Any:
        """The reply, when the stream has ended."""
        self._thread.join(RUN_S)
        assert not self.is_running, "the stream goes on"
        if self.error is not None:
            raise self.error
        return self.reply


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread. Its result, or its error, is appended to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def assert_computed_by(models: Mapping[int, Any], prompt: list[int], reply: Any, tolerance: float = 1e-5) -> None:
    """Each greedy token of the reply, and its log probability, is that of the model whose version its span names.

    Hugging Face computes the log probabilities in float64, of all tokens up to the end of a span at once.
    """
    tokens, meta = reply["output_ids"], reply["meta_info"]
    assert meta["weight_versions"][0]["start"] == 0
    assert meta["weight_versions"][-1]["end"] == len(tokens) == len(meta["output_token_logprobs"])
    for span in meta["weight_versions"]:
        model = in_float64(models[span["version"]])
        with torch.no_grad():
            sequence = torch.tensor([[*prompt, *tokens[: span["end"]]]])
            logits = model(sequence, logits_to_keep=span["end"] - span["start"] + 1).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1)
        assert logprobs.argmax(-1).tolist() == tokens[span["start"] : span["end"]]
        got = torch.tensor([entry[0] for entry in meta["output_token_logprobs"][span["start"] : span["end"]]])
        assert float((logprobs.max(-1).values - got).abs().max()) < tolerance


@contextlib.contextmanager
def serving_as_before(engine: VerlEngine) -> Iterator[None]:
    """After the body, the server generates the same tokens with the same version of the weights as before."""
    adapter = adapter_of(engine)

    def answer() -> list[Any]:
        params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        replies = adapter.generate(input_ids=[[1, 2, 3], [200, 17]], sampling_params=params)
        return [(reply["output_ids"], reply["meta_info"]["weight_version"]) for reply in replies]

    before = answer()
    yield
    assert answer() == before
