"""What a weight update needs of the servers that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from verl_server.config import PauseMode
from verl_server.types import Member

Json = dict[str, Any]


class UpdatableServers(Protocol):
    """What a weight update needs of the servers that it goes to. Calls raise `verl_server.errors`."""

    @property
    def members(self) -> Sequence[Member]:
        """Those that the next attempt at an update goes to. Raises ServerDiedError when there is none."""

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; `mode` says what becomes of requests in flight."""

    def resume(self) -> None: ...
    def begin_weight_update(self) -> None: ...
    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        """Make each member's TP ranks call the loader; `wires` has what it is told, by member."""

    def end_weight_update(self) -> None: ...


#: Loads what is published last into others.
ReplayFn = Callable[[UpdatableServers], None]
