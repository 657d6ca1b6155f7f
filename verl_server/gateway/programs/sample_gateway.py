"""`SampleGateway`: the gateway of one sample, whose only session records in the episode of the sample."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn

from verl_server.agent.episodes.episode import Episode
from verl_server.agent.episodes.recorded_paths import end_at
from verl_server.agent.user_code import wait_despite_cancellation
from verl_server.errors import InfrastructureError
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.http.app import make_app
from verl_server.gateway.http.connections import protocol_of
from verl_server.gateway.sessions.conversation_labels import label_conversations, trained_ends
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_end import record_kinds
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.gateway.sessions.slots import Slots
from verl_server.gateway.worker_threads import run_aside
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.view.token_texts import decoder_of

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
        server = _Server(
            uvicorn.Config(
                app,
                http=protocol_of(config),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=config.idle_timeout_s,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
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
