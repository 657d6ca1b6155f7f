"""Routes with which a trainer pauses a router and updates weights and LoRA adapters, on real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from both_engines import adapter_config, model_of, server_settings
from helpers import PROMPTS, all_at_once, change_weights, greedy_with_logprobs, in_float64, reference_model, wait_until
from safetensors.torch import save_file
from test_lora import CONFIG, TARGETS, adapter_for, merged
from vllm_helpers import needs_vllm

from verl_server import HttpServerEngineAdapter
from verl_server.router.vllm_wire.admin import ADMIN_ROUTES

pytestmark = pytest.mark.timeout(900)

KEY, ADMIN_KEY = "key-of-the-agents", "key-of-the-trainer"
GENERATE = "/inference/v1/generate"
WAIT_S = 300.0
"""Seconds for a step to end, also beside other tests on a slow machine."""
KEYS = {"api_key": "replicas", "admin_api_key": "replicas-admin"}
"""Keys of the servers."""


@dataclass(frozen=True)
class Router:
    """A router of `verl-server router`."""

    url: str
    folder: Path
    pool: ThreadPoolExecutor
    servers: list[Any]

    def call(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=200)
        return reply.status_code, reply.json()

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON of a successful reply to a request with the admin key."""
        status, reply = self.call("POST", path, body)
        assert status == 200, reply
        return reply

    def start(self, num_tokens: int, **fields: Any) -> Future[Any]:
        """A greedy request with the key of the agents, which runs in a thread."""
        params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 1}
        body = {"token_ids": PROMPTS[0], "sampling_params": params, **fields}
        return self.pool.submit(self.call, "POST", GENERATE, body, KEY)

    def until_tokens(self, count: int) -> None:
        wait_until(lambda: self.tokens_in_flight() >= count, WAIT_S, f"not {count} tokens in flight")

    def tokens_in_flight(self) -> int:
        return max(int(row["tokens_in_flight"]) for row in self.call("GET", "/replicas")[1])

    def until_admitted(self, count: int) -> None:
        wait_until(lambda: self.num_admitted == count, WAIT_S, f"not {count} servers are admitted")

    @property
    def num_admitted(self) -> int:
        return sum(row["admitted"] for row in self.call("GET", "/replicas")[1])

    @contextlib.contextmanager
    def silent_server(self) -> Iterator[None]:
        """The second server does not answer meanwhile."""
        self.until_admitted(2)
        os.kill(self.servers[1].pids.main, signal.SIGSTOP)
        try:
            self.until_admitted(1)
            yield
        finally:
            os.kill(self.servers[1].pids.main, signal.SIGCONT)

    @property
    def versions(self) -> set[int]:
        return {row["weight_version"] for row in self.call("GET", "/replicas")[1]}


@contextlib.contextmanager
def router_of(servers: list[Any], folder: Path, admin_key: str = "replicas-admin") -> Iterator[Router]:
    """A router process over servers, whose keys are `replicas` and `replicas-admin`."""
    command = [sys.executable, "-m", "verl_server.cli", "router", *(f"--replica={each.base_url}" for each in servers)]
    env = {
        **os.environ, "VERL_SERVER_API_KEY": KEY, "VERL_SERVER_ADMIN_API_KEY": ADMIN_KEY,
        "VERL_SERVER_REPLICA_API_KEY": "replicas", "VERL_SERVER_REPLICA_ADMIN_API_KEY": admin_key,
    }  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        ready = process.stdout.readline()
        assert ready.startswith("Ready: "), ready + process.stderr.read()
        with ThreadPoolExecutor(16) as pool:
            yield Router(ready.split()[1], folder, pool, servers)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.fixture(scope="module")
def running_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router over two SGLang servers with LoRA."""
    folder = model_of(tmp_path_factory.mktemp("model"))
    settings: dict[str, Any] = {**server_settings("sglang"), **KEYS, "enable_lora": True, "max_lora_rank": 8}

    def start() -> Any:
        return HttpServerEngineAdapter(str(folder), lora_target_modules=TARGETS, **settings)

    with all_at_once(start, start) as servers, router_of(servers, folder) as router:
        yield router


@pytest.fixture
def router(running_router: Router) -> Iterator[Router]:
    """The router, without a pause and without requests of a test that failed."""
    yield running_router
    assert running_router.call("POST", "/resume")[0] == 200
    wait_until(lambda: running_router.tokens_in_flight() == 0, WAIT_S, "requests of the test are still in flight")


def checkpoint(router: Router, folder: Path, seed: int) -> Any:
    """Write other weights as a checkpoint into `folder`; returns the model."""
    model = reference_model(router.folder)
    change_weights(model, seed)
    folder.mkdir()
    model.save_pretrained(folder)
    return model


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a LoRA adapter in PEFT's form; returns its folder."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def assert_tokens_of(models: dict[int, Any], reply: Any, num_tokens: int) -> None:
    """Each greedy token is that of the model whose version its span names."""
    (choice,) = reply["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == num_tokens
    assert [choice["weight_versions"][0]["start"], choice["weight_versions"][-1]["end"]] == [0, num_tokens]
    for span in choice["weight_versions"]:
        with torch.no_grad():
            sequence = torch.tensor([[*PROMPTS[0], *tokens[: span["end"]]]])
            logits = in_float64(models[int(span["version"])])(sequence).logits[0, len(PROMPTS[0]) - 1 : -1]
        assert logits.argmax(-1).tolist()[span["start"] :] == tokens[span["start"] : span["end"]]


def test_the_routes_need_the_admin_key(router: Router) -> None:
    for method, path in ADMIN_ROUTES:
        assert router.call(method, path, {}, key="wrong")[0] == 401
        if path == "/is_paused":
            assert router.call(method, path, key=KEY) == (200, {"is_paused": False}), "it changes nothing"
            continue
        status, reply = router.call(method, path, {}, key=KEY)
        assert (status, reply["error"]["details"]["key"]) == (403, "admin_api_key")
        assert "VERL_SERVER_ADMIN_API_KEY" in reply["error"]["message"]
    assert router.call("GET", "/v1/models")[0] == 200, "a trainer has one key"
    assert router.call("GET", "/is_paused") == (200, {"is_paused": False})
    for password, status in ((KEY, 200), (ADMIN_KEY, 200), ("wrong", 401)):
        url = router.url.replace("http://", f"http://any:{password}@")
        assert requests.get(f"{url}/v1/models", timeout=30).status_code == status


def test_keys_must_differ(router: Router) -> None:
    env = {**os.environ, "VERL_SERVER_API_KEY": KEY, "VERL_SERVER_ADMIN_API_KEY": KEY}
    command = [sys.executable, "-m", "verl_server.cli", "router", "--replica=http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, "must differ" in done.stderr) == (2, True), done.stderr


def test_an_update_during_a_pause(router: Router, tmp_path: Path) -> None:
    """As prime-rl updates weights: pause with mode keep, update, resume. The running request has both weights."""
    original, changed = reference_model(router.folder), checkpoint(router, tmp_path / "new", seed=3)
    before = router.post("/update_weights", {"weight_dir": str(router.folder)})["weight_version"]
    running = router.start(600)
    router.until_tokens(100)
    assert router.post("/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert router.post("/pause?mode=keep") == {"status": "paused"}, "a second pause changes nothing"
    waiting = router.start(20)
    assert router.call("GET", "/is_paused")[1] == {"is_paused": True}
    assert router.call("GET", "/v1/models", key=KEY)[0] == router.call("GET", "/health")[0] == 200
    assert router.post("/update_weights", {"weight_dir": str(tmp_path / "new")})["weight_version"] == before + 1
    assert not running.done()
    assert not waiting.done(), "the router holds requests until it is resumed"
    assert router.post("/resume") == {"status": "resumed"}
    models = {before: original, before + 1: changed}
    status, reply = running.result(WAIT_S)
    assert status == 200, reply
    assert_tokens_of(models, reply, 600)
    assert [span["version"] for span in reply["choices"][0]["weight_versions"]] == [str(before), str(before + 1)]
    assert_tokens_of({before + 1: changed}, waiting.result(WAIT_S)[1], 20)
    assert router.versions == {before + 1}


def test_an_update_without_a_pause(router: Router, tmp_path: Path) -> None:
    """The router pauses meanwhile. Calls that are repeated while the update runs load the weights once."""
    (before,) = router.versions
    changed = checkpoint(router, tmp_path / "new", seed=4)
    body = {"weight_dir": str(tmp_path / "new")}
    calls = [router.pool.submit(router.post, "/update_weights", body) for _ in range(3)]
    assert [call.result(WAIT_S)["weight_version"] for call in calls] == [before + 1] * 3
    assert_tokens_of({before + 1: changed}, router.start(20).result(WAIT_S)[1], 20)
    again = {**body, "weight_version": before + 1}
    assert router.post("/update_weights", again)["weight_version"] == before + 1, "the last update: nothing is loaded"
    status, reply = router.call("POST", "/update_weights", {**again, "weight_dir": str(router.folder)})
    assert (status, f"above {before + 1}" in reply["error"]["message"]) == (400, True)
    assert router.post("/update_weights", {**body, "weight_version": before + 7})["weight_version"] == before + 7
    assert router.versions == {before + 7}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights", {"weight_dir": "/no/such/folder"}, "has no file"),
        ("/update_weights", {"weight_dir": "relative"}, "must be the absolute path"),
        ("/update_weights", {"weight_dir": None}, "weight_broadcast.type"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "relative"}, "must be the absolute path"),
        ("/load_lora_adapter", {"lora_name": "", "lora_path": "/tmp"}, "lora_name"),
        ("/pause?mode=sleep", None, "mode must be one of"),
    ],
)
def test_invalid_requests_change_nothing(path: str, body: Any, message: str, router: Router) -> None:
    before = router.versions
    status, reply = router.call("POST", path, body)
    assert (status, message in reply["error"]["message"]) == (400, True), reply
    assert router.versions == before
    assert router.start(4).result(WAIT_S)[0] == 200


def test_folders_that_do_not_fit_change_nothing(router: Router, tmp_path: Path) -> None:
    """SGLang's scheduler would end, or keep the old tensor."""
    before = router.versions
    tensors = {name: tensor.contiguous() for name, tensor in reference_model(router.folder).state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    for number, (other, message) in enumerate(
        [
            ({name: torch.zeros(3, 3)}, name),
            ({"unknown": torch.zeros(3)}, "unknown"),
            (None, f"lacks 1 tensors .* {name}"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = {key: tensor for key, tensor in tensors.items() if other is not None or key != name}
        save_file({**kept, **(other or {})}, folder / "model.safetensors")
        status, reply = router.call("POST", "/update_weights", {"weight_dir": str(folder)})
        assert (status, bool(re.search(message, reply["error"]["message"]))) == (400, True), reply
    assert router.versions == before
    assert router.start(4).result(WAIT_S)[0] == 200


def test_a_pause_that_aborts(router: Router, tmp_path: Path) -> None:
    """The caller receives the tokens so far. The same request id continues from them after the pause."""
    model = checkpoint(router, tmp_path / "whole", seed=6)
    router.post("/update_weights", {"weight_dir": str(tmp_path / "whole")})
    running = router.start(900, request_id="aborted")
    router.until_tokens(100)
    router.post("/pause?mode=abort")
    _, reply = running.result(WAIT_S)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 900
    continued = router.start(900, request_id="aborted")
    router.post("/resume")
    (whole,) = continued.result(WAIT_S)[1]["choices"]
    assert whole["token_ids"] == greedy_with_logprobs(model, PROMPTS[0], 900)[0]
    assert whole["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]


def test_a_pause_that_waits(router: Router) -> None:
    running = router.start(600)
    router.until_tokens(50)
    router.post("/pause?mode=wait")
    assert running.result(0.5)[1]["choices"][0]["finish_reason"] == "length"
    waiting = router.start(4)
    assert router.tokens_in_flight() == 0
    router.post("/resume")
    assert waiting.result(WAIT_S)[0] == 200


def test_lora_adapters(router: Router, tmp_path: Path) -> None:
    """As prime-rl loads them: the same name again and again, each time from another folder."""
    base = checkpoint(router, tmp_path / "whole", seed=7)
    router.post("/update_weights", {"weight_dir": str(tmp_path / "whole")})
    for number in range(2):
        tensors = adapter_for(base, seed=number)
        folder = write_adapter(tmp_path / f"adapter-{number}", tensors)
        assert router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": folder}) == {"status": "ok"}
        cards = {card["id"]: card for card in router.call("GET", "/v1/models", key=KEY)[1]["data"]}
        assert cards["policy"]["parent"] == str(router.folder)
        assert cards["policy"]["max_model_len"] == cards[str(router.folder)]["max_model_len"]
        expected, _ = greedy_with_logprobs(merged(base, tensors), PROMPTS[0], 8)
        for _ in range(4):  # both servers have the adapter
            reply = router.start(8, model="policy").result(WAIT_S)[1]
            assert reply["choices"][0]["token_ids"] == expected
            assert reply["model"] == "policy"
        body = {
            "model": "policy", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0.0, "return_token_ids": True,
            "ignore_eos": True,
        }  # fmt: skip
        assert router.call("POST", "/v1/completions", body, KEY)[1]["choices"][0]["token_ids"] == expected
    assert router.start(8).result(WAIT_S)[1]["choices"][0]["token_ids"] == greedy_with_logprobs(base, PROMPTS[0], 8)[0]
    assert router.post("/v1/unload_lora_adapter", {"lora_name": "policy"}) == {"status": "ok"}
    wait_until(lambda: router.start(8, model="policy").result(WAIT_S)[0] == 404, WAIT_S, "the adapter is still there")


def test_forwarded_requests_use_the_adapter_that_they_name(router: Router, tmp_path: Path) -> None:
    """vLLM selects an adapter by its name. SGLang would answer with the base model."""
    base = checkpoint(router, tmp_path / "whole", seed=10)
    router.post("/update_weights", {"weight_dir": str(tmp_path / "whole")})
    folder = write_adapter(tmp_path / "adapter", adapter_for(base, seed=2))
    router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": folder})
    name = str(router.folder)
    chat = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True,
        "return_token_ids": True, "return_prompt_token_ids": True,
    }  # fmt: skip

    def chat_tokens(model: str) -> tuple[list[int], list[int]]:
        status, reply = router.call("POST", "/v1/chat/completions", {**chat, "model": model}, KEY)
        assert (status, reply["model"]) == (200, model), reply
        (choice,) = reply["choices"]
        return choice["prompt_token_ids"], choice["response_token_ids"]

    def completion(model: str, prompt: list[int], **fields: Any) -> Any:
        body = {"model": model, "prompt": [prompt], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
        status, reply = router.call("POST", "/v1/completions", {**body, "return_token_ids": True}, KEY)
        assert status == 200, reply
        return reply["choices"][0]["token_ids"]

    def message(model: str) -> tuple[int, Any]:
        body = {"model": model, "messages": chat["messages"], "max_tokens": 8, "temperature": 0.0}
        status, reply = router.call("POST", "/v1/messages", body, KEY)
        return status, reply.get("content")

    prompt, with_adapter = chat_tokens("policy")
    generated = {model: router.start(8, model=model, token_ids=prompt).result(WAIT_S)[1] for model in (name, "policy")}
    expected = {model: reply["choices"][0]["token_ids"] for model, reply in generated.items()}
    assert expected[name] != expected["policy"]
    for model in (name, "policy"):
        assert chat_tokens(model) == (prompt, expected[model])
        assert completion(model, prompt) == expected[model]
    assert with_adapter == chat_tokens(f"{name}:policy")[1] == expected["policy"]
    assert chat_tokens("default") == (prompt, expected[name])
    assert message(name)[0] == 200
    assert message("policy") == message(f"{name}:policy") != message(name)
    status, reply = router.call("POST", "/v1/responses", {"model": "policy", "input": "hello"}, KEY)
    assert (status, reply["error"]["type"]) == (501, "UnsupportedError")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"):
        status, reply = router.call("POST", path, {**chat, "model": "polciy"}, KEY)
        assert (status, "The model `polciy` does not exist" in reply["error"]["message"]) == (404, True), path
    router.post("/unload_lora_adapter", {"lora_name": "policy"})


def test_a_server_that_was_silent_does_first_what_it_has_missed(router: Router, tmp_path: Path) -> None:
    base = checkpoint(router, tmp_path / "whole", seed=8)
    router.post("/update_weights", {"weight_dir": str(tmp_path / "whole")})

    def assert_policy(model: Any) -> None:
        expected, _ = greedy_with_logprobs(model, PROMPTS[0], 8)
        for reply in [router.start(8, model="policy") for _ in range(8)]:
            assert reply.result(WAIT_S)[1]["choices"][0]["token_ids"] == expected

    adapters = [adapter_for(base, seed=number) for number in range(2)]
    folders = [write_adapter(tmp_path / f"adapter-{number}", each) for number, each in enumerate(adapters)]
    router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": folders[0]})
    assert_policy(merged(base, adapters[0]))
    with router.silent_server():
        router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": folders[1]})
        assert_policy(merged(base, adapters[1]))
    router.until_admitted(2)
    assert_policy(merged(base, adapters[1]))
    router.post("/pause?mode=keep")
    with router.silent_server():
        router.post("/resume")
        assert router.start(4).result(WAIT_S)[0] == 200
    router.until_admitted(2)
    assert {reply.result(WAIT_S)[0] for reply in [router.start(4) for _ in range(8)]} == {200}
    changed = checkpoint(router, tmp_path / "changed", seed=9)
    with router.silent_server():
        version = router.post("/update_weights", {"weight_dir": str(tmp_path / "changed")})["weight_version"]
    for _ in range(8):
        time.sleep(0.3)
        assert_tokens_of({version: changed}, router.start(8).result(WAIT_S)[1], 8)
    assert router.num_admitted == 1
    router.post("/update_weights", {"weight_dir": str(tmp_path / "whole")})
    router.until_admitted(2)
    router.post("/unload_lora_adapter", {"lora_name": "policy"})


def test_a_missed_probe_does_not_take_away_an_adapter_in_use(router: Router, tmp_path: Path) -> None:
    """SGLang unloads an adapter when its running requests have ended. Until then, the server would be left out."""
    folder = write_adapter(tmp_path / "adapter", adapter_for(reference_model(router.folder), seed=1))
    router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": folder})
    running = [router.start(1900, model="policy") for _ in range(4)]
    with router.silent_server():
        pass
    router.until_admitted(2)
    assert not all(call.done() for call in running)
    assert {call.result(WAIT_S)[0] for call in running} == {200}
    router.post("/unload_lora_adapter", {"lora_name": "policy"})


def test_a_router_that_is_started_during_a_pause_continues_the_servers(router: Router) -> None:
    with router_of(router.servers, router.folder) as first:
        first.post("/pause?mode=keep")
    with router_of(router.servers, router.folder) as second:
        waiting = second.start(4)
        time.sleep(1.0)  # some probes
        assert (second.num_admitted, waiting.done()) == (0, False), "the servers are paused"
        second.post("/resume")
        assert waiting.result(WAIT_S)[0] == 200
        assert {reply.result(WAIT_S)[0] for reply in [second.start(4) for _ in range(8)]} == {200}


def test_a_wrong_admin_key_of_the_servers(router: Router) -> None:
    with router_of(router.servers, router.folder, "another-key") as wrong:
        for path in ("/pause?mode=keep", "/resume"):
            status, reply = wrong.call("POST", path)
            assert (status, reply["error"]["details"]["key"]) == (502, "replica_admin_api_key"), reply
        assert wrong.call("GET", "/is_paused") == (200, {"is_paused": False})
        time.sleep(1.5)  # some probes
        assert wrong.num_admitted == 2


@needs_vllm
def test_a_vllm_server_pauses_and_loads_adapters_but_no_checkpoint(tmp_path: Path) -> None:
    folder = model_of(tmp_path)
    settings: dict[str, Any] = {**server_settings("vllm"), **KEYS, "enable_lora": True, "max_lora_rank": 8}
    with (
        HttpServerEngineAdapter(str(folder), config=adapter_config("vllm"), **settings) as server,
        router_of([server], folder) as router,
    ):
        checkpoint(router, tmp_path / "new", seed=3)
        status, reply = router.call("POST", "/update_weights", {"weight_dir": str(tmp_path / "new")})
        assert (status, reply["error"]["type"]) == (501, "UnsupportedError")
        assert "VerlEngine(servers=[...])" in reply["error"]["message"]
        running = router.start(1500)
        router.until_tokens(100)
        router.post("/pause?mode=keep")
        waiting = router.start(4)
        assert not running.done()
        router.post("/resume")
        assert running.result(WAIT_S)[0] == waiting.result(WAIT_S)[0] == 200
        assert_tokens_of({0: reference_model(folder)}, running.result()[1], 1500)
        for number in range(2):
            tensors = adapter_for(reference_model(folder), seed=number)
            lora_folder = write_adapter(tmp_path / f"adapter-{number}", tensors)
            router.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": lora_folder})
            expected, _ = greedy_with_logprobs(merged(reference_model(folder), tensors), PROMPTS[0], 8)
            assert router.start(8, model="policy").result(WAIT_S)[1]["choices"][0]["token_ids"] == expected
