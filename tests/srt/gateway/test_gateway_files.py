"""The files of the gateway: few open files, damaged files, and ends that reach the disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import few_files_gateway
import httpx
import pytest
from agent_helpers import ScriptedGenerateFn, renderer_with_template
from helpers import wait_until

from verl_server.agent import RolloutLimits
from verl_server.errors import DeadlineError, ServerBusyError, UnsupportedError
from verl_server.gateway import Gateway, records
from verl_server.gateway.records import LOCK_FILE, TOO_MANY_FILES, FolderLock
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import load_session

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Gateway]:
    """Starts a gateway with a folder."""
    renderer = renderer_with_template(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), CHAT_TEMPLATE)
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")

    def start(run_dir: Path, **options: Any) -> Gateway:
        return Gateway(generate, run_dir, renderer=renderer, limits=LIMITS, **options)

    return start


def ask(gateway: Gateway, key: str) -> httpx.Response:
    """The reply to a chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)


def test_a_gateway_with_few_open_files_serves_many_sessions_and_ends_them(tmp_path: Path) -> None:
    """Records that are not used have no open file. Without a free file, sessions end, and no session is created."""
    program = [sys.executable, few_files_gateway.__file__, str(tmp_path)]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["turns"]) == set(found["later_turns"]) == {200}
    assert found["open_records"] <= 100 // 4
    assert found["full_readiness"][-1] == [503, {"status": "not ready", "reasons": [TOO_MANY_FILES]}]
    status, body = found["created"]
    assert (status, body["error"]["message"]) == (503, f"the session 'new' was not created: {TOO_MANY_FILES}")
    assert found["ends"] == [200] * 3
    assert (found["later_readiness"][0], found["later_created"]) == (200, 200)
    for index in range(few_files_gateway.NUM_SESSIONS):
        graph = load_session(tmp_path / "run" / f"s{index}.jsonl")
        is_ended = index in (0, 59)
        assert (len(graph.leaves), sum(node.sampled for node in graph.nodes)) == (1, 1 if is_ended else 2)
        assert list(graph.rewards.values()) == ([[1.0]] if is_ended else [])


# -- a folder that several machines share -----------------------------------------------------------------


@pytest.fixture
def local_locks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A file system whose locks are local to a machine. The function lets the next gateway run on another machine."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    monkeypatch.setattr(records, "WATCH_S", 3.0)
    monkeypatch.setattr(records, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr("verl_server.gateway.gateway.REFRESH_S", 0.1)
    return lambda: monkeypatch.setattr(records, "boot_id", lambda: "another machine")


def test_a_folder_that_a_gateway_on_another_machine_serves_is_refused(
    start: Callable[..., Gateway], tmp_path: Path, local_locks: Callable[[], None]
) -> None:
    with start(tmp_path) as first:
        host = os.uname().nodename
        local_locks()
        with pytest.raises(
            ServerBusyError, match=f"another gateway serves .*{first.url}, process .* on the host {host}"
        ):
            start(tmp_path)
        _, key = first.create_session()
        assert ask(first, key).status_code == 200
    assert (tmp_path / LOCK_FILE).read_text() == ""
    began_at = time.monotonic()
    with start(tmp_path) as second:
        assert ask(second, key).status_code == 200
    assert time.monotonic() - began_at < records.WATCH_S, "a folder that was released is not watched"


def test_a_gateway_that_has_lost_its_folder_serves_no_more(
    start: Callable[..., Gateway],
    tmp_path: Path,
    local_locks: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For example a gateway that did not run for a minute, on a machine that was overloaded."""
    with start(tmp_path) as first:
        _, key = first.create_session("a")
        assert ask(first, key).status_code == 200
        local_locks()
        monkeypatch.setattr(records, "RECENT_S", -1.0)
        with start(tmp_path) as second:
            url, reason = f"{first.url}/health/readiness", "another gateway serves the folder of the records"
            wait_until(lambda: httpx.get(url, timeout=60.0).status_code == 503, 30, "the gateway is ready")
            assert httpx.get(url, timeout=60.0).json()["reasons"] == [reason]
            headers = {"authorization": f"Bearer {first.admin_key}"}
            for path, body in (("", {}), ("/a/end", {"reward": 1.0})):
                reply = httpx.post(f"{first.url}/admin/sessions{path}", json=body, headers=headers, timeout=60.0)
                assert (reply.status_code, reply.json()["error"]["message"]) == (503, reason)
            assert ask(first, key).status_code == 503
            assert f"{second.url}, process {os.getpid()} on the host" in caplog.text
            assert ask(second, key).status_code == 200
            first.shutdown()
            assert second.url in (tmp_path / LOCK_FILE).read_text()
            second.end_session("a", reward=1.0)
    assert load_session(tmp_path / "a.jsonl").last_termination is not None


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_the_folder_of_a_machine_that_is_gone_is_taken_over(
    tmp_path: Path, local_locks: Callable[[], None], age_s: float
) -> None:
    """It is watched first if it was used a short time ago."""
    FolderLock(tmp_path, "http://10.0.0.2:9000")  # never released
    written_at = time.time() - age_s
    os.utime(tmp_path / LOCK_FILE, (written_at, written_at))
    local_locks()
    began_at = time.monotonic()
    lock = FolderLock(tmp_path, "http://10.0.0.3:9000")
    assert (time.monotonic() - began_at >= records.WATCH_S) == (age_s == 0.0)
    assert lock.refresh() is None
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnsupportedError, match=f"file system of the folder {tmp_path} has no locks .*; mount it with"):
        start(tmp_path)


# -- slow disks -------------------------------------------------------------------------------------------


def test_the_end_of_a_session_does_not_stop_other_requests_on_a_slow_disk(
    start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is on the disk before the settings say that the session has ended."""
    fdatasync, written = os.fdatasync, list[tuple[str, Any]]()

    def slow(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        written.append((name, json.loads((tmp_path / "a.session.json").read_bytes())["ended_at"]))
        time.sleep(0.5)
        fdatasync(fd)

    with start(tmp_path) as gateway, ThreadPoolExecutor(3) as pool:
        for _, key in (gateway.create_session("a"), gateway.create_session("b")):
            assert ask(gateway, key).status_code == 200
        monkeypatch.setattr(os, "fdatasync", slow)
        ends = [pool.submit(gateway.end_session, "a", reward) for reward in (0.5, 1.0)]
        wait_until(lambda: written, 30, "no end")
        latencies = list[float]()
        while not all(end.done() for end in ends):
            began_at = time.monotonic()
            assert httpx.get(f"{gateway.url}/health/liveness", timeout=60.0).status_code == 200
            latencies.append(time.monotonic() - began_at)
        assert max(latencies) < 0.4
        assert [name for name, _ in written] == ["a.jsonl", "a.session.new"] * 2
        assert [ended_at is None for _, ended_at in written] == [True, True, False, False]
        assert ends[1].result().reward == 1.0
    assert list(load_session(tmp_path / "a.jsonl").rewards.values()) == [[1.0]]


def test_a_shutdown_closes_many_records_on_a_slow_disk(
    start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the files would take 12 seconds."""
    gateway = start(tmp_path)
    for _ in range(60):
        assert ask(gateway, gateway.create_session()[1]).status_code == 200
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        time.sleep(0.2)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    began_at = time.monotonic()
    gateway.shutdown()
    assert time.monotonic() - began_at < 6.0
    with start(tmp_path) as again:
        assert len(again.sessions()) == 60


def test_a_shutdown_that_waits_for_the_disk_says_so_and_gives_the_folder_back_later(
    start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, go, fdatasync = start(tmp_path), threading.Event(), os.fdatasync
    assert ask(gateway, gateway.create_session("a")[1]).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (go.wait(60), fdatasync(fd)))
        patch.setattr("verl_server.gateway.gateway.STOP_TIMEOUT_S", 0.5)
        named = f"did not stop; 1 records are still being written to the disk of {tmp_path}"
        with pytest.raises(DeadlineError, match=named):
            gateway.shutdown()
        with pytest.raises(ServerBusyError):
            start(tmp_path)
        go.set()
        gateway._thread.join(30)
    with start(tmp_path) as again:
        assert [info.id for info in again.sessions()] == ["a"]
