"""How staged weights come to the servers. One file is one transport, with both of its ends:

`Sender` runs on trainer rank 0 and sends what is staged in the arena; `Stream` runs on all trainer ranks and
takes tensors as they come; `Receiver` runs in every TP rank of every server (see `base`). A new file here is a
new transport; its name is what `WeightsConfig(transport=...)` takes.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from verl_server.errors import BadInputError

_NOT_TRANSPORTS = frozenset({"base", "group", "patches"})


def names() -> list[str]:
    """The transports there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NOT_TRANSPORTS)


def is_stream(transport: str) -> bool:
    """Whether it takes tensors as they come instead of from the arena: its trainer end is a `Stream`."""
    return hasattr(_module_of(transport), "Stream")


def end_of(transport: str, which: str) -> Any:
    """The class `Sender`, `Stream` or `Receiver` of a transport. Raises BadInputError for a name that is none."""
    return getattr(_module_of(transport), which)


def _module_of(transport: str) -> Any:
    if transport not in names():
        raise BadInputError(f"weight transport {transport!r} is none of {names()}")
    return importlib.import_module(f"{__name__}.{transport}")
