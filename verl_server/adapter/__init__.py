"""Clients of one inference engine over HTTP. The engine runs in its own processes, see `verl_server.server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

__all__ = ["AsyncHttpServerEngineAdapter", "HttpServerEngineAdapter"]


def __getattr__(name: str) -> Any:
    """Import on first use. The server's own processes import this package too, but not the clients."""
    if name == "HttpServerEngineAdapter":
        from verl_server.adapter.blocking import HttpServerEngineAdapter

        return HttpServerEngineAdapter
    if name == "AsyncHttpServerEngineAdapter":
        from verl_server.adapter.client import AsyncHttpServerEngineAdapter

        return AsyncHttpServerEngineAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
