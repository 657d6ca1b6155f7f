"""`HttpServerEngineAdapter`: the methods of the asynchronous adapter as blocking calls.

Each request has one implementation, the asynchronous one. Here a private event loop in one thread runs it while the
caller waits. That costs about 0.1 ms a call, and any number of threads share one connection pool. The event loop only
sends requests; the server runs in its own processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import uvloop

from verl_server.adapter.client import AsyncHttpServerEngineAdapter, KnownServer
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, ShutDownError
from verl_server.server.process import (
    AbortCheck,
    Supervisor,
    never_abort,
    raise_open_file_limit,
    start_thread,
)
from verl_server.types import Json

# -- Event loop thread ------------------------------------------------------------------------------
# An event loop in a thread of its own, for blocking callers.

R = TypeVar("R")


class EventLoopThread:
    """An event loop in a daemon thread. Calls that are running when it is closed raise ShutDownError."""

    def __init__(self) -> None:
        raise_open_file_limit()  # the loop has files of its own
        self._loop = uvloop.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close a stream meanwhile
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="verl-server-http", daemon=True)
        start_thread(self._thread)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_tasks())
        finally:
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result. An interrupt of the waiting thread, such as Ctrl-C, cancels it.

        Raises ShutDownError after `close`, and BadInputError in a forked child process.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ShutDownError("the adapter was shut down during this call") from None
        finally:
            future.cancel()  # after an interrupt; a future that is done is not changed
            del (
                future
            )  # the traceback of its error refers to this frame: a cycle, which would keep the caller's objects

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Start a coroutine without waiting. Cancelling the returned future cancels the coroutine.

        Raises the errors of `run`.
        """
        if os.getpid() != self._pid:
            coroutine.close()
            raise BadInputError(
                "this object cannot be used in a forked child process: its event loop runs in the parent process. In "
                "the child process, create an adapter with `attach`, or a RouterClient"
            )
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ShutDownError("the adapter was shut down")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """`run` for the end of an object, which the garbage collector may find in the thread of the event loop itself.

        There it starts the coroutine and does not wait.
        """
        if threading.current_thread() is self._thread:
            self.submit(coroutine)
        else:
            self.run(coroutine)

    def close(self) -> None:
        """Stop the event loop and its thread. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _cancel_tasks() -> None:
    """Cancel all tasks of the running event loop and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


# -- Blocking ---------------------------------------------------------------------------------------

P = ParamSpec("P")
Asynchronous = AsyncHttpServerEngineAdapter


def _blocking(
    method: Callable[Concatenate[AsyncHttpServerEngineAdapter, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[HttpServerEngineAdapter, P], R]:
    """The blocking form of an asynchronous method, with the same signature and documentation."""

    def call(self: HttpServerEngineAdapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.run(method(self.asynchronous, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class HttpServerEngineAdapter(KnownServer):
    """One server of an inference engine, started in its own process and driven over HTTP with blocking calls.

    The constructor returns when the server is ready; `attach` drives a server that already runs. Methods, arguments and
    errors are those of `AsyncHttpServerEngineAdapter`. Thread-safe. Use it as a context manager, or call `shutdown`.
    """

    asynchronous: AsyncHttpServerEngineAdapter
    """The asynchronous adapter of the same server, for use in other event loops."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        check_abort: AbortCheck = never_abort,
        **server_args: Any,
    ) -> None:
        """Start a server and wait until it is ready. See `AsyncHttpServerEngineAdapter` for arguments and errors."""
        self._loop = EventLoopThread()  # first: if there is no thread, no server is started
        try:
            asynchronous = AsyncHttpServerEngineAdapter(
                model_path, config=config, env=env, check_abort=check_abort, **server_args
            )
        except BaseException:
            self._loop.close()
            raise
        self._drive(asynchronous)

    @classmethod
    def attach(
        cls,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        config: AdapterConfig | None = None,
        process: Supervisor | None = None,
    ) -> Self:
        """Drive a server that already runs.

        Sends no request: `check_keys` tells whether the server accepts the keys. `shutdown` leaves the server running
        unless its supervisor is given as `process`.
        """
        self = cls.__new__(cls)
        asynchronous = AsyncHttpServerEngineAdapter.attach(
            base_url, api_key=api_key, admin_api_key=admin_api_key, config=config, process=process
        )
        self._loop = EventLoopThread()
        self._drive(asynchronous)
        return self

    def _drive(self, asynchronous: AsyncHttpServerEngineAdapter) -> None:
        self.asynchronous = asynchronous
        self.base_url, self.config = asynchronous.base_url, asynchronous.config
        self.api_key, self.admin_api_key = asynchronous.api_key, asynchronous.admin_api_key
        self.process, self.connection = asynchronous.process, asynchronous.connection

    # The table of blocking calls. Signature, types and documentation are those of the asynchronous method.
    generate = _blocking(Asynchronous.generate)
    abort_request = _blocking(Asynchronous.abort_request)
    pause_generation = _blocking(Asynchronous.pause_generation)
    continue_generation = _blocking(Asynchronous.continue_generation)
    flush_cache = _blocking(Asynchronous.flush_cache)
    begin_weight_update = _blocking(Asynchronous.begin_weight_update)
    end_weight_update = _blocking(Asynchronous.end_weight_update)
    update_weights_from_tensor = _blocking(Asynchronous.update_weights_from_tensor)
    init_weights_update_group = _blocking(Asynchronous.init_weights_update_group)
    destroy_weights_update_group = _blocking(Asynchronous.destroy_weights_update_group)
    update_weights_from_distributed = _blocking(Asynchronous.update_weights_from_distributed)
    update_weights_from_disk = _blocking(Asynchronous.update_weights_from_disk)
    update_weight_version = _blocking(Asynchronous.update_weight_version)
    load_lora_adapter = _blocking(Asynchronous.load_lora_adapter)
    unload_lora_adapter = _blocking(Asynchronous.unload_lora_adapter)
    list_lora_adapters = _blocking(Asynchronous.list_lora_adapters)
    weights_checker = _blocking(Asynchronous.weights_checker)
    release_memory_occupation = _blocking(Asynchronous.release_memory_occupation)
    resume_memory_occupation = _blocking(Asynchronous.resume_memory_occupation)
    get_model_info = _blocking(Asynchronous.get_model_info)
    get_server_info = _blocking(Asynchronous.get_server_info)
    get_loads = _blocking(Asynchronous.get_loads)
    is_ready = _blocking(Asynchronous.is_ready)
    ping = _blocking(Asynchronous.ping)
    health = _blocking(Asynchronous.health)
    check_keys = _blocking(Asynchronous.check_keys)
    capabilities = _blocking(Asynchronous.capabilities)
    fused_modules = _blocking(Asynchronous.fused_modules)

    def generate_stream(
        self,
        /,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: list[int] | None = None,
        rid: str | None = None,
        **fields: Any,
    ) -> Iterator[Json]:
        """Generate for one prompt and yield replies, each with all tokens so far.

        Other keyword arguments are those of `generate`. Closing the iterator aborts the request on the server.
        """
        events = self.asynchronous.generate_stream(prompt, sampling_params, input_ids, rid, **fields)
        try:
            while (event := self._loop.run(_next_event(events))) is not None:
                yield event
        finally:
            self._loop.finish(events.aclose())

    def shutdown(self) -> None:
        """End the server, unless it was attached, and close the connections. May be called more than once."""
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

    # -- internal: called by other folders of this package, no part of the public API -------------------

    end_update_pause = _blocking(Asynchronous.end_update_pause)
    prepare_release = _blocking(Asynchronous.prepare_release)
    cancel_release = _blocking(Asynchronous.cancel_release)
    update_released_memory = _blocking(Asynchronous.update_released_memory)

    def ask_schedulers(self) -> Future[Json]:
        """Internal. Ask all schedulers for their state, without waiting. They answer between two steps.

        Raises ShutDownError after `shutdown`.
        """
        return self._loop.submit(self.asynchronous.get_server_info())


async def _next_event(events: AsyncGenerator[Json, None]) -> Json | None:
    """The next event, or None at the end of the stream."""
    async for event in events:
        return event
    return None
