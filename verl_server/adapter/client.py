"""`AsyncHttpServerEngineAdapter`: every SGLang endpoint that RL uses, over HTTP, for one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from verl_server.adapter.calls_lora import LoraCalls
from verl_server.adapter.calls_memory import MemoryCalls
from verl_server.adapter.http_client import HttpClient
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.adapter.sglang.launch import launch_sglang_server
from verl_server.config import AdapterConfig
from verl_server.errors import ServerDiedError, ShutDownError, VerlServerError
from verl_server.server.exit_status import ExitStatus, Supervisor
from verl_server.server.process import AbortCheck, WardenFactory, never_abort, spawn_warden


class AsyncHttpServerEngineAdapter(MemoryCalls, LoraCalls):
    """One SGLang server, started in its own process and driven over HTTP.

    `AsyncHttpServerEngineAdapter(model_path=..., **server_args)` blocks until the server is ready (inside
    an event loop use `await AsyncHttpServerEngineAdapter.launch(...)`); `attach` drives a server that
    somebody else started. `check_abort` is asked while the server starts: an error that it returns ends the
    start and is raised. `warden` makes the process that starts and watches the server. Server arguments are
    the fields of SGLang's `ServerArgs`, passed on verbatim.
    Every method raises the errors of `verl_server.errors`; none is swallowed.
    """

    def __init__(
        self,
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        check_abort: AbortCheck = never_abort,
        warden_factory: WardenFactory = spawn_warden,
        **server_args: Any,
    ) -> None:
        config = config or AdapterConfig()
        server = launch_sglang_server(server_args, config, env or {}, check_abort, warden_factory)
        try:
            self._setup(config, server.base_url, server.api_key, server.admin_api_key, server.process)
        except BaseException:
            server.process.stop(config.timeouts.stop_s)
            raise
        self.server_args = server.server_args

    @classmethod
    async def launch(cls, **arguments: Any) -> Self:
        """The constructor, without blocking the event loop."""
        return await asyncio.to_thread(cls, **arguments)

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
        """Drive a server that runs already. `shutdown` leaves it running, but for one with a `process`."""
        self = cls.__new__(cls)
        self._setup(config or AdapterConfig(), base_url.rstrip("/"), api_key, admin_api_key, process)
        return self

    def _setup(
        self,
        config: AdapterConfig,
        base_url: str,
        api_key: str | None,
        admin_api_key: str | None,
        process: Supervisor | None,
    ) -> None:
        http = HttpClient(
            base_url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            timeouts=config.timeouts,
            repeats=config.repeats,
            death=self._death,
        )
        self._start_calls(http)
        self.config = config
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.process = process
        self._closed = False
        if process is not None:
            process.on_exit(self._on_exit)
        self._registration = RouterRegistration.start(config, base_url, api_key)

    def _death(self, wait_s: float) -> ServerDiedError | None:
        if self.process is None or self.process.wait_exit(wait_s) is None:
            return None
        return self.process.died(self.base_url)

    def _on_exit(self, _: ExitStatus) -> None:
        assert self.process is not None
        self.fail(ShutDownError("the adapter was shut down") if self._closed else self.process.died(self.base_url))

    def fail(self, error: VerlServerError) -> None:
        """Make every call in flight and every later call raise `error` (a peer's server died, say)."""
        self._http.fail(error)

    # -- end ----------------------------------------------------------------------------------------

    def shutdown_process(self) -> None:
        """End the server's tree, blocking; from any thread. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._registration.stop()
            self._http.fail(ShutDownError(f"the adapter of {self.base_url} was shut down"))
        if self.process is not None:
            self.process.stop(self.config.timeouts.stop_s)

    async def close_connections(self) -> None:
        """Close the connections of the running event loop; the server and other loops are not touched."""
        await self._http.aclose()

    async def shutdown(self) -> None:
        """End the server (unless attached) and close the connections. Safe to call twice."""
        await asyncio.to_thread(self.shutdown_process)
        await self.close_connections()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
