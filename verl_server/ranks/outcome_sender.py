"""Rank 0's message about the end of a call, which is sent also when the call fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_server.ranks.peer_errors import to_peer_wire

if TYPE_CHECKING:
    from verl_server.ranks.coordinator import RankCoordinator


class OutcomeSender:
    """Sends all ranks the outcome of a call when the body ends: `result`, or the error that the body raised."""

    def __init__(self, coordinator: RankCoordinator, call_id: str) -> None:
        self._coordinator, self._call_id = coordinator, call_id
        self.result: Any = None

    def __enter__(self) -> OutcomeSender:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._coordinator.send_outcome(self._call_id, {"error": to_peer_wire(error, self._coordinator.rank)})
        else:
            self._coordinator.send_outcome(self._call_id, {"result": self.result})
