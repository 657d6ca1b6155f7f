"""The start of one server: its port and its log."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import no_new_shared_memory

from verl_server.adapter.sglang.launch import launch_sglang_server
from verl_server.config import AdapterConfig


def _own_sockets() -> set[str]:
    """This process's open sockets, by number of file descriptor and inode."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
    return {entry for entry in found if "socket:" in entry}


def _steal_the_next_reserved_port(thieves: list[socket.socket], known: set[str], stop: threading.Event) -> None:
    """Listen on the port that this process has just reserved, as a program with a fixed port number does."""
    while not thieves and not stop.wait(0.001):
        for entry in _own_sockets() - known:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.split()[0]))) as found:
                if found.family == socket.AF_INET and found.getsockname()[1]:
                    thieves.append(socket.create_server(found.getsockname()))


def test_a_port_that_another_program_takes_is_replaced(tiny: Callable[..., Path]) -> None:
    """Another program listens on the chosen port while the server loads: the start is retried on another port."""
    thieves: list[socket.socket] = []
    stop = threading.Event()
    thief = threading.Thread(target=_steal_the_next_reserved_port, args=(thieves, _own_sockets(), stop))
    thief.start()
    try:
        with no_new_shared_memory():
            server = launch_sglang_server(
                {"model_path": str(tiny("qwen3")), "max_total_tokens": 4096}, AdapterConfig(), {}
            )
            server.process.stop()
        assert thieves
        assert server.base_url != f"http://127.0.0.1:{thieves[0].getsockname()[1]}"
    finally:
        stop.set()
        thief.join()
        for listener in thieves:
            listener.close()


def test_a_relative_log_folder_is_relative_to_the_caller(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warden of a forked server has another working directory. For a spawned server: `test_forkserver.py`."""
    monkeypatch.chdir(tmp_path)
    config = AdapterConfig(log_dir="logs")
    server = launch_sglang_server({"model_path": str(tiny("qwen3")), "max_total_tokens": 4096}, config, {})
    server.process.stop()
    (log,) = (tmp_path / "logs").iterdir()
    assert log == server.process.log_path
    assert "server_args" in log.read_text()
