"""Routes of vLLM-RL servers on a router: replies, request ids, sessions and lost replicas, with both engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from both_engines import CONTEXT_LENGTH, KINDS, adapter_config, model_of, server_settings
from fleet_helpers import RECOVERY, RESTART_S, healthy, states
from helpers import GREEDY, PROMPTS, greedy_with_logprobs, reference_model, server_pid, wait_until
from vllm_helpers import VLLM_PYTHON, needs_vllm

from verl_server import RolloutManager, RouterConfig

pytestmark = pytest.mark.timeout(900)

CLIENTS = Path(__file__).parents[4] / ".venv-rl-clients" / "bin" / "python"
PROGRAM = Path(__file__).parents[2] / "rl_clients" / "verifiers_client.py"
needs_clients = pytest.mark.skipif(
    not CLIENTS.exists(), reason="there is no .venv-rl-clients; `make rl-clients` makes it"
)
CLIENT_TIMEOUT_S = 400.0
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
GREEDY_PARAMS = {"temperature": 0.0, "max_tokens": GREEDY["max_new_tokens"], "ignore_eos": True, "logprobs": 1}
#: vLLM's class of the reply, which prime-rl reads replies with.
VALIDATE = (
    "import sys; from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse as Reply; "
    "reply = Reply.model_validate_json(sys.stdin.read()); print(reply.model_dump_json())"
)


@dataclass(frozen=True)
class Router:
    """The router process of a fleet with two replicas."""

    kind: str
    fleet: RolloutManager
    folder: Path

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the reply to a POST request, or to a GET request without a body."""
        headers = {"Authorization": f"Bearer {self.fleet.router_key}", **headers}
        method = "GET" if body is None else "POST"
        reply = requests.request(method, f"{self.fleet.router_url}{path}", json=body, headers=headers, timeout=300)
        return reply.status_code, reply.json()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The JSON of a successful reply."""
        status, reply = self.call(path, body, **headers)
        assert status == 200, reply
        return reply

    def counter(self, name: str) -> int:
        text = requests.get(f"{self.fleet.router_url}/metrics", timeout=30).text
        return int(
            float(next(line for line in text.splitlines() if line.startswith(f"verl_router_{name}_total")).split()[1])
        )

    def kill_a_replica(self, min_tokens: int) -> None:
        """Kill the server of a replica with SIGKILL when it has `min_tokens` tokens in flight."""

        names: list[str] = []

        def find_busy() -> list[str]:
            _, rows = self.call("/replicas")
            names[:] = [row["name"] for row in rows if row["tokens_in_flight"] >= min_tokens]
            return names

        wait_until(find_busy, 120.0, f"no replica has {min_tokens} tokens in flight")
        os.kill(server_pid(next(each for each in self.fleet.replicas if each.name == names[0])), signal.SIGKILL)

    def until_healthy(self) -> None:
        wait_until(lambda: healthy(self.fleet) == 2, RESTART_S, f"not healthy: {states(self.fleet)}")


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    kind = request.param
    folder = model_of(tmp_path_factory.mktemp(f"model-{kind}"))
    config = RouterConfig(min_tokens_per_event=8)
    with RolloutManager(
        2, model_path=str(folder), config=adapter_config(kind), recovery=RECOVERY, router_process=True,
        router=config, **server_settings(kind),
    ) as fleet:  # fmt: skip
        yield Router(kind, fleet, folder)


# -- replies -----------------------------------------------------------------------------------------


def test_token_ids_and_log_probabilities(router: Router) -> None:
    model = reference_model(router.folder)
    for prompt in PROMPTS:
        reply = router.post(GENERATE, {"token_ids": prompt, "sampling_params": GREEDY_PARAMS})
        (choice,) = reply["choices"]
        tokens, logprobs = greedy_with_logprobs(model, prompt)
        content = choice["logprobs"]["content"]
        assert choice["token_ids"] == tokens
        assert [entry["token_id"] for entry in content] == tokens
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert [entry["logprob"] for entry in content] == pytest.approx(logprobs, abs=1e-4)
        assert [[top["token_id"] for top in entry["top_logprobs"]] for entry in content] == [[t] for t in tokens]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(tokens)}]
        assert reply["model"] == str(router.folder)
        assert reply["usage"]["prompt_tokens"] == len(prompt)
        assert reply["usage"]["total_tokens"] == len(prompt) + len(tokens)


def test_stop_tokens_and_several_samples(router: Router) -> None:
    tokens, _ = greedy_with_logprobs(reference_model(router.folder), PROMPTS[0])
    stop = next(token for index, token in enumerate(tokens) if index > 2 and tokens.index(token) == index)
    params = {**GREEDY_PARAMS, "ignore_eos": False, "stop_token_ids": [stop], "n": 3, "logprobs": 3, "output_kind": 2}
    reply = router.post(GENERATE, {"token_ids": PROMPTS[0], "sampling_params": params, "return_token_ids": True})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for choice in reply["choices"]:
        assert choice["token_ids"] == tokens[: tokens.index(stop) + 1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        for entry in choice["logprobs"]["content"]:
            assert [top["rank"] for top in entry["top_logprobs"]] == [1, 2, 3]
            assert entry["rank"] == 1
    assert reply["prompt_token_ids"] == PROMPTS[0]
    seeded = {"max_tokens": 20, "ignore_eos": True, "seed": 7, "n": 2}
    first, again = (
        [
            choice["token_ids"]
            for choice in router.post(GENERATE, {"token_ids": [5], "sampling_params": seeded})["choices"]
        ]
        for _ in range(2)
    )
    assert first[0] != first[1], "each sample has a seed of its own"
    if router.kind == "vllm":  # SGLang samples by seed only with deterministic inference
        assert first == again


@needs_vllm
def test_the_reply_is_that_of_vllm(router: Router) -> None:
    """vLLM's own class reads the reply. A vLLM replica's own route answers with the same fields and values."""
    body = {
        "token_ids": PROMPTS[0], "sampling_params": GREEDY_PARAMS, "model": str(router.folder), 
        "request_id": "same form",
        "return_token_ids": True,
    }  # fmt: skip
    reply = router.post(GENERATE, body)
    read = subprocess.run(
        [str(VLLM_PYTHON), "-c", VALIDATE],
        input=json.dumps(reply),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert read.returncode == 0, read.stderr[-3000:]
    parsed = json.loads(read.stdout)
    assert parsed["choices"][0]["weight_versions"] == reply["choices"][0]["weight_versions"]
    assert parsed["request_id"] == reply["request_id"] == "generate-tokens-same form"
    if router.kind == "vllm":
        adapter = router.fleet.replicas[0].adapter
        assert adapter is not None
        headers = {"Authorization": f"Bearer {adapter.server_args['api_key']}"}
        own = requests.post(adapter.base_url + GENERATE, json=body, headers=headers, timeout=60).json()
        for content in (own["choices"][0]["logprobs"]["content"], parsed["choices"][0]["logprobs"]["content"]):
            for entry in content:
                entry["logprob"] = round(entry["logprob"], 3)
                entry["rank"] = entry["top_logprobs"] = None
        for changing in ("created", "usage"):
            del own[changing], parsed[changing]
        assert parsed == own


def test_without_max_tokens_the_output_may_fill_the_context(router: Router) -> None:
    """As in vLLM. SGLang refuses a maximum that is larger than the rest of the context."""
    tokens, _ = greedy_with_logprobs(reference_model(router.folder), PROMPTS[0])
    params = {"temperature": 0.0, "stop_token_ids": [tokens[3]]}
    for limit in ({}, {"max_tokens": None}, {"max_tokens": 10 * CONTEXT_LENGTH}):
        reply = router.post(GENERATE, {"token_ids": PROMPTS[0], "sampling_params": {**params, **limit}})
        assert reply["choices"][0]["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
        assert reply["choices"][0]["logprobs"] is None


def test_completions_with_token_ids(router: Router) -> None:
    """The body is that of SkyRL's Tinker server for external inference."""
    body = {
        "model": str(router.folder), "prompt": PROMPTS[1], "n": 2, "seed": None, "max_tokens": GREEDY["max_new_tokens"],
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "stream": False, "return_token_ids": True,
        "ignore_eos": True,
    }  # fmt: skip
    tokens, logprobs = greedy_with_logprobs(reference_model(router.folder), PROMPTS[1])
    reply = router.post(COMPLETIONS, body, **{"X-Session-ID": "sampling-session"})
    assert reply["object"] == "text_completion"
    for choice in reply["choices"]:
        assert choice["token_ids"] == tokens
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(tokens)}]
        assert isinstance(choice["text"], str) == (router.kind == "sglang")
    if router.kind == "sglang":
        scored = router.post(COMPLETIONS, {**body, "n": 1, "prompt_logprobs": 0})["choices"][0]["prompt_logprobs"]
        assert scored[0] is None
        assert [int(next(iter(entry))) for entry in scored[1:]] == PROMPTS[1][1:]
    text = {"model": str(router.folder), "prompt": "hello", "max_tokens": 3}
    assert router.post(COMPLETIONS, text)["choices"][0]["text"] is not None, "forwarded to a replica"


def test_models(router: Router) -> None:
    status, reply = router.call("/v1/models")
    assert status == 200
    assert [(card["id"], card["max_model_len"]) for card in reply["data"]] == [(str(router.folder), CONTEXT_LENGTH)]


def test_the_header_names_the_session(router: Router) -> None:
    """Later turns find the earlier turns in the prefix cache of the session's replica."""
    history = list(range(100, 196))
    for turn in range(4):
        reply = router.post(
            GENERATE,
            {"token_ids": history, "sampling_params": GREEDY_PARAMS},
            **{"X-Session-ID": f"{router.kind}-session"},
        )
        if turn and router.kind == "sglang":  # vLLM does not tell the number of cached tokens
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(history) - 32
        history += [*reply["choices"][0]["token_ids"], 7, 8, 9]


def test_a_request_id_has_one_generation(router: Router) -> None:
    """A repeated id receives the stored samples. The header `X-Request-Id` comes before the field, as in vLLM."""
    body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 30, "ignore_eos": True, "n": 2, "logprobs": 0}}
    before = router.counter("requests"), router.counter("attached")
    first = router.post(GENERATE, {**body, "request_id": "again"})
    second = router.post(GENERATE, {**body, "request_id": "ignored"}, **{"X-Request-Id": "again"})
    assert first["choices"] == second["choices"]
    assert first["request_id"] == second["request_id"] == "generate-tokens-again"
    assert (router.counter("requests"), router.counter("attached")) == (before[0] + 2, before[1] + 2)
    status, reply = router.call(GENERATE, {**body, "token_ids": [4, 6], "request_id": "again"})
    assert (status, "choose a new rid" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (GENERATE, {}, 400, "token_ids must be one list of token ids"),
        (GENERATE, {"token_ids": [[1]]}, 400, "one list of token ids"),
        (GENERATE, {"token_ids": [10**9]}, 400, "vocabulary"),
        (GENERATE, {"token_ids": [1], "model": "other"}, 404, "The model `other` does not exist"),
        (GENERATE, {"token_ids": [1], "stream": True}, 400, "'stream' is not supported"),
        (GENERATE, {"token_ids": [1], "output_mode": "text"}, 400, "decode token_ids yourself"),
        (GENERATE, {"token_ids": [1], "content_parts": [{"type": "image_url"}]}, 400, "send images to /generate"),
        (GENERATE, {"token_ids": [1], "kv_transfer_params": {"a": 1}}, 400, "'kv_transfer_params' is not supported"),
        (GENERATE, {"token_ids": [1], "sampling_parms": {}}, 400, "did you mean 'sampling_params'"),
        (GENERATE, {"token_ids": [1], "priority": 3}, 400, "low numbers come first in vLLM"),
        (GENERATE, {"token_ids": [1], "cache_salt": ""}, 400, "cache_salt"),
        (GENERATE, {"token_ids": [1], "request_id": 5}, 400, "request_id must be a string"),
        (GENERATE, {"token_ids": [1], "sampling_params": []}, 400, "sampling_params must be an object"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_token": 4}}, 400, "did you mean 'max_tokens'"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 0}}, 400, "n must be"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": -1}}, 400, "logprobs must be"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"bad_words": ["a"]}}, 400, "'bad_words' is not supported"),
        (GENERATE, {"token_ids": [1], "weight_version": 77}, 503, "no replica serves weight version 77"),
        (COMPLETIONS, {"prompt": [1], "return_token_ids": True, "echo": True}, 400, "'echo' is not supported"),
        (COMPLETIONS, {"prompt": [1], "return_token_ids": True, "model": "other"}, 404, "does not exist"),
    ],
)  # fmt: skip
def test_invalid_requests(path: str, body: Any, status: int, message: str, router: Router) -> None:
    got, reply = router.call(path, body)
    assert (got, message in reply["error"]["message"]) == (status, True), reply


def test_requests_need_the_key(router: Router) -> None:
    for path in (GENERATE, COMPLETIONS, "/v1/models"):
        status, reply = router.call(path, None if path == "/v1/models" else {}, Authorization="Bearer wrong")
        assert (status, reply["error"]["type"]) == (401, "ServerError")


def test_the_router_of_a_fleet_offers_no_admin_routes(router: Router) -> None:
    for path in ("/pause", "/resume", "/update_weights", "/load_lora_adapter"):
        assert router.call(path, {}, Authorization="Bearer wrong")[0] == 401
        status, reply = router.call(path, {})
        assert (status, reply["error"]["type"]) == (501, "UnsupportedError")
        assert "push weights with VerlEngine(fleet=...)" in reply["error"]["message"]


# -- lost replicas -----------------------------------------------------------------------------------


def test_requests_survive_a_lost_replica(router: Router) -> None:
    """A server is killed while 24 requests of both routes run. All of them have the tokens of Hugging Face."""
    num_tokens, model = 300, reference_model(router.folder)
    expected = {number: greedy_with_logprobs(model, [1, 2, 3 + number], num_tokens) for number in range(6)}

    def ask(number: int) -> Any:
        prompt, params = [1, 2, 3 + number % 6], {**GREEDY_PARAMS, "max_tokens": num_tokens}
        if number % 2:
            return router.post(COMPLETIONS, {"prompt": prompt, **params, "return_token_ids": True})
        return router.post(GENERATE, {"token_ids": prompt, "sampling_params": params, "request_id": f"lost-{number}"})

    router.until_healthy()
    before = router.counter("requests"), router.counter("finished")
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, number) for number in range(24)]
        router.kill_a_replica(min_tokens=200)
        replies = [each.result() for each in asked]
    for number, reply in enumerate(replies):
        (choice,) = reply["choices"]
        tokens, logprobs = expected[number % 6]
        assert choice["token_ids"] == tokens
        content = choice["logprobs"]
        got = content["token_logprobs"] if number % 2 else [entry["logprob"] for entry in content["content"]]
        assert got == pytest.approx(logprobs, abs=1e-3)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": num_tokens}]
    assert (router.counter("requests"), router.counter("finished")) == (before[0] + 24, before[1] + 24)


@needs_clients
def test_rollouts_of_verifiers_survive_a_lost_replica(router: Router) -> None:
    """200 rollouts of two turns run at the same time, and a server is killed. No rollout is lost or sampled twice."""
    router.until_healthy()
    given = {
        "url": router.fleet.router_url, "key": router.fleet.router_key, "model": str(router.folder),
        "rollouts": 200, "turns": 2, "max_tokens": 64,
    }  # fmt: skip
    names = ("requests", "finished", "failed", "continued", "restarted")
    before = {name: router.counter(name) for name in names}
    with subprocess.Popen(
        [str(CLIENTS), str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ) as process, ThreadPoolExecutor(1) as pool:  # fmt: skip
        output = pool.submit(process.communicate, json.dumps(given), CLIENT_TIMEOUT_S)
        try:
            router.kill_a_replica(min_tokens=2000)
            killed_at = time.monotonic()
            stdout, stderr = output.result()
        finally:
            process.kill()
    assert process.returncode == 0, stderr[-4000:]
    rollouts = json.loads(stdout)
    added = {name: router.counter(name) - before[name] for name in names}
    print(f"{router.kind}: {added}, {time.monotonic() - killed_at:.1f} s after the kill", file=sys.stderr)
    assert (added["requests"], added["finished"], added["failed"]) == (400, 400, 0)
    assert added["continued"] + added["restarted"] > 0, "the killed server ran no request"
    turns = [turn for rollout in rollouts for turn in rollout]
    assert len(rollouts) == 200
    assert len({turn["id"] for turn in turns}) == 400
    assert {turn["finish_reason"] for turn in turns} <= {"length", "stop"}
    assert {len(turn["completion_ids"]) for turn in turns if turn["finish_reason"] == "length"} == {64}
    model = reference_model(router.folder)
    for turn in turns[::20]:
        tokens, logprobs = greedy_with_logprobs(model, turn["prompt_ids"], 64)
        count = len(turn["completion_ids"])
        assert turn["completion_ids"] == tokens[:count]
        assert turn["logprobs"] == pytest.approx(logprobs[:count], abs=1e-3)
    router.until_healthy()
