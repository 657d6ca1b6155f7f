"""Whose weights the model of a server's process holds. So two trainers that update one server are noticed.

The trainer adds `owner_fields` to the message of each update, and every TP rank calls `require_owner` before it changes
a weight. The check is made in the server, so it holds for updates that come at the same time.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

_NONCE = secrets.token_hex(4)
_owner: list[tuple[str, int]] = []
"""The trainer that has updated this process's model last, and the version of the weights. Empty before."""


def owner_fields(weight_version: int, base: int | None) -> dict[str, Any]:
    """What the message of an update says about this process, which is the trainer.

    `base`: weight version that the server had when this trainer connected to it. Its weights may be replaced, whoever
    has pushed them. None: the server holds weights of this trainer, or those of its checkpoint.
    """
    trainer = f"process {os.getpid()} on {socket.gethostname()} ({_NONCE})"
    return {"trainer": trainer, "weight_version": weight_version, "base": base}


def require_owner(message: Mapping[str, Any]) -> None:
    """Make the trainer that has sent `message` the owner of the weights, before they change.

    Raises RuntimeError if another trainer has updated the model since the trainer connected.
    """
    if "trainer" not in message:
        return
    trainer, version, base = message["trainer"], message["weight_version"], message["base"]
    owner, owned_version = _owner[0] if _owner else (trainer, 0)
    if owner != trainer and (base is None or owned_version > base):
        raise RuntimeError(
            f"two trainers update this server: {owner} has pushed weight version {owned_version}, and now {trainer} "
            f"pushes version {version}. Stop one of them. The next VerlEngine that connects takes over"
        )
    _owner[:] = [(trainer, owned_version)]


def note_loaded(message: Mapping[str, Any]) -> None:
    """The update of `message` is loaded. After one that fails, the trainer owns torn weights of the version before."""
    if "trainer" in message:
        _owner[:] = [(message["trainer"], message["weight_version"])]
