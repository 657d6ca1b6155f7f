"""The systems that `bench_gateway.py` compares: processes with a URL, in front of an engine or of a fake upstream."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import requests
from bench_router import KEY, our_router
from servers import free_port

from verl_server.cli.common import load_tokenizer
from verl_server.trajectory import get_renderer
from verl_server.types import Json

BENCHMARKS = Path(__file__).parent
LITELLM_PROGRAM = BENCHMARKS.parent / ".venv-clients" / "bin" / "litellm"
ENGINE, ROUTER, GATEWAY, LITELLM = "direct engine", "verl-server router", "gateway", "LiteLLM's proxy"
ENGINE_LOGPROBS = "direct engine, log probs"
CHAT_PATH = "/v1/chat/completions"
UPSTREAM = "direct upstream"
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 20.0
ADMIN_KEY_VARIABLE = "VERL_SERVER_GATEWAY_ADMIN_KEY"


@dataclass(frozen=True)
class System:
    """A process that takes OpenAI's requests, or those of a path of its own."""

    url: str
    """Base URL without `/v1`."""
    make_keys: Callable[[int], list[str]]
    """Makes a key for each of N callers."""
    pid: int | None = None
    """Process whose CPU time is measured."""
    path: str = CHAT_PATH
    convert: Callable[[Json], Json] | None = None
    """Makes the body for the path of a body for `CHAT_PATH`."""

    def encode(self, body: Json) -> bytes:
        """A body for `CHAT_PATH` as the body for the path of the system."""
        return orjson.dumps(body if self.convert is None else self.convert(body))


def with_key(url: str, key: str, pid: int | None = None) -> System:
    """A system with one key for all callers."""
    return System(url, lambda count: [key] * count, pid)


@contextlib.contextmanager
def process(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is ended at the end."""
    with log.open("w") as errors:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(env),
            start_new_session=True,
        )  # fmt: skip
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait(EXIT_TIMEOUT_S)


def ready_url(started: subprocess.Popen[str], log: Path) -> str:
    """The URL in the line `Ready: URL` of a process. Raises RuntimeError with the log if the process ends."""
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("Ready: "):
            return line.split()[1]
    raise RuntimeError(f"a process has not started:\n{log.read_text()[-4000:]}")


def _gateway_system(url: str, admin_key: str, pid: int) -> System:
    def make_keys(count: int) -> list[str]:
        headers = {"Authorization": f"Bearer {admin_key}"}
        settings = {"sampling_params": {"ignore_eos": True}}  # the gateway does not take this field of a request
        with requests.Session() as admin:
            admin.trust_env = False
            target = f"{url}/admin/sessions"
            replies = [admin.post(target, json=settings, headers=headers, timeout=60) for _ in range(count)]
        return [str(reply.json()["key"]) for reply in replies]

    return System(url, make_keys, pid)


@contextlib.contextmanager
def gateway(scratch: Path, server_url: str | None = None, tokenizer: Path | None = None) -> Iterator[System]:
    """`verl-server gateway` in front of a server, or with a tokenizer a gateway whose upstream answers at once."""
    name = "engine" if tokenizer is None else "upstream"
    run_dir, log, admin_key = scratch / f"run-{name}", scratch / f"gateway-{name}.log", secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "verl_server.cli", "gateway", str(run_dir), "--server", str(server_url)]
    if tokenizer is not None:
        command = [sys.executable, str(BENCHMARKS / "fake_upstream.py"), "gateway", str(run_dir), str(tokenizer)]
    env = {**os.environ, ADMIN_KEY_VARIABLE: admin_key, "VERL_SERVER_API_KEY": KEY}
    with process(command, env, log) as started:
        url = ready_url(started, log)
        _wait_until_ready(f"{url}/health/readiness", started, log)  # the gateway starts before it knows the engine
        yield _gateway_system(url, admin_key, started.pid)


@contextlib.contextmanager
def fake_upstream(scratch: Path) -> Iterator[System]:
    """An HTTP server with OpenAI's chat API that answers at once."""
    log = scratch / "upstream.log"
    command = [sys.executable, str(BENCHMARKS / "fake_upstream.py"), "server"]
    with process(command, os.environ, log) as started:
        yield with_key(ready_url(started, log), KEY)


@contextlib.contextmanager
def litellm_proxy(upstream: str, scratch: Path, name: str) -> Iterator[System]:
    """LiteLLM's proxy with one worker in front of an upstream. Its key is the only check of its requests."""
    if not LITELLM_PROGRAM.exists():
        raise RuntimeError("LiteLLM is not installed; run `make clients`")
    config, log, port, key = scratch / f"litellm-{name}.yaml", scratch / f"litellm-{name}.log", free_port(), _key()
    params = {"model": "openai/policy", "api_base": f"{upstream}/v1", "api_key": "os.environ/UPSTREAM_KEY"}
    settings = {"telemetry": False, "num_retries": 0, "request_timeout": 120}
    models = [{"model_name": "policy", "litellm_params": params}]
    config.write_bytes(orjson.dumps({"model_list": models, "litellm_settings": settings}))  # JSON is YAML
    env = {
        "PATH": os.environ["PATH"], "HOME": str(scratch), "UPSTREAM_KEY": KEY, "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR",
    }  # fmt: skip
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    command = ["sh", "-c", 'exec "$0" "$@" >/dev/null', str(LITELLM_PROGRAM), *arguments]  # nobody reads the output
    with process(command, env, log) as started:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(f"{url}/health/liveliness", started, log)
        yield with_key(url, key, started.pid)


def _key() -> str:
    return f"sk-{secrets.token_hex(24)}"


def _wait_until_ready(url: str, started: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer:\n{log.read_text()[-4000:]}")


def engine_with_logprobs(server_url: str, model: Path) -> System:
    """The engine, asked for what the gateway asks for: token ids and their log probabilities."""
    renderer = get_renderer(load_tokenizer(str(model), ""))

    def convert(body: Json) -> Json:
        return {
            "input_ids": renderer.render_prompt(body["messages"], body.get("tools")),
            "sampling_params": {"max_new_tokens": body["max_tokens"], "ignore_eos": True},
            "return_logprob": True,
            "stream": body["stream"],
        }

    return System(server_url, lambda count: [KEY] * count, path="/generate", convert=convert)


@contextlib.contextmanager
def engine_systems(server_url: str, model: Path, scratch: Path) -> Iterator[dict[str, System]]:
    """The engine, and what can stand in front of it."""
    with (
        our_router([server_url]) as router,
        gateway(scratch, server_url=server_url) as ours,
        litellm_proxy(server_url, scratch, "engine") as litellm,
    ):
        engine, engine_logprobs = with_key(server_url, KEY), engine_with_logprobs(server_url, model)
        router_system = with_key(router, KEY)
        yield {ENGINE: engine, ENGINE_LOGPROBS: engine_logprobs, ROUTER: router_system, GATEWAY: ours, LITELLM: litellm}


@contextlib.contextmanager
def upstream_systems(tokenizer: Path, scratch: Path) -> Iterator[dict[str, System]]:
    """An upstream that answers at once, and what can stand in front of it."""
    with (
        fake_upstream(scratch) as upstream,
        gateway(scratch, tokenizer=tokenizer) as ours,
        litellm_proxy(upstream.url, scratch, "upstream") as litellm,
    ):
        yield {UPSTREAM: upstream, GATEWAY: ours, LITELLM: litellm}
