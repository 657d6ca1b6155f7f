"""The error that the other trainer ranks raise when one rank fails."""

from __future__ import annotations

from typing import Any

from verl_server.errors import PeerError, VerlServerError, to_wire


def to_peer_wire(error: BaseException, rank: int) -> dict[str, Any]:
    """Convert an exception of trainer rank `rank` to plain JSON values for the other ranks.

    The other ranks raise the same type with the same message. An exception that is not of this library becomes a
    `PeerError` that names the rank and the exception's type; the rank itself raises the original exception.
    """
    if isinstance(error, VerlServerError):
        return to_wire(error)
    return to_wire(PeerError(f"trainer rank {rank} failed: {type(error).__name__}: {error}", ranks=[rank]))
