"""Control calls on every trainer rank: rank 0 changes the backend and all ranks learn which memory is released."""

from __future__ import annotations

from collections.abc import Callable

from verl_server.engine.backend import Backend
from verl_server.errors import VerlServerError, from_wire, to_wire
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.types import Json
from verl_server.weights.update.updater import WeightUpdater


class RankControl:
    """Control calls that all ranks of one engine make together. They are possible while the weights are torn."""

    def __init__(
        self,
        group: RankCoordinator,
        get_backend: Callable[[], Backend],
        get_updater: Callable[[], WeightUpdater],
        get_refusal: Callable[[bool], VerlServerError | None],
        timeout_s: float,
    ) -> None:
        """`get_backend` returns rank 0's backend, `get_updater` this rank's updater. `get_refusal(allow_torn)` returns
        the reason why this rank cannot take part now, or None. `timeout_s`: deadline of one call in seconds.
        """
        self._group, self._get_backend, self._get_updater = group, get_backend, get_updater
        self._get_refusal, self._timeout_s = get_refusal, timeout_s

    def run(self, operation: str, action: Callable[[Backend], None]) -> None:
        """Run `action` on rank 0, and record on all ranks which memory is released afterwards, also when it failed.

        A release that fails may have released the memory of some of the servers.
        """
        error: VerlServerError | None = None

        def act(_: list[Json]) -> Json:
            nonlocal error
            backend = self._get_backend()
            try:
                action(backend)
            except VerlServerError as failure:
                error = failure
            return {"released": sorted(backend.released_memory), "error": None if error is None else to_wire(error)}

        call_id, refusal = self._group.next_call_id(operation), self._get_refusal(True)
        outcome = self._group.agree(call_id, act, error=refusal, action_timeout_s=self._timeout_s)
        self._get_updater().released_memory = frozenset(outcome["released"])
        if outcome["error"] is not None:
            raise error or from_wire(outcome["error"])
