"""The processes of a local sandbox: launcher, namespaces, command server. Imports the standard library only.

The launcher makes the folder of the sandbox and stays outside of the namespaces, so that it can remove the folder. Its
child enters the namespaces, and the child of that child, the first process of the process namespace, becomes the
command server. When one of them ends, the kernel ends the next one with SIGKILL, and with the command server all
processes of the namespace.

Commands run in a second process namespace within the first one, so they have no name for the command server: they
cannot signal, trace, limit or slow it down. They can end the first process of their own namespace, and all processes in
it. The command server then asks for another namespace, which the child of the launcher makes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from verl_server.agent.sandboxes import confinement
from verl_server.agent.sandboxes.command_server import PROCESS_FACTOR, CommandNamespace, CommandServer, kill_processes
from verl_server.agent.sandboxes.frames import FrameBuffer, encode_frame
from verl_server.server.warden.process_tree import list_descendants

START = -1
"""Id of the answer to the start."""
TRY_WITHOUT_NAMESPACES = 77
"""Exit code if the kernel refuses namespaces, or the mounts in them."""
SHARED_FOLDERS = ("/dev/shm", "/dev/pts")
"""Folders of the machine that commands may write if they have none of their own: programs need them."""
END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def main(folder: str) -> None:
    """Run a sandbox until the trainer closes the socket at standard input, or ends.

    Makes `folder`, which must not exist, with the folders `work` and `tmp` in it, and removes it at the end.
    """
    os.mkdir(folder, 0o700)  # END_SIGNALS are blocked until the handlers are set (_blocked_signals in local_sandbox.py)
    try:
        for inner in ("work", "tmp"):
            os.mkdir(os.path.join(folder, inner))
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: sys.exit(1))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        _run()
    finally:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _kill_descendants()
        remove_folder(folder)


def _run() -> None:
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    settings, launcher = _receive_settings(connection), os.getpid()
    if settings is None:
        return  # the trainer has ended
    confinement.call_prctl(confinement.PR_SET_CHILD_SUBREAPER)
    _die_with_parent(settings["trainer_pid"], signal.SIGTERM)
    code = _wait(_fork(lambda: _enter_namespaces(settings, connection, launcher)))
    if code == TRY_WITHOUT_NAMESPACES:
        _wait(_fork(lambda: _serve(settings, connection, [], None)))
    connection.close()


def _receive_settings(connection: socket.socket) -> dict[str, Any] | None:
    """The first message of the trainer, which sends no other before the answer."""
    frames = FrameBuffer()
    while data := connection.recv(1 << 16):
        for message, _ in frames.feed(data):
            return message
    return None


def remove_folder(folder: str) -> None:
    """Remove a folder of processes that have ended, also if they took away the rights to folders in it.

    The programs `rm` and `chmod` can remove folders that are nested deeper than Python's functions can. They follow no
    symbolic link in the folder.
    """
    if os.path.islink(folder):
        os.unlink(folder)
        return
    remove = ["rm", "-rf", "--", folder]
    if subprocess.run(remove, stderr=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(remove, check=False)


def _fork(body: Callable[[], int]) -> int:
    """Run `body` in a child, which dies with this process and ends with the exit code that `body` returns.

    Returns the id of the child.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        confinement.call_prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
        code = body()
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    """Wait for a child. Returns its exit code, as a positive number."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _enter_namespaces(settings: dict[str, Any], connection: socket.socket, launcher: int) -> int:
    confined = confinement.enter_namespaces(settings["network"])
    if not confined:
        return TRY_WITHOUT_NAMESPACES
    _die_with_parent(launcher, signal.SIGKILL)  # entering a user namespace clears the parent-death signal
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _fork(lambda: _serve(settings, connection, confined, theirs))
    connection.close()
    theirs.close()
    max_processes = PROCESS_FACTOR * settings["limits"]["max_processes"]
    while (request := socket.recv_fds(ours, 1, 1))[0]:
        for descriptor in request[1]:
            with socket.socket(fileno=descriptor) as replies, contextlib.suppress(OSError):
                _wait(_fork(functools.partial(_start_first_process, ours, replies, max_processes)))
    return _wait(child)


def _start_first_process(requests: socket.socket, replies: socket.socket, max_processes: int) -> int:
    """Start the first process of a new process namespace, which becomes a child of the command server.

    It sends the open namespace, and reaps processes that have lost their parents.
    """
    requests.close()
    confinement.enter_process_namespace(None)
    if os.fork():
        return 0
    confinement.mount_own_processes(max_processes)
    namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    confinement.call_prctl(confinement.PR_SET_DUMPABLE, 0)
    socket.send_fds(replies, [b"1"], [namespace])
    replies.close()
    os.close(namespace)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _serve(
    settings: dict[str, Any], connection: socket.socket, confined: list[str], maker: socket.socket | None
) -> int:
    """Confine this process and serve requests. `maker`: makes process namespaces."""
    writable = [settings["folder"], *SHARED_FOLDERS]
    proc, namespace = os.open("/proc", os.O_RDONLY), None
    if maker is not None:
        try:
            writable = confinement.mount_private_folders(
                settings["work"], settings["temporary"], hides_sockets=not settings["network"]
            )
            proc = confinement.hide_processes()
            if confinement.mount_read_only(writable):
                confined.append("read_only")
            namespace = CommandNamespace(maker)
            namespace.make()
        except OSError:
            traceback.print_exc()
            return TRY_WITHOUT_NAMESPACES
        settings["env"]["TMPDIR"] = "/tmp"
    if "network" in confined:
        confinement.start_loopback()
    confinement.call_prctl(confinement.PR_SET_CHILD_SUBREAPER)
    confinement.leave_keyring()
    confinement.drop_privileges()
    oom_score = os.open("self/oom_score_adj", os.O_RDWR, dir_fd=proc)
    if confinement.restrict_writes([*writable, *confinement.WRITABLE_DEVICES]):
        confined.append("writes")
    confinement.call_prctl(confinement.PR_SET_DUMPABLE, 0)  # commands cannot trace this process
    os.chdir(settings["work"])
    connection.sendall(encode_frame({"id": START, "confined": confined}))
    counts_own = "user" in confined and confinement.kernel_version() >= (5, 14)
    CommandServer(connection, settings["limits"], settings["env"], proc, oom_score, namespace, counts_own).serve()
    return 0


def _kill_descendants() -> None:
    """Kill all processes below this process. Without a process namespace, the kernel does not end them."""
    while running := list_descendants(os.getpid()):
        kill_processes(running)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _die_with_parent(parent: int, signal_number: int) -> None:
    """Let the kernel send a signal to this process when its parent ends."""
    confinement.call_prctl(confinement.PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
