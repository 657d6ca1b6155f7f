"""Where what an agent asked for left what was recorded. Pure.

Each fork says why it is there; this says where exactly: after how many turns, and at which token the new path differs
from the one that was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_server.trajectory.graph import ForkReason, Session


@dataclass(frozen=True)
class Drift:
    """One fork."""

    node: int
    """The first node of the new path."""
    beside: int
    """The node that was there before."""
    reason: ForkReason
    turn: int
    """How often the policy had spoken before."""
    at: int
    """Position of the first token that differs, from the root."""
    was: int | None
    """The token there before; None: its path ended."""
    became: int | None


def drifts(session: Session) -> list[Drift]:
    """All forks, in the order in which they happened."""
    return list(_drifts(session))


def _drifts(session: Session) -> Iterator[Drift]:
    for node in session.nodes:
        first = session.children(node.parent)[0]
        if node.id == first or node.fork is None:
            continue
        before = 0 if node.parent is None else session.length(node.parent)
        old, new = _ahead(session, first), list(node.tokens)
        same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        yield Drift(
            node=node.id,
            beside=first,
            reason=node.fork,
            turn=0 if node.parent is None else session.turns(node.parent),
            at=before + same,
            was=old[same] if same < len(old) else None,
            became=new[same] if same < len(new) else None,
        )


def _ahead(session: Session, node: int) -> list[int]:
    """The tokens of a node and of the first path below it."""
    tokens: list[int] = []
    here: int | None = node
    while here is not None:
        tokens.extend(session.node(here).tokens)
        below = session.children(here)
        here = below[0] if below else None
    return tokens
