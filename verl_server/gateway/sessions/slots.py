"""`Slots`: how many requests may be open at a time, in a session and in the whole gateway."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from verl_server.gateway.errors import ErrorKind, GatewayError


class Slots:
    """Counts open requests. Use it in one event loop.

    A request is open until its client has the reply or has gone. A turn that is generated without a client counts as a
    request.
    """

    def __init__(
        self,
        maximum: float = math.inf,
        kind: ErrorKind = ErrorKind.TOO_MANY_REQUESTS,
        owner: str = "the session",
        parent: Slots | None = None,
    ) -> None:
        """`kind`: kind of the error for a request without a slot. `parent`: each slot needs a slot of it, too."""
        self._maximum, self._kind, self._owner, self._parent = maximum, kind, owner, parent
        self.num_taken = 0
        """Number of open requests."""
        self.num_arriving = 0
        """Number of requests that are being read and have no slot yet."""

    def _require(self, num_known: int) -> None:
        if num_known >= self._maximum:
            raise GatewayError(
                self._kind, f"{self._owner} has {self._maximum} open requests already; send the request again later"
            )

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return self.num_taken >= self._maximum or (self._parent is not None and self._parent.is_full)

    def require_free(self) -> None:
        """Raise GatewayError if all slots are taken."""
        self._require(self.num_taken)
        if self._parent is not None:
            self._parent.require_free()

    def begin_arrival(self) -> None:
        """Count a request that is being read, until `end_arrival`.

        Raises GatewayError if as many requests as there are slots are being read.
        """
        self._require(self.num_arriving)
        if self._parent is not None:
            self._parent.begin_arrival()
        self.num_arriving += 1

    def end_arrival(self) -> None:
        """The request of `begin_arrival` has a slot or is refused."""
        self.num_arriving -= 1
        if self._parent is not None:
            self._parent.end_arrival()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a slot within the block. Raises the errors of `take`."""
        with self.taken():
            yield
        self.release()

    def take(self) -> None:
        """Take a slot. Raises GatewayError if all are taken."""
        self._require(self.num_taken)
        if self._parent is not None:
            self._parent.take()
        self.num_taken += 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take a slot, which is given back if the block raises an exception. Raises the errors of `take`."""
        self.take()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self.num_taken -= 1
        if self._parent is not None:
            self._parent.release()
