"""The SGLang server on a CPU with two TP ranks: tokens, seeds, grammars, CPU use when idle, and memory release."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from helpers import all_at_once

from verl_server.server.warden.processes import find_shared_memory, remove_shared_memory
from verl_server.tiny import make_model

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present")

PROMPT = list(range(20, 40))
START_SECONDS = 240


@dataclass
class Server:
    url: str
    process: psutil.Process
    model: Path

    def post(self, endpoint: str, **payload: Any) -> requests.Response:
        return requests.post(f"{self.url}/{endpoint}", json=payload, timeout=120)

    def generate(self, input_ids: list[int], **sampling: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0, **sampling}
        reply = self.post("generate", input_ids=input_ids, sampling_params=sampling, return_logprob=True)
        assert reply.status_code == 200, reply.text
        return reply.json()  # type: ignore[no-any-return]

    def tokens(self, input_ids: list[int], **sampling: Any) -> tuple[int, ...]:
        return tuple(self.generate(input_ids, **sampling)["output_ids"])

    def schedulers(self) -> list[psutil.Process]:
        children = self.process.children(recursive=True)
        return sorted((c for c in children if "scheduler" in "".join(c.cmdline())), key=lambda c: c.pid)

    def resident(self) -> list[int]:
        return [scheduler.memory_info().rss for scheduler in self.schedulers()]


@contextlib.contextmanager
def launch(model: Path, log: Path, *arguments: str, **env: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), model)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{server.url}/ready", timeout=5).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        else:
            pytest.fail(f"not ready: {log.read_text()[-3000:]}")
        yield server
    finally:
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        leftovers = find_shared_memory(pids)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        remove_shared_memory(leftovers)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, started at the same time.

    The first server has a tiny model and no arguments but model and port; its float32 rounding stays below the bound of
    the test. The second server is for all other tests. Its model is large enough to measure memory. Its only argument
    is the number of ranks. The BLAS of both servers uses one thread, so that their workers are forked. Spawned workers:
    `test_in_process_engine_behaves_as_a_server`.
    """
    folder = tmp_path_factory.mktemp("platform")
    sizes: dict[str, Any] = {"hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 2048}
    small = make_model(folder / "small")
    large = make_model(folder / "large", tie_word_embeddings=True, **sizes)
    with all_at_once(
        lambda: launch(small, folder / "small.log", OPENBLAS_NUM_THREADS="1"),
        lambda: launch(large, folder / "large.log", "--tp", "2", OPENBLAS_NUM_THREADS="1"),
    ) as started:
        yield started


@pytest.fixture
def bare(servers: list[Server]) -> Server:
    return servers[0]


@pytest.fixture
def server(servers: list[Server]) -> Server:
    return servers[1]


def test_a_server_without_arguments_returns_the_tokens_of_hugging_face(bare: Server) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bare.model, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(PROMPT) :
    ]
    reply = bare.generate(PROMPT, max_new_tokens=24)
    assert reply["output_ids"] == expected.tolist()
    with torch.no_grad():
        logits = model(torch.cat([prompt[0], expected])[None, :-1]).logits[0, len(PROMPT) - 1 :]
    logprobs = logits.log_softmax(-1).gather(1, expected[:, None])[:, 0]
    served = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (served - logprobs).abs().max() < 1e-5


def test_a_seed_determines_the_tokens_whatever_other_requests_run(server: Server) -> None:
    alone = server.tokens(PROMPT, temperature=1.0, sampling_seed=7)
    assert alone == server.tokens(PROMPT, temperature=1.0, sampling_seed=7)
    assert alone != server.tokens(PROMPT, temperature=1.0, sampling_seed=8)
    assert server.tokens(PROMPT, temperature=1.0) != server.tokens(PROMPT, temperature=1.0)
    filtered = {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02, "top_k": 20, "sampling_seed": 9}
    filtered_alone = server.tokens(PROMPT, **filtered)
    greedy_alone = server.tokens(PROMPT)
    crowd: list[dict[str, Any]] = [
        {"temperature": 1.0, "sampling_seed": 7},
        filtered,
        {},
        {"temperature": 0.9, "min_p": 0.1},
    ]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: server.tokens(PROMPT, **crowd[i % 4]), range(32)))
    assert set(results[0::4]) == {alone}
    assert set(results[1::4]) == {filtered_alone}
    assert set(results[2::4]) == {greedy_alone}


def test_grammars_constrain_a_random_model(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    options = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": False}
    assert json.loads(server.generate(PROMPT, json_schema=json.dumps(schema), **options)["text"])["n"] < 100
    text = server.generate(PROMPT, regex="(yes|no) [0-9]{3}", **options)["text"]
    assert text.split()[0] in ("yes", "no")
    assert text.split()[1].isdigit()


def _cpu_share(server: Server, windows: int = 5, seconds: float = 2.0) -> float:
    """Median share of one core over several windows, so that a disturbance in one window does not count."""

    def used() -> float:
        return sum(sum(scheduler.cpu_times()[:2]) for scheduler in server.schedulers())

    shares: list[float] = []
    for _ in range(windows):
        before, began = used(), time.monotonic()
        time.sleep(seconds)
        shares.append((used() - before) / (time.monotonic() - began))
    return statistics.median(shares)


def test_an_idle_server_and_a_paused_server_use_little_cpu(server: Server) -> None:
    server.tokens(PROMPT)
    assert _cpu_share(server) < 0.2
    server.post("pause_generation", mode="retract")
    try:
        assert _cpu_share(server) < 0.2
    finally:
        server.post("continue_generation")
    assert len(server.tokens(PROMPT)) == 16


def _push(server: Server) -> None:
    reply = server.post("update_weights_from_disk", model_path=str(server.model))
    assert reply.json()["success"], reply.text


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_released_memory_leaves_every_rank_and_comes_back(server: Server, tag: str) -> None:
    expected = server.tokens(PROMPT)
    tokens = requests.get(f"{server.url}/server_info", timeout=30).json()["max_total_num_tokens"]
    # float32, 8 layers, key and value, 2 of 4 heads of 64 a rank; half of 31 million parameters a rank.
    bytes_per_rank = {"kv_cache": tokens * 8 * 2 * 2 * 64 * 4, "weights": 31_000_000 // 2 * 4}[tag]
    before = server.resident()
    assert len(before) == 2
    assert server.post("release_memory_occupation", tags=[tag]).status_code == 200
    released = server.resident()
    assert server.post("resume_memory_occupation", tags=[tag]).status_code == 200
    after = server.resident()
    for rank in range(2):
        assert before[rank] - released[rank] > 0.8 * bytes_per_rank
        assert after[rank] - released[rank] > 0.8 * bytes_per_rank
    if tag == "weights":
        refused = server.post("generate", input_ids=PROMPT)
        assert refused.status_code == 503
        assert "push weights" in refused.text
        _push(server)
    assert server.tokens(PROMPT) == expected


def test_nothing_is_served_from_released_memory(server: Server) -> None:
    expected = server.tokens(PROMPT)
    server.post("release_memory_occupation")
    assert server.post("release_memory_occupation").status_code == 200, "again changes nothing"
    refused = server.post("generate", input_ids=PROMPT)
    assert refused.status_code == 503
    assert "resume_memory_occupation" in refused.text
    assert not server.post("begin_weight_update").json()["success"]
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200
    for tag in ("weights", "kv_cache", "kv_cache"):
        assert server.post("resume_memory_occupation", tags=[tag]).status_code == 200
    _push(server)
    assert server.tokens(PROMPT) == expected


def test_an_invalid_release_is_refused_without_harm(server: Server) -> None:
    assert server.post("release_memory_occupation", tags=["everything"]).status_code == 409
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.tokens, PROMPT, max_new_tokens=80)
        time.sleep(0.3)
        refused = server.post("release_memory_occupation")
        assert refused.status_code == 409, refused.text
        assert "running" in refused.text
        assert len(running.result()) == 80
    server.post("begin_weight_update")
    assert server.post("release_memory_occupation", tags=["weights"]).status_code == 409
    assert server.post("end_weight_update").json()["success"]


def test_requests_queued_before_a_release_wait_for_the_resume(server: Server) -> None:
    expected = server.tokens(PROMPT, max_new_tokens=60)
    results: list[tuple[int, ...]] = []
    client = threading.Thread(target=lambda: results.append(server.tokens(PROMPT, max_new_tokens=60)))
    client.start()
    time.sleep(0.3)
    server.post("pause_generation", mode="retract")
    assert server.post("release_memory_occupation", tags=["kv_cache"]).status_code == 200
    server.post("continue_generation")
    time.sleep(1)
    assert not results
    server.post("resume_memory_occupation", tags=["kv_cache"])
    client.join(timeout=60)
    assert results == [expected]


def test_twenty_cycles_leak_nothing(server: Server) -> None:
    expected = server.tokens(PROMPT)
    before = server.resident()
    for _ in range(20):
        assert server.post("release_memory_occupation").status_code == 200
        assert server.post("resume_memory_occupation").status_code == 200
    for rank, resident in enumerate(server.resident()):
        assert resident - before[rank] < 30_000_000
    _push(server)
    assert server.tokens(PROMPT) == expected
