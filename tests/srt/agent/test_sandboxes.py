"""Sandboxes: commands, limits, confinement, and what is left after every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import wait_until
from transformers import AutoTokenizer

from verl_server.agent import (
    Environment,
    Episode,
    LocalSandbox,
    RolloutLimits,
    RolloutRunner,
    Sample,
    SandboxLimits,
    Task,
    reward,
)
from verl_server.agent.sandboxes import local_sandbox
from verl_server.agent.sandboxes.confinement import kernel_version
from verl_server.errors import BadInputError, InfrastructureError
from verl_server.trajectory import ChatRenderer


def run_in_sandbox(body: Callable[[LocalSandbox], Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """The result of `body`, which is given a started sandbox."""

    async def run() -> Any:
        async with LocalSandbox(*args, **kwargs) as box:
            return await body(box)

    return asyncio.run(run())


def processes_with(text: str) -> list[int]:
    """Ids of the processes of this machine with this text in their command."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(text in part for part in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_outputs_and_exit_codes() -> None:
    async def body(box: LocalSandbox) -> None:
        result = await box.run("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert result.text == "out\nerr\n[exit code 3]"
        assert (await box.run("kill -SEGV $$")).exit_code == 128 + signal.SIGSEGV
        assert (await box.run(["no-such-program"])).exit_code == 127
        assert "no-such-program" in (await box.run(["no-such-program"])).stderr
        assert (await box.run(["printf", "%s", "a b", "$HOME"])).stdout == "a b$HOME"
        assert (await box.run("cat; echo $SEED", stdin="ümlaut", env={"SEED": "7"})).stdout == "ümlaut7\n"
        assert (await box.run(["cat"], stdin=b"\xff")).stdout == "�"
        assert (await box.run("echo", stdin="x" * 10_000_000)).exit_code == 0  # nobody reads the input

    run_in_sandbox(body)


def test_commands_share_the_folder_and_have_it_for_themselves() -> None:
    async def body(box: LocalSandbox) -> Path:
        assert box.folder is not None
        assert (await box.run("pwd")).stdout.strip() == str(box.folder) == (await box.run("echo $HOME")).stdout.strip()
        await box.run("mkdir -p a && echo 1 > a/b && touch /tmp/c && mkfifo pipe && ln -s /nowhere link")
        await box.run("python3 -c 'import tempfile; print(tempfile.mkstemp())' && mkdir locked/x -p && chmod 0 locked")
        assert (await box.run("cat a/b; ls /tmp/c")).stdout == "1\n/tmp/c\n"
        async with LocalSandbox() as other:
            assert (await other.run("ls -A; ls /tmp/c")).exit_code
        return box.folder.parent

    assert not run_in_sandbox(body).exists()
    assert not Path("/tmp/c").exists()


def test_files() -> None:
    async def body(box: LocalSandbox) -> None:
        await box.write_file("new folder/-x", b"\x00\xff")
        assert await box.read_file("new folder/-x") == b"\x00\xff"
        await box.write_file("/tmp/big", "1" * 4000)
        with pytest.raises(OSError, match=r"has 4000 bytes or more; raise SandboxLimits\.max_output_bytes"):
            await box.read_file("/tmp/big")
        with pytest.raises(OSError, match="No such file"):
            await box.read_file("missing")
        with pytest.raises(OSError, match="Read-only file system"):
            await box.write_file("/etc/passwd", "")
        await box.write_file(Path("-"), "a dash")
        assert await box.read_file(Path("-")) == b"a dash"
        assert (await box.run(["ls", Path("new folder")], cwd=".")).stdout == "-x\n"
        assert (await box.run("pwd", cwd="/usr")).stdout == "/usr\n"
        assert "cwd missing: No such file" in (await box.run("pwd", cwd="missing")).stderr

    run_in_sandbox(body, SandboxLimits(max_output_bytes=4000))


def test_keys_of_the_trainer_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SERVER_API_KEY", "secret")

    async def body(box: LocalSandbox) -> str:
        return (await box.run("env; cat /proc/*/environ")).stdout

    assert "secret" not in run_in_sandbox(body)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder with a file that a sandbox can see: the machine's `/tmp` is hidden."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        (Path(folder) / "victim").write_text("whole")
        yield Path(folder)


def test_only_its_own_processes_network_and_files(outside: Path) -> None:
    """What this machine's kernel can do, which CI needs, too."""
    sleeping = subprocess.Popen(["sleep", "300"])
    victim, server = outside / "victim", asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)

    async def body(box: LocalSandbox) -> None:
        assert box.confined == {"user", "processes", "mounts", "network", "read_only", "writes"}
        assert (await box.run(f"cat {victim}")).stdout == "whole"
        for change in ("echo >", "rm", "chmod 0", "touch -d 2001-01-01", "truncate -s 0", "ln -f", "chown 1"):
            assert (await box.run(f"{change} {victim}")).exit_code, change
        assert (await box.run(f"touch {outside}/new; chmod 0 {outside}")).exit_code
        port = (listening := await server).sockets[0].getsockname()[1]
        assert (await box.run(f"kill -9 {sleeping.pid}")).exit_code
        assert str(sleeping.pid) not in (await box.run("ls /proc")).stdout.split()
        connect = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"
        assert "refused" in (await box.run(["python3", "-c", connect, str(port)])).stderr
        serve = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('free here')"
        assert (await box.run(["python3", "-c", serve, str(port)])).stdout == "free here\n"
        assert (await box.run("ls -A /run")).stdout == ""  # sockets of daemons
        async with LocalSandbox(network=True) as open_box:
            assert (await open_box.run(["python3", "-c", connect, str(port)])).exit_code == 0
        listening.close()
        assert (await box.run("grep -E 'Cap(Eff|Bnd|Prm)' /proc/self/status")).stdout.split()[1::2] == ["0" * 16] * 3
        await box.run("kill -9 -1")
        assert (await box.run("echo alive")).stdout == "alive\n"  # the command server cannot be killed from inside

    before = victim.stat()
    try:
        run_in_sandbox(body)
        assert sleeping.poll() is None
    finally:
        sleeping.kill()
        sleeping.wait()
    assert victim.read_text() == "whole"
    after = victim.stat()
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)


def test_signals_have_their_usual_effect() -> None:
    """A test that starts a server and ends it with SIGTERM would hang otherwise."""

    async def body(box: LocalSandbox) -> None:
        assert (await box.run("sleep 60 & kill $!; wait $!; echo $?")).stdout == f"{128 + signal.SIGTERM}\n"
        ignored = int((await box.run("grep SigIgn /proc/self/status")).stdout.split()[1], 16)
        assert not [number for number in signal.valid_signals() if ignored & 1 << (number - 1)]

    run_in_sandbox(body)


def test_limits_of_time() -> None:
    async def body(box: LocalSandbox) -> None:
        started = time.monotonic()
        assert (await box.run("sleep 4071 & sleep 4071", timeout_s=0.3)).exceeded == "time"
        assert time.monotonic() - started < 10
        await asyncio.sleep(0.1)
        assert not processes_with("4071")
        assert (await box.run("python3 -c 'while True: pass'")).exceeded == "cpu"
        assert (await box.run("(while true; do :; done) & (while true; do :; done) & wait")).exceeded == "cpu"
        assert "[killed: time limit exceeded]" in (await box.run("sleep 60", timeout_s=0.1)).text

    run_in_sandbox(body, SandboxLimits(cpu_s=1.0))


def test_limits_of_memory_processes_and_files() -> None:
    limits = SandboxLimits(memory_bytes=200 << 20, max_processes=20, max_file_bytes=1 << 20)

    async def body(box: LocalSandbox) -> None:
        hungry = "python3 -c 'import time; x = b\"1\" * (90 << 20); time.sleep(60)'"
        assert (await box.run(f"{hungry} & {hungry} & {hungry} & wait")).exceeded == "memory"
        assert (await box.run("for i in $(seq 40); do sleep 60 & done; wait")).exceeded == "processes"
        assert (await box.run("[ -c /dev/stdin ]")).exit_code == 0  # an empty standard input is /dev/null
        threads = "import threading as t, time; [t.Thread(target=time.sleep, args=(60,)).start() for _ in range(40)]"
        assert (await box.run(["python3", "-c", threads])).exceeded == "processes"
        assert (await box.run("head -c 2000000 /dev/zero > file")).exit_code
        assert (await box.run("stat -c %s file")).stdout == f"{1 << 20}\n"
        result = await box.run("echo still here")
        assert (result.stdout, result.exceeded) == ("still here\n", None)

    run_in_sandbox(body, limits)


COMETS = """
import os, sys, time
end = time.monotonic() + 10.0
for _ in range(30):
    if os.fork() == 0:
        break
trail = os.open("trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while time.monotonic() < end:
    os.write(trail, b".")
    if os.fork():
        os._exit(0)
"""
"""31 processes, each of which goes on as its own child all the time. They end after 10 seconds."""


def test_processes_that_fork_all_the_time_are_killed_in_one_step() -> None:
    """A list of them is old before it has been read."""

    async def body(box: LocalSandbox) -> None:
        assert box.folder is not None
        await box.run(["python3", "-c", COMETS], timeout_s=30.0)  # its first process ends at once, without a limit
        trail = box.folder / "trail"
        await asyncio.to_thread(wait_until, trail.exists, 10.0, "no process has started")
        size = -1
        while size < trail.stat().st_size:
            assert time.monotonic() < deadline, "the processes go on"
            size = trail.stat().st_size
            await asyncio.sleep(0.3)
        left = await box.run("ls /proc | grep -c '^[0-9]'")
        assert (left.exceeded, int(left.stdout) < 10) == (None, True), left

    deadline = time.monotonic() + 6.0
    run_in_sandbox(body, SandboxLimits(max_processes=30))


BOMB = """
import os, pathlib, time
pathlib.Path("ready").touch()
while not os.path.exists("go"):
    time.sleep(0.01)
made = 0
for _ in range(800):
    try:
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
    except BlockingIOError:
        break
    made += 1
pathlib.Path("made.new").write_text(str(made))
os.rename("made.new", "made")
time.sleep(10)
"""
"""A fork bomb of at most 800 processes, which end after 10 seconds."""


def has_bounded_processes() -> bool:
    """Whether this kernel bounds the processes of a sandbox by itself."""
    return kernel_version() >= ((6, 14) if os.getuid() == 0 else (5, 14))


@pytest.mark.skipif(not has_bounded_processes(), reason="the kernel does not bound the processes of a namespace")
def test_a_fork_bomb_is_bounded_while_the_command_server_waits_for_the_processor() -> None:
    async def body(box: LocalSandbox) -> None:
        assert box.folder is not None
        machine_maximum = Path("/proc/sys/kernel/pid_max").read_text()
        bomb = asyncio.create_task(box.run(["python3", "-c", BOMB], timeout_s=30.0))
        await asyncio.to_thread(wait_until, (box.folder / "ready").exists, 10.0, "the bomb has not started")
        server = command_server_of(box)
        server.suspend()
        try:
            (box.folder / "go").touch()
            await asyncio.to_thread(wait_until, (box.folder / "made").exists, 20.0, "the bomb goes on")
            async with LocalSandbox() as neighbour:
                assert (await neighbour.run("echo works")).stdout == "works\n"
        finally:
            server.resume()
        assert (await bomb).exceeded == "processes"
        assert 20 < int((box.folder / "made").read_text()) < 400
        assert (await box.run("echo next")).stdout == "next\n"
        assert Path("/proc/sys/kernel/pid_max").read_text() == machine_maximum

    run_in_sandbox(body, SandboxLimits(max_processes=20))


ATTACKS = {
    "limits of others": "for pid in pids:\n for kind in range(16):\n  attempt(resource.prlimit, pid, kind, (0, 0))",
    "signals to others": (
        "for pid in (*pids, -1):\n"
        " for number in (9, 19, 15, 6, 11):\n  attempt(os.kill, pid, number); attempt(libc.tgkill, pid, pid, number)"
    ),
    "tracing": "for pid in pids:\n attempt(libc.ptrace, 0x4206, pid, 0, 0); attempt(libc.ptrace, 16, pid, 0, 0)",
    "files of processes": (
        "for pid in pids:\n for name in ('oom_score_adj', 'mem', 'clear_refs', 'comm', 'timerslack_ns', 'uid_map'):\n"
        "  attempt(lambda: open(f'/proc/{pid}/{name}', 'r+b', buffering=0).write(b'1000'))"
    ),
    "the scheduler": (
        "attempt(os.setpriority, os.PRIO_USER, os.getuid(), 19)\n"
        "for pid in pids:\n attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)\n"
        " attempt(os.sched_setaffinity, pid, {0})\n"
        " attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))"
    ),
    "pidfds": (
        "for pid in pids:\n"
        " for number in range(20):\n  attempt(lambda: libc.syscall(438, os.pidfd_open(pid), number, 0))\n"
        " attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9))"
    ),
    "memory of others": "for pid in pids:\n attempt(libc.process_vm_writev, pid, vector, 1, vector, 1, 0)",
    "its own descriptors": "os.closerange(0, 100)\nattempt(lambda: [os.open('/dev/null', 0) for _ in range(30_000)])",
    "all processes": "attempt(lambda: [os.fork() or time.sleep(5) for _ in range(500)])",
    "memory": (
        "files = [os.memfd_create(str(n)) for n in range(4)]\nfor file in files:\n os.write(file, bytes(20 << 20))\n"
        "attempt(lambda: open('/dev/shm/full', 'wb').write(bytes(80 << 20)))\n"
        "attempt(lambda: open('/tmp/full', 'wb').write(bytes(80 << 20)))\nheld = b'x' * (300 << 20)\ntime.sleep(5)"
    ),
    "a reaper that works": (  # the first process of the namespace may use one second of the processor
        "attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))\nend = time.monotonic() + 1.0\n"
        "while time.monotonic() < end:\n if os.fork() == 0:\n  os.fork()\n  os._exit(0)\n os.wait()"
    ),
}
ATTACK = """
import contextlib, ctypes, os, resource, signal, sys, time
libc, vector, pids = ctypes.CDLL(None), bytes(16), [pid for pid in range(64) if pid != os.getpid()]

def attempt(function, *args):
    with contextlib.suppress(OSError, ValueError, MemoryError):
        function(*args)

exec(sys.argv[1])
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_command_cannot_end_its_sandbox(attack: str) -> None:
    """Otherwise a policy could choose which of its samples count: those of a failed sandbox are attempted again."""
    limits = SandboxLimits(memory_bytes=200 << 20, max_processes=100, max_file_bytes=64 << 20)

    async def body(box: LocalSandbox) -> None:
        many = (
            "for n in $(seq 60); do (sleep 0.01 &); done; seq 100000 | tail -1"  # work for all that the attack reaches
        )
        for _ in range(2):
            await box.run(["python3", "-c", ATTACK, ATTACKS[attack]], timeout_s=10.0)
            results = [await box.run(many, stdin="x" * 1_000_000) for _ in range(3)]
            # The first process of the namespace may end at its work, and the command with it.
            assert {result.exit_code for result in results} <= {0, 128 + signal.SIGKILL}, results
            assert "100000\n" in [result.stdout for result in results], results

    run_in_sandbox(body, limits)


def test_a_sandbox_goes_on_after_the_end_of_its_first_process() -> None:
    async def body(box: LocalSandbox) -> None:
        num_mounts = (await box.run("wc -l < /proc/mounts; touch kept")).stdout
        for _ in range(5):
            running = asyncio.create_task(box.run("sleep 4078"))
            await asyncio.to_thread(wait_until, lambda: bool(processes_with("4078")), 10.0, "not started")
            first = next(p for p in command_server_of(box).children() if p.status() != "zombie" and p.name() != "sleep")
            first.kill()
            result = await running
            assert (result.exit_code, result.exceeded) == (128 + signal.SIGKILL, None)
            assert (await box.run("ls; echo $$ > file; cat /proc/$(cat file)/comm; rm file")).stdout == "kept\nbash\n"
        assert (await box.run("wc -l < /proc/mounts")).stdout == num_mounts

    run_in_sandbox(body)


def test_the_kernel_kills_commands_first_when_the_memory_is_used_up() -> None:
    async def body(box: LocalSandbox) -> None:
        assert (await box.run("cat /proc/self/oom_score_adj")).stdout == "1000\n"
        own = Path("/proc/self/oom_score_adj").read_text()
        assert Path(f"/proc/{command_server_of(box).pid}/oom_score_adj").read_text() == own

    run_in_sandbox(body)


def test_of_a_long_output_the_middle_is_left_out() -> None:
    async def body(box: LocalSandbox) -> None:
        text = (await box.run("seq 1000000; echo end")).stdout
        assert text.startswith("1\n2\n")
        assert text.endswith("1000000\nend\n")
        assert "bytes omitted ...]" in text
        assert len(text) < 1100
        assert (await box.run("yes", timeout_s=0.3)).exceeded == "time"
        assert (await box.run("head -c 1000 /dev/zero")).stdout == "\0" * 1000  # exactly the limit

    run_in_sandbox(body, SandboxLimits(max_output_bytes=1000))


def test_processes_in_the_background_live_until_the_end_of_the_sandbox() -> None:
    async def body(box: LocalSandbox) -> None:
        started = time.monotonic()
        assert (await box.run("sleep 4072 & echo started")).stdout == "started\n"
        await box.run("setsid nohup sleep 4072 > /dev/null 2>&1 &")
        await box.run("(while true; do echo x; sleep 0.01; done) &")
        assert time.monotonic() - started < 10
        assert len(processes_with("4072")) >= 2

    run_in_sandbox(body)
    assert not processes_with("4072")


def test_a_cancelled_command_is_killed() -> None:
    async def body(box: LocalSandbox) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run("sleep 4073"), 0.3)
        await asyncio.to_thread(wait_until, lambda: not processes_with("4073"), 10.0, "the command runs on")
        assert (await box.run("echo next")).stdout == "next\n"

    run_in_sandbox(body)


def test_many_commands_at_a_time() -> None:
    async def body(box: LocalSandbox) -> None:
        results = await asyncio.gather(*(box.run(f"sleep 0.{n % 3}; echo {n}; cat", stdin=str(n)) for n in range(60)))
        assert [result.stdout for result in results] == [f"{n}\n{n}" for n in range(60)]

    run_in_sandbox(body)


def test_wrong_commands_are_refused() -> None:
    async def body(box: LocalSandbox) -> None:
        for command in ([], "a\0b", ["true", "a\0b"], "x" * 200_000):
            with pytest.raises(BadInputError):
                await box.run(command)
        for wrong in ([1], 5):
            with pytest.raises(TypeError):
                await box.run(wrong)  # type: ignore[arg-type]
        with pytest.raises(BadInputError, match="timeout_s must be a positive number"):
            await box.run("true", timeout_s=0)
        with pytest.raises(TypeError):
            await box.write_file("x", 5)  # type: ignore[arg-type]
        for kwargs in ({"env": {"A=B": "1"}}, {"env": {"A": "a\0"}}, {"cwd": "a\0"}, {"env": {"A": "x" * 200_000}}):
            assert (await box.run("true", **kwargs)).exit_code == 127
        with pytest.raises(BadInputError, match="env must be a dict of strings"):
            await box.run("true", env={"SEED": 1})  # type: ignore[dict-item]
        with pytest.raises(BadInputError, match="`~` is not expanded"):
            await box.write_file("~/x", "")
        with pytest.raises(OSError, match="cannot read"):
            await box.read_file("")
        for path in ("a\0", "a/../\0"):
            with pytest.raises(BadInputError, match="NUL"):
                await box.read_file(path)
            with pytest.raises(BadInputError, match="NUL"):
                await box.write_file(path, "")
        with pytest.raises(BadInputError, match=r"another event loop.*async def"):
            await asyncio.to_thread(asyncio.run, box.run("true"))
        assert (await box.run("true")).exit_code == 0

    run_in_sandbox(body)
    with pytest.raises(BadInputError, match="network must be a valid boolean, got 'no'"):
        LocalSandbox(network="no")  # type: ignore[arg-type]
    for limits in ({"memory_bytes": 0}, {"cpu_s": -1}, {"max_output_bytes": 1.5}):
        with pytest.raises(BadInputError):
            SandboxLimits(**limits)
    with pytest.raises(BadInputError, match="limits must be an instance of SandboxLimits"):
        LocalSandbox({"memory_bytes": 1})  # type: ignore[arg-type]


def test_text_that_is_no_utf_8_is_refused_by_name() -> None:
    """A policy can write half of a surrogate pair. The surrogates of Python's file names are bytes."""

    async def body(box: LocalSandbox) -> None:
        wrong = "\ud800"
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "the command": lambda: box.run(["echo", wrong]),
            "cwd": lambda: box.run("true", cwd=wrong),
            "env": lambda: box.run("true", env={"A": wrong}),
            "stdin": lambda: box.run("true", stdin=wrong),
            "path": lambda: box.read_file(wrong),
            "content": lambda: box.write_file("x", wrong),
        }
        for name, call in calls.items():
            with pytest.raises(BadInputError, match=f"^{name} has a character that UTF-8 does not have"):
                await call()
        await box.write_file("\udc80", "\udc80")
        assert await box.read_file("\udc80") == b"\x80"
        assert (await box.run("cat \udc80; printf $A", env={"A": "\udc80"})).stdout == "\ufffd\ufffd"

    run_in_sandbox(body)


def test_a_sandbox_that_does_not_run() -> None:
    async def body() -> None:
        box = LocalSandbox()
        with pytest.raises(BadInputError, match=r"not started: write `await box.start\(\)`"):
            await box.run("true")
        await box.start()
        with pytest.raises(BadInputError, match="started once"):
            await box.start()
        await box.close()
        await box.close()
        with pytest.raises(InfrastructureError, match="it was closed"):
            await box.run("true")

    asyncio.run(body())


def test_a_folder_that_is_hard_to_remove() -> None:
    """Deeper than Python's functions can remove, and without rights to the folder itself."""
    deep = "import os\nfor _ in range(3000):\n os.mkdir('d'); os.chdir('d')"

    async def body(box: LocalSandbox) -> Path:
        assert (await box.run(["python3", "-c", deep])).exit_code == 0
        await box.run("ln -s /var/tmp link; chmod 0 . ..")
        assert box.folder is not None
        return box.folder.parent

    assert not run_in_sandbox(body).exists()


FEW_DESCRIPTORS = """
import asyncio, contextlib, os
from verl_server.agent import LocalSandbox

async def main():
    async with LocalSandbox() as box:
        results = await asyncio.gather(*(box.run(f"sleep 0.2; echo {n}") for n in range(100)))
        started = [n for n, result in enumerate(results) if result.stdout == f"{n}\\n"]
        refused = [result for result in results if result.exit_code == 126]
        print(len(started) + len(refused), bool(started), refused[0].stderr.strip())
        for number in range(60):
            assert (await box.run(f"sleep 60 & echo {number}")).stdout == f"{number}\\n"
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        print((await box.run("echo output")).stdout)
        os.closerange(50, 100)

asyncio.run(main())
"""


def test_many_commands_with_few_descriptors() -> None:
    """Results are complete, or the command says that it did not start. Of outputs that processes in the background hold
    open, the oldest are closed for new ones. A trainer without a free descriptor receives outputs.
    """
    command = ["sh", "-c", 'ulimit -n 100; exec "$0" -c "$1"', sys.executable, FEW_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    message = "sandbox: the command cannot be started: Too many open files"
    assert done.stdout == f"100 True {message}\noutput\n\n", done.stderr


def test_a_command_server_does_not_grow() -> None:
    async def body(box: LocalSandbox) -> None:
        async def memory() -> int:
            return command_server_of(box).memory_info().rss

        for _ in range(5):
            await box.run("head -c 2000000 /dev/zero")
        before = await memory()
        for _ in range(40):
            await box.run("head -c 2000000 /dev/zero")
        assert await memory() < before + (8 << 20)

    run_in_sandbox(body)


class Box(Environment):
    """Its sandbox is killed in the first attempt."""

    _num_attempts = 0

    async def setup(self) -> None:
        Box._num_attempts += 1
        self.box = LocalSandbox()
        await self.box.start()

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        if self._num_attempts == 1:
            for child in psutil.Process(launcher_of(self.box)).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.output = (await self.box.run("echo from the sandbox")).stdout

    @reward
    async def has_output(self, sample: Sample) -> float:
        return float(self.output == "from the sandbox\n" and (await self.box.run("true")).exit_code == 0)

    async def teardown(self) -> None:
        await self.box.close()


def test_a_sample_is_attempted_again_when_its_sandbox_fails(tiny: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))

    async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
        meta = {"finish_reason": {"type": "stop"}, "weight_version": 0, "output_token_logprobs": [[-1.0, 5, None]]}
        return {"output_ids": [5], "meta_info": meta}

    async def run() -> Sample:
        runner = RolloutRunner(
            Box, generate, renderer=ChatRenderer(tokenizer), limits=RolloutLimits(max_response_tokens=100)
        )
        return (await anext(runner.run([Task("t", [{"role": "user", "content": "go"}])]))).samples[0]

    sample = asyncio.run(run())
    assert (sample.error, sample.reward, Box._num_attempts) == (None, 1.0, 2)


def launcher_of(box: LocalSandbox) -> int:
    """Process id of the launcher of a sandbox, which has the folder in its arguments."""
    assert box.folder is not None
    folder = str(box.folder.parent)
    return next(pid for pid in processes_with(folder) if psutil.Process(pid).ppid() == os.getpid())


def command_server_of(box: LocalSandbox) -> psutil.Process:
    """The command server of a sandbox in namespaces."""
    (entered,) = psutil.Process(launcher_of(box)).children()
    (server,) = entered.children()
    return server


def test_a_command_server_that_is_killed_ends_commands_with_an_infrastructure_error() -> None:
    async def body(box: LocalSandbox) -> Path:
        running = asyncio.ensure_future(box.run("sleep 4074"))
        await asyncio.to_thread(wait_until, lambda: bool(processes_with("4074")), 10.0, "not started")
        assert box.folder is not None
        launcher = launcher_of(box)
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with pytest.raises(InfrastructureError, match="its process has ended"):
            await running
        with pytest.raises(InfrastructureError):
            await box.run("true")
        return box.folder.parent

    assert not run_in_sandbox(body).exists()
    assert not processes_with("4074")


def test_a_command_fails_while_no_namespace_for_it_can_be_made() -> None:
    """And nothing waits. Later commands run. The process that makes namespaces lacks file descriptors here."""

    async def body(box: LocalSandbox) -> tuple[Any, Any]:
        server = command_server_of(box)
        maker = server.parent()
        assert maker is not None
        (first,) = server.children()
        limits = maker.rlimit(psutil.RLIMIT_NOFILE)
        used = {int(entry) for entry in os.listdir(f"/proc/{maker.pid}/fd")}
        free = min(set(range(len(used) + 1)) - used)
        maker.rlimit(psutil.RLIMIT_NOFILE, (free, limits[1]))
        first.kill()
        wait_until(lambda: not server.children(), 5.0, "the first process still runs")
        refused = await asyncio.wait_for(box.run("echo hi"), 5.0)
        maker.rlimit(psutil.RLIMIT_NOFILE, limits)
        return refused, await box.run("echo hi")

    refused, later = run_in_sandbox(body)
    assert refused.exit_code == 126
    assert "the command cannot be started: no process namespace" in refused.stderr
    assert later.stdout == "hi\n"


def test_an_answer_that_arrives_while_the_event_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by a training step in the event loop. The sandbox has answered in time, and stays usable."""
    monkeypatch.setattr(local_sandbox, "ANSWER_TIMEOUT_S", 0.5)

    async def body(box: LocalSandbox) -> None:
        command = asyncio.create_task(box.run("sleep 0.3; echo hi", timeout_s=0.5))
        await asyncio.sleep(0.01)
        time.sleep(2.0)
        assert (await command).stdout == "hi\n"
        assert (await box.run("echo again")).stdout == "again\n"

    run_in_sandbox(body)


KILLED_TRAINER = """
import asyncio, sys
from verl_server.agent import LocalSandbox

async def main():
    box = LocalSandbox()
    await box.start()
    await box.run("sleep 4075 &")
    print(box.folder, flush=True)
    await box.run("sleep 4075", timeout_s=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_trainer_that_was_killed(number: signal.Signals) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", KILLED_TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    folder = Path(trainer.stdout.readline().strip())
    assert folder.is_dir()
    trainer.send_signal(number)
    trainer.wait()
    wait_until(lambda: not processes_with("4075") and not folder.parent.exists(), 10.0, "something is left")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.08, 0.2, 0.5])
def test_no_folder_is_left_of_a_trainer_that_is_killed_during_the_start(delay_s: float, tmp_path: Path) -> None:
    program = "import asyncio; from verl_server.agent import LocalSandbox; print(flush=True)\n"
    program += (
        "async def main(): await asyncio.gather(*(LocalSandbox().start() for _ in range(4)))\nasyncio.run(main())"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert trainer.stdout is not None
    trainer.stdout.readline()
    wait_until(lambda: bool(processes_with(str(tmp_path))), 10.0, "no sandbox starts")
    time.sleep(delay_s)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not processes_with(str(tmp_path)), 20.0, "a sandbox still runs")
    assert not list(tmp_path.iterdir())


def test_a_sandbox_without_a_place_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(InfrastructureError, match="No such file or directory"):
        run_in_sandbox(lambda box: asyncio.sleep(0))


WITHOUT_NAMESPACES = """
import asyncio, os, sys
from verl_server.agent import LocalSandbox

async def main():
    async with LocalSandbox() as box:
        print(sorted(box.confined))
        await box.run("setsid sleep 4076 & sleep 4076 &")
        print((await box.run("sleep 4076", timeout_s=0.2)).exceeded, (await box.run("echo hello")).stdout, flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        if sys.argv[1] == "server killed":
            await box.run("kill -9 $PPID")

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["closed", "killed", "server killed"])
def test_a_kernel_without_namespaces(end: str) -> None:
    """Commands are not hidden from others then. Their limits and their end are the same."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -all --inh-caps -all -- "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", forbid, "sh", sys.executable, "-c"]
    done = subprocess.run([*command, WITHOUT_NAMESPACES, end], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['writes']\ntime hello\n\n", done.stderr
    wait_until(lambda: not processes_with("4076"), 10.0, "a process is left")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(3)", 0.0),  # the output of one case
        ("import os; os._exit(0)", 0.0),
        ("open('TASK.md', 'w').write('3')", 0.0),
    ],
)
def test_the_reward_of_the_documentation_is_not_hacked(program: str, expected: float) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents-reference.md").read_text()
    example = next(part for part in page.split("```python\n") if "class Coding(Environment)" in part).partition("```")[
        0
    ]
    names: dict[str, Any] = {}
    exec(compile(example.partition("```")[0], "agents-reference.md", "exec"), names)

    async def run() -> float:
        cases = [["1 2\n", "3"], ["4 5 6\n", "15"]]
        environment = names["Coding"](
            Task("sum", [{"role": "user", "content": "Write sum.py."}], data={"cases": cases})
        )
        await environment.setup()
        try:
            await environment.box.write_file("sum.py", program)
            found: float = await environment.tests_pass(None)
            return found
        finally:
            await environment.teardown()

    assert asyncio.run(run()) == expected
