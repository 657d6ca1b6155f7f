"""Validation of the memory tags of a release or a resume, for one server, the in-process engine and a fleet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from verl_server.config import MemoryTag
from verl_server.errors import BadInputError


def tags_to_release(tags: Sequence[str] | None, released: Collection[str]) -> list[str]:
    """The memory tags to release. `tags` of None means all; `released` are the tags that are released now.

    Raises BadInputError for unknown tags and for tags that are released.
    """
    requested = _parse_tags(tags)
    already_released = sorted(set(requested).intersection(released))
    if already_released:
        raise BadInputError(
            f"the memory of {already_released} is released already; released memory: {sorted(released)}. "
            "Name only other tags, or call resume_memory_occupation first."
        )
    return requested


def tags_to_resume(tags: Sequence[str] | None, released: Collection[str]) -> list[str]:
    """The memory tags to resume. `tags` of None means all that are released; `released` are the released tags.

    Raises BadInputError for unknown tags, for tags that are not released, and when nothing is released.
    """
    requested = sorted(released) if tags is None else _parse_tags(tags)
    if not requested:
        raise BadInputError("nothing is released: call release_memory_occupation before resume_memory_occupation")
    not_released = sorted(set(requested).difference(released))
    if not_released:
        raise BadInputError(
            f"the memory of {not_released} is not released; released memory: {sorted(released)}. "
            "Name only released tags, or leave `tags` out to resume all of them."
        )
    return requested


def undefined_weights_reason(
    undefined: bool, released: Collection[str], cause: str = "their memory was released and resumed"
) -> str | None:
    """The reason of `UpdatableServers.undefined_weights`: None unless the weights are undefined and in memory.

    `undefined`: not all weights were loaded since the `cause`. `released` are the tags that are released now.
    """
    if not undefined or MemoryTag.WEIGHTS in released:
        return None
    return f"the weights of the servers are undefined, because {cause}"


def _parse_tags(tags: Sequence[str] | None) -> list[str]:
    """Memory tags as plain strings."""
    if tags is None:
        return [tag.value for tag in MemoryTag]
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        got = "the string " if isinstance(tags, str) else ""
        raise BadInputError(f"tags must be a list of strings, got {got}{tags!r}")
    try:
        values = [MemoryTag(tag).value for tag in tags]
    except ValueError:
        raise BadInputError(f"memory tags are {[t.value for t in MemoryTag]}, got {list(tags)!r}") from None
    if not values:
        raise BadInputError("tags is empty; leave it out to mean all")
    if len(set(values)) != len(values):
        raise BadInputError(f"a tag is named twice: {values}")
    return values
