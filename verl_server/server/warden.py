"""The warden: a small process that stands between a trainer and its server and outlives neither.

    trainer --spawns--> warden --spawns--> SGLang main --spawns--> scheduler, detokenizer, ...

It runs as a plain script on the standard library alone (about 10 MB, no thread), because it must still
work when everything else is broken. Its duties:

* the trainer is gone (its pidfd fires, or the lifeline on standard input ends): end the whole tree;
* the server's main process or one of its workers is gone (SGLang itself takes 5 s and more to notice the
  latter): end what it left behind, tell the trainer exit code and last words;
* it is the sub-reaper of the tree, so an orphaned scheduler becomes its own child and cannot escape;
* it drains the server's output into a bounded log file and keeps the tail;
* afterwards it removes the scratch folder and the shared-memory files that the tree had open.

Wire: one JSON line in (`Spec`), then commands (`stop`); JSON lines out (`started`, `exited`).
It does not talk to the server and knows nothing of SGLang but the names of its shared-memory files.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Protocol

PR_SET_CHILD_SUBREAPER = 36
TAIL_BYTES = 32 * 1024
CLEANER_GRACE_S = 1.0
MAIN_EXIT_S = 0.3
SHM_SURVEY_S = 2.0
SHM_MAPPED_S = 0.1
"""From the making of a file in shared memory until its maker has mapped it."""
PARENT_POLL_S = 0.5
SHM_DIR = "/dev/shm/"
#: Names that torch, SGLang and multiprocessing give to files in shared memory; nothing else is removed.
SHM_NAMES = re.compile(r"^(torch_|sglang|sgl_|sem\.mp-|psm_|mp-|nccl-|cuda)")
#: Those that do not say whose they are: their makers are looked for at once.
SHM_NAMELESS = re.compile(rb"^(sglang|sgl_|sem\.mp-|psm_|mp-)")
IN_CREATE, IN_NONBLOCK, IN_CLOEXEC = 0x100, 0o4000, 0o2000000


class Log:
    """A log file that never grows past twice `limit` bytes, and its tail in memory. Hides `secrets`."""

    def __init__(self, path: str, limit: int, secrets: list[str]) -> None:
        self._path, self._limit = path, limit
        self._secrets = [secret.encode() for secret in secrets]
        self._partial = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - owned by this object, closed in close()
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_size = 0

    def write(self, chunk: bytes) -> None:
        """Take output as it comes; whole lines are written (SGLang logs its arguments, keys included)."""
        whole, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
        if len(self._partial) > TAIL_BYTES:
            whole, newline, self._partial = whole + newline + self._partial, b"", b""
        self._write(whole + newline)

    def _write(self, chunk: bytes) -> None:
        for secret in self._secrets:
            chunk = chunk.replace(secret, b"***")
        self._tail.append(chunk)
        self._tail_size += len(chunk)
        while self._tail_size - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft())
        with contextlib.suppress(OSError):  # a full disk must not end the server
            if self._file.tell() > self._limit:
                self._file.close()
                os.replace(self._path, self._path + ".1")
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._file.write(chunk)

    def tail(self) -> str:
        return b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        self._write(self._partial)
        self._partial = b""
        self._file.close()


def descendants(root: int) -> list[int]:
    """Pids of the tree below `root`, parents first. Zombies are left out, but not what is below them.

    (A killed process is a zombie as soon as its first thread is gone; its children stay its own until the last one is.)
    """
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] == b"Z":
            zombies.add(int(entry))
        children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if pid not in zombies]


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_cleaner(pid: int) -> bool:
    """Whether a process is one of the helpers that remove shared memory once its owner is gone."""
    line = command_of(pid)
    return b"resource_tracker" in line or b"torch_shm_manager" in line


def worker_name(pid: int) -> str | None:
    """`sglang::scheduler` and the like: workers without which the server is dead. None for others."""
    name = command_of(pid).partition(b"\0")[0].decode("utf-8", "replace")
    return name if name.startswith("sglang::") else None


def shared_memory_of(pids: list[int]) -> set[str]:
    """Files in shared memory that these processes have mapped.

    Told by inode: glibc maps a named semaphore under a temporary name before it links the final one.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            inodes.update(int(line.split()[4]) for line in file if SHM_DIR in line)
    found = set()
    for entry in os.scandir(SHM_DIR) if os.path.isdir(SHM_DIR) else []:
        if entry.inode() in inodes and SHM_NAMES.match(entry.name):
            found.add(entry.name)
    return found


def watch_shared_memory() -> int | None:
    """A descriptor that is readable when a file is made in shared memory (inotify); None where that cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, SHM_DIR.encode(), IN_CREATE) < 0:
        os.close(fd)
        return None
    return fd


def names_made(fd: int) -> list[bytes]:
    """The names of the files that were made since the last call."""
    names = []
    with contextlib.suppress(BlockingIOError):
        while events := os.read(fd, 65536):
            at = 0
            while at < len(events):
                length = int.from_bytes(events[at + 12 : at + 16], sys.byteorder)
                names.append(events[at + 16 : at + 16 + length].rstrip(b"\0"))
                at += 16 + length
    return names


def remove_shared_memory(names: set[str], dead_pids: set[int], reader: int | None = None) -> None:
    """Remove what the dead tree owned, unless a living process still maps it (other than its `reader`)."""
    owned = set(names)
    for name in os.listdir(SHM_DIR) if os.path.isdir(SHM_DIR) else []:
        numbers = {int(number) for number in re.findall(r"\d+", name)}
        if SHM_NAMES.match(name) and numbers & dead_pids and not name.startswith("sem."):
            owned.add(name)
    if owned:
        owned -= shared_memory_of([int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != reader])
    for name in owned:
        with contextlib.suppress(OSError):
            os.unlink(SHM_DIR + name)


class Server(Protocol):
    """The main process of a server, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Its output, errors included."""

    def wait(self, timeout: float | None = None) -> int: ...

    def poll(self) -> int | None: ...


def spawned(spec: dict[str, Any]) -> Server:
    """A server in a new process that begins with nothing."""
    server = subprocess.Popen(
        spec["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=spec["env"],
        cwd=spec["scratch"],
    )
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: the loop reports its exit
        server.stdin.write(spec["payload"].encode())
        server.stdin.close()
    return server


class Warden:
    """One server tree, from spawn to the last file."""

    def __init__(self, spec: dict[str, Any], start: Callable[[dict[str, Any]], Server]) -> None:
        self._spec = spec
        self._log = Log(spec["log_path"], spec["log_limit"], spec["secrets"])
        self._selector = selectors.DefaultSelector()
        self._shm: set[str] = set()
        self._pids: set[int] = set()
        self._workers: set[int] = set()
        self._next_survey = 0.0
        self._server = start(spec)
        self._emit({"event": "started", "pid": self._server.pid})

    def _emit(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the trainer is gone
            os.write(1, json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        """Serve until the server, the trainer or a `stop` ends it; then leave nothing behind."""
        reason = "trainer gone"
        try:
            reason = self._watch()
        finally:
            self._end(reason)

    def _watch(self) -> str:
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._selector.register(self._server.stdout, selectors.EVENT_READ, "log")
        self._selector.register(0, selectors.EVENT_READ, "lifeline")
        for pid, name in ((self._server.pid, "server"), (self._spec["trainer_pid"], "trainer")):
            try:
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, name)
            except ProcessLookupError:
                return f"{name} gone"
        if (made := watch_shared_memory()) is not None:
            self._selector.register(made, selectors.EVENT_READ, "made")
        while True:
            patience_s = min(PARENT_POLL_S, max(self._next_survey - time.monotonic(), 0.0))
            for key, _ in self._selector.select(patience_s):
                if key.data == "made":
                    if any(SHM_NAMELESS.match(name) for name in names_made(key.fd)):
                        self._next_survey = min(self._next_survey, time.monotonic() + SHM_MAPPED_S)
                elif key.data == "log":
                    if not self._pump():
                        self._selector.unregister(self._server.stdout)
                elif key.data == "lifeline":
                    command = os.read(0, 4096)
                    if not command:
                        return "trainer gone"
                    if b"stop" in command:
                        return "stop"
                else:
                    return f"{key.data} gone"
            self._survey()

    def _pump(self) -> bool:
        """Move one piece of output to the log; False at its end."""
        assert self._server.stdout is not None
        try:
            chunk = os.read(self._server.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        self._log.write(chunk)
        return bool(chunk)

    def _survey(self) -> None:
        """Note the tree's shared memory while it lives; often at first, rarely later."""
        now = time.monotonic()
        if now < self._next_survey:
            return
        pids = descendants(os.getpid())
        self._pids.update(pids)
        if found := shared_memory_of(pids) - self._shm:
            self._shm |= found
            self._emit({"event": "owns", "shared_memory": sorted(found)})  # for the trainer, should this process die
        for pid in set(pids) - self._workers:
            if (name := worker_name(pid)) is not None:
                self._workers.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, name)
        self._next_survey = now + (SHM_SURVEY_S if now < self._spec["deadline"] else 15 * SHM_SURVEY_S)

    def _end(self, reason: str) -> None:
        """End the tree and clean up; each step is done whatever happens to the others."""
        code = self._exit_code(reason)
        with contextlib.ExitStack() as steps:  # last in, first out
            steps.callback(self._log.close)
            steps.callback(shutil.rmtree, self._spec["scratch"], ignore_errors=True)
            steps.callback(lambda: remove_shared_memory(self._shm, self._pids))
            steps.callback(self._kill_tree)
            steps.callback(lambda: self._emit(self._exit_event(reason, code)))  # callers wait: before the cleaning
            steps.callback(self._drain)
            self._next_survey = 0.0
            self._survey()
            self._kill(CLEANER_GRACE_S)

    def _exit_code(self, reason: str) -> int | None:
        """The main process's exit code, if it ended by itself (a worker's end often comes with its own)."""
        if reason in ("stop", "trainer gone"):
            return None
        try:  # its workers die with it and may be noticed first
            return self._server.wait(MAIN_EXIT_S)
        except subprocess.TimeoutExpired:
            return None

    def _exit_event(self, reason: str, code: int | None) -> dict[str, Any]:
        return {"event": "exited", "reason": reason, "code": code, "tail": self._log.tail()}

    def _drain(self) -> None:
        while self._pump():
            pass

    def _kill_tree(self) -> None:
        """SIGKILL everything below, then give the cleaners a moment, then SIGKILL them too."""
        started = time.monotonic()
        while self._kill(CLEANER_GRACE_S - (time.monotonic() - started)):
            time.sleep(0.01)

    def _kill(self, patience_s: float) -> bool:
        """One sweep; while there is patience, the cleaners are spared. False when nobody is left."""
        pids = descendants(os.getpid())
        self._pids.update(pids)
        for pid in pids:
            if patience_s <= 0 or not is_cleaner(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._reap()
        return bool(pids)

    def _reap(self) -> None:
        self._server.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def main(start: Callable[[dict[str, Any]], Server] = spawned) -> None:
    """Until the tree has ended; `start` starts its first process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides, not its terminal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, so the tree goes too
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the sub-reaper of the server's tree")
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return  # the trainer died before it said what to start
        line += chunk
    Warden(json.loads(line), start).run()


if __name__ == "__main__":
    main()
