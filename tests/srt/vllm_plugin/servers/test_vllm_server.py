"""A real vLLM server under supervision: tokens, weights through the arena, keys, memory, and the end of each process.

There is one server at a time. The last test with a server kills one of its processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import reference_model, wait_until
from vllm_helpers import (
    TINY_SERVER,
    Checkpoints,
    VllmServer,
    expected_of,
    leaves_nothing,
    needs_vllm,
    start_config,
)

from verl_server.adapter.vllm.requests import (
    ABORT,
    IS_PAUSED,
    OPENAPI,
    PAUSE,
    RESUME,
    VERSION,
    abort_payload,
    pause_query,
)
from verl_server.adapter.vllm.server_arguments import launch_vllm_server
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, VerlServerError

pytestmark = needs_vllm

TOLERANCE = 1e-5
NOTICE_S = 2.0
"""Maximum number of seconds until the end of a server is noticed."""
LONG = 30_000
"""Number of tokens of a request that runs until a test ends it, also on a busy machine."""
#: Requests that no route of `/openapi.json` lists: other methods, other spellings, and paths that climb.
OTHER_REQUESTS = [
    ("GET", "/docs"), ("GET", "/nothing"), ("POST", "/health"), ("GET", "//health"), ("GET", "/health/"),
    ("POST", "/inference/v1/../../collective_rpc"), ("POST", "/v1/%2e%2e/collective_rpc"), ("GET", "/HEALTH"),
    ("OPTIONS", "/collective_rpc"),
]  # fmt: skip
#: Paths for which the API key suffices, beside those below `/v1/` and `/inference/v1/`.
API_PATHS = {"/generate", "/model_info", "/server_info", "/openapi.json", "/health", "/ready", "/ping"}
OPEN = {"GET /health", "GET /ping", "GET /ready", "GET /metrics"}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Qwen2 models: tied embeddings and biases."""
    return Checkpoints(tmp_path_factory.mktemp("tied"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Qwen3 models with mixtures of experts."""
    return Checkpoints(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def serve(model: Path, use_forkserver: bool = True) -> Iterator[VllmServer]:
    with leaves_nothing() as env:  # each server is killed by its last test
        server = VllmServer(model, env, use_forkserver)
        try:
            yield server
        finally:
            server.close()


@pytest.fixture(scope="module")
def server(tied: Checkpoints) -> Iterator[VllmServer]:
    yield from serve(tied.folders[0])


@pytest.fixture(scope="module")
def moe_server(experts: Checkpoints) -> Iterator[VllmServer]:
    yield from serve(experts.folders[0], use_forkserver=False)


# -- a model with tied embeddings --------------------------------------------------------------------


def test_tokens_and_log_probabilities_are_those_of_hugging_face(server: VllmServer, tied: Checkpoints) -> None:
    first, second = tied.expected
    assert server.largest_gap(first) < TOLERANCE
    server.push(tied.weights[1], 1)
    assert server.largest_gap(second) < TOLERANCE
    server.push(dict(reversed(tied.weights[0].items())), 2)
    assert server.largest_gap(first) < TOLERANCE
    server.push(tied.weights[0], 3)
    assert server.largest_gap(first) < TOLERANCE, "the same weights again"


def test_log_probabilities_are_those_behind_the_temperature(server: VllmServer, tied: Checkpoints) -> None:
    prompt, temperature = [5, 6, 7], 0.5
    reply = server.generate(prompt, {"temperature": temperature, "max_new_tokens": 8, "ignore_eos": True})
    whole = torch.tensor([prompt + reply["output_ids"]])
    with torch.no_grad():
        logits = reference_model(tied.folders[0])(whole).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, -1).gather(1, whole[0, len(prompt) :, None])[:, 0]
    got = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert (expected - got).abs().max() < TOLERANCE


def test_a_request_that_runs_across_an_update_names_both_versions(server: VllmServer, tied: Checkpoints) -> None:
    running: list[tuple[threading.Thread, list[Any]]] = []

    def start_request() -> None:
        running.append(
            server.in_background([1, 2, 3], {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}, rid="long")
        )

    server.push(tied.weights[0], 4)
    server.push(tied.weights[0], 5, before_pause=start_request)
    tokens = server.generated_tokens()
    wait_until(lambda: server.generated_tokens() > tokens + 5, 60.0, "the request does not go on")
    server.call(ABORT, abort_payload(["long"]))
    ((thread, results),) = running
    thread.join(60)
    (reply,) = results
    spans = reply["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [4, 5]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(reply["output_ids"])


def test_a_part_of_a_fused_module_is_refused_and_nothing_changes(server: VllmServer, tied: Checkpoints) -> None:
    first, new = tied.expected[0], tied.weights[1]
    server.push(tied.weights[0], 6)
    layer = "model.layers.1"
    cases = {
        "q without k and v": [f"{layer}.self_attn.q_proj.weight"],
        "gate without up": [f"{layer}.mlp.gate_proj.weight"],
        "a bias without its weight": [f"{layer}.self_attn.q_proj.bias"],
    }
    for case, names in cases.items():
        with pytest.raises(VerlServerError, match="which vLLM loads together"):
            server.push({name: new[name] for name in names}, 7, is_whole=False)
        assert server.largest_gap(first) < TOLERANCE, case
    reply = server.generate([1, 2], {"max_new_tokens": 1})
    assert reply["meta_info"]["weight_version"] == 6, "a refused update has no version"
    whole = {name: tensor for name, tensor in new.items() if f"{layer}." in name}
    server.push(whole, 8, is_whole=False)
    mixed = reference_model(tied.folders[0])
    mixed.load_state_dict(whole, strict=False)
    assert server.largest_gap(expected_of(mixed)) < TOLERANCE, "a part of the model that is whole modules"


def test_an_aborted_request_has_its_tokens(server: VllmServer) -> None:
    thread, results = server.in_background(
        [1, 2, 3], {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}, rid="to-abort"
    )
    server.call(ABORT, abort_payload(["to-abort"]))
    thread.join(60)
    (reply,) = results
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) < LONG
    assert reply["meta_info"]["id"] == "to-abort"


def test_wrong_requests_raise_bad_input(server: VllmServer) -> None:
    for prompt, params in [([99999], {}), ([1] * 40_000, {}), ([1], {"temperature": -1.0}), ([1], {"top_p": 2.0})]:
        with pytest.raises(BadInputError):
            server.generate(prompt, params)
    assert server.call(VERSION)["version"].startswith(("0.32", "0.33"))


def test_every_route_needs_a_key(server: VllmServer) -> None:
    paths = server.call(OPENAPI)["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert len(routes) > 50
    assert {("POST", "/generate"), ("POST", "/pause"), ("POST", "/pause_generation")} < routes
    admin, api = server.launched.admin_api_key, server.launched.api_key
    for method, path in sorted(routes | set(OTHER_REQUESTS)):
        route = f"{method} {path}"
        if route in OPEN:
            assert server.send(method, path).status_code == 200
            continue
        body = "{" if method == "POST" else None  # nothing happens by accident
        for key in ("", "Bearer wrong", f"Basic {admin}", f"Bearer {admin} {api}"):
            assert server.send(method, path, body, key).status_code == 401, route
        is_api_path = path.startswith(("/v1/", "/inference/v1/")) or path in API_PATHS
        if not is_api_path or path.endswith("load_lora_adapter"):
            assert server.send(method, path, body, f"Bearer {api}").status_code == 401, route


def test_the_keys_are_on_no_command_line_and_in_no_environment(server: VllmServer) -> None:
    keys = (server.launched.admin_api_key, server.launched.api_key)
    pids = server.process.pids
    for pid in (pids.main, *pids.workers):
        process = psutil.Process(pid)
        shown = " ".join([*process.cmdline(), *process.environ().values()])
        assert not any(key in shown for key in keys)
    assert server.process.log_path.is_file()
    assert not any(key in server.process.log_path.read_text() for key in keys)


def test_memory_is_released_and_resumed(server: VllmServer, tied: Checkpoints) -> None:
    before = server.worker_call({"method": "verl_server_memory", "args": []})
    server.call(PAUSE, query=pause_query(PauseMode.ABORT))
    released = server.memory("release", ["kv_cache", "weights"])
    assert released["ok"], released["error"]
    assert released["released"] == ["kv_cache", "weights"]
    assert released["rss_bytes"] < before["rss_bytes"] - 0.9 * 2**30, "the KV cache has 1 GiB"
    resumed = server.memory("resume", ["kv_cache", "weights"])
    assert resumed["ok"], resumed["error"]
    assert resumed["released"] == []
    assert resumed["rss_bytes"] > before["rss_bytes"] - 0.1 * 2**30
    server.call(RESUME)
    server.push(tied.weights[1], 9)
    assert server.largest_gap(tied.expected[1]) < TOLERANCE
    assert not server.call(IS_PAUSED)["is_paused"]


def test_the_death_of_the_api_server_ends_the_server(server: VllmServer) -> None:
    thread, results = server.in_background([1, 2, 3], {"max_new_tokens": LONG, "ignore_eos": True})
    noticed = kill_and_wait(server, server.process.pids.main)
    assert noticed < NOTICE_S
    thread.join(10)
    assert isinstance(results[0], Exception)


# -- mixtures of experts -----------------------------------------------------------------------------


def test_mixtures_of_experts_are_exact(moe_server: VllmServer, experts: Checkpoints) -> None:
    first, second = experts.expected
    assert moe_server.largest_gap(first) < TOLERANCE
    moe_server.push(experts.weights[0], 1)
    assert moe_server.largest_gap(first) < TOLERANCE, "the same weights"
    moe_server.push(experts.weights[1], 2)
    assert moe_server.largest_gap(second) < TOLERANCE
    some = {name: tensor for name, tensor in experts.weights[0].items() if ".experts.0." in name}
    with pytest.raises(VerlServerError, match="which vLLM loads together"):
        moe_server.push(some, 3, is_whole=False)
    assert moe_server.largest_gap(second) < TOLERANCE, "one expert of four is refused"


def test_the_death_of_a_worker_ends_the_server(moe_server: VllmServer) -> None:
    workers = [pid for pid in moe_server.process.pids.workers if "VLLM::Worker" in psutil.Process(pid).cmdline()[0]]
    assert len(workers) == 1
    assert kill_and_wait(moe_server, workers[0]) < NOTICE_S


def kill_and_wait(server: VllmServer, pid: int) -> float:
    """Kill one process of a server. Returns the seconds until the end of the server is noticed, with its log."""
    pids = server.process.pids
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    status = server.process.wait_exit(30.0)
    noticed = time.monotonic() - started
    assert status is not None
    assert "Application startup complete" in status.log_tail
    last_line = status.log_tail.strip().splitlines()[-1]
    assert last_line in str(server.process.died(server.launched.base_url))
    wait_until(lambda: not any(map(psutil.pid_exists, (pids.main, *pids.workers))), 10.0, "the tree lives")
    return noticed


# -- starts ------------------------------------------------------------------------------------------

TRAINER = """
import sys, time
from vllm_helpers import VllmServer
from pathlib import Path
import os
server = VllmServer(Path(sys.argv[1]), {"VERL_SERVER_TEST_MARK": os.environ["VERL_SERVER_TEST_MARK"]})
print("ready", flush=True)
time.sleep(600)
"""


def test_the_death_of_the_trainer_ends_the_server(tied: Checkpoints) -> None:
    with leaves_nothing() as env:
        folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[4])]
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(tied.folders[0])],
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(folders)},
            stdout=subprocess.PIPE,
        )
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"ready\n"
        finally:
            trainer.kill()
            trainer.communicate(timeout=10)


@pytest.mark.parametrize(
    ("heads", "arguments", "message"),
    [
        (4, {}, r"vLLM refuses .*heads of 16 elements.*computes heads of 32"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_before_the_engine_loads(
    heads: int, arguments: dict[str, Any], message: str, tiny: Callable[..., Path]
) -> None:
    model = tiny("llama", heads=heads)
    with leaves_nothing() as env, pytest.raises(BadInputError, match=message):
        launch_vllm_server({"model_path": model, **TINY_SERVER, **arguments}, start_config(), env)
