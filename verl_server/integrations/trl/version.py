"""The version of TRL that this folder works with.

TRL calls `rollout_func` and the asynchronous trainer experimental and changes them between its versions, so that other
versions are refused.
"""

from __future__ import annotations

import importlib.metadata

from verl_server.errors import UnsupportedError

TRL_VERSION = "1.16.0"


def require_trl() -> None:
    """Raise UnsupportedError, with the version to install, unless `TRL_VERSION` is installed."""
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed != TRL_VERSION:
        found = "trl is not installed" if installed is None else f"trl {installed} is installed"
        raise UnsupportedError(
            f"verl_server.integrations.trl works with trl {TRL_VERSION}, and {found}: pip install trl=={TRL_VERSION}"
        )
