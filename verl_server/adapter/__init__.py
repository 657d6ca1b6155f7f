"""Clients of one inference engine over HTTP. The engine runs in its own processes, see `verl_server.server`.

The names are imported lazily: the server's own processes import this package too, but not the clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

__all__ = ["AsyncHttpServerEngineAdapter", "HttpServerEngineAdapter"]


__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.adapter.blocking": ("HttpServerEngineAdapter",),
        "verl_server.adapter.client": ("AsyncHttpServerEngineAdapter",),
    },
)
