"""The contribution of each trainer rank to an update: a digest of its tensor names, which rank 0 compares."""

from __future__ import annotations

import zlib
from collections.abc import Container, Sequence

from verl_server.errors import BadInputError
from verl_server.types import Json


def contribution_of(names: Sequence[str], has_shards: bool) -> Json:
    """What a rank tells rank 0 about its tensors. The digest is equal for equal names in equal order.

    `has_shards`: some tensors are DTensors, so every rank must take part.
    """
    return {"num_tensors": len(names), "digest": zlib.crc32("\0".join(names).encode()), "has_shards": has_shards}


def require_tensors(contributions: Sequence[Json]) -> None:
    """Raise BadInputError if rank 0 has no tensors."""
    if not contributions[0]["num_tensors"]:
        raise BadInputError("named_tensors is empty on rank 0: there is nothing to push")


def require_same_shards(contributions: Sequence[Json]) -> None:
    """Check that all ranks have DTensors of the same names. The names are those of a rank's DTensors only.

    Ranks gather their DTensors one after the other. With other names or another order they would mix the tensors, or
    wait for each other. Raises BadInputError with the first rank that differs from rank 0.
    """
    first = contributions[0]
    for rank, other in enumerate(contributions):
        if other["digest"] != first["digest"]:
            raise BadInputError(
                f"rank {rank} passed {other['num_tensors']} DTensors, which differ from the {first['num_tensors']} of "
                "rank 0; all ranks must pass DTensors of the same names in the same order",
                rank=rank,
            )


def require_same_names(contributions: Sequence[Json], writers: Container[int] = ()) -> None:
    """Check that all ranks push the same tensors. Raises BadInputError with the first rank that differs from rank 0.

    A rank may push nothing when the state dict was gathered on rank 0: unless tensors come in shards, or the rank is
    among `writers`, the ranks that write staging memory of their own.
    """
    require_tensors(contributions)
    first = contributions[0]
    for rank, other in enumerate(contributions):
        must_match = other["num_tensors"] or first["has_shards"] or rank in writers
        if must_match and other["digest"] != first["digest"]:
            raise BadInputError(
                f"rank {rank} pushed {other['num_tensors']} tensors that differ from the {first['num_tensors']} of "
                "rank 0; all ranks must push the same names in the same order",
                rank=rank,
            )
