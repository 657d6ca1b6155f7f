"""The start of one server: its port and its log."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import no_new_shared_memory, tree_of

from verl_server.adapter.sglang.server_arguments import launch_sglang_server
from verl_server.config import AdapterConfig, Timeouts
from verl_server.server.environment import server_environment
from verl_server.server.server_main import set_environment


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


def test_no_process_of_a_server_listens_on_another_interface(tiny: Callable[..., Path]) -> None:
    """Also torch's store, in which the schedulers find each other: it takes data from everybody who reaches it."""
    args = {"model_path": str(tiny("qwen3")), "max_total_tokens": 4096, "tp_size": 2}
    with no_new_shared_memory():
        server = launch_sglang_server(args, AdapterConfig(), {})
        listening = {
            connection.laddr.ip
            for pid in tree_of(server.process.pids.main)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        folder = server.process.log_path.parent
        server.process.stop()
    assert listening == {"127.0.0.1"}
    assert not folder.exists()


def test_the_watchdog_of_a_server_allows_a_pause_as_long_as_two_updates(tiny: Callable[..., Path]) -> None:
    """A request that is paused in place looks to SGLang like one that hangs."""
    args = {"model_path": str(tiny("qwen3")), "max_total_tokens": 4096}
    config = AdapterConfig(timeouts=Timeouts(weights_s=700.0))
    server = launch_sglang_server(args, config, {})
    server.process.stop()
    assert server.server_args["watchdog_timeout"] == 1400.0


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("expandable_segments:True", None),
        (" expandable_segments : True ", None),
        ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        (
            "expandable_segments:true,roundup_power2_divisions:[256:1,512:2,>:8],backend:cudaMallocAsync",
            "roundup_power2_divisions:[256:1,512:2,>:8]",
        ),
        ("backend:native,pinned_num_register_threads:8", "backend:native,pinned_num_register_threads:8"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("is_inherited", [True, False])
def test_servers_do_not_get_settings_of_the_allocator_with_which_no_memory_is_released(
    name: str, setting: str, expected: str | None, is_inherited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers set them for themselves."""
    if is_inherited:
        monkeypatch.setenv(name, setting)
    assert server_environment({} if is_inherited else {name: setting}, None).get(name) == expected


def test_servers_have_the_plugin_of_this_library_beside_others() -> None:
    assert server_environment({"SGLANG_PLUGINS": "other"}, None)["SGLANG_PLUGINS"] == "other,verl_server_cpu"
    assert "SGLANG_PLUGINS" not in server_environment({}, None)


@pytest.mark.parametrize(("saver", "expected"), [(True, "false"), (False, None)])
def test_servers_that_share_gpus_start_beside_trainers_of_unequal_size(
    saver: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "env://")
    set_environment({"enable_memory_saver": saver})
    assert os.environ.get(name) == expected
    os.environ.pop(name, None)
