"""`ProgramAgentLoop`: an agent whose samples are runs of a program, for example Claude Code."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import uvicorn

from verl_server.agent.environments import Environment
from verl_server.agent.episode import Episode, end_at
from verl_server.agent.samples import Task
from verl_server.agent.sandboxes.local_sandbox import LocalSandbox
from verl_server.agent.sandboxes.sandbox import MAX_COMMAND_BYTES, CommandResult, Sandbox, SandboxLimits
from verl_server.agent.user_code import wait_despite_cancellation
from verl_server.errors import BadInputError, InfrastructureError, ProgramError
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.http.app import make_app
from verl_server.gateway.http.connections import server_settings
from verl_server.gateway.sessions.history import label_conversations, trained_ends
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore, record_kinds
from verl_server.gateway.sessions.turns import Slots
from verl_server.gateway.threads import run_aside
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.view import decoder_of

# -- Sample gateway ---------------------------------------------------------------------------------
# `SampleGateway`: the gateway of one sample, whose only session records in the episode of the sample.

GRACE_S = 1
"""Seconds in which replies may still be sent after the program has ended."""
STOP_TIMEOUT_S = 10.0
SESSION_ID = "sample"


class SampleGateway:
    """The HTTP server through which the program of one sample acts, in the event loop of the runner.

    The session has the limits, the sampling parameters and the record of the episode. So the record of the sample is
    the token graph of the session.
    """

    def __init__(self, episode: Episode, session: Session, key: str, port: int, serving: asyncio.Task[None]) -> None:
        self._episode, self._session, self.key, self._serving = episode, session, key, serving
        self.url = f"http://127.0.0.1:{port}"
        """Base URL without `/v1`, as Anthropic's clients take it."""
        self._first_node = len(episode.graph.nodes)

    @property
    def reached_limit(self) -> str | None:
        """Name of the limit of the episode for which a request of the program was refused."""
        return self._session.reached_limit

    @property
    def has_overflowed(self) -> bool:
        """Whether a conversation of the program was too long for the context, and no turn has followed."""
        return isinstance(self._session.failure, GatewayError)

    def require_turns(self) -> None:
        """Raise InfrastructureError if the engine or the gateway has failed and no turn has followed.

        A program may ignore the error of its request and end with exit code 0.
        """
        if (failure := self._session.failure) is not None and not self.has_overflowed:
            raise InfrastructureError(f"a turn has failed while the program ran: {failure}") from failure

    def require_running(self) -> None:
        """Raise InfrastructureError if the server has ended."""
        if self._serving.done():
            error = None if self._serving.cancelled() else self._serving.exception()
            raise InfrastructureError(f"the gateway of the sample has ended: {error!r}")

    async def finish(self) -> int:
        """Abort the turns that are being generated, and let the episode end with the conversations of the program.

        The record gets the kinds of the conversations, as that of any session. Returns the number of turns.
        """
        self._session.close()
        await self._session.wait_for_turns()
        graph = self._episode.graph
        kinds = await run_aside(False, label_conversations, graph)  # the closed session does not change the graph
        record_kinds(self._episode._state.record, kinds)
        ends = trained_ends(graph, kinds)
        end_at(self._episode, [end for end in ends if end >= self._first_node])
        return sum(node.sampled for node in graph.nodes[self._first_node :])


class _Server(uvicorn.Server):
    """A server that leaves the signals of the process to the trainer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_episode(episode: Episode, listener: socket.socket) -> AsyncIterator[SampleGateway]:
    """Serve a session that records in `episode`, on a socket that listens. The socket is closed at the end."""
    slots, key = Slots(GatewayConfig.max_session_requests), f"sk-{secrets.token_urlsafe(32)}"
    session = Session(episode._state, episode._sampling_params, None, slots)
    with tempfile.TemporaryDirectory(prefix="verl-program-") as folder, listener:

        def open_session(record: Recorder, *_: object) -> Session:
            record.close()  # the session records in the episode
            return session

        store = SessionStore(Path(folder), open_session, episode.limits)
        store.create(SESSION_ID, key=key)
        config = GatewayConfig(Path(folder), None, episode.limits)
        app = make_app(store, config, decoder_of(episode._renderer.tokenizer))
        server = _Server(server_settings(app, config, GRACE_S))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield SampleGateway(episode, session, key, listener.getsockname()[1], serving)
        finally:
            session.close()
            server.should_exit = True
            stop = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, serving.cancel)
            cancelled = await wait_despite_cancellation(serving)  # the server still uses the socket
            stop.cancel()
            store.close()
            await store.wait_closed()
            if cancelled is not None:
                raise cancelled


# -- Variables --------------------------------------------------------------------------------------
# The environment variables by which agent programs find the gateway.

MODEL = "policy"


def program_variables(url: str, key: str) -> dict[str, str]:
    """Environment variables for a program that acts through the gateway at `url` (without `/v1`).

    They are those of OpenAI's and Anthropic's SDKs, of LiteLLM, and of Claude Code, which then sends nothing to other
    addresses. Codex takes its address from its settings: see docs/programs-reference.md.
    """
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",
    }


# -- Program loop -----------------------------------------------------------------------------------

MAX_PROGRAM_S = 3600.0
"""Maximum seconds of a program without `RolloutLimits.timeout_s`."""
MEMORY_BYTES = 8 << 30
"""Maximum memory of a program: programs in JavaScript reserve much more than they use."""
POLL_S = 0.2
"""Seconds between two checks whether a limit of the episode ends the program."""
MAX_ERROR_CHARS = 2000
"""Number of characters of the program's output in an error."""
MAX_PROMPT_BYTES = MAX_COMMAND_BYTES - 8 * 1024
"""Maximum size of the last message of a task. The rest of `MAX_COMMAND_BYTES` is for the other variables."""
MAKE_FOLDERS = 'cd "${TMPDIR:-/tmp}" && mkdir workspace home && pwd'


class ProgramAgentLoop(Environment):
    """Runs a program in a sandbox for each sample. The program acts through a gateway of its own.

    A subclass sets `command`, writes the files of the task in `prepare`, and computes rewards from the workspace in
    methods with the decorator `reward`. The program finds the gateway by environment variables, see
    `program_variables`, and the text of the last message of the task in `PROMPT`. It has an empty home folder, and no
    network except the gateway, if the kernel allows this.

    The conversations of the program are the paths of the sample: all of them are trained with its reward. The program
    is killed at the limits of the runner (`timeout_s`, `max_turns`, `max_response_tokens`), and the sample then has a
    reward as usual. So has a program that fails because its conversation is too long, without another turn after that
    (`max_context_tokens`). A sample whose program ends with another exit code than 0 for any other reason fails with
    ProgramError. A sample that was not finished starts again in an empty workspace; earlier turns stay in its record
    and are not trained.
    """

    command: ClassVar[str | Sequence[str]] = ""
    """Line for the shell, for example `claude -p "$PROMPT"`, or list of a program and its arguments. Do not write the
    text of a task into the line: a shell would read it."""
    env: ClassVar[Mapping[str, str]] = {}
    """Additional environment variables of the program."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if not self.command:
            name = type(self).__name__
            raise BadInputError(f"{name} has no command; write `command = 'claude -p \"$PROMPT\"'` in the class")
        self.sandbox = self.make_sandbox()
        """Sandbox of the program."""
        self.workspace = ""
        """Folder in the sandbox in which the program starts. Equal for all samples if the kernel has mount namespaces,
        so that prompts which name the folder are equal, too."""
        self.result: CommandResult | None = None
        """Exit code and outputs of the program. None before its end, and if it was killed at a limit."""

    def make_sandbox(self) -> Sandbox:
        """A new sandbox, which can `listen`. By default a `LocalSandbox`."""
        return LocalSandbox(SandboxLimits(memory_bytes=MEMORY_BYTES))

    async def prepare(self) -> None:
        """Write the files of the task into the workspace, for example with `write_file`."""

    async def setup(self) -> None:
        await self.sandbox.start()
        made = await self.sandbox.run(MAKE_FOLDERS)
        if made.exit_code:
            raise InfrastructureError(f"the sandbox cannot make the workspace: {made.text}")
        self._folder = made.stdout.strip()
        self.workspace = f"{self._folder}/workspace"
        await self.prepare()

    async def teardown(self) -> None:
        await self.sandbox.close()

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file. `path`: relative to the workspace. Raises the errors of `Sandbox.write_file`."""
        await self.sandbox.write_file(f"{self.workspace}/{path}", content)

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or None if there is no such file. `path`: relative to the workspace.

        Characters that are not UTF-8 are replaced. Raises InfrastructureError if the sandbox has failed.
        """
        try:
            content = await self.sandbox.read_file(f"{self.workspace}/{path}")
        except OSError:
            return None
        return content.decode("utf-8", "replace")

    async def run(self, episode: Episode) -> None:
        """Run the program until it ends or reaches a limit. Raises ProgramError if it fails."""
        listener = await self.sandbox.listen()
        async with serve_episode(episode, listener) as gateway:
            program = asyncio.create_task(self._run_program(episode, gateway))
            try:
                while not program.done() and gateway.reached_limit is None:
                    await asyncio.wait((program,), timeout=POLL_S)
                    gateway.require_running()
            finally:
                program.cancel()
                await asyncio.wait((program,))
                num_turns = await gateway.finish()
            if gateway.reached_limit is not None:
                raise episode._state.stop(gateway.reached_limit)
            gateway.require_turns()
            self.result = program.result()
            if self.result.exit_code and gateway.has_overflowed:
                raise episode._state.stop("max_context_tokens")
        _require_success(self.result, num_turns, gateway.key)

    async def _run_program(self, episode: Episode, gateway: SampleGateway) -> CommandResult:
        """Run the program. Raises EpisodeStopped at the deadline of the episode."""
        shell = [self.sandbox.shell, "-c", self.command] if isinstance(self.command, str) else self.command
        home = {"HOME": f"{self._folder}/home", "PROMPT": read_prompt(self.task)}
        command = self.sandbox.run(
            shell,
            cwd=self.workspace,
            env={**program_variables(gateway.url, gateway.key), **home, **self.env},
            timeout_s=MAX_PROGRAM_S,
        )
        result = await episode._state.finish_in_time(command, "the program")
        if result.exceeded == "time":
            raise episode._state.stop("timeout_s")
        return result


def read_prompt(task: Task) -> str:
    """Text of the last message of a task.

    Raises BadInputError for a message with images, and for a text that no environment variable can have.
    """
    content = task.messages[-1].get("content") if task.messages else ""
    if not isinstance(content, str):
        raise BadInputError(f"the last message of task {task.id!r} must be a text: a program gets it as PROMPT")
    what = f"a program gets the last message of task {task.id!r} as the environment variable PROMPT, and the message"
    if "\0" in content:
        raise BadInputError(f"{what} has a NUL character, which no variable can have; remove it")
    if (num_bytes := len(content.encode())) > MAX_PROMPT_BYTES:
        raise BadInputError(
            f"{what} has {num_bytes:,} bytes, the maximum is {MAX_PROMPT_BYTES:,}; put the long text into Task.data, "
            "write it to a file in `prepare` with `write_file`, and let the message name the file"
        )
    return content


def _require_success(result: CommandResult, num_turns: int, key: str) -> None:
    """Raise ProgramError for a program that has failed, or that has not used the policy. `key`: left out of errors."""
    if result.exceeded is not None:
        problem = f"the program was killed: {result.exceeded} limit exceeded"
    elif result.exit_code:
        problem = f"the program has ended with exit code {result.exit_code}"
    elif not num_turns:
        problem = "the program has ended without a turn of the policy; does it use the variables of the gateway?"
    else:
        return
    outputs = {"stderr": result.stderr, "stdout": result.stdout}
    tails = {name: text.replace(key, "KEY")[-MAX_ERROR_CHARS:].strip() for name, text in outputs.items()}
    shown = "; ".join(f"{name}: {text}" for name, text in tails.items() if text)
    raise ProgramError(f"{problem}. {shown or 'It has printed nothing'}", exit_code=result.exit_code, **tails)
