"""`HttpServerEngineAdapter`: the same calls as the asynchronous adapter, blocking.

There is one implementation of every call. Here a private event loop in one thread runs it and the caller
waits; that costs about 0.1 ms a call and makes any number of threads share one connection pool. (The loop
only sends requests. The server itself never runs in a thread of the trainer: see DESIGN, "why a separate
process".)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.errors import ShutDownError

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[AsyncHttpServerEngineAdapter, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[HttpServerEngineAdapter, P], R]:
    """The blocking twin of an asynchronous method, with its signature and documentation."""

    def call(self: HttpServerEngineAdapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.run(method(self.asynchronous, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class HttpServerEngineAdapter:
    """One SGLang server, started in its own process and driven over HTTP, blocking.

    `HttpServerEngineAdapter(model_path=..., **server_args)` returns when the server is ready. The methods,
    their arguments and errors are those of `AsyncHttpServerEngineAdapter`, which `asynchronous` holds.
    Thread-safe. Use it as a context manager, or call `shutdown`.
    """

    def __init__(self, **arguments: Any) -> None:
        self.asynchronous = AsyncHttpServerEngineAdapter(**arguments)
        self._loop = EventLoopThread()

    @classmethod
    def attach(cls, base_url: str, **arguments: Any) -> Self:
        """Drive a server that runs already. `shutdown` then leaves it running."""
        self = cls.__new__(cls)
        self.asynchronous = AsyncHttpServerEngineAdapter.attach(base_url, **arguments)
        self._loop = EventLoopThread()
        return self

    generate = _blocking(AsyncHttpServerEngineAdapter.generate)
    abort_request = _blocking(AsyncHttpServerEngineAdapter.abort_request)
    pause_generation = _blocking(AsyncHttpServerEngineAdapter.pause_generation)
    continue_generation = _blocking(AsyncHttpServerEngineAdapter.continue_generation)
    flush_cache = _blocking(AsyncHttpServerEngineAdapter.flush_cache)
    begin_weight_update = _blocking(AsyncHttpServerEngineAdapter.begin_weight_update)
    end_weight_update = _blocking(AsyncHttpServerEngineAdapter.end_weight_update)
    update_weights_from_tensor = _blocking(AsyncHttpServerEngineAdapter.update_weights_from_tensor)
    init_weights_update_group = _blocking(AsyncHttpServerEngineAdapter.init_weights_update_group)
    destroy_weights_update_group = _blocking(AsyncHttpServerEngineAdapter.destroy_weights_update_group)
    update_weights_from_distributed = _blocking(AsyncHttpServerEngineAdapter.update_weights_from_distributed)
    update_weights_from_disk = _blocking(AsyncHttpServerEngineAdapter.update_weights_from_disk)
    update_weight_version = _blocking(AsyncHttpServerEngineAdapter.update_weight_version)
    load_lora_adapter_from_tensors = _blocking(AsyncHttpServerEngineAdapter.load_lora_adapter_from_tensors)
    unload_lora_adapter = _blocking(AsyncHttpServerEngineAdapter.unload_lora_adapter)
    weights_checker = _blocking(AsyncHttpServerEngineAdapter.weights_checker)
    release_memory_occupation = _blocking(AsyncHttpServerEngineAdapter.release_memory_occupation)
    resume_memory_occupation = _blocking(AsyncHttpServerEngineAdapter.resume_memory_occupation)
    get_model_info = _blocking(AsyncHttpServerEngineAdapter.get_model_info)
    get_server_info = _blocking(AsyncHttpServerEngineAdapter.get_server_info)
    get_loads = _blocking(AsyncHttpServerEngineAdapter.get_loads)
    is_ready = _blocking(AsyncHttpServerEngineAdapter.is_ready)
    ping = _blocking(AsyncHttpServerEngineAdapter.ping)
    health = _blocking(AsyncHttpServerEngineAdapter.health)
    capabilities = _blocking(AsyncHttpServerEngineAdapter.capabilities)

    def generate_stream(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """`generate` for one prompt, as it grows. Closing the iterator aborts the request."""
        events = self.asynchronous.generate_stream(*args, **kwargs)
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.run(events.aclose())

    @property
    def base_url(self) -> str:
        return self.asynchronous.base_url

    def shutdown(self) -> None:
        """End the server (unless attached) and the connections. Safe to call twice."""
        try:
            self._loop.run(self.asynchronous.shutdown())
        except ShutDownError:
            return
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


async def _next(events: Any) -> dict[str, Any] | None:
    async for event in events:
        return dict(event)
    return None
