"""Servers behind the gateway that start after it, restart and end; routers; fleets; and keys from a file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gateway_commands import ADMIN_KEY, SHORT, ask, create_session, forward, gateway_command, is_ready
from helpers import adapter_of, free_port, remote_server_of, wait_until
from transformers import AutoTokenizer

from verl_server import BadInputError, RemoteServer, VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.trajectory import ChatRenderer, load_session

LIMITS = RolloutLimits(max_turns=1000)


class Servers:
    """The servers that a gateway finds. A test changes them."""

    def __init__(self) -> None:
        self.found: dict[str, RemoteServer] = {}
        self.error: Exception | None = None

    def find(self) -> dict[str, RemoteServer]:
        if self.error is not None:
            raise self.error
        return dict(self.found)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.gateway.engines.FIND_INTERVAL_S", 0.1)
    monkeypatch.setattr("verl_server.router.process.static_replicas.PROBE_INTERVAL_S", 0.1)


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def gateway(servers: Servers, tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(DiscoveredServers(servers.find), tmp_path, limits=LIMITS) as gateway:
        yield gateway


def test_a_gateway_waits_for_its_first_server(gateway: Gateway, servers: Servers, shared_engine: VerlEngine) -> None:
    """Without a server, agents get an error after which they send the request again. Then the same session works."""
    info, key = gateway.create_session("a", sampling_params=SHORT)
    servers.error = RuntimeError("no cluster at 10.0.0.9")
    for path, status in (("/v1/chat/completions", 503), ("/v1/messages", 529), ("/v1/messages/count_tokens", 529)):
        reply = ask(gateway.url, key, path)
        assert (reply.status_code, reply.headers["retry-after"]) == (status, "1")
        assert "the gateway has found no server yet; send the request again" in reply.text
    assert ask(gateway.url, "sk-wrong").status_code == 401
    ready = httpx.get(f"{gateway.url}/health/readiness")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["the gateway has found no server yet"])
    health = httpx.get(f"{gateway.url}/health", headers={"x-api-key": gateway.admin_key}, timeout=60.0)
    wait_until(lambda: "10.0.0.9" in httpx.get(health.url, headers={"x-api-key": gateway.admin_key}).text, 10, "error")
    servers.error, servers.found["r0"] = None, remote_server_of(adapter_of(shared_engine))
    wait_until(lambda: is_ready(gateway.url), 30, "the server is not found")
    assert ask(gateway.url, key).status_code == 200
    assert ask(gateway.url, key, max_tokens=10**9).status_code == 200, "the gateway knows the context length"
    too_long = ask(gateway.url, key, messages=[{"role": "user", "content": "word " * 20_000}])
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert len([node for node in load_session(gateway.config.run_dir / f"{info.id}.jsonl").nodes if node.sampled]) == 2


def test_a_gateway_follows_servers_that_go_and_come(
    gateway: Gateway, servers: Servers, shared_engine: VerlEngine
) -> None:
    """A server that moves keeps its name. One of the two addresses is a proxy, so one process serves both."""
    server = remote_server_of(adapter_of(shared_engine))
    with forward(server.base_url) as (proxy, cut):
        servers.found = {"r0": RemoteServer(proxy, server.api_key)}
        wait_until(lambda: is_ready(gateway.url), 30, "not ready")
        _, key = gateway.create_session(sampling_params=SHORT)
        assert ask(gateway.url, key).status_code == 200
        cut()
        wait_until(lambda: not is_ready(gateway.url), 30, "the lost server is not noticed")
        servers.found = {"r0": server}
        wait_until(lambda: is_ready(gateway.url), 30, "the server is not found at its new address")
        assert ask(gateway.url, key).status_code == 200
        servers.found = {}
        wait_until(lambda: not is_ready(gateway.url), 30, "the removed server is still used")
        assert ask(gateway.url, key, messages=[{"role": "user", "content": "b"}]).status_code == 503


class HangingSearch:
    """A search for servers that hangs until `released` is set. Finds no server."""

    def __init__(self, *, hangs_at_close: bool = False) -> None:
        self.released = threading.Event()
        self.num_calls = self.num_running = self.max_running = 0
        self._hangs_at_close = hangs_at_close

    def __call__(self) -> dict[str, RemoteServer]:
        self.num_calls += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.released.wait()
        self.num_running -= 1
        return {}

    def close(self) -> None:
        if self._hangs_at_close:
            self.released.wait()


@pytest.mark.parametrize("hangs_at_close", [False, True])
def test_a_search_that_hangs_is_called_once_and_does_not_block_the_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_at_close: bool
) -> None:
    """The other searches wait for the call that hangs. The gateway names the problem, and ends without the call."""
    monkeypatch.setattr("verl_server.gateway.engines.FIND_TIMEOUT_S", 0.05)
    monkeypatch.setattr("verl_server.gateway.engines.CLOSE_TIMEOUT_S", 0.05, raising=False)
    search = HangingSearch(hangs_at_close=hangs_at_close)
    try:
        with Gateway(DiscoveredServers(search), tmp_path, limits=LIMITS) as gateway:
            headers = {"x-api-key": gateway.admin_key}

            def problem() -> str:
                report = httpx.get(f"{gateway.url}/health", headers=headers, timeout=60.0).json()
                return report["engine"]["problem"] or ""

            wait_until(lambda: "took more than 0.05 s" in problem(), 30, "the problem is not named")
    finally:
        search.released.set()
    assert search.num_calls == 1


def test_a_search_that_ends_late_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.gateway.engines.FIND_TIMEOUT_S", 0.01)
    search = HangingSearch()
    with Gateway(DiscoveredServers(search), tmp_path, limits=LIMITS):
        wait_until(lambda: search.num_running == 1, 30, "no search")
        search.released.set()
        wait_until(lambda: search.num_calls >= 3, 30, "the search is not called again")
    assert search.max_running == 1


def test_a_tokenizer_that_does_not_load_is_named_and_the_search_goes_on(
    tmp_path: Path, shared_engine: VerlEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the tokenizer can be on a network file system that hangs. They are read once."""
    monkeypatch.setattr("verl_server.gateway.engines.FIND_TIMEOUT_S", 0.5)
    load, released, num_calls = AutoTokenizer.from_pretrained, threading.Event(), [0, 0]

    def hang(*args: Any, **options: Any) -> Any:
        num_calls[1] += 1
        released.wait()
        return load(*args, **options)

    def find() -> dict[str, RemoteServer]:
        num_calls[0] += 1
        return {"r0": remote_server_of(adapter_of(shared_engine))}

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", hang)
    try:
        with Gateway(DiscoveredServers(find), tmp_path, limits=LIMITS) as gateway:
            headers = {"x-api-key": gateway.admin_key}

            def problem() -> str:
                return str(
                    httpx.get(f"{gateway.url}/health", headers=headers, timeout=60.0).json()["engine"]["problem"]
                )

            wait_until(
                lambda: "loading the tokenizer took more than 0.5 s" in problem(), 30, "the problem is not named"
            )
            num_before = num_calls[0]
            wait_until(lambda: num_calls[0] >= num_before + 3, 30, "the search has stopped")
            assert num_calls[1] == 1
            released.set()
            wait_until(lambda: is_ready(gateway.url), 30, "the tokenizer that loads late is not used")
    finally:
        released.set()


def test_servers_beside_a_wrong_server_are_found_when_the_function_is_right(
    gateway: Gateway, servers: Servers, shared_engine: VerlEngine
) -> None:
    """The wrong value is named, and the servers beside it are probed later."""
    server = remote_server_of(adapter_of(shared_engine))
    wrong: Any = server.base_url
    servers.found = {"r0": server, "r1": wrong}
    headers = {"x-api-key": gateway.admin_key}

    def problem() -> str:
        return str(httpx.get(f"{gateway.url}/health", headers=headers, timeout=60.0).json()["engine"]["problem"])

    wait_until(lambda: "got a value of type str" in problem(), 30, "the wrong server is not named")
    servers.found = {"r0": server}
    wait_until(lambda: is_ready(gateway.url), 30, "the server is not probed")


def test_the_shortest_context_of_the_servers_counts(tiny: Callable[..., Path]) -> None:
    found, renderer = DiscoveredServers(dict), ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    infos = [{"max_req_input_len": 3000}, {"max_req_input_len": 2000}, {}]
    assert found._make_parts(renderer, infos).max_tokens == 2000


def test_lists_of_servers_are_checked() -> None:
    server = RemoteServer("http://127.0.0.1:1")
    with pytest.raises(BadInputError, match="twice"):
        DiscoveredServers([server, server])
    with pytest.raises(BadInputError, match="at least one"):
        DiscoveredServers([])


def test_the_search_for_servers_is_closed_with_the_gateway(tmp_path: Path) -> None:
    class Finder:
        is_closed = False

        def __call__(self) -> dict[str, RemoteServer]:
            return {}

        def close(self) -> None:
            self.is_closed = True

    finder = Finder()
    with Gateway(DiscoveredServers(finder), tmp_path, limits=LIMITS):
        assert not finder.is_closed
    assert finder.is_closed


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_with_several_servers_starts_before_them(shared_engine: VerlEngine, tmp_path: Path) -> None:
    server, key_file = remote_server_of(adapter_of(shared_engine)), tmp_path / "key"
    key_file.write_text("the-key-in-the-file\n")
    missing = f"http://127.0.0.1:{free_port()}"
    arguments = (str(tmp_path / "run"), "--server", missing, "--server", server.base_url)
    keys = {"VERL_SERVER_API_KEY": server.api_key or "", "VERL_SERVER_GATEWAY_ADMIN_KEY": ""}
    with gateway_command(*arguments, "--admin-key-file", str(key_file), **keys) as url:
        children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
        (command,) = [each for each in children if "gateway" in each.cmdline()]
        environment = Path(f"/proc/{command.pid}/environ").read_bytes()
        assert b"VERL_SERVER_API_KEY" in environment
        assert (server.api_key or "").encode() not in environment
        key = create_session(url, "the-key-in-the-file")
        wait_until(lambda: is_ready(url), 60, "not ready")
        assert ask(url, key).status_code == 200
        health = httpx.get(f"{url}/health", headers={"x-api-key": "the-key-in-the-file"}, timeout=60.0).json()
        assert {row["name"]: row["admitted"] for row in health["engine"]["servers"]} == {
            missing: False, server.base_url: True,
        }  # fmt: skip


def test_the_command_with_a_router_that_does_not_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    router = f"http://127.0.0.1:{free_port()}"
    model = ("--model", str(tiny("qwen3")), "--max-context-tokens", "500")
    with gateway_command(str(tmp_path), "--router", router, *model, VERL_SERVER_GATEWAY_ADMIN_KEY=ADMIN_KEY) as url:
        assert not is_ready(url)
        assert httpx.get(f"{url}/health/readiness").json()["reasons"] == ["the engine does not answer"]
        assert httpx.get(f"{url}/health/liveness").status_code == 200


def test_the_open_mode_accepts_the_key_open(tmp_path: Path, shared_engine: VerlEngine) -> None:
    with Gateway(shared_engine, tmp_path, limits=LIMITS, is_open=True) as gateway:
        _, key = gateway.create_session("a")
        assert [ask(gateway.url, sent).status_code for sent in (None, "open", key, "sk-x")] == [200, 200, 200, 401]
        assert ask(gateway.url, None, "/session/open/v1/chat/completions").status_code == 200
    with Gateway(shared_engine, tmp_path, limits=LIMITS) as gateway:
        assert ask(gateway.url, "open").status_code == 401


@pytest.mark.parametrize(("content", "named"), [(None, "cannot be read"), ("", "one key"), ("a b", "one key")])
def test_a_wrong_key_file_is_named(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    program = [sys.executable, "-m", "verl_server.cli", "gateway", str(tmp_path), "--server", "http://127.0.0.1:9"]
    done = subprocess.run([*program, "--admin-key-file", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert named in " ".join(done.stderr.split())


def test_without_a_terminal_the_command_says_how_it_gets_the_key(tmp_path: Path) -> None:
    """Under systemd, Docker and nohup, nobody would see a random key."""
    program = [sys.executable, "-m", "verl_server.cli", "gateway", str(tmp_path), "--server", "http://127.0.0.1:9"]
    env = {**os.environ, "VERL_SERVER_GATEWAY_ADMIN_KEY": ""}
    for options in ((), ("--open",)):
        done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=120, env=env)
        found = " ".join(done.stderr.split())
        assert (done.returncode, "not a terminal" in found) == (2, True)
        assert "set VERL_SERVER_GATEWAY_ADMIN_KEY, or pass --admin-key-file FILE:" in found


def test_one_kind_of_engine_is_named(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "verl_server.cli", "gateway", str(tmp_path)]
    env = {**os.environ, "VERL_SERVER_GATEWAY_ADMIN_KEY": ADMIN_KEY}
    one_of, url = "pass one of --server URL, --router URL and --fleet NAME", "http://127.0.0.1:9"
    for options, error in {
        (): one_of,
        ("--server", url, "--fleet", "verl_server"): one_of,
        ("--engine", url): "No such option: --engine",
    }.items():
        done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 2
        assert error in " ".join(done.stderr.split())
