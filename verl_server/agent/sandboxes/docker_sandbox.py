"""A sandbox in a container of Docker, through the package `docker`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from verl_server.agent.sandboxes.command_server import BoundedOutput
from verl_server.agent.sandboxes.sandbox import (
    ANSWER_TIMEOUT_S,
    CommandOutcome,
    CommandRequest,
    ExceededLimit,
    Sandbox,
    SandboxLimits,
    not_running,
)
from verl_server.agent.user_code import call_user_function, wait_uncancelled
from verl_server.errors import BadInputError, InfrastructureError, VerlServerError

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container

Result = TypeVar("Result")

POLL_S = 0.1
"""Seconds between two checks whether a command without new output has ended."""
NEEDED_PROGRAMS = "cat dirname head mkdir timeout"
STDOUT, STDERR = 1, 2
CPU_TIME_EXIT_CODE, KILLED_EXIT_CODE = 128 + 24, 128 + 9
LABEL = "verl_server.sandbox"

# The program becomes the child of `timeout`, in a process group with the id that is printed first.
WRAPPER = 'echo $$ >&2; [ "$2" = 0 ] || ulimit -S -t "$2"; t="$1"; shift 2; exec timeout -s KILL "$t" "$@"'


class DockerSandbox(Sandbox):
    """Runs commands in a new container, which is removed when the sandbox is closed.

    The daemon is found as the command `docker` finds it (DOCKER_HOST). The image needs a shell and the programs `cat`,
    `dirname`, `head`, `mkdir` and `timeout`; all images with coreutils or busybox have them. Commands start in the
    working folder of the image. The container ends when the trainer ends, also by SIGKILL: its first process reads from
    a connection of the trainer.

    `SandboxLimits.cpu_s` counts for each process of a command. When the memory is used up, the kernel kills a process,
    and the exit code of the command is 137.
    """

    def __init__(self, image: str, limits: SandboxLimits | None = None, *, network: bool = False) -> None:
        """`image`: name of an image that the daemon has or can pull. `network`: whether commands may use the network.

        Raises BadInputError if the package `docker` is not installed.
        """
        super().__init__(limits, network=network)
        try:
            import docker  # noqa: F401
        except ImportError as error:
            raise BadInputError("DockerSandbox needs the package docker: pip install 'verl-server[docker]'") from error
        self.image = image
        self._client: DockerClient | None = None
        self._container: Container | None = None
        self._connection: Any = None

    async def start(self) -> None:
        self._begin()
        try:
            self._client = await _in_thread(_connect)
            await _in_thread(lambda: _provide_image(self._client, self.image))
            await wait_uncancelled(_in_thread(self._start))  # so that `close` knows the container
            await self._check_image()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._ending = self._ending or "it was closed"
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection._sock.shutdown(socket.SHUT_RDWR)  # a forked child of the trainer may hold it, too
            self._connection.close()
            self._connection = None
        if (container := self._container) is not None:
            await wait_uncancelled(_in_thread(lambda: _remove(container)))
            self._container = None
        if self._client is not None:
            self._client.close()

    async def _check_image(self) -> None:
        script = f"for p in {NEEDED_PROGRAMS}; do command -v $p > /dev/null || echo $p; done"
        if missing := (await self.run(script)).text.split():
            raise BadInputError(f"the image {self.image} lacks programs that a sandbox needs: {', '.join(missing)}")
        self.shell = (await self.run("command -v bash || echo sh")).stdout.strip()

    def _start(self) -> None:
        from docker.types import Ulimit

        limits = self.limits
        assert self._client is not None
        self._container = self._client.containers.create(
            self.image,
            entrypoint=["cat"],
            command=[],
            stdin_open=True,  # the container ends with the first connection to its standard input
            init=True,
            auto_remove=True,
            network_mode="bridge" if self.network else "none",
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=limits.max_processes,
            ulimits=[
                Ulimit(name="core", soft=0, hard=0),
                Ulimit(name="fsize", soft=limits.max_file_bytes, hard=limits.max_file_bytes),
            ],
            security_opt=["no-new-privileges"],
            labels={LABEL: str(os.getpid())},
        )
        self._connection = self._container.attach_socket(params={"stdin": 1, "stream": 1})
        self._container.start()

    async def _execute(self, request: CommandRequest) -> CommandOutcome:
        if self._client is None or self._container is None:
            raise not_running("it did not start")
        execution = _Execution(self._client, self._container, self.limits, request)
        try:
            return await _in_thread(execution.run)
        except asyncio.CancelledError:
            with contextlib.suppress(InfrastructureError):
                await asyncio.shield(_in_thread(execution.kill))
            raise


class _Execution:
    """One command in a container. Its methods block."""

    def __init__(
        self, client: DockerClient, container: Container, limits: SandboxLimits, request: CommandRequest
    ) -> None:
        self._api, self._container, self._limits, self._request = client.api, container, limits, request
        self._outputs = {stream: BoundedOutput(limits.max_output_bytes) for stream in (STDOUT, STDERR)}
        self._received, self._first_line = bytearray(), b""
        self._is_cancelled = False
        self._process_group: int | None = None
        """Process id, in the container, of the leader of the command's process group."""

    def run(self) -> CommandOutcome:
        """Run the command and wait for its end."""
        request = self._request
        cpu_s = str(0 if self._limits.cpu_s is None else max(1, round(self._limits.cpu_s)))
        arguments = ["sh", "-c", WRAPPER, "sh", f"{request.timeout_s:.3f}", cpu_s, *request.arguments]
        execution = self._api.exec_create(
            self._container.id, arguments, stdin=True, environment=dict(request.env), workdir=request.cwd
        )["Id"]
        started = time.monotonic()
        if self._is_cancelled:
            raise InfrastructureError("the command was cancelled before it started")
        connection = self._api.exec_start(execution, socket=True)
        try:
            self._exchange(execution, connection._sock, started + request.timeout_s + ANSWER_TIMEOUT_S)
        finally:
            connection.close()
        exit_code = self._api.exec_inspect(execution)["ExitCode"]
        exceeded: ExceededLimit | None = None
        if exit_code in (None, KILLED_EXIT_CODE) and time.monotonic() - started >= request.timeout_s:
            self.kill()  # the program `timeout` of busybox kills one process only
            exceeded, exit_code = "time", KILLED_EXIT_CODE
        elif exit_code == CPU_TIME_EXIT_CODE and self._limits.cpu_s is not None:
            exceeded = "cpu"
        if exit_code is None:
            raise InfrastructureError("Docker closed the connection of a command that had not ended")
        return CommandOutcome(exit_code, self._outputs[STDOUT].content, self._outputs[STDERR].content, exceeded)

    def kill(self) -> None:
        """Kill the processes of the command, or prevent its start."""
        self._is_cancelled = True
        if self._process_group is not None:
            self._container.exec_run(["sh", "-c", f"kill -9 -{self._process_group} {self._process_group}"])

    def _exchange(self, execution: str, connection: socket.socket, deadline: float) -> None:
        """Send the standard input and receive the outputs, until the command has ended.

        A process in the background can hold the outputs open, so their end is not waited for.
        """
        connection.settimeout(POLL_S)
        remaining: memoryview | None = memoryview(self._request.stdin)
        is_running = True
        while time.monotonic() < deadline:
            if remaining is not None:
                remaining = _send_some(connection, remaining)
            try:
                chunk = connection.recv(1 << 16)
            except TimeoutError:
                if not is_running:
                    return
                is_running = self._api.exec_inspect(execution)["Running"]  # what it has printed comes before this
                continue
            if not chunk:
                return
            self._received += chunk
            self._take_frames()

    def _take_frames(self) -> None:
        """Take the frames of the multiplexed stream: one byte with the number of the output, three of 0, a length."""
        while len(self._received) >= 8:
            stream, size = struct.unpack(">BxxxI", self._received[:8])
            if len(self._received) < 8 + size:
                return
            content = bytes(self._received[8 : 8 + size])
            del self._received[: 8 + size]
            if stream == STDERR and self._process_group is None:
                self._first_line += content
                first, newline, content = self._first_line.partition(b"\n")
                if newline and first.isdigit():
                    self._process_group = int(first)
                    if self._is_cancelled:
                        self.kill()
                elif not newline:
                    continue
            if stream in self._outputs:
                self._outputs[stream].add(content)


def _connect() -> DockerClient:
    import docker

    try:
        client = docker.from_env()
        client.ping()
    except Exception as error:
        address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        raise InfrastructureError(
            f"no daemon of Docker answers at {address}: {error}. Start Docker, set DOCKER_HOST, or use LocalSandbox"
        ) from error
    return client


def _provide_image(client: DockerClient | None, image: str) -> None:
    """Pull an image that the daemon does not have. Raises BadInputError if there is no such image."""
    from docker.errors import ImageNotFound

    assert client is not None
    if client.images.list(image):
        return
    try:
        client.images.pull(image)
    except ImageNotFound as error:
        raise BadInputError(f"there is no image {image}: {error}") from error


def _send_some(connection: socket.socket, remaining: memoryview) -> memoryview | None:
    """Send a part of the standard input. Returns the rest. None when the input is closed."""
    try:
        if remaining:
            return remaining[connection.send(remaining[: 1 << 16]) :]
        connection.shutdown(socket.SHUT_WR)
    except TimeoutError:
        return remaining
    except OSError:  # the command does not read its input
        return None
    return None


async def _in_thread(function: Callable[[], Result]) -> Result:
    """Call a function that blocks. Errors of Docker are raised as InfrastructureError, a missing image too."""
    try:
        result: Result = await call_user_function(function)
    except VerlServerError:
        raise
    except Exception as error:  # of docker, requests and urllib3
        raise InfrastructureError(f"Docker: {type(error).__name__}: {error}") from error
    return result


def _remove(container: Container) -> None:
    from docker.errors import APIError, NotFound

    with contextlib.suppress(NotFound):
        try:
            container.remove(force=True)
        except APIError as error:
            if error.status_code != 409:  # it is being removed, because its first process has ended
                raise
