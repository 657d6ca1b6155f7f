"""Versions of verl that this plugin supports."""

from __future__ import annotations

from importlib import metadata

from verl_server.errors import UnsupportedError

SUPPORTED_VERSIONS = ("0.9.0", "0.9.1")
"""Versions whose interfaces were tested. Other versions have other interfaces under the same names."""


def require_supported_version() -> None:
    """Raise UnsupportedError for another version of verl."""
    version = metadata.version("verl")
    if version.split("+")[0] not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"verl {version} is installed, but the rollout `verl_server` supports verl "
            f"{' and '.join(SUPPORTED_VERSIONS)}; run pip install 'verl=={SUPPORTED_VERSIONS[-1]}'"
        )
