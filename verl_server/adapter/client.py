"""`AsyncHttpServerEngineAdapter`: every SGLang endpoint that RL uses, over HTTP, for one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

from verl_server.adapter import sglang as api
from verl_server.adapter.capabilities import Capabilities, probe
from verl_server.adapter.launch import launch
from verl_server.adapter.link import Link
from verl_server.adapter.model_files import read_model_config
from verl_server.adapter.process import Exit, ServerProcess
from verl_server.adapter.router import RouterRegistration
from verl_server.config import AdapterConfig, PauseMode
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerDiedError,
    ShutDownError,
    VerlServerError,
)

Json = dict[str, Any]


class AsyncHttpServerEngineAdapter:
    """One SGLang server, started in its own process and driven over HTTP.

    `AsyncHttpServerEngineAdapter(model_path=..., **server_args)` blocks until the server is ready (inside
    an event loop use `await AsyncHttpServerEngineAdapter.launch(...)`); `attach` drives a server that
    somebody else started. Server arguments are the fields of SGLang's `ServerArgs`, passed on verbatim.
    Every method raises the errors of `verl_server.errors`; none is swallowed.
    """

    def __init__(
        self,
        *,
        config: AdapterConfig | None = None,
        env: Mapping[str, str] | None = None,
        **server_args: Any,
    ) -> None:
        config = config or AdapterConfig()
        server = launch(server_args, config, env or {})
        self._setup(config, server.base_url, server.api_key, server.admin_api_key, server.process)
        self.server_args: Mapping[str, Any] = server.server_args

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
    ) -> Self:
        """Drive a server that runs already. `shutdown` then leaves it running."""
        self = cls.__new__(cls)
        self._setup(config or AdapterConfig(), base_url.rstrip("/"), api_key, admin_api_key, None)
        self.server_args = {}
        return self

    def _setup(
        self,
        config: AdapterConfig,
        base_url: str,
        api_key: str | None,
        admin_api_key: str | None,
        process: ServerProcess | None,
    ) -> None:
        self.config = config
        self.base_url = base_url
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.process = process
        self._limits: api.Limits | None = None
        self._capabilities: Capabilities | None = None
        self._asleep: set[str] = set()
        self._paused = False
        self._in_flight = 0
        self._closed = False
        self._link = Link(
            base_url,
            api_key=api_key,
            admin_api_key=admin_api_key,
            timeouts=config.timeouts,
            repeats=config.repeats,
            death=self._death,
        )
        if process is not None:
            process.on_exit(self._on_exit)
        self._registration = RouterRegistration.start(config, base_url, api_key)

    def _death(self, wait_s: float) -> ServerDiedError | None:
        if self.process is None or self.process.wait_exit(wait_s) is None:
            return None
        return self.process.died(self.base_url)

    def _on_exit(self, _: Exit) -> None:
        assert self.process is not None
        self.fail(ShutDownError("the adapter was shut down") if self._closed else self.process.died(self.base_url))

    def fail(self, error: VerlServerError) -> None:
        """Make every call in flight and every later call raise `error` (a peer's server died, say)."""
        self._link.fail(error)

    # -- generation ---------------------------------------------------------------------------------

    async def generate(
        self,
        /,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt (a dict comes back) or a list of prompts (a list of dicts).

        The reply is SGLang's own: `output_ids` and `meta_info` with `output_token_logprobs` as
        `[logprob, token id, text]`, `finish_reason`, `weight_version`. Further keyword arguments are fields
        of SGLang's `GenerateReqInput`. Raises BadInputError before sending what the server cannot take,
        NotReadyError while its memory is released, ServerDiedError when it ends.
        """
        given = {
            "image_data": image_data,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "lora_path": lora_path,
            "custom_logit_processor": custom_logit_processor,
            **fields,
        }
        body = await self._generate_body(prompt, sampling_params, input_ids, rid, False, given)
        self._in_flight += 1
        try:
            return await self._link.call(api.GENERATE, body)
        finally:
            self._in_flight -= 1

    async def generate_stream(
        self,
        /,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: list[int] | None = None,
        rid: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Json, None]:
        """`generate` for one prompt, as it grows: each item is the whole reply so far.

        Closing the iterator (leaving the `async for`) aborts the request on the server.
        """
        body = await self._generate_body(prompt, sampling_params, input_ids, rid, True, fields)
        self._in_flight += 1
        try:
            async for event in self._link.stream(api.GENERATE, body):
                yield event
        finally:
            self._in_flight -= 1

    async def _generate_body(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        rid: Any,
        stream: bool,
        fields: Mapping[str, Any],
    ) -> Json:
        if self._asleep:
            raise NotReadyError(
                f"the server at {self.base_url} has released {sorted(self._asleep)}; "
                "call resume_memory_occupation first",
                url=self.base_url,
            )
        return api.generate_payload(
            await self.learn_limits(),
            prompt=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            rid=rid,
            stream=stream,
            fields=fields,
        )

    async def learn_limits(self) -> api.Limits:
        """What this server accepts; asked once."""
        if self._limits is None:
            info = await self.get_server_info()
            self._limits = api.limits_of(info, read_model_config(str(info.get("model_path"))))
        return self._limits

    async def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End requests whose id *begins* with `rid` (SGLang matches prefixes), or all."""
        await self._link.call(api.ABORT, api.abort_payload(rid, abort_all))

    async def pause_generation(self, mode: str = PauseMode.ABORT) -> None:
        """Hold generation; new requests wait. See `PauseMode`."""
        await self._link.call(api.PAUSE, api.pause_payload(mode))
        self._paused = True

    async def continue_generation(self) -> None:
        """Go on after `pause_generation`. Refused (NotReadyError) while memory is released."""
        if self._asleep:
            raise NotReadyError(f"cannot continue while {sorted(self._asleep)} is released", url=self.base_url)
        await self._link.call(api.CONTINUE, {})
        self._paused = False

    async def flush_cache(self) -> None:
        """Forget the prefix cache. Raises ServerBusyError when requests run that are not paused."""
        try:
            await self._link.call(api.FLUSH, {})
        except BadInputError as error:
            raise ServerBusyError(
                f"the cache of {self.base_url} was not flushed because requests are running: {error.message}",
                url=self.base_url,
            ) from error

    # -- weights ------------------------------------------------------------------------------------

    async def begin_weight_update(self) -> None:
        """Open an update session, where this version of SGLang has sessions.

        A session that a dead trainer left open is closed first: it belongs to nobody.
        """
        if not (await self.capabilities()).update_sessions:
            return
        try:
            await self._link.call(api.BEGIN_UPDATE, {})
        except VerlServerError as error:
            if "already open" not in error.message:
                raise
            await self._link.call(api.END_UPDATE, {})
            await self._link.call(api.BEGIN_UPDATE, {})

    async def end_weight_update(self) -> None:
        """Close the session; the server then finishes quantized layers."""
        if (await self.capabilities()).update_sessions:
            await self._link.call(api.END_UPDATE, {})

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> Json:
        """One bucket of an update. `serialized_named_tensors`: one base64 payload per TP rank.

        `VerlEngine.update_weights_from_tensor` is the call for whole models; this one is the bare endpoint.
        """
        api.check_tensor_payloads(
            serialized_named_tensors,
            int(self.server_args.get("tp_size") or 1) if self.server_args else None,
            load_format,
            self.server_args.get("custom_weight_loader") or (),
        )
        body = api.update_from_tensor_payload(
            serialized_named_tensors,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        return await self._weights_call(api.UPDATE_FROM_TENSOR, body)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Json:
        """Join a process group that the trainer opens at the same time (its rank 0 broadcasts)."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        return await self._weights_call(api.INIT_UPDATE_GROUP, body)

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Json:
        """Leave the process group."""
        return await self._weights_call(api.DESTROY_UPDATE_GROUP, {"group_name": group_name})

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        weight_version: str | None = None,
        load_format: str | None = None,
    ) -> Json:
        """Receive tensors by broadcast from the trainer, in the order given."""
        body = api.update_from_distributed_payload(
            names,
            [str(dtype) for dtype in dtypes],
            shapes,
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        return await self._weights_call(api.UPDATE_FROM_DISTRIBUTED, body)

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> Json:
        """Load a checkpoint folder that the server can read."""
        body = api.update_from_disk_payload(
            model_path, load_format=load_format, flush_cache=flush_cache, weight_version=weight_version
        )
        return await self._weights_call(api.UPDATE_FROM_DISK, body)

    async def update_weight_version(self, version: str, abort_all_requests: bool = False) -> None:
        """Name the weights that are served now."""
        body = {"new_version": str(version), "abort_all_requests": abort_all_requests}
        await self._link.call(api.WEIGHT_VERSION, body)

    async def weights_checker(self, action: str = "checksum") -> Json:
        """Hash (`checksum`), remember (`snapshot`) or compare the weights inside the server."""
        return await self._weights_call(api.WEIGHTS_CHECKER, api.checker_payload(action))

    async def _weights_call(self, endpoint: api.Endpoint, body: Json) -> Json:
        reply = await self._link.call(endpoint, body)
        return api.require_success(reply, self.base_url + endpoint.path)

    # -- memory -------------------------------------------------------------------------------------

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back (`weights`, `kv_cache`, `cuda_graph`; None: all) until it is resumed.

        Raises ServerBusyError while requests run: SGLang itself would die. New requests that other clients
        send meanwhile wait in the server until it is resumed. Weights come back undefined: push them.
        """
        wanted = api.memory_tags(tags)
        again = self._asleep.intersection(wanted)
        if again:
            raise BadInputError(f"{sorted(again)} is released already")
        if not self._asleep:
            running = self._in_flight or api.requests_in(await self.get_loads())
            if running:
                raise ServerBusyError(
                    f"{running} requests run on {self.base_url}: wait for them or abort them, then release",
                    url=self.base_url,
                )
            await self._link.call(api.PAUSE, api.pause_payload(PauseMode.RETRACT))
        self._asleep.update(wanted)
        await self._link.call(api.RELEASE_MEMORY, {"tags": wanted})

    @property
    def asleep(self) -> frozenset[str]:
        """Memory tags that are released."""
        return frozenset(self._asleep)

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back. None: all that is released. Generation goes on when nothing is missing."""
        wanted = api.memory_tags(tags) if tags is not None else sorted(self._asleep)
        missing = set(wanted) - self._asleep
        if missing or not wanted:
            raise BadInputError(f"{sorted(missing) or 'nothing'} is released; released: {sorted(self._asleep)}")
        await self._link.call(api.RESUME_MEMORY, {"tags": wanted})
        self._asleep.difference_update(wanted)
        if not self._asleep:
            await self._link.call(api.FLUSH, {})
            if not self._paused:
                await self._link.call(api.CONTINUE, {})

    # -- information --------------------------------------------------------------------------------

    async def get_model_info(self) -> Json:
        """SGLang's `/model_info`: path, architecture, weight version."""
        return dict(await self._link.call(api.MODEL_INFO))

    async def get_server_info(self) -> Json:
        """SGLang's `/server_info`: all resolved arguments and live scheduler state, without the keys."""
        return api.without_keys(await self._link.call(api.SERVER_INFO))

    async def get_loads(self) -> Json:
        """SGLang's `/v1/loads`: running and waiting requests and token usage, per DP rank."""
        return dict(await self._link.call(api.LOADS))

    async def is_ready(self) -> bool:
        """Whether new requests are served now (false while paused)."""
        return await self._is_ok(api.READY)

    async def ping(self) -> bool:
        """Whether the HTTP loop answers; true also while paused."""
        return await self._is_ok(api.PING)

    async def health(self) -> bool:
        """Whether one token can be generated. Takes a second; not meaningful while paused."""
        return await self._is_ok(api.HEALTH)

    async def _is_ok(self, endpoint: api.Endpoint) -> bool:
        try:
            await self._link.call(endpoint)
        except NotReadyError:
            return False
        return True

    async def capabilities(self) -> Capabilities:
        """What this version of SGLang can do, found by asking it; asked once."""
        if self._capabilities is None:
            self._capabilities = await probe(self._link)
        return self._capabilities

    # -- end ----------------------------------------------------------------------------------------

    def shutdown_process(self) -> None:
        """End the server's tree, blocking; from any thread. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._registration.stop()
            self._link.fail(ShutDownError(f"the adapter of {self.base_url} was shut down"))
        if self.process is not None:
            self.process.stop(self.config.timeouts.stop_s)

    async def shutdown(self) -> None:
        """End the server (unless attached) and close the connections. Safe to call twice."""
        await asyncio.to_thread(self.shutdown_process)
        await self._link.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
