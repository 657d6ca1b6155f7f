"""Where work on conversations runs: long work in a worker thread, so that other sessions go on, short work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

MAX_PARSED_BYTES = 128 * 1024
"""Size of a body that is parsed or compared at once: about a millisecond. A worker thread costs 0.1 ms."""
MAX_RENDERED_CHARS = 4 * 1024
"""Number of characters that are rendered and tokenized at once: a few milliseconds."""

Params = ParamSpec("Params")
Result = TypeVar("Result")


async def run_aside(
    is_short: bool, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """Call a function: at once if its work is short, otherwise in a worker thread."""
    if is_short:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def is_short_body(num_bytes: int) -> bool:
    """Whether a body of this size is parsed, and its messages are compared, at once."""
    return num_bytes <= MAX_PARSED_BYTES


def is_short_prompt(messages: Sequence[Mapping[str, Any]], num_bytes: int | None = None) -> bool:
    """Whether messages can be rendered at once: they have texts only, and few characters.

    `num_bytes`: size of the whole request, if all of it is rendered: its tools, too.
    """
    contents: list[Any] = [message.get("content") for message in messages]
    if not all(isinstance(content, str) for content in contents):
        return False
    return (sum(map(len, contents)) if num_bytes is None else num_bytes) <= MAX_RENDERED_CHARS
