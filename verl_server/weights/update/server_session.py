"""The servers' side of a streamed update on trainer rank 0: pause, begin, load in the background, end, resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from verl_server.config import PauseMode
from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.types import Json, ServerInfo
from verl_server.weights.layout import MAX_TP_RANKS
from verl_server.weights.update.commit import begin_on_all, leave_out_failed, load_then_end, resume_published
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

    def __init__(self, servers: UpdatableServers, validated: ValidatedUpdate) -> None:
        self._servers, self._validated = servers, validated
        self.members = servers.members
        self._open_session: ExitStack | None = None
        self._loading: Future[None] | None = None
        self.pause_started = math.nan
        """Time of `time.monotonic` just before the servers were paused."""
        tp_ranks = sum(member.tp_size for member in self.members)
        if tp_ranks > MAX_TP_RANKS:
            raise UnsupportedError(
                f"the servers have {tp_ranks} TP ranks, but one trainer serves at most {MAX_TP_RANKS}: "
                "use fewer servers"
            )

    def pause_and_begin(self, weights_are_torn: bool, prepare: Callable[[], None]) -> None:
        """Pause generation, open the session and call `prepare`, which must not change the weights.

        On an error, generation continues unless the weights were torn.
        """
        self.pause_started = time.monotonic()
        try:
            self._servers.pause(self._validated.pause_mode)
            begin_on_all(self._servers)
            try:
                prepare()
            except BaseException:
                with suppress(VerlServerError):
                    self._servers.end_weight_update()
                raise
        except BaseException as error:  # also KeyboardInterrupt: no server has loaded anything
            if isinstance(error, VerlServerError):
                leave_out_failed(self._servers, error)
            if not weights_are_torn:
                with suppress(VerlServerError):
                    self._servers.resume()
            raise

    def call_loaders(self, message: Json) -> None:
        """Call the loaders of all servers with a message that changes no weights, and wait for them."""
        self._servers.load(self._messages(message), None, flush_cache=False)

    def start_loading(self, message: Json) -> None:
        """Start the loaders of all servers in a background thread. `message`: the message that all loaders get."""
        self._open_session = ExitStack()
        loading = load_then_end(self._servers, self._messages(message), self._validated)
        self._loading = self._open_session.enter_context(loading)

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
        session, self._open_session = self._open_session, None
        self._loading = None
        if session is not None:
            session.close()

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
