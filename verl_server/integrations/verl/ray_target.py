"""`RayTarget`: calls of trainer rank 0 to the servers that the actor of a fleet has."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from verl_server.config import PauseMode
from verl_server.errors import DeadlineError, ServerDiedError, ServerError, VerlServerError, from_wire, to_wire
from verl_server.rollout.launchers.ray_server import first_line
from verl_server.types import Json, ServerInfo
from verl_server.weights.update.servers import ReplayFn

POLL_S = 0.5


class RayTarget:
    """Servers of the actor (`UpdatableServers`): those of the fleet, or the server of a replay job.

    `timeout_s`: seconds for one call. The actor's own calls have shorter deadlines, so it is reached only if the actor
    itself does not answer. `get_failure` returns an error that ends calls in flight.
    """

    def __init__(
        self,
        actor: Any,
        target: str,
        timeout_s: float,
        get_failure: Callable[[], VerlServerError | None] = lambda: None,
    ) -> None:
        self._actor, self._target, self._timeout_s, self._get_failure = actor, target, timeout_s, get_failure

    def call(self, method: str, *args: Any) -> Any:
        """The value of a method or a property in the actor. Raises its error."""
        return unwrap(self.wait(self._actor.call.remote(self._target, method, args), method))

    def wait(self, reference: Any, operation: str) -> Any:
        """The value of a Ray reference. Raises the actor's error; DeadlineError; ServerDiedError if it has ended."""
        deadline = time.monotonic() + self._timeout_s
        future = reference.future()  # `ray.get` warns in an asynchronous actor, also in its threads
        while not concurrent.futures.wait([future], POLL_S).done:
            if (failure := self._get_failure()) is not None:
                raise failure
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the actor of the fleet did not answer {operation} within {self._timeout_s:g} s",
                    operation=operation,
                    seconds=self._timeout_s,
                )
        try:
            return future.result()
        except RayTaskError as error:  # the actor's method has raised
            raise from_wire(to_wire(error.cause)) from error
        except ActorUnavailableError as error:
            raise ServerError(f"the actor of the fleet cannot be reached now: {first_line(error)}") from error
        except RayError as error:
            raise ServerDiedError(f"the actor of the fleet has ended: {first_line(error)}") from error

    @property
    def members(self) -> Sequence[ServerInfo]:
        members: Sequence[ServerInfo] = self.call("members")
        return members

    @property
    def undefined_weights(self) -> str | None:
        reason: str | None = self.call("undefined_weights")
        return reason

    def check_weights(self) -> int:
        """0: the actor owns its servers."""
        return 0

    def pause(self, mode: PauseMode) -> None:
        self.call("pause", mode)

    def resume(self) -> None:
        self.call("resume")

    def begin_weight_update(self) -> None:
        self.call("begin_weight_update")

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        self.call("load", messages, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self.call("end_weight_update")

    @property
    def can_leave_out(self) -> bool:
        return bool(self.call("can_leave_out"))

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        return bool(self.call("leave_out", list(failed), error))

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        self.call("published", version, whole, None)


def unwrap(reply: Json) -> Any:
    """The value of a reply of `FleetActor.call`. Raises its error."""
    if "error" in reply:
        raise from_wire(reply["error"])
    return reply["value"]
