"""Ends of sessions while turns run, and what a gateway gives back at its end."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import renderer_with_template
from helpers import wait_until
from test_gateway_limits import LIMITS, HeldGenerateFn

from verl_server.agent import Task
from verl_server.agent.episode import Episode
from verl_server.errors import StartupError, VerlServerError
from verl_server.gateway import Gateway
from verl_server.gateway.programs import serve_episode
from verl_server.gateway.records import LOCK_FILE, FolderLock, ObservedRecorder
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_with_template(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), CHAT_TEMPLATE)


@pytest.fixture
def generate(renderer: ChatRenderer) -> HeldGenerateFn:
    made = HeldGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    made.hold()
    return made


def ask(gateway: Gateway, key: str, text: str) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: OSError) -> Iterator[None]:
    """A function of `owner` raises `error` during the body."""

    def fail(_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


class HeldDisk:
    """`os.fdatasync` that waits for `go` at one file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.go, self.is_waiting, self._name, self._sync = threading.Event(), threading.Event(), name, os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == self._name:
            self.is_waiting.set()
            assert self.go.wait(60)
        self._sync(fd)


@pytest.mark.parametrize("held", ["a.jsonl", "a.session.new"])
def test_a_turn_that_finishes_while_its_session_is_being_ended_is_not_written_behind_the_end(
    held: str, generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client sends the request again and learns that the session has ended. The end trains what it has labelled."""
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway, ThreadPoolExecutor(2) as pool:
        _, key = gateway.create_session("a")
        generate.go.set()
        assert ask(gateway, key, "first").status_code == 200
        generate.go.clear()
        turn = pool.submit(ask, gateway, key, "second")
        wait_until(lambda: generate.num_calls == 2, 30, "no turn")
        disk = HeldDisk(monkeypatch, held)
        try:
            end = pool.submit(gateway.end_session, "a", 1.0)
            assert disk.is_waiting.wait(30)
            generate.go.set()
            assert turn.result(60).status_code == 503
            assert not end.done()
        finally:
            disk.go.set()
        assert end.result(60).reward == 1.0
        assert ask(gateway, key, "second").status_code == 403
    graph = load_session(tmp_path / "a.jsonl")
    assert graph.last_termination is not None
    assert graph.last_termination.reward == 1.0
    assert graph.trained_segments is not None
    ((leaf, _),) = graph.trained_segments
    assert graph.rewards[leaf] == [1.0]
    assert sum(node.sampled for node in graph.nodes) == 1


def test_a_session_whose_end_fails_takes_turns_again(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate.go.set()
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        _, key = gateway.create_session("a")
        assert ask(gateway, key, "first").status_code == 200
        full = OSError(28, "No space left on device")
        with failing(monkeypatch, os, "fdatasync", full), pytest.raises(OSError, match="No space left"):
            gateway.end_session("a", 1.0)
        assert ask(gateway, key, "second").status_code == 200
        assert gateway.end_session("a", 0.5).reward == 0.5
    graph = load_session(tmp_path / "a.jsonl")
    assert sorted(graph.rewards.values()) == [[0.5], [0.5]]
    assert len(graph.trained_segments or ()) == 2


def test_a_session_has_ended_also_if_its_file_cannot_be_closed(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report an error when a file is closed. The end is on the disk then."""
    generate.go.set()
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        _, key = gateway.create_session("a")
        assert ask(gateway, key, "first").status_code == 200
        broken = OSError(5, "Input/output error")
        with failing(monkeypatch, ObservedRecorder, "close", broken), pytest.raises(OSError, match="Input/output"):
            gateway.end_session("a", 1.0)
        assert ask(gateway, key, "second").status_code == 403
    assert len(load_session(tmp_path / "a.jsonl").trained_segments or ()) == 1


def test_the_end_of_a_session_whose_closed_file_was_removed_fails_once(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path
) -> None:
    generate.go.set()
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        _, key = gateway.create_session("a")
        assert ask(gateway, key, "first").status_code == 200
        gateway._call(lambda: gateway._store._open["a"].record.pause())  # type: ignore[union-attr]
        (tmp_path / "a.jsonl").unlink()
        with pytest.raises((OSError, VerlServerError)):
            gateway.end_session("a", 1.0)
        assert not (tmp_path / "a.jsonl").exists()
        assert gateway.end_session("a", 1.0).ended_at is not None


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_gateways_of_samples_give_back_their_files(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path
) -> None:
    async def serve(count: int) -> None:
        for number in range(count):
            task = Task(f"t{number}", [{"role": "user", "content": "a"}])
            episode = Episode(task, TrajectoryGraph(f"s{number}"), generate, renderer, LIMITS, {})
            async with serve_episode(episode, socket.create_server(("127.0.0.1", 0))):
                pass

    async def run() -> tuple[int, int]:
        await serve(2)
        before = num_open_files()
        await serve(20)
        return before, num_open_files()

    before, after = asyncio.run(run())
    assert after <= before + 1


def test_a_gateway_gives_back_its_files(generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path) -> None:
    def serve(count: int) -> int:
        for _ in range(count):
            with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS):
                pass
        return num_open_files()

    assert serve(2) + 1 >= serve(8)


def test_a_gateway_whose_folder_was_taken_while_it_was_read_does_not_start(
    generate: HeldGenerateFn, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks of the folder are local to a machine, and the other gateway has found no sign of life."""
    opened = SessionStore.__init__

    def read_slowly(store: SessionStore, run_dir: Path, *args: object) -> None:
        opened(store, run_dir, *args)  # type: ignore[arg-type]
        other = (run_dir / LOCK_FILE).read_text().replace('"token": "', '"token": "0')
        (run_dir / LOCK_FILE).write_text(other)

    monkeypatch.setattr(SessionStore, "__init__", read_slowly)
    with pytest.raises(StartupError, match="serves the folder"):
        Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS)
    assert '"token": "0' in (tmp_path / LOCK_FILE).read_text()  # that of the other gateway stays


def test_a_gateway_does_not_remove_the_lock_of_another(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "http://127.0.0.1:1")
    other = (tmp_path / LOCK_FILE).read_text().replace('"token": "', '"token": "0')
    (tmp_path / LOCK_FILE).write_text(other)
    lock.release()
    assert (tmp_path / LOCK_FILE).read_text() == other
