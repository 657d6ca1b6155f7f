"""Public names that a package imports on their first use, so that importing the package itself is fast.

A package lists its public names three times: in `__all__`, in imports under `TYPE_CHECKING` for type checkers and
editors, and here with the modules that define them. `test_public_api.py` compares the lists. This module
imports the standard library only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def export_lazily(
    package: str, names_by_module: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package with lazy public names.

    `package` is the package's `__name__`. `names_by_module` has the public names that each module defines.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return import_name, list_names
