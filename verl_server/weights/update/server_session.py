"""The servers' side of a streamed update on trainer rank 0: pause, begin, load in the background, end, resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from verl_server.config import PauseMode
from verl_server.errors import ServerDiedError, UnsupportedError, VerlServerError
from verl_server.types import Json, ServerInfo
from verl_server.weights.layout import MAX_TP_RANKS
from verl_server.weights.update.commit import leave_out_failed, open_session, resume_published, resume_unchanged
from verl_server.weights.update.request import ValidatedUpdate, outcome_message, torn_error
from verl_server.weights.update.servers import UpdatableServers


@dataclass(frozen=True)
class OpenedUpdate:
    """A streamed update for which the servers are loading, as all ranks know it."""

    validated: ValidatedUpdate
    update_id: str
    update_number: int
    """Number of the update through the double buffers."""
    members: Sequence[ServerInfo]
    """The servers that load the update."""
    opened_at: float
    """Time of `time.monotonic` at which this rank learned of the update."""

    def to_message(self) -> Json:
        """The update as rank 0 sends it to the other ranks."""
        return {
            "validated": asdict(self.validated),
            "update_id": self.update_id,
            "update_number": self.update_number,
            "members": [[member.name, member.tp_size] for member in self.members],
        }

    @classmethod
    def from_message(cls, message: Json) -> OpenedUpdate:
        """The update that `to_message` described."""
        validated = ValidatedUpdate(
            **{**message["validated"], "pause_mode": PauseMode(message["validated"]["pause_mode"])}
        )
        members = [ServerInfo(name, tp_size) for name, tp_size in message["members"]]
        return cls(validated, message["update_id"], message["update_number"], members, time.monotonic())


class ServerSession:
    """The weight update session of all servers during one streamed update.

    Raises UnsupportedError if the servers have more TP ranks than a double buffer serves.
    """

    def __init__(self, servers: UpdatableServers, opened: OpenedUpdate) -> None:
        self._servers, self.opened = servers, opened
        self._validated, self.members = opened.validated, opened.members
        self._steps = ExitStack()
        """What `end` has to end: the session of the servers, and their loaders."""
        self._loading: Future[None] | None = None
        self.may_have_loaded = False
        """Whether a server may hold a part of the update."""
        self.pause_started = math.nan
        """Time of `time.monotonic` just before the servers were paused."""
        tp_ranks = sum(member.tp_size for member in self.members)
        if not tp_ranks:
            raise ServerDiedError("no server runs now, and this transport does not keep the weights for later")
        if tp_ranks > MAX_TP_RANKS:
            raise UnsupportedError(
                f"the servers have {tp_ranks} TP ranks, but one trainer serves at most {MAX_TP_RANKS}: "
                "use fewer servers"
            )

    def open(self, weights_are_torn: bool, prepare: Callable[[], None], message: Json) -> None:
        """Pause generation, open the session, call `prepare` and start the loaders of all servers with `message`.

        `prepare` must not change the weights. The loaders run in a background thread until `end`. After an error before
        a loader was started, generation continues unless the weights were torn.
        """
        self.pause_started = time.monotonic()
        try:
            self._servers.pause(self._validated.pause_mode)
            self._steps.enter_context(open_session(self._servers))
            prepare()
            self.may_have_loaded = True
            pool = self._steps.enter_context(ThreadPoolExecutor(1, thread_name_prefix="verl-server-load"))
            version, flushes = self._validated.weight_version, self._validated.flush_cache
            self._loading = pool.submit(self._servers.load, self._messages(message), version, flushes)
        except BaseException as error:  # also KeyboardInterrupt
            if not self.may_have_loaded:
                self._undo(error, weights_are_torn)
            raise

    def _undo(self, error: BaseException, weights_are_torn: bool) -> None:
        """End a session in which no server has loaded anything."""
        with suppress(VerlServerError):
            self.end()
        if isinstance(error, VerlServerError):
            leave_out_failed(self._servers, error)
        if not weights_are_torn:
            resume_unchanged(self._servers)

    def call_loaders(self, message: Json) -> None:
        """Call the loaders of all servers with a message that changes no weights, and wait for them."""
        self._servers.load(self._messages(message), None, flush_cache=False)

    def _messages(self, message: Json) -> list[Json]:
        tp_sizes = [member.tp_size for member in self.members]
        firsts = [sum(tp_sizes[:index]) for index in range(len(tp_sizes))]
        return [
            {**message, "first_receiver": first, "tp_size": tp_size}
            for first, tp_size in zip(firsts, tp_sizes, strict=True)
        ]

    def require_loading(self) -> None:
        """Raise VerlServerError if the servers are not loading any more."""
        if self._loading is not None and self._loading.done():
            raise VerlServerError("the servers stopped loading before they had received all tensors")

    def end(self) -> None:
        """Wait until the servers have loaded, and end the session. Raises the servers' error. Safe to call twice."""
        loading, self._loading = self._loading, None
        with self._steps:
            if loading is not None:
                loading.result()

    def torn_outcome(self, error: VerlServerError, cause: VerlServerError) -> Json:
        """The message about an update that failed with `error`. A server that fails repeatedly is left out of the next.

        `cause`: the error that the caller receives.
        """
        torn = torn_error(cause, self._validated)
        if (failed := error.details.get("servers")) is not None:
            torn.details["servers"] = failed
        leave_out_failed(self._servers, torn)
        return outcome_message(self._validated, torn)

    def publish_and_resume(self, whole: bool) -> VerlServerError | None:
        """Record the new weight version, and continue generation. `whole`: the update contained all tensors.

        Returns the error if generation does not continue.
        """
        self._servers.published(self._validated.weight_version, whole, None)
        return resume_published(self._servers, self._validated)
