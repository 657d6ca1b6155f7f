"""`AsyncHttpServerEngineAdapter`: every endpoint of an inference engine that RL uses, over HTTP, for one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from verl_server.adapter.connection import ServerConnection
from verl_server.adapter.engine import get_engine
from verl_server.adapter.http_client import HttpClient
from verl_server.adapter.requests import generation, information, lora_adapters, memory_occupation, weight_updates
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.config import AdapterConfig
from verl_server.errors import ShutDownError, UnsupportedError, VerlServerError
from verl_server.server.exit_status import ExitStatus
from verl_server.server.supervisor import AbortCheck, ServerPids, Supervisor, never_abort
from verl_server.type_checks import check_arguments
from verl_server.validation import require_http_url


class AsyncHttpServerEngineAdapter:
    """One server of an inference engine, started in its own process and driven over HTTP from any event loop.

    The constructor blocks until the server is ready; inside an event loop use `await
    AsyncHttpServerEngineAdapter.launch(...)`. `attach` drives a server that already runs. Use the adapter with
    `async with`, or call `shutdown`.

    The methods that send requests are plain functions of the modules `information`, `generation`,
    `memory_occupation`, `weight_updates` and `lora_adapters`; their first parameter is the adapter.

    Every method raises the errors of `verl_server.errors`: ServerDiedError when the server's process ends,
    DeadlineError after the deadline of `config.timeouts`, ShutDownError after `shutdown`.
    """

    @check_arguments()
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        check_abort: AbortCheck = never_abort,
        **server_args: Any,
    ) -> None:
        """Start a server and wait until it is ready.

        Args:
            model_path: Folder of the model, or its name on a hub.
            config: Settings of this adapter.
            env: Environment variables to add to the server's environment.
            check_abort: Internal. Called repeatedly while the server starts; the error that it returns ends the start.
            server_args: Further arguments of the server: fields of SGLang's `ServerArgs`, or the arguments of a vLLM
                server (docs/vllm.md), according to `config.engine_kind`.

        Raises StartupError, DeadlineError, BadInputError (an argument that the engine refuses), or the error of
        `check_abort`.
        """
        config = config or AdapterConfig()
        server_args = {"model_path": model_path, **server_args}
        server = get_engine(config.engine_kind).launch(server_args, config, env or {}, check_abort)
        try:
            self._connect(
                server.base_url, server.api_key, server.admin_api_key, config, server.process, server.server_args
            )
        except BaseException:
            server.process.stop(config.timeouts.stop_s)
            raise

    @classmethod
    async def launch(
        cls,
        model_path: str | os.PathLike[str],
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        **server_args: Any,
    ) -> Self:
        """Start a server without blocking the event loop. Arguments and errors are those of the constructor."""
        return await asyncio.to_thread(cls, model_path, config=config, env=env, **server_args)

    @classmethod
    @check_arguments()
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
        base_url = require_http_url("base_url", base_url)
        self._connect(base_url, api_key, admin_api_key, config or AdapterConfig(), process, {})
        return self

    def _connect(
        self,
        base_url: str,
        api_key: str | None,
        admin_api_key: str | None,
        config: AdapterConfig,
        process: Supervisor | None,
        server_args: Mapping[str, Any],
    ) -> None:
        http = HttpClient(
            base_url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            timeouts=config.timeouts,
            max_retries=config.max_retries,
            is_supervised=process is not None,
        )
        self.base_url = base_url
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.config = config
        self.process = process
        """Supervisor of the server's process. None for an attached server."""
        self.connection = ServerConnection(http, server_args)
        """Internal: the HTTP connections and the state that the functions of this folder share."""
        self._is_shut_down = False
        if process is not None:
            process.on_exit(self._on_exit)
        self._registration = RouterRegistration.start(config, base_url, api_key)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def server_args(self) -> Mapping[str, Any]:
        """Arguments that the server was started with. Empty for an attached server until they are needed."""
        return self.connection.server_args

    @property
    def paused(self) -> bool:
        """Whether this adapter has paused generation."""
        return self.connection.paused

    @property
    def released_memory(self) -> frozenset[str]:
        """Memory tags that are released, as of this adapter's last call that released or resumed memory."""
        return self.connection.released_memory

    @property
    def needs_continue(self) -> bool:
        """Internal. Whether a release or a resume of memory has left generation paused."""
        return self.connection.needs_continue

    @property
    def pids(self) -> ServerPids:
        """Process ids of the server main, its warden and its workers.

        Raises UnsupportedError for an attached server.
        """
        if self.process is None:
            raise UnsupportedError(f"the process ids of {self.base_url} are not known: this adapter did not start it")
        return self.process.pids

    @property
    def log_path(self) -> Path | None:
        """Path of the server's log file. None for a server that was attached or that runs on another machine."""
        return None if self.process is None else self.process.log_path

    # Requests: plain functions, which become methods of this class. Their documentation is in their modules.

    get_model_info = information.get_model_info
    get_server_info = information.get_server_info
    get_loads = information.get_loads
    is_ready = information.is_ready
    ping = information.ping
    health = information.health
    check_keys = information.check_keys
    capabilities = information.capabilities
    fused_modules = information.fused_modules

    generate = generation.generate
    generate_stream = generation.generate_stream
    abort_request = generation.abort_request
    pause_generation = generation.pause_generation
    continue_generation = generation.continue_generation
    flush_cache = generation.flush_cache

    release_memory_occupation = memory_occupation.release_memory_occupation
    resume_memory_occupation = memory_occupation.resume_memory_occupation

    begin_weight_update = weight_updates.begin_weight_update
    end_weight_update = weight_updates.end_weight_update
    update_weights_from_tensor = weight_updates.update_weights_from_tensor
    init_weights_update_group = weight_updates.init_weights_update_group
    destroy_weights_update_group = weight_updates.destroy_weights_update_group
    update_weights_from_distributed = weight_updates.update_weights_from_distributed
    update_weights_from_disk = weight_updates.update_weights_from_disk
    update_weight_version = weight_updates.update_weight_version
    weights_checker = weight_updates.weights_checker

    load_lora_adapter = lora_adapters.load_lora_adapter
    unload_lora_adapter = lora_adapters.unload_lora_adapter
    list_lora_adapters = lora_adapters.list_lora_adapters

    # -- end ------------------------------------------------------------------------------------------

    async def close_connections(self) -> None:
        """Close the connections of the running event loop. The server and other event loops are not affected."""
        await self.connection.http.aclose()

    async def shutdown(self) -> None:
        """End the server, unless it was attached, and close the connections. May be called more than once."""
        await asyncio.to_thread(self.shutdown_process)
        await self.close_connections()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- internal: called by other folders of this package, no part of the public API -------------------

    end_update_pause = generation.end_update_pause
    prepare_release = memory_occupation.prepare_release
    cancel_release = memory_occupation.cancel_release
    update_released_memory = memory_occupation.update_released_memory

    def _on_exit(self, _: ExitStatus) -> None:
        assert self.process is not None
        if self._is_shut_down:
            self.fail(ShutDownError("the adapter was shut down"))
        else:
            self.fail(self.process.died(self.base_url))

    def fail(self, error: VerlServerError) -> None:
        """Internal. Make every call in flight and every later call raise `error`."""
        self.connection.http.fail(error)

    def shutdown_process(self) -> None:
        """Internal. End the server's process tree. Blocks; may be called from any thread and more than once."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._registration.stop()
            self.fail(ShutDownError(f"the adapter of {self.base_url} was shut down"))
        if self.process is not None:
            self.process.stop(self.config.timeouts.stop_s)
