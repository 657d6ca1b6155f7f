"""The thread of a gateway: a start that fails, and calls that its event loop does not answer."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import ScriptedGenerateFn
from helpers import free_port, wait_until
from transformers import AutoTokenizer

from verl_server import BadInputError, DeadlineError, HttpServerEngineAdapter, StartupError, UnsupportedError
from verl_server.agent import RolloutLimits
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.trajectory import ChatRenderer

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


class NoCluster(DiscoveredServers):
    """An engine source of a user, whose start fails."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.is_closed = False

    async def start(self) -> None:
        raise ConnectionError("no cluster at 10.0.0.9")

    async def close(self) -> None:
        self.is_closed = True


def test_a_start_that_fails_is_an_error_with_its_cause(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The folder and the port are free again."""
    source = NoCluster()
    with pytest.raises(StartupError, match=r"the gateway did not start: no cluster at 10\.0\.0\.9") as raised:
        Gateway(source, tmp_path, limits=LIMITS)
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert source.is_closed
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        assert gateway.sessions() == []


def test_a_thread_that_cannot_start_keeps_neither_the_port_nor_the_folder(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    generate, port = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes"), free_port()
    default = threading.stack_size(1 << 47)  # no machine has so much memory for the stack of a thread
    try:
        with pytest.raises(UnsupportedError, match=r"can't start new thread: .*ulimit -u: .*--pids-limit"):
            Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS, port=port)
        with pytest.raises(UnsupportedError, match=r"can't start new thread: .*Raise ulimit -u"):
            HttpServerEngineAdapter("no model: the server would not start")
    finally:
        threading.stack_size(default)
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS, port=port) as gateway:
        assert gateway.sessions() == []


def test_a_gateway_starts_on_a_full_disk(renderer: ChatRenderer, tmp_path: Path) -> None:
    """It makes sessions when there is space again. The folder is free at its end."""
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        gateway = Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS)
        with pytest.raises(OSError, match="File too large"):
            gateway.create_session("a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with gateway:
        gateway.create_session("a")
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as again:
        assert [info.id for info in again.sessions()] == ["a"]


class BlockingGenerateFn(ScriptedGenerateFn):
    """A policy of a user that blocks the event loop of the gateway until `go` is set."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda prompt: "yes")
        self.go, self.is_blocking = threading.Event(), False

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.is_blocking = True
        self.go.wait()
        return await super().__call__(rid=rid, session_id=session_id, **request)


def test_a_call_that_the_gateway_did_not_answer_has_no_effect_later(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = BlockingGenerateFn(renderer.tokenizer)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway, ThreadPoolExecutor(1) as pool:
        headers = {"authorization": f"Bearer {gateway.create_session('a')[1]}"}
        url = f"{gateway.openai_url}/chat/completions"
        turn = pool.submit(httpx.post, url, json=body, headers=headers, timeout=60.0)
        wait_until(lambda: generate.is_blocking, 30, "no turn")
        try:
            with monkeypatch.context() as patch:
                patch.setattr("verl_server.gateway.gateway.STOP_TIMEOUT_S", 0.05)
                with pytest.raises(DeadlineError, match="the call was taken back"):
                    gateway.create_session("b")
        finally:
            generate.go.set()
        assert turn.result().status_code == 200
        assert [info.id for info in gateway.sessions()] == ["a"]
        gateway.create_session("b")


def test_a_shutdown_names_the_likely_cause_of_its_failure(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = BlockingGenerateFn(renderer.tokenizer)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    gateway = Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS)
    with ThreadPoolExecutor(1) as pool:
        headers = {"authorization": f"Bearer {gateway.create_session('a')[1]}"}
        turn = pool.submit(httpx.post, f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60)
        wait_until(lambda: generate.is_blocking, 30, "no turn")
        try:
            with monkeypatch.context() as patch:
                patch.setattr("verl_server.gateway.gateway.STOP_TIMEOUT_S", 0.05)
                with pytest.raises(DeadlineError, match="did not stop; a generate function that ignores its cancella"):
                    gateway.shutdown()
        finally:
            generate.go.set()
        turn.exception(60.0)
    gateway.shutdown()


@pytest.mark.parametrize("path", ["ui/sessions/a", "admin/sessions/a/record", "admin/sessions/a/record?format=atif"])
def test_a_record_that_cannot_be_read_does_not_hold_up_the_shutdown(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The record is a pipe without an end, as a file on a disk that hangs. The folder is free after the shutdown."""
    monkeypatch.setattr("verl_server.gateway.gateway.GRACE_S", 1)
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    gateway = Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS)
    gateway.create_session("a")
    os.mkfifo(tmp_path / "a.jsonl")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as at_end:
        reading = pool.submit(httpx.get, f"{gateway.url}/{path}", headers={"x-api-key": gateway.admin_key}, timeout=60)
        writers = list[int]()

        def is_read() -> bool:
            with contextlib.suppress(OSError):  # nobody reads the pipe yet
                writers.append(os.open(tmp_path / "a.jsonl", os.O_WRONLY | os.O_NONBLOCK))
                at_end.callback(os.close, writers[-1])
            return bool(writers)

        wait_until(is_read, 30, "the record is not read")
        gateway.shutdown()
        reading.exception(60.0)
    (tmp_path / "a.jsonl").unlink()
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as again:
        assert [info.id for info in again.sessions()] == ["a"]


def test_the_end_of_an_unknown_session_is_bad_input(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Over HTTP, the status is 404."""
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        with pytest.raises(BadInputError, match="there is no session 'a'"):
            gateway.end_session("a", reward=1.0)
        headers, url = {"x-api-key": gateway.admin_key}, f"{gateway.url}/admin/sessions/a/end"
        assert httpx.post(url, json={}, headers=headers, timeout=60.0).status_code == 404
