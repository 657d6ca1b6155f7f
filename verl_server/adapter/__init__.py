"""HTTP adapters for a separately spawned SGLang server, and the supervision of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

__all__ = ["AsyncHttpServerEngineAdapter", "HttpServerEngineAdapter"]


def __getattr__(name: str) -> Any:
    """Import on first use: the server's own processes import this package, too, and need none of it."""
    if name == "HttpServerEngineAdapter":
        from verl_server.adapter.blocking import HttpServerEngineAdapter

        return HttpServerEngineAdapter
    if name == "AsyncHttpServerEngineAdapter":
        from verl_server.adapter.client import AsyncHttpServerEngineAdapter

        return AsyncHttpServerEngineAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
