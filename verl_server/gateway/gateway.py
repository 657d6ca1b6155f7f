"""`Gateway`: serves agent programs over HTTP, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import uvicorn
import uvloop
from pydantic import Field

from verl_server.agent.episode import EpisodeState
from verl_server.agent.limits import RolloutLimits
from verl_server.errors import BadInputError, DeadlineError, ShutDownError, StartupError
from verl_server.gateway.config import MIN_ADMIN_KEY_CHARS, GatewayConfig
from verl_server.gateway.engines import EngineOrSource, make_source
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.health import GatewayHealth, GatewayMetrics
from verl_server.gateway.http.app import make_app
from verl_server.gateway.http.connections import server_settings
from verl_server.gateway.records import REFRESH_S, FolderLock, ObservedRecorder
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionInfo, SessionStore, as_json, require_token_limit
from verl_server.gateway.sessions.turns import Slots
from verl_server.gateway.threads import await_in_loop, call_in_thread
from verl_server.ranks.placement import is_loopback
from verl_server.server.launch import bind, join_host_port, listen
from verl_server.server.process import raise_open_file_limit, start_thread
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.view import decoder_of
from verl_server.types import Json
from verl_server.validation import check_arguments, require_key

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
GRACE_S = 5
"""Seconds in which replies may still be sent at the end, after all turns were aborted."""
EXPIRY_INTERVAL_S = 5.0
"""Seconds between two searches for sessions that have expired."""


class Gateway:
    """HTTP server through which unmodified agents act: OpenAI's and Anthropic's APIs in front of a policy.

    Use it as a context manager, or call `shutdown`. Methods can be called from any thread.
    """

    @check_arguments(skip=("engine", "limits", "chat_template_kwargs"))
    def __init__(
        self,
        engine: EngineOrSource,
        run_dir: Path | Annotated[str, Field(min_length=1)],
        *,
        renderer: ChatRenderer | None = None,
        limits: RolloutLimits | None = None,
        host: Annotated[str, Field(pattern="^[^/]+$")] = "127.0.0.1",
        port: int = 0,
        admin_key: str | None = None,
        is_open: bool = False,
        model_names: Annotated[Sequence[str], Field(min_length=1)] = ("policy",),
        session_expiry_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`engine`: as in `RolloutRunner`, or `DiscoveredServers`. `port` 0: a free port. `admin_key` None: a random
        key. `chat_template_kwargs`: variables of the chat template, for example `{"enable_thinking": False}`, which
        agents and sessions may replace. Raises BadInputError for wrong arguments, StartupError, and the errors of a
        request to the engine.
        """
        if admin_key is not None:
            require_key("admin_key", admin_key, MIN_ADMIN_KEY_CHARS)
        if is_open and not is_loopback(host):
            raise BadInputError(
                f"requests without a key (is_open, --open) are served on this machine only, but other machines reach "
                f"the host {host!r}; leave out the host, or create sessions with keys"
            )
        self._engine, limits = make_source(engine, renderer, limits)
        self.admin_key = admin_key or f"sk-admin-{secrets.token_urlsafe(32)}"
        folder = Path(run_dir).expanduser()
        raise_open_file_limit()
        self.config = GatewayConfig(
            folder,
            self.admin_key,
            limits,
            is_open,
            tuple(model_names),
            session_expiry_s=session_expiry_s,
            chat_template_kwargs=as_json("chat_template_kwargs", chat_template_kwargs),
        )
        self._require_template_arguments({})
        self._metrics = GatewayMetrics()
        self._slots = Slots(self.config.max_requests, ErrorKind.OVERLOADED, "the gateway")
        self._is_shut_down, self._socket = False, bind(host, port)
        self._address: tuple[str, int] = self._socket.getsockname()[:2]
        self._lock: FolderLock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()
        """Has a result when the server accepts requests, and the error if its thread ended before."""
        try:
            self._lock = FolderLock(folder, self.url)
            self._store = SessionStore(
                folder, self._open_session, limits, session_expiry_s, self.admin_key, self._require_template_arguments
            )
            self._server = self._make_server()
            listen(self._socket)  # now: a client whose connection is accepted waits for its reply
            self._thread = threading.Thread(target=self._run, name="verl-gateway", daemon=True)
            start_thread(self._thread)
        except BaseException:
            self._release()
            raise
        self._wait_for_start()

    def _release(self) -> None:
        """Give back the port and the folder of the records."""
        self._socket.close()
        if self._lock is not None:
            self._lock.release()

    def _wait_for_start(self) -> None:
        """Raise StartupError if the server does not start."""
        wait([self._started], START_TIMEOUT_S)
        late = TimeoutError(f"no start in {START_TIMEOUT_S:g} s")
        error = self._started.exception() if self._started.done() else late
        if error is not None:
            with contextlib.suppress(DeadlineError):
                self.shutdown()
            raise StartupError(f"the gateway did not start: {error or type(error).__name__}") from error

    def _open_session(self, record: ObservedRecorder, limits: RolloutLimits, info: SessionInfo) -> Session:
        """The session of a record. Raises GatewayError while the engine is not known yet."""
        parts = self._engine.parts()
        limits = parts.complete_limits(limits)
        require_token_limit(limits)
        record.on_node = self._metrics.count_node
        slots = Slots(self.config.max_session_requests, parent=self._slots)
        generate = self._metrics.measure(parts.generate)
        state = EpisodeState(record.graph.session_id, record, generate, parts.renderer, limits, False)
        return Session(
            state,
            info.sampling_params,
            record,
            slots,
            template_defaults=self.config.chat_template_kwargs,
            template_arguments=info.chat_template_kwargs,
        )

    def _require_template_arguments(self, arguments: Json) -> None:
        """Raise BadInputError if the chat template does not have these variables of a session, or those of the gateway.

        They are not checked while the engine is not known.
        """
        with contextlib.suppress(GatewayError):
            self._engine.parts().renderer.with_arguments(self.config.chat_template_kwargs | arguments)

    def _make_server(self) -> uvicorn.Server:
        config = self.config
        health = GatewayHealth(
            config.run_dir, self._store, self._engine, self._metrics, config.limits.max_context_tokens
        )

        def decode(token_ids: Sequence[int]) -> str:
            return decoder_of(self._engine.parts().renderer.tokenizer)(token_ids)

        app = make_app(self._store, config, decode, metrics=self._metrics, health=health)
        return uvicorn.Server(server_settings(app, config, GRACE_S))

    @property
    def url(self) -> str:
        """Base URL without `/v1`, as Anthropic's clients take it."""
        return f"http://{join_host_port(*self._address)}"

    @property
    def openai_url(self) -> str:
        """Base URL with `/v1`, as OpenAI's clients take it."""
        return f"{self.url}/v1"

    def create_session(
        self,
        session_id: str | None = None,
        *,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        expires_in_s: float | None = None,
    ) -> tuple[SessionInfo, str]:
        """Create a session. Returns the session and its key. `session_id`, `key`: by default random.

        `limits`: fields of `RolloutLimits` that replace those of the gateway. `sampling_params`: SGLang's sampling
        parameters of every turn, which replace those of the agent. `chat_template_kwargs`: variables of the chat
        template, which replace those of the agent. `expires_in_s`: seconds after which the session ends
        by itself. A call with the id, the key and the settings of a session returns this session again. Raises
        BadInputError for values that are not allowed, and for an id or a key that is taken. A key has at least
        16 printable ASCII characters and no spaces.
        """
        return self._call(
            lambda: self._store.create(
                session_id,
                key=key,
                metadata=metadata,
                limits=limits,
                sampling_params=sampling_params,
                chat_template_kwargs=chat_template_kwargs,
                expires_in_s=expires_in_s,
            )
        )

    def end_session(
        self,
        session_id: str,
        reward: float | None = None,
        *,
        stop_reason: str = "done",
        rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        train: Sequence[str] | None = None,
    ) -> SessionInfo:
        """End a session, and record its reward at the end of each trained conversation.

        `rewards`: results of reward functions by name. `metadata`: added to that of the session. `train`: kinds of
        conversations that are trained (`ConversationKind`), by default all but titles and other side calls. A session
        that has ended gets the new result too. Raises BadInputError for an unknown session and for wrong values.
        """
        result: Json = {"reward": reward, "rewards": rewards, "metadata": metadata, "train": train}
        try:
            end = functools.partial(self._store.end, session_id, stop_reason, **result)
            return await_in_loop(self._running_loop(), end, STOP_TIMEOUT_S)
        except GatewayError as error:  # the session is unknown
            raise BadInputError(error.message) from None

    def sessions(self) -> list[SessionInfo]:
        """All sessions, in the order of their creation."""
        return self._call(self._store.infos)

    def shutdown(self) -> None:
        """Abort all turns, close the records and stop the server. Calling this a second time has no effect.

        Raises DeadlineError if the server does not stop.
        """
        self._is_shut_down = True
        if self._loop is not None:
            abort = functools.partial(self._store.close, at_once=False)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(abort)  # clients get their replies, so that uvicorn can end
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._socket.close()
            cause = "a generate function that ignores its cancellation, or blocks the event loop, is a likely cause"
            if count := self._store.num_unwritten:
                cause = f"{count} records are still being written to the disk of {self.config.run_dir}, which is slow"
            raise DeadlineError(f"the gateway did not stop; {cause}", operation="gateway", seconds=STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)  # raised in the constructor
        finally:
            self._release()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch_folder())
        try:
            await self._engine.start()
            assert self._lock
            await call_in_thread(self._lock.require_own)
            serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
                raise StartupError("its HTTP server has ended at once; see the log")
            self._started.set_result(None)
            while not serving.done():
                await self._store.end_expired()
                await asyncio.wait((serving,), timeout=EXPIRY_INTERVAL_S)
            serving.result()
        finally:
            self._store.close(at_once=False)
            await self._store.wait_closed()
            watching.cancel()  # other gateways wait until the records are closed
            await self._engine.close()

    async def _watch_folder(self) -> None:
        """Stop serving when another gateway serves the folder: it is on a machine with other locks."""
        assert self._lock
        owner = None
        while owner is None:
            try:
                owner = await call_in_thread(self._lock.refresh)
            except RuntimeError:  # no thread can be started
                logger.exception("the lock of the folder %s cannot be refreshed", self.config.run_dir)
            await asyncio.sleep(REFRESH_S if owner is None else 0)
        logger.error("%s serves the folder %s too; this gateway serves no more", owner, self.config.run_dir)
        self._store.close("another gateway serves the folder of the records")

    def _call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the event loop of the server, which owns the sessions.

        Raises ShutDownError after `shutdown`, and the errors of `await_in_loop`.
        """

        async def call() -> Result:
            return function()

        return await_in_loop(self._running_loop(), call, STOP_TIMEOUT_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._is_shut_down or self._loop is None or not self._thread.is_alive():
            raise ShutDownError("the gateway was shut down; make another one with the same folder")
        return self._loop
