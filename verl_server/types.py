"""What crosses a boundary between rooms, processes or ranks. Nothing here imports torch, ray or sglang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: full (unsharded) shape and dtype, by torch's name of it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Member:
    """One server that takes part in a weight update."""

    name: str
    """Another one when another process serves."""
    tp_size: int


@dataclass(frozen=True)
class WeightUpdateResult:
    """What a finished weight update was. Equal on every trainer rank."""

    weight_version: str
    """Requests that start from now on carry this version."""
    tensors: int
    bytes: int
    missing: int
    """Parameters of the model that this update did not contain (0 for a whole update)."""
    transport: str
    """How the tensors came to the servers: a file of `verl_server/weights/transports/`."""
    staging_bytes: int
    """Memory that the trainer keeps for staging on this machine, all its ranks together."""
    sent_bytes: int
    """Bytes of tensors that went over a network or into a file (0: the servers read them in place)."""
    gather_s: float
    """Seconds in which the ranks copied their shards into the staging memory."""
    load_s: float
    """Seconds from the pause to the continuation of generation."""


def parse_weight_version(label: int | str | None) -> int:
    """The weight version that a server's label names.

    SGLang labels weights with strings. A label that is not a whole number, for example SGLang's "default", and a
    missing label name the checkpoint's weights: version 0.
    """
    try:
        return int(label)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0
