"""The interface of sandboxes, and what they have in common."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from verl_server.config import Positive, PositiveInt
from verl_server.errors import BadInputError, InfrastructureError, UnsupportedError, UserCodeError
from verl_server.validation import check_arguments, check_fields, require_seconds

MAX_COMMAND_BYTES = 120 * 1024
"""Maximum size of an argument of a program. Linux refuses an argument of 128 KiB."""


def _as_arguments(command: str | Sequence[str | os.PathLike[str]], shell: str) -> list[str]:
    """The program and its arguments for a command: a line for the shell, or a list.

    A policy writes commands, so what no program can be given is BadInputError, and no failure of the sandbox.
    """
    arguments = [shell, "-c", command] if isinstance(command, str) else [os.fspath(item) for item in command]
    if not arguments:
        raise BadInputError("the command is empty")
    for item in arguments:
        if "\0" in item or len(_as_bytes("the command", item)) > MAX_COMMAND_BYTES:
            raise BadInputError(
                f"the command has a NUL character, or more than {MAX_COMMAND_BYTES:,} bytes; write it to a file with "
                "write_file and run the file"
            )
    return arguments


def _as_bytes(name: str, content: str | bytes) -> bytes:
    """The bytes of a text, also those of surrogates that Python puts into file names. `name`: that of the argument."""
    if not isinstance(content, str):
        return bytes(memoryview(content))
    try:
        return content.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadInputError(f"{name} has a character that UTF-8 does not have: {error}") from None


def _as_path(name: str, path: str | os.PathLike[str]) -> str:
    """The path as text. Raises BadInputError for a leading `~`, which would be the name of a folder."""
    if (text := os.fspath(path)).startswith("~"):
        raise BadInputError(f"`~` is not expanded in {text!r:.80}; the folder of the sandbox is its home")
    _as_bytes(name, text)
    return text


def _require_texts(env: Mapping[str, str]) -> Mapping[str, str]:
    """The variables. Raises BadInputError for values that are no text: the command would end with exit code 127."""
    if not all(isinstance(item, str) for pair in env.items() for item in pair):
        raise BadInputError(f'env must be a dict of strings such as {{"SEED": "1"}}, got {env!r:.80}')
    _as_bytes("env", "".join(itertools.chain(*env.items())))
    return env


# -- Sandbox ----------------------------------------------------------------------------------------

DEFAULT_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 15.0
"""Maximum seconds between the timeout of a command and the answer of the sandbox."""

ExceededLimit = Literal["time", "memory", "cpu", "processes"]


@check_fields()
@dataclass(frozen=True)
class SandboxLimits:
    """Limits of the processes of a sandbox. Raises BadInputError for a value that is not a positive number."""

    memory_bytes: PositiveInt = 2 << 30
    """Maximum memory of all processes of the sandbox together, and of each process. A local sandbox counts the resident
    memory of each process: pages that processes share count several times, and files in memory do not count."""
    cpu_s: Positive | None = None
    """Maximum processor seconds that the sandbox uses during one command. None: no limit except the timeout."""
    max_processes: PositiveInt = 1024
    """Maximum number of processes and threads at a time."""
    max_file_bytes: PositiveInt = 1 << 30
    """Maximum size of each file. The size of all files together is not limited."""
    max_output_bytes: PositiveInt = 1 << 20
    """Maximum size of each of the two outputs of a command. Of a longer output, the middle is left out."""


@dataclass(frozen=True)
class CommandResult:
    """Exit code and outputs of a command."""

    exit_code: int
    """Exit code of the command. 128 + N if the signal N ended the command; 127 if there is no such program."""
    stdout: str
    stderr: str
    exceeded: ExceededLimit | None = None
    """The limit for which the command was killed. None if the command ended by itself."""

    @property
    def text(self) -> str:
        """Both outputs and how the command ended, as a tool returns it to the policy."""
        parts = [output.rstrip("\n") for output in (self.stdout, self.stderr) if output.strip()]
        if self.exceeded is not None:
            parts.append(f"[killed: {self.exceeded} limit exceeded]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(parts)


@dataclass(frozen=True)
class CommandRequest:
    """A program to run, with checked arguments."""

    arguments: Sequence[str]
    stdin: bytes
    cwd: str | None
    env: Mapping[str, str]
    timeout_s: float


@dataclass(frozen=True)
class CommandOutcome:
    """How a program ended. The fields are those of `CommandResult`, with outputs as bytes."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    exceeded: ExceededLimit | None


class Sandbox(ABC):
    """Runs commands apart from the trainer.

    Use it as `async with`, or call `start` in `Environment.setup` and `close` in `Environment.teardown`. A command that
    fails returns a `CommandResult` with its exit code. If the sandbox itself fails, its methods raise
    InfrastructureError, and the runner attempts the sample again in a new environment. All methods are called in the
    event loop in which the sandbox was started: in coroutine functions, also tools and rewards.
    """

    shell = "sh"
    """Program that runs a line for the shell: bash if the sandbox has it."""

    @check_arguments()
    def __init__(self, limits: SandboxLimits | None = None, *, network: bool = False) -> None:
        """`network`: whether commands may use the network of this machine. Raises BadInputError for another type."""
        self.limits, self.network = limits or SandboxLimits(), network
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: str | None = None
        """Why the sandbox does not run any more. None before that."""

    @abstractmethod
    async def start(self) -> None:
        """Start the sandbox.

        Raises InfrastructureError if the sandbox cannot start, and BadInputError if it was started before.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all processes of the sandbox and remove its files. Calling this a second time has no effect."""

    async def listen(self) -> socket.socket:
        """A socket that listens on a free port of the sandbox's own loopback interface, for a server in this process.

        Commands reach the server also if the sandbox has no other network. The caller closes the socket. Raises
        UnsupportedError for a kind of sandbox that cannot do this, and the errors of `run`.
        """
        raise UnsupportedError(f"a {type(self).__name__} cannot listen for its commands; use a LocalSandbox")

    @abstractmethod
    async def _execute(self, request: CommandRequest) -> CommandOutcome:
        """Run a program of a sandbox that was started."""

    async def run(
        self,
        command: str | Sequence[str | os.PathLike[str]],
        *,
        stdin: str | bytes = b"",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> CommandResult:
        """Run a command and wait for its end.

        `command`: a line for the shell, or a list of a program and its arguments, which no shell reads. `stdin`:
        standard input. `cwd`: folder in which the command starts, by default that of the sandbox. `env`: additional
        environment variables. `timeout_s`: maximum seconds; the processes of the command are killed after that, except
        those that have begun a session of their own. Output that is not UTF-8, or is cut within a character, has
        replacement characters.

        Raises BadInputError for a command that is empty, has a NUL character or is longer than 120 KiB, for text that
        UTF-8 does not have, for a `timeout_s` that is no positive number, and for a sandbox that was not started or was
        started in another event loop; InfrastructureError if the sandbox has failed or is closed.
        """
        folder, data = None if cwd is None else _as_path("cwd", cwd), _as_bytes("stdin", stdin)
        outcome = await self._execute_running(command, data, folder, _require_texts(env or {}), timeout_s)
        stdout, stderr = (output.decode("utf-8", "replace") for output in (outcome.stdout, outcome.stderr))
        return CommandResult(outcome.exit_code, stdout, stderr, outcome.exceeded)

    async def write_file(
        self, path: str | os.PathLike[str], content: str | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Write a file, and make its folder. `path`: absolute, or relative to the folder of the sandbox.

        Raises OSError if the file cannot be written, and the errors of `run`.
        """
        data, target = _as_bytes("content", content), _as_path("path", path)
        if len(data) > self.limits.max_file_bytes:
            raise OSError(
                f"{target} would have {len(data)} bytes, more than max_file_bytes={self.limits.max_file_bytes}"
            )
        script = 'mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'
        result = await self.run(["sh", "-c", script, "sh", target], stdin=data, timeout_s=timeout_s)
        if result.exit_code:
            raise OSError(f"the sandbox cannot write {target}: {result.text}")

    async def read_file(self, path: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
        """The content of a file that is shorter than `max_output_bytes`.

        Raises OSError if the file cannot be read or is longer, and the errors of `run`.
        """
        target, limit = _as_path("path", path), self.limits.max_output_bytes
        command = ["sh", "-c", 'exec head -c "$2" < "$1"', "sh", target, str(limit)]
        outcome = await self._execute_running(command, b"", None, {}, timeout_s)
        if outcome.exit_code:
            reason = outcome.stderr.decode("utf-8", "replace").strip() or f"[killed: {outcome.exceeded} limit exceeded]"
            raise OSError(f"the sandbox cannot read {target}: {reason}")
        if len(outcome.stdout) >= limit:
            raise OSError(
                f"{target} has {limit} bytes or more; raise SandboxLimits.max_output_bytes, or read a part with run"
            )
        return outcome.stdout

    async def _execute_running(
        self,
        command: str | Sequence[str | os.PathLike[str]],
        stdin: bytes,
        cwd: str | None,
        env: Mapping[str, str],
        timeout_s: float,
    ) -> CommandOutcome:
        """Run a program. Raises the errors of `run`."""
        arguments, timeout_s = _as_arguments(command, self.shell), require_seconds("timeout_s", timeout_s)
        if self._ending is not None:
            raise not_running(self._ending)
        if self._loop is None:
            raise UserCodeError(
                "the sandbox was not started: write `await box.start()` in Environment.setup, or `async with`"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise UserCodeError(
                "the sandbox was started in another event loop. Call it in coroutine functions only: write `async def` "
                "tools and rewards, without asyncio.run"
            )
        return await self._execute(CommandRequest(arguments, stdin, cwd, env, timeout_s))

    def _begin(self) -> None:
        """Note that the sandbox starts in the running event loop. Raises UserCodeError if it was started before."""
        if self._loop is not None or self._ending is not None:
            raise UserCodeError("a sandbox is started once; make a new one")
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def not_running(reason: str) -> InfrastructureError:
    """The error of a command in a sandbox that does not run."""
    return InfrastructureError(f"the sandbox does not run: {reason}")
