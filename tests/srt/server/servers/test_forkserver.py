"""Forked servers behave like spawned servers: same replies, same errors, no processes or files left behind."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from forbidden_calls import forbid
from helpers import GREEDY, MARK, marked_processes, no_new_shared_memory, wait_until

from verl_server import HttpServerEngineAdapter
from verl_server.config import FORKSERVER_FOLDER, AdapterConfig
from verl_server.cpu import forkserver as forkserver_module
from verl_server.cpu import forkserver_main, sglang_server
from verl_server.cpu.forkserver import (
    SGLANG_SERVER,
    ForkedWarden,
    Forkserver,
    OwnForkserver,
    SharedForkserver,
    forkserver_pid,
)
from verl_server.cpu.forkserver_main import LATE_VARIABLES, InheritedState, Requests
from verl_server.errors import BadInputError, ServerDiedError
from verl_server.server.environment import inherited_environment
from verl_server.server.process import ServerProcess, never_abort

READY_S = 250.0


@pytest.fixture
def private_forkservers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that kill and replace forkservers: they do not use the forkserver of the suite."""
    monkeypatch.delenv(FORKSERVER_FOLDER)


def start(tiny: Callable[..., Path], **changed: Any) -> HttpServerEngineAdapter:
    given = {"model_path": str(tiny("qwen3")), "dtype": "float32", "max_total_tokens": 8192, **changed}
    return HttpServerEngineAdapter(**given)


def answer(adapter: HttpServerEngineAdapter) -> Any:
    return adapter.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)["output_ids"]


def process_of(adapter: HttpServerEngineAdapter) -> ServerProcess:
    process = adapter.process
    assert isinstance(process, ServerProcess)
    return process


def tree(adapter: HttpServerEngineAdapter) -> tuple[psutil.Process, list[psutil.Process]]:
    """The server's warden and all of its descendants."""
    warden = psutil.Process(adapter.pids.warden)
    return warden, warden.children(recursive=True)


def blocked_signals(process: psutil.Process) -> int:
    """The signal mask of a process: one bit for each signal."""
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigBlk" in line)
    return int(line.split()[1], 16)


def test_a_forked_server_equals_a_spawned_one(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with no_new_shared_memory():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in threads of some programs
        spawned = start(tiny, config=AdapterConfig(log_dir="logs", use_forkserver=False))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert [blocked_signals(process) for process in (tree(spawned)[0], *tree(spawned)[1][:1])] == [0, 0]
        assert list((tmp_path / "logs").iterdir()) == [process_of(spawned).log_path], "relative to the caller's folder"
        one, two = start(tiny), start(tiny)
        try:
            assert answer(one) == answer(two) == answer(spawned)
            assert tree(spawned)[0].ppid() == os.getpid()
            for server in (one, two):
                process = process_of(server)
                assert tree(server)[0].ppid() == forkserver_pid()
                assert str(server.api_key) not in process.log_path.read_text()
                assert "server_args" in process.log_path.read_text()
            warden, below = tree(one)
            os.kill(below[0].pid, signal.SIGKILL)
            with pytest.raises(ServerDiedError, match="SIGKILL"):
                one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1500, "ignore_eos": True})
            _, alive = psutil.wait_procs([warden, *below], 10.0)
            assert not alive
            assert answer(two) == answer(spawned), "the other server was not touched"
        finally:
            left = [*tree(two)[1], tree(two)[0]]
            spawned.shutdown()
            one.shutdown()
            two.shutdown()
        _, alive = psutil.wait_procs(left, 10.0)
        assert not alive
    assert forkserver_pid() is not None


def test_a_killed_warden_of_a_forked_server(tiny: Callable[..., Path]) -> None:
    with no_new_shared_memory():
        server = start(tiny)
        warden, below = tree(server)
        assert warden.ppid() == forkserver_pid()
        warden.kill()
        _, alive = psutil.wait_procs([warden, *below], 10.0)
        assert not alive
        with pytest.raises(ServerDiedError):
            answer(server)
        server.shutdown()


def test_wrong_arguments_of_a_forked_server_are_an_error(tiny: Callable[..., Path]) -> None:
    expected = (
        "did not start: .*no argument 'max_total_token'; did you mean 'max_total_tokens'.*"
        "load_format must be one of .*, got 'safetensor'; did you mean 'safetensors'.*"
        "no argument 'max_model_len'; did you mean 'context_length'"  # vLLM's name
    )
    with pytest.raises(BadInputError, match=expected) as caught:
        start(tiny, max_total_token=1, load_format="safetensor", max_model_len=1)
    assert "\n" not in str(caught.value), "without the warnings in the server's log"


@pytest.mark.usefixtures("private_forkservers")
def test_a_killed_or_hanging_forkserver_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that needs the lost forkserver is spawned; a later server is forked by a new forkserver."""
    shared = SharedForkserver()
    environment = inherited_environment()

    def assert_spawns(forkserver: Forkserver) -> None:
        warden = forkserver.start_warden()
        assert not isinstance(warden, ForkedWarden)
        assert warden.stdin is not None
        warden.stdin.close()
        warden.wait(10.0)
        assert forkserver.has_ended

    try:
        first = shared.prepare(environment)
        assert first is not None
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        with no_new_shared_memory():
            assert_spawns(first)
        second = shared.prepare(environment)
        assert second is not None
        assert second is not first
        assert second.pid is not None
        assert second.wait_ready(READY_S, never_abort)
        monkeypatch.setattr(forkserver_module, "FORK_TIMEOUT_S", 1.0)  # to make the test short
        os.kill(second.pid, signal.SIGSTOP)
        assert_spawns(second)
        assert shared.prepare(environment) is not second
    finally:
        shared.close()


@pytest.mark.usefixtures("private_forkservers")
def test_the_forkserver_is_replaced_when_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a variable or a resource limit replaces the forkserver.

    Changes of late variables (as imports of ray and SGLang cause them), of the signal mask and of the handling of
    Ctrl-C do not.
    """
    shared = SharedForkserver()
    try:
        first = shared.prepare(inherited_environment())
        assert first is not None
        for name in LATE_VARIABLES - {FORKSERVER_FOLDER} | {"RAY_CLIENT_MODE", "CUDA_VISIBLE_DEVICES"}:
            monkeypatch.setenv(name, "changed")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert shared.prepare(inherited_environment()) is first
        signal.signal(signal.SIGINT, on_interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        monkeypatch.setenv("SGLANG_ANYTHING", "1")
        second = shared.prepare(inherited_environment())
        assert second is not first
        assert first.has_ended
        assert shared.prepare({**inherited_environment(), "SGLANG_PLATFORM": "another"}) is None
        assert shared.prepare(inherited_environment()) is second
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            assert shared.prepare(inherited_environment()) is not second
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        shared.close()


def test_a_process_with_many_open_files_has_a_forkserver() -> None:
    """Descriptors above 1023, as in a trainer with many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 2000))
        forkserver = Forkserver(connection)
        has_ended = [forkserver.has_ended]
        theirs.send(b"ready 7")
        assert forkserver.wait_ready(10.0, never_abort)
        assert forkserver.pid == 7
        theirs.close()
        has_ended.append(forkserver.has_ended)
        assert has_ended == [False, True]
        forkserver.close()
    finally:
        ours.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forkserver_with_many_connections_answers() -> None:
    """Its descriptors are above 1023, as with many connections and servers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 2000))
    pidfd = os.pidfd_open(os.getpid())
    try:
        theirs.close()
        serving = threading.Thread(target=Requests(owner, pidfd, None, sglang_server, {}).serve, daemon=True)
        serving.start()
        assert ours.recv(64) == b"ready %d" % os.getpid()
        time.sleep(0.2)
        assert serving.is_alive()
        ours.close()
        serving.join(10.0)
        assert not serving.is_alive()
    finally:
        owner.close()
        os.close(pidfd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


#: A forkserver without the imports of SGLang, to which a system call is forbidden.
LIMITED_FORKSERVER = """
import os, signal, socket
from verl_server.cpu import sglang_server
from verl_server.cpu.forkserver_main import Requests
owner, pidfd = socket.socket(fileno=0), os.pidfd_open(os.getppid())
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
{forbid}
Requests(owner, pidfd, None, sglang_server, {{}}).serve()
"""


@pytest.mark.parametrize("call", ["clone", "pidfd_open"])
def test_a_forkserver_that_cannot_fork_goes_on(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """For example because the limit of processes is reached. The servers are spawned meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", LIMITED_FORKSERVER.format(forbid=forbid(call))]
    process = subprocess.Popen(command, stdin=theirs.fileno(), env={**os.environ, MARK: mark})
    theirs.close()
    forkserver = Forkserver(ours)
    try:
        assert forkserver.wait_ready(60.0, never_abort)
        for _ in range(2):
            warden = forkserver.start_warden()
            assert not isinstance(warden, ForkedWarden)
            assert warden.stdin is not None
            warden.stdin.close()
            warden.wait(10.0)
            assert not forkserver.has_ended
        assert "the forkserver cannot fork a server: [Errno 1] Operation not permitted" in caplog.text
        wait_until(lambda: len(marked_processes(mark)) == 1, 10.0, "a warden that was not handed out still runs")
        forkserver.close()
        assert process.wait(10.0) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()


@pytest.mark.usefixtures("private_forkservers")
def test_a_fork_of_the_trainer_leaves_the_forkserver_alone() -> None:
    shared = SharedForkserver()
    try:
        forkserver = shared.prepare(inherited_environment())
        assert forkserver is not None
        pid = os.fork()
        if pid == 0:
            shared.disown()
            os._exit(0 if shared.pid is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert shared.pid == forkserver.pid
        assert not forkserver.has_ended
    finally:
        shared.close()


def test_processes_with_the_same_folder_share_a_forkserver() -> None:
    """A process that connects to the forkserver of another process ends its connection, not the forkserver."""
    owner, other = SharedForkserver(), SharedForkserver()
    try:
        for shared in (owner, other, other):
            forkserver = shared.prepare(inherited_environment())
            assert forkserver is not None
            assert forkserver.wait_ready(READY_S, never_abort)
            warden = forkserver.start_warden()
            assert isinstance(warden, ForkedWarden)
            assert psutil.Process(warden.pid).ppid() == forkserver.pid
            warden.stdin.close()
            warden.wait(10.0)
            if shared is other:
                assert type(forkserver) is Forkserver
                assert forkserver.pid == owner.pid
                shared.close()
    finally:
        owner.close()
        other.close()


def test_a_process_outlives_the_forkserver_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts its own forkserver, at the same socket, when the owner of the shared forkserver has ended."""
    monkeypatch.setenv(FORKSERVER_FOLDER, str(tmp_path))
    owner, other = SharedForkserver(), SharedForkserver()
    try:
        assert isinstance(owner.prepare(inherited_environment()), OwnForkserver)
        shared = other.prepare(inherited_environment())
        assert shared is not None
        assert not isinstance(shared, OwnForkserver)
        owner.close()
        assert not shared.wait_ready(READY_S, never_abort)
        assert isinstance(other.prepare(inherited_environment()), OwnForkserver)
        assert type(owner.prepare(inherited_environment())) is Forkserver
    finally:
        owner.close()
        other.close()


def test_a_process_that_cannot_find_the_shared_forkserver_in_time_spawns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process, which hangs, holds the lock under which forkservers are found and started."""
    monkeypatch.setenv(FORKSERVER_FOLDER, str(tmp_path))
    monkeypatch.setattr(forkserver_main, "LOCK_TIMEOUT_S", 0.2)  # to make the test short
    shared, environment = SharedForkserver(), inherited_environment()
    name = InheritedState.of_server(environment).fingerprint(engine=SGLANG_SERVER)
    with forkserver_main.lock(tmp_path / name):
        assert shared.prepare(environment) is None
    assert "the forkserver cannot be started" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{name}.lock"]


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, message in ((tmp_path / "missing", "create the folder first"), (tmp_path, "with the mode 0700")):
        tmp_path.chmod(0o755)
        monkeypatch.setenv(FORKSERVER_FOLDER, str(folder))
        with pytest.raises(BadInputError, match=message):
            SharedForkserver().prepare(inherited_environment())


TRAINER = """
import sys, time
from verl_server import HttpServerEngineAdapter
from verl_server.cpu.forkserver import prepare_forkserver
prepare_forkserver()
print("importing", flush=True)
if len(sys.argv) > 1:
    server = HttpServerEngineAdapter(model_path=sys.argv[1], dtype="float32", max_total_tokens=8192)
    print("working", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("private_forkservers")
@pytest.mark.parametrize("working", [False, True], ids=["while it imports", "at work"])
def test_a_killed_trainer_leaves_nothing(tiny: Callable[..., Path], working: bool) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", TRAINER, *([str(tiny("qwen3"))] if working else [])]
    with no_new_shared_memory():
        trainer = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "importing\n"
        if working:
            assert trainer.stdout.readline() == "working\n"
        else:
            time.sleep(2.0)
        assert len(marked_processes(mark)) > 1
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not marked_processes(mark), 10.0, f"left behind: {marked_processes(mark)}")
