"""How staged weights come to the servers. One file is one transport, with both of its ends:

`Sender` runs on trainer rank 0, `Receiver` in every TP rank of every server (see `base`). A new file here is
a new transport; its name is what `WeightsConfig(transport=...)` takes.
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


def end_of(transport: str, which: str) -> Any:
    """The class `Sender` or `Receiver` of a transport. Raises BadInputError for a name that is none."""
    if transport not in names():
        raise BadInputError(f"weight transport {transport!r} is none of {names()}")
    return getattr(importlib.import_module(f"{__name__}.{transport}"), which)
