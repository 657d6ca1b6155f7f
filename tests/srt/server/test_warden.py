"""Wardens with small programs in place of SGLang: moved logs, systems without pidfds, files of others, lost parents."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forbidden_calls import forbid
from helpers import MARK, marked_processes, no_new_shared_memory, wait_until

from verl_server.errors import DeadlineError, StartupError
from verl_server.server.environment import (
    LOG_NAME,
    MAX_KEPT_LOGS,
    WORKING_FOLDER,
    EngineProfile,
    inherited_environment,
    kept_logs,
    make_server_folder,
)
from verl_server.server.process import (
    _EXCEPTION,
    WARDEN_SCRIPT,
    ExitNotifier,
    ExitStatus,
    ServerProcess,
    spawn_warden,
    write_all,
)
from verl_server.server.warden import processes
from verl_server.server.warden.processes import has_pidfds, read_command_line, start_time, worker_name
from verl_server.server.warden.warden import BoundedLog

REPOSITORY = Path(__file__).parents[3]


class RunningWarden:
    """A warden whose server main is a Python program. `code` runs first in the process of the warden."""

    def __init__(self, folder: Path, program: str, code: str = "", trainer_pid: int | None = None) -> None:
        self.folder, self.mark, self.log_path = folder, uuid.uuid4().hex, folder / "logs" / "server.log"
        self.log_path.parent.mkdir()
        (folder / "scratch").mkdir()
        spec = {
            "argv": [sys.executable, "-c", program],
            "env": {**os.environ, MARK: self.mark},
            "payload": "",
            "scratch": str(folder / "scratch"),
            "temporary": str(folder / "scratch"),
            "log_path": str(self.log_path),
            "log_limit_bytes": 1000,
            "secrets": [],
            "trainer_pid": os.getpid() if trainer_pid is None else trainer_pid,
            "start_deadline": time.monotonic(),
            "worker_prefix": "sglang::",
        }
        command = [sys.executable, "-I", str(WARDEN_SCRIPT)]
        if code:
            start = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from verl_server.server.warden import warden"
            command = [sys.executable, "-c", f"{code}\n{start}; warden.main()"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.send(json.dumps(spec))
        self.events = self._events()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def _events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        return map(json.loads, self.process.stdout)

    def wait_for(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == name)

    def end(self, command: str = "stop") -> dict[str, Any]:
        """The event `exited`, after a command if there is one."""
        if command:
            self.send(command)
        exited = self.wait_for("exited")
        self.process.wait(30)
        assert not marked_processes(self.mark)
        return exited

    def __enter__(self) -> RunningWarden:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        for pid in marked_processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


# -- logs --------------------------------------------------------------------------------------------

TALKATIVE = """
import time
for number in range(10_000):
    print(f"line {number} " + 60 * "x", flush=True)
    time.sleep(0.01)
"""


def remove_file(log: Path) -> None:
    log.unlink()


def move_file(log: Path) -> None:
    log.rename(log.with_name("moved"))


def remove_folder(log: Path) -> None:
    for path in log.parent.iterdir():
        path.unlink()
    log.parent.rmdir()


def is_done(change: Callable[[Path], None], log: Path) -> bool:
    try:
        change(log)
    except FileNotFoundError:  # the log was just rotated
        return False
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # the log was just written again
            raise
        return False
    return True


def has_line(log: Path) -> bool:
    try:
        return "line" in log.read_text()
    except FileNotFoundError:  # the log is just being rotated
        return False


@pytest.mark.parametrize("change", [remove_file, move_file, remove_folder])
def test_a_server_outlives_its_log(change: Callable[[Path], None], tmp_path: Path) -> None:
    """The log grows over its limit several times after it was moved or removed. The server goes on."""
    with RunningWarden(tmp_path, TALKATIVE) as warden:
        pid = warden.wait_for("started")["pid"]
        wait_until(lambda: warden.log_path.exists() and warden.log_path.stat().st_size, 10.0, "no log")
        wait_until(lambda: is_done(change, warden.log_path), 10.0, "the log was not changed")
        time.sleep(0.6)
        assert start_time(pid) is not None
        if change is not remove_folder:
            wait_until(lambda: has_line(warden.log_path), 10.0, "no line in the new log")
        exited = warden.end()
        assert (exited["reason"], exited["code"]) == ("stop", None)
        last = exited["tail"].splitlines()[-1]
        assert int(last.split()[1]) > 40, "the tail has the last lines, whether or not there is a file"


def test_a_log_is_written_again_when_its_folder_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = BoundedLog(str(folder / "log"), 100, ["a secret key"])
    log.write(b"first\n")
    remove_folder(folder / "log")
    log.write(b"lost\n")
    folder.mkdir()
    log.write(b"again a secret key\n")
    assert (folder / "log").read_text() == "again ***\n"
    log.write(100 * b"x" + b"\n")
    log.write(b"rotated\n")
    assert (folder / "log").read_text() == "rotated\n"
    assert (folder / "log.1").read_text().startswith("again")
    log.close()
    assert log.tail().startswith("first\nlost\nagain ***\n")


def test_a_log_that_cannot_be_rotated_keeps_its_limit(tmp_path: Path) -> None:
    """A folder has the name of the rotated log."""
    (tmp_path / "log.1" / "file").mkdir(parents=True)
    log = BoundedLog(str(tmp_path / "log"), 100, [])
    for _ in range(20):
        log.write(28 * b"x" + b"\n")
    assert (tmp_path / "log").read_text() == 4 * (28 * "x" + "\n"), "the line that exceeds the limit is the last"


# -- the end of processes ----------------------------------------------------------------------------

WITHOUT_PIDFDS = "import os; del os.pidfd_open"


@pytest.mark.parametrize("code", [WITHOUT_PIDFDS, forbid("pidfd_open")], ids=["no os.pidfd_open", "seccomp"])
def test_a_warden_without_pidfds(code: str, tmp_path: Path) -> None:
    """It notices the end of its server and of its trainer."""
    trainer = subprocess.Popen(["sleep", "600"])
    for name, expected in (("server", {"reason": "server gone", "code": 3}), ("trainer", {"reason": "trainer gone"})):
        folder = tmp_path / name
        folder.mkdir()
        program = "import sys, time; time.sleep(1); sys.exit(3)" if name == "server" else "import time; time.sleep(600)"
        with RunningWarden(folder, program, code, trainer.pid) as warden:
            pid = warden.wait_for("started")["pid"]
            if name == "trainer":
                time.sleep(0.5)
                assert start_time(pid) is not None
                trainer.kill()
                wait_until(lambda: start_time(pid) is None, 10.0, "the server outlives its trainer")  # noqa: B023
            assert warden.end("").items() >= expected.items()
    trainer.wait()


def test_processes_that_have_ended_have_no_start_time() -> None:
    """A zombie has ended, unless only its first thread has ended."""
    child = subprocess.Popen(["sleep", "600"])
    assert start_time(child.pid) == start_time(child.pid) is not None
    child.kill()
    wait_until(lambda: start_time(child.pid) is None, 10.0, "a zombie counts as alive")
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert start_time(child.pid) is None
    assert start_time(os.getpid()) is not None


def test_servers_are_not_forked_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver hands out pidfds of its wardens, so servers are started as new programs."""
    from verl_server.cpu.forkserver import SharedForkserver
    from verl_server.server.environment import inherited_environment

    assert has_pidfds()
    monkeypatch.delattr(os, "pidfd_open")
    assert not processes.has_pidfds()
    assert SharedForkserver().prepare(inherited_environment()) is None


def test_an_error_of_the_warden_is_the_reason_of_the_end(tmp_path: Path) -> None:
    """The folder of the log is missing in one case; the selector fails in the other, while the server runs."""
    broken = "import selectors; selectors.DefaultSelector.select = lambda *_: 1 / 0"
    with RunningWarden(tmp_path, "import time; time.sleep(600)", broken) as warden:
        assert warden.end("")["reason"] == "warden failed: ZeroDivisionError: division by zero"
    (tmp_path / "second").mkdir()
    missing = "import os; os.stat = None; import builtins; builtins.open = lambda *_, **__: 1 / 0"
    with RunningWarden(tmp_path / "second", "", missing) as warden:
        assert "warden failed: ZeroDivisionError" in warden.end("")["reason"]


def test_a_warden_that_cannot_be_a_subreaper_says_so(tmp_path: Path) -> None:
    forbidden = (
        "import ctypes; ctypes.CDLL = lambda *_, **__: type('Library', (), {'prctl': staticmethod(lambda *_: -1)})"
    )
    with RunningWarden(tmp_path, "", forbidden) as warden:
        assert "PR_SET_CHILD_SUBREAPER" in warden.end("")["reason"]


def test_a_reader_that_hangs_does_not_block_a_writer() -> None:
    """The specification of a server can be longer than the buffer of a pipe."""
    read_end, write_end = os.pipe()
    data = bytes(range(256)) * 4096
    with os.fdopen(write_end, "wb") as pipe:
        with pytest.raises(TimeoutError, match="were not read"):
            write_all(pipe, data, 0.3)
        received = bytearray()

        def read() -> None:
            while len(received) < len(data) or bytes(received[-len(data) :]) != data:
                received.extend(os.read(read_end, 65536))

        reader = threading.Thread(target=read)
        reader.start()
        write_all(pipe, data, 30.0)
        reader.join(30.0)
        assert not reader.is_alive()
        os.close(read_end)
        with pytest.raises(BrokenPipeError):
            write_all(pipe, data, 30.0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-9, "killed by SIGKILL"), (-40, "killed by signal 40"), (1, "exit code 1"), (None, "sglang::scheduler gone")],
)
def test_every_end_is_reported_to_all_listeners(code: int | None, expected: str) -> None:
    """Signal 40 has no name. A listener that fails does not hide the end from the others."""
    server, seen = ExitNotifier(), []

    def fail(_: ExitStatus) -> None:
        raise RuntimeError

    server.on_exit(fail)
    server.on_exit(lambda exit_status: seen.append(exit_status.describe()))
    server.note_exit(ExitStatus("sglang::scheduler gone", code, ""))
    assert len(seen) == 1
    assert seen[0].endswith(expected)


# -- shared memory -----------------------------------------------------------------------------------

#: Maps a file and says its process id. The file is older than the process or is created now.
MAPS_A_FILE = """
import mmap, os, time
fd = os.open({path!r}.format(pid=os.getpid()), os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096) if os.fstat(fd).st_size == 0 else None
memory = mmap.mmap(fd, 4096)
print("mapped", flush=True)
time.sleep(600)
"""


def make_file(name: str) -> Path:
    path = Path("/dev/shm", name)
    path.write_bytes(bytes(4096))
    return path


def test_only_files_of_the_tree_are_removed(tmp_path: Path) -> None:
    """Containers can share /dev/shm but not process ids: a file of another container may have the id of our server."""
    mark = uuid.uuid4().hex
    with contextlib.ExitStack() as files:
        older = make_file(f"torch_older_{mark}")
        files.callback(older.unlink, missing_ok=True)
        for number, path in enumerate(("/dev/shm/torch_{pid}_" + mark, str(older))):
            folder = tmp_path / str(number)
            folder.mkdir()
            with RunningWarden(folder, MAPS_A_FILE.format(path=path)) as warden:
                pid = warden.wait_for("started")["pid"]
                foreign = make_file(f"torch_{pid}_foreign_{mark}")
                files.callback(foreign.unlink, missing_ok=True)
                wait_until(lambda: "mapped" in warden.log_path.read_text(), 10.0, "not mapped")
                warden.end()
            assert foreign.exists()
            assert older.exists()
            assert not Path(path.format(pid=pid)).exists() or path == str(older)


def test_a_name_that_another_file_has_now_is_not_removed(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    path = Path(f"/dev/shm/sglang_loads_{mark}")
    try:
        with RunningWarden(tmp_path, MAPS_A_FILE.format(path=str(path))) as warden:
            owned = warden.wait_for("owns")["shared_memory"]
            assert owned == {path.name: path.stat().st_ino}
            path.unlink()
            make_file(path.name)
            warden.end()
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


#: A worker of Ray that ends: it kills its children with SIGKILL, then itself.
DYING_PARENT = """
import os, signal, subprocess, sys, threading
warden = subprocess.Popen([sys.executable, "-I", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
spec = sys.stdin.readline().replace('"TRAINER"', str(os.getpid()))
warden.stdin.write(spec)
warden.stdin.flush()
for line in warden.stdout:
    if "owns" in line:
        break
os.kill(warden.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("parent_dies", [True, False])
def test_a_warden_outlives_its_parents(parent_dies: bool, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    path = f"/dev/shm/sglang_loads_{mark}"
    spec = {
        "argv": [sys.executable, "-c", MAPS_A_FILE.format(path=path)],
        "env": {**os.environ, MARK: mark},
        "payload": "",
        "scratch": str(tmp_path),
        "temporary": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "log_limit_bytes": 1 << 20,
        "secrets": [],
        "trainer_pid": "TRAINER",
        "worker_prefix": "sglang::",
        "start_deadline": time.monotonic(),
    }
    program = DYING_PARENT if parent_dies else DYING_PARENT.replace("os.kill(os.getpid(), signal.SIGKILL)", "")
    with no_new_shared_memory():
        parent = subprocess.Popen(
            [sys.executable, "-c", program, str(WARDEN_SCRIPT)],
            stdin=subprocess.PIPE,
            env={**os.environ, MARK: mark},
            text=True,
        )
        parent.communicate(json.dumps(spec) + "\n", timeout=60)
        wait_until(lambda: not marked_processes(mark), 10.0, f"left behind: {marked_processes(mark)}")
        wait_until(lambda: not Path(path).exists(), 10.0, "the file of the server was not removed")


# -- logs of crashed servers -------------------------------------------------------------------------


def test_logs_of_crashed_servers_are_kept_in_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "verl-server-other").mkdir()
    (tmp_path / "verl-server-other" / "file").touch()
    crashed = []
    for number in range(MAX_KEPT_LOGS + 3):
        folder = make_server_folder()
        (folder / LOG_NAME).write_text("the end")
        os.utime(folder / LOG_NAME, (number, number))
        if number != 1:  # server 1 still runs
            (folder / WORKING_FOLDER).rmdir()
            crashed.append(folder)
    running = set(tmp_path.iterdir()) - set(crashed)
    assert len(running) == 2
    last = make_server_folder()
    assert set(tmp_path.iterdir()) == {*running, *crashed[-MAX_KEPT_LOGS:], last}


def test_a_start_without_a_temporary_folder_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/folder")
    with pytest.raises(StartupError, match="Set the environment variable TMPDIR to a writable folder"):
        make_server_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/no/such/folder"])
    for use in (inherited_environment, make_server_folder):
        with pytest.raises(StartupError, match=r"No usable temporary directory.*TMPDIR"):
            use()


SLEEPING_SERVER = EngineProfile(
    name="a server that sleeps",
    main_module="sleeping_server",
    secret_arguments=(),
    ready_paths=(),
    worker_node_ready_paths=(),
    authenticated_path="",
    port_taken_phrases=(),
    worker_prefix="sglang::",
)


@pytest.fixture
def sleeping_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """A server that logs a line and sleeps."""
    (tmp_path / "sleeping_server.py").write_text("import time\nprint('sleeping', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process = ServerProcess(
        {},
        SLEEPING_SERVER,
        env={"PYTHONPATH": str(tmp_path)},
        log_dir=None,
        start_timeout_s=60.0,
        warden_factory=spawn_warden,
    )
    wait_until(lambda: process.log_path.exists() and process.log_path.read_text(), 20.0, "no log")
    yield process
    process.stop()


def test_a_log_is_kept_when_an_error_refers_to_it(sleeping_server: ServerProcess) -> None:
    with pytest.raises(DeadlineError, match="not ready after 0") as caught:
        sleeping_server.wait_ready(lambda: False, 0.1)
    sleeping_server.stop()
    assert Path(caught.value.details["log_path"]).read_text() == "sleeping\n"
    assert not (sleeping_server.log_path.parent / WORKING_FOLDER).exists()


def test_the_log_counts_when_the_warden_was_killed(sleeping_server: ServerProcess) -> None:
    """For example by the kernel, which had no memory."""
    (parent,) = [process.pid for process in psutil.Process(sleeping_server.pids.main).parents()[:1]]
    os.kill(parent, signal.SIGKILL)
    assert sleeping_server.wait_exit(20.0) is not None
    sleeping_server.stop()
    folder = sleeping_server.log_path.parent
    assert kept_logs(folder.parent) == [folder]
    assert sleeping_server.log_path.read_text() == "sleeping\n"


HALF_AN_EVENT = """
import json, os, signal, sys
sys.stdin.buffer.readline()
os.write(1, json.dumps({"event": "started", "pid": os.getpid()}).encode() + b"\\n")
os.write(1, json.dumps({"event": "exited", "reason": "x", "code": None, "tail": 1000 * "y"}).encode()[:500])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_warden_that_was_killed_while_it_wrote_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", HALF_AN_EVENT], stdin=pipe, stdout=pipe, start_new_session=True)

    process = ServerProcess({}, SLEEPING_SERVER, env={}, log_dir=None, start_timeout_s=10.0, warden_factory=start)
    try:
        ended = process.wait_exit(10.0)
        assert ended is not None
        assert ended.reason == "warden killed"
    finally:
        process.stop()


def test_a_warden_that_does_not_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def start_sleep() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(["sleep", "60"], stdin=pipe, stdout=pipe, start_new_session=True))
        return started[0]

    arguments = {"long": 300_000 * "y"}
    with pytest.raises(DeadlineError, match="the warden process did not read"):
        ServerProcess(arguments, SLEEPING_SERVER, env={}, log_dir=None, start_timeout_s=0.2, warden_factory=start_sleep)
    assert started[0].returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_warden_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with EAGAIN, when a limit of processes is reached: `Popen` raises an OSError."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(tmp_path / "no such program")])

    with pytest.raises(StartupError, match=r"the warden process, .* could not be started: .*No such file.*`ulimit -u`"):
        ServerProcess({}, SLEEPING_SERVER, env={}, log_dir=None, start_timeout_s=10.0, warden_factory=start)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("started", [False, True], ids=["before the warden", "while it reads"])
def test_an_interrupted_start_leaves_nothing(started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, before the warden was started, and while it does not read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wardens: list[subprocess.Popen[bytes]] = []

    def start_sleep() -> subprocess.Popen[bytes]:
        timer.start()
        if not started:
            time.sleep(30.0)
        pipe = subprocess.PIPE
        wardens.append(subprocess.Popen(["sleep", "60"], stdin=pipe, stdout=pipe, start_new_session=True))
        return wardens[0]

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores the signal in its workers
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    arguments = {"long": 300_000 * "y"}
    try:
        with pytest.raises(KeyboardInterrupt):
            ServerProcess(
                arguments, SLEEPING_SERVER, env={}, log_dir=None, start_timeout_s=30.0, warden_factory=start_sleep
            )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [warden.returncode for warden in wardens] == ([-signal.SIGKILL] if started else [])
    assert not list(tmp_path.iterdir())


def test_a_clean_end_leaves_nothing(sleeping_server: ServerProcess) -> None:
    pids = sleeping_server.pids
    assert pids.warden is not None
    sleeping_server.stop()
    sleeping_server.stop()
    assert not sleeping_server.log_path.parent.exists()
    assert [pid for pid in (pids.main, pids.warden) if start_time(pid) is not None] == []


def test_a_program_that_a_worker_starts_is_no_worker() -> None:
    """Between `fork` and `exec` it has the title of the worker, and its end is not that of the worker."""
    program = "import os, time\nchild = os.fork()\nprint(child, flush=True) if child else None\ntime.sleep(60)"
    command = ["sglang::scheduler", "-c", program]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            child = int(worker.stdout.readline())
            assert read_command_line(child) == read_command_line(worker.pid)
            assert worker_name(worker.pid, "sglang::") == "sglang::scheduler"
            assert worker_name(child, "sglang::") is None
        finally:
            worker.kill()
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: To serve at least one request",
        "(EngineCore pid=13) ERROR 11-29 06:47:32 [core.py:1510] ValueError: To serve at least one request",
    ],
)
def test_the_first_exception_of_a_log_is_the_cause_of_a_failed_start(line: str) -> None:
    """The exceptions after it follow from it: vLLM's last one only says that there is a cause above."""
    log = [
        "  File 'x.py', line 1",
        "OSError in the middle of a line: no",
        line,
        "RuntimeError: Engine core initialization failed",
    ]
    found = [match[1] for each in log if (match := _EXCEPTION.match(each)) is not None]
    assert found[0] == "ValueError: To serve at least one request"
