"""Real kills of trainers, servers, workers and wardens: what the survivors notice, and that nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import trainer_script
from helpers import (
    GREEDY,
    all_at_once,
    is_listening,
    marked_processes,
    no_new_shared_memory,
    processes,
    remote_server_of,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, VerlEngine
from verl_server.config import AdapterConfig, Timeouts
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ShutDownError,
    StartupError,
    VerlServerError,
)
from verl_server.server.process import WARDEN_SCRIPT
from verl_server.server.warden.processes import find_shared_memory, list_descendants


class Trainer:
    """A trainer process that the test kills. The environment of all processes that it starts contains a mark."""

    def __init__(self, folder: Path, scratch: Path, tp_size: int, server_python: Path | None = None) -> None:
        self.mark, self.scratch = uuid.uuid4().hex, scratch
        scratch.mkdir(exist_ok=True)
        self.process = processes().Process(
            target=trainer_script.main,
            args=(str(folder), tp_size, str(scratch), self.mark, server_python and str(server_python)),
        )
        self.process.start()

    def wait_for(self, name: str) -> None:
        wait_until(lambda: (self.scratch / name).exists() or not self.process.is_alive(), 240, f"no {name}")
        assert self.process.is_alive(), (self.scratch / "out").read_text()

    def kill_and_expect_nothing(self) -> None:
        address = self.scratch / "url"
        port = int(address.read_text().split()[0].rpartition(":")[2]) if address.exists() else None
        assert marked_processes(self.mark) or port is None
        self.process.kill()
        self.process.join()
        wait_until(lambda: not marked_processes(self.mark), 10.0, f"left behind: {marked_processes(self.mark)}")
        if port is not None:
            wait_until(lambda: not is_listening(port), 10.0, f"port {port} is still open")


def test_killed_trainer_leaves_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The trainer is killed with SIGKILL while its server starts, at several moments, and while it serves with TP 2."""
    folder = tiny("qwen3")

    def kill_after(moment: tuple[str, float]) -> None:
        event, seconds = moment
        trainer = Trainer(folder, tmp_path / f"{event}-{seconds}", tp_size=2)
        trainer.wait_for(event)
        time.sleep(seconds)
        trainer.kill_and_expect_nothing()

    with no_new_shared_memory(), ThreadPoolExecutor() as pool:
        moments = [("starting", 0.05), ("starting", 2.0), ("starting", 8.0), ("working", 1.0)]
        list(pool.map(kill_after, moments))


@pytest.fixture(scope="module")
def servers_to_kill(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Any]]:
    """Three servers, one for each test that kills a server."""

    def start() -> Any:
        return HttpServerEngineAdapter(
            model_path=str(tiny("qwen3")),
            dtype="float32",
            max_total_tokens=8192,
            config=AdapterConfig(log_dir=tmp_path_factory.mktemp("logs"), timeouts=Timeouts(control_s=5.0)),
        )

    with all_at_once(start, start, start) as started:
        yield iter(started)


@pytest.fixture
def own_adapter(servers_to_kill: Iterator[Any]) -> Any:
    return next(servers_to_kill)


def test_killed_server_is_noticed_by_waiting_calls(own_adapter: Any) -> None:
    """A running generation raises within 2 s, with the exit code and the end of the server's log."""
    caught: dict[str, Any] = {}

    def generate() -> None:
        try:
            own_adapter.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1500, "ignore_eos": True})
        except ServerDiedError as error:
            caught.update(error=error, at=time.monotonic())

    waiting = threading.Thread(target=generate)
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive(), "the generation must still run when the server is killed"
    killed_at = time.monotonic()
    with no_new_shared_memory():
        os.kill(own_adapter.pids.main, signal.SIGKILL)
        waiting.join(5.0)
        assert caught["at"] - killed_at < 2.0
    error = caught["error"]
    assert error.details["exit_code"] == -signal.SIGKILL
    assert "SIGKILL" in str(error)
    assert "end of the server's log" in str(error)
    assert Path(error.details["log_path"]).is_file()
    with pytest.raises(ServerDiedError):
        own_adapter.flush_cache()
    own_adapter.shutdown()
    own_adapter.shutdown()
    with pytest.raises(ShutDownError):
        own_adapter.flush_cache()


def test_killed_scheduler_and_stalled_server(own_adapter: Any) -> None:
    """A stopped server raises DeadlineError. A killed scheduler raises ServerDiedError within 4 s."""
    main = own_adapter.pids.main
    os.kill(main, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="did not answer within 5 s"):
        own_adapter.get_model_info()
    os.kill(main, signal.SIGCONT)
    own_adapter.get_model_info()
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    scheduler = next(pid for pid in children if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(scheduler), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServerDiedError, match="scheduler"):
        list(iter(lambda: own_adapter.generate(input_ids=[1, 2], sampling_params=GREEDY), None))
    assert time.monotonic() - started < 4.0


def test_killed_warden_ends_the_server(own_adapter: Any) -> None:
    pids = own_adapter.pids
    owned = find_shared_memory(list_descendants(pids.warden))
    os.kill(pids.warden, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pids.main}").exists(), 5.0, "the server lives on")
    with pytest.raises(ServerDiedError, match="warden"):
        own_adapter.get_model_info()
    assert owned
    wait_until(lambda: not owned.keys() & set(os.listdir("/dev/shm")), 10.0, f"left in /dev/shm: {owned}")


def test_start_up_failures_carry_the_reason(tiny: Callable[..., Path], tmp_path: Path) -> None:
    broken = shutil.copytree(tiny("qwen3"), tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))

    def failure(server_args: dict[str, Any]) -> Exception:
        with pytest.raises(VerlServerError) as caught:
            HttpServerEngineAdapter(**server_args)
        return caught.value

    attempts = [{"model_path": str(tiny("qwen3")), "no_such_argument": 1}, {"model_path": str(broken)}]
    with ThreadPoolExecutor() as pool:
        argument, model = pool.map(failure, attempts)
    assert isinstance(argument, BadInputError)
    assert "no_such_argument" in str(argument)
    assert isinstance(model, StartupError)
    assert "no_such_model" in str(model), "the end of the server's log"
    with pytest.raises(BadInputError, match="plain JSON"):
        HttpServerEngineAdapter(model_path=tiny("qwen3"), attention_backend=object())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadInputError, match="cannot bind"):
        HttpServerEngineAdapter(model_path=str(tiny("qwen3")), port=taken.getsockname()[1])


def test_start_deadline_ends_what_was_started(tiny: Callable[..., Path]) -> None:
    with no_new_shared_memory(), pytest.raises(DeadlineError, match="not ready after 1") as caught:
        HttpServerEngineAdapter(model_path=str(tiny("qwen3")), config=AdapterConfig(timeouts=Timeouts(start_s=1.0)))
    log = Path(caught.value.details["log_path"])
    assert log.exists(), "the error refers to it"
    shutil.rmtree(log.parent)


def test_keys_show_nowhere(adapter: HttpServerEngineAdapter) -> None:
    """Neither API key appears on a command line or in the log. Requests without the right key are refused."""
    import requests

    assert adapter.api_key is not None
    assert adapter.admin_api_key is not None
    assert adapter.log_path is not None
    keys = (adapter.api_key, adapter.admin_api_key)
    log = adapter.log_path.read_text(errors="replace")
    lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    shown = "".join(path.read_text(errors="replace") for path in lines if path.exists())
    assert not any(key in log or key in shown for key in keys)
    assert requests.post(f"{adapter.base_url}/generate", json={"input_ids": [1]}, timeout=5).status_code == 401
    only_api = {"Authorization": f"Bearer {keys[0]}"}
    for path in ("flush_cache", "begin_weight_update", "release_memory_occupation", "abort_request"):
        assert requests.post(f"{adapter.base_url}/{path}", json={}, headers=only_api, timeout=5).status_code == 401
    assert not any(key in repr(adapter.get_server_info()) for key in keys)


LATE_FILE = """
import mmap, os, signal, time
path = "/dev/shm/sglang_loads_" + os.environ["MARK"]
time.sleep(1.5)
fd = os.open(path, os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_that_is_made_just_before_a_death_is_removed(tmp_path: Path) -> None:
    """The warden surveys the tree rarely after the start. inotify tells it about new files in between."""
    mark = uuid.uuid4().hex
    spec = {
        "argv": [sys.executable, "-c", LATE_FILE],
        "env": {**os.environ, "MARK": mark},
        "payload": "",
        "scratch": str(tmp_path),
        "temporary": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "log_limit_bytes": 1 << 20,
        "secrets": [],
        "trainer_pid": os.getpid(),
        "worker_prefix": "sglang::",
        "start_deadline": time.monotonic(),
    }
    with no_new_shared_memory():
        process = subprocess.Popen(
            [sys.executable, "-I", str(WARDEN_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        events = _run_warden(process, spec)
    assert any(f"sglang_loads_{mark}" in event for event in events), events


def _run_warden(process: subprocess.Popen[str], spec: dict[str, Any]) -> list[str]:
    """The events of a warden until it ends. Its standard input stays open, as with a living trainer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(spec) + "\n")
    process.stdin.flush()
    events = list(process.stdout)
    process.stdin.close()
    process.wait(30)
    return events


HALF_DEAD = """
import ctypes, platform, subprocess, threading, time
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2): only this thread
"""


def test_children_of_a_process_whose_first_thread_has_ended_are_found() -> None:
    """The first thread has ended and another thread runs: `/proc` shows a zombie that still has children."""
    process = subprocess.Popen([sys.executable, "-c", HALF_DEAD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", 10.0, "its first thread lives on")
        below = list_descendants(os.getpid())
        assert child in below
        assert process.pid not in below
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()


def test_an_engine_that_is_lost_in_the_thread_of_its_adapter_ends(
    adapter: HttpServerEngineAdapter, one_rank: DeviceMesh
) -> None:
    """The garbage collector may find it in any thread. Its end waits for the thread of the adapter."""
    folder = adapter.server_args["model_path"]
    engine = VerlEngine(one_rank, servers=[remote_server_of(adapter)], model_path=folder, dtype="float32")
    assert engine.adapter is not None
    loop = engine.adapter._loop
    engine.__dict__["itself"] = engine
    gc.disable()
    try:
        del engine
        loop._loop.call_soon_threadsafe(gc.collect)
        wait_until(lambda: not loop._thread.is_alive(), 20.0, "the thread waits for itself")
    finally:
        gc.enable()


def test_a_stream_that_is_lost_in_the_thread_of_its_adapter_ends(adapter: HttpServerEngineAdapter) -> None:
    attached = HttpServerEngineAdapter.attach(
        adapter.base_url, api_key=adapter.api_key, admin_api_key=adapter.admin_api_key
    )
    stream = attached.generate_stream(input_ids=[1], sampling_params={"max_new_tokens": 2000, "ignore_eos": True})
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    gc.disable()
    try:
        del stream, cycle
        attached._loop._loop.call_soon_threadsafe(gc.collect)
        model_info = attached._loop.submit(attached.asynchronous.get_model_info())
        assert "weight_version" in model_info.result(20.0), "the thread waits for itself"
    finally:
        gc.enable()
    attached.shutdown()


def test_an_engine_that_is_lost_ends_its_server(
    adapter: HttpServerEngineAdapter,
    one_rank: DeviceMesh,
    tiny: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a notebook whose cell runs twice. The next engine starts when the server has ended: both need the GPU."""
    folder = str(tiny("qwen3"))
    engine = VerlEngine(one_rank, model_path=folder, dtype="float32", max_total_tokens=8192)
    assert engine.adapter is not None
    process = engine.adapter.process
    assert process is not None
    main = process.pids.main
    del engine
    gc.collect()
    running = remote_server_of(adapter)
    with VerlEngine(one_rank, servers=[running], model_path=adapter.server_args["model_path"], dtype="float32"):
        assert not psutil.pid_exists(main), "the server still runs"
    assert "lost without shutdown" in caplog.text
