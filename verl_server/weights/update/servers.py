"""The servers that a weight update is sent to, as the update protocol sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from verl_server.config import PauseMode
from verl_server.errors import VerlServerError
from verl_server.types import Json, ServerInfo


class UpdatableServers(Protocol):
    """One or more inference servers whose weights can be updated together.

    Trainer rank 0 calls the methods in this order: `pause`, `begin_weight_update`, `load`, `end_weight_update`,
    `published`, `resume`. Every method raises a `VerlServerError` when a server fails. ServerDiedError and
    ShutDownError mean that no server is left.
    """

    @property
    def members(self) -> Sequence[ServerInfo]:
        """The servers that take part in the next attempt at an update.

        Empty if there is none now, but servers that start later get the weights by `replay`. Otherwise raises
        ServerDiedError if there is none.
        """

    @property
    def undefined_weights(self) -> str | None:
        """Why the members' weights are undefined, or None. Not None from a resume of released weights, or the notice
        that a server was started again, until an update of all tensors is published. None while the weights are
        released: then no update is possible.
        """

    def check_weights(self) -> int:
        """Ask the members, before an update, whether they still hold the weights that they were given last.

        Returns a weight version that the next one must exceed. `undefined_weights` is not None afterwards if a member
        was started again. Raises ServerError, once, if another client has changed the weights.
        """

    def pause(self, mode: PauseMode) -> None:
        """Pause generation on every member. `mode` says what happens to running requests."""

    def resume(self) -> None:
        """Continue generation on every member."""

    def begin_weight_update(self) -> None:
        """Open a weight update session on every member."""

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        """Make every TP rank of every member call the weight loader (`verl_server.weights.loader.load`).

        `messages` holds the loader's JSON message for each member, in the order of `members`. The method returns when
        all loaders have returned. Requests that start afterwards carry `weight_version`; None: the messages change no
        weights. `flush_cache` removes the prefix cache, which was computed with the old weights.
        """

    def end_weight_update(self) -> None:
        """Close the weight update session on every member."""

    @property
    def can_leave_out(self) -> bool:
        """Whether `leave_out` can leave members out."""

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        """Called when an attempt failed because of the members named `failed`, with the `error` of the attempt.

        Returns whether a member that fails repeatedly is left out of the next attempt, so that another attempt can
        succeed.
        """

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """Record that all members have loaded and verified weight version `version`. Generation is still paused.

        `whole`: the update contained every parameter in which a member that was started again may differ from the other
        members, so that its earlier weights do not matter. `replay`: loads all published parameters into other servers
        later, for example into a server that was started again. None if the trainer does not keep them.
        """


ReplayFn = Callable[[UpdatableServers], None]
"""Loads the weights that were published last into servers that missed the update. Raises VerlServerError."""
