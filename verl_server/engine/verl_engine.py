"""`VerlEngine`: the rollout engine on every trainer rank."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.engine import with_common_names
from verl_server.adapter.model_files import lora_paths_by_name
from verl_server.config import AdapterConfig, EngineKind, PauseMode, RemoteServer, Timeouts, WeightsConfig
from verl_server.engine.start import (
    BackendSource,
    RolloutFleet,
    connect_coordinator,
    require_mesh,
    start_backend,
    start_weight_updater,
)
from verl_server.errors import BadInputError, ShutDownError, VerlServerError, from_wire, to_wire
from verl_server.ranks.coordinator import RankCoordinator, to_peer_wire
from verl_server.ranks.placement import compute_placement
from verl_server.ranks.shared_meshes import engine_ended, engine_started
from verl_server.threads import call_in_thread
from verl_server.types import Json, WeightUpdateResult
from verl_server.validation import check_arguments, is_list, is_whole_number, to_plain
from verl_server.weights.manifest import fused_with
from verl_server.weights.update.options import Servers, UpdateOptions
from verl_server.weights.update.updater import EngineRanks, WeightUpdater

logger = logging.getLogger(__name__)


# -- Generation -------------------------------------------------------------------------------------
# Generation on every trainer rank: rank 0 asks the backend and all ranks get the same reply or the same stream.


def generation_request(fields: Json, *, return_logprob: bool | list[bool] | None, **arguments: Any) -> Json:
    """A backend's request. `arguments` are the other arguments of a generate method, `fields` its further fields.

    Arguments with their default value (None, or False for `return_logprob`) are left out, so that a request with a
    `rid` equals the same request that is sent to the fleet's router directly.
    """
    request = {name: value for name, value in arguments.items() if value is not None}
    if return_logprob is not None and return_logprob is not False:
        request["return_logprob"] = return_logprob
    return {**request, **fields}


def digest_of(request: Json) -> Json:
    """What a rank tells rank 0 about its request: a digest, or None for a request without a prompt.

    The id of a request does not count: it does not change the reply.
    """
    fields = {name: value for name, value in request.items() if name != "rid"}
    if not any(name in fields for name in ("prompt", "input_ids", "input_embeds")):
        return {"request": None}
    options = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return {"request": zlib.crc32(orjson.dumps(fields, default=_plain, option=options))}
    except TypeError:  # no JSON, for example a number of more than 64 bits: the backend of rank 0 says what is wrong
        return {"request": None}


def _plain(value: Any) -> Any:
    """A value that JSON does not know, for a digest: its numbers, its bytes, or its type."""
    if isinstance(value, bytes):
        return zlib.crc32(value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def require_same_request(contributions: list[Json]) -> None:
    """Raise BadInputError if ranks bring different requests: all get one reply, the one to the request of rank 0."""
    digests = [item["request"] for item in contributions]
    for rank, digest in enumerate(digests):
        if digest is not None and digests[0] is not None and digest != digests[0]:
            raise BadInputError(
                f"rank {rank} passed another request to generate than rank 0, but all ranks get the same reply. Pass "
                "equal requests on all ranks, or the request on rank 0 and prompt=None on the others. For a request "
                "of its own on each rank, use an engine for each rank, or a RolloutRouter",
                rank=rank,
            )


class RankGeneration:
    """Generation calls that all ranks of one engine make together."""

    def __init__(
        self,
        group: RankCoordinator,
        backend_for: Callable[[Json], Servers],
        get_refusal: Callable[[], VerlServerError | None],
        generation_s: float | None,
    ) -> None:
        """`backend_for` returns rank 0's backend for a request. `get_refusal` returns the reason why this rank cannot
        take part now, or None. `generation_s`: deadline of one generation in seconds.
        """
        self._group, self._backend_for, self._get_refusal = group, backend_for, get_refusal
        self._generation_s = generation_s

    def generate(self, request: Json) -> Any:
        """The reply to the request of rank 0, on all ranks."""

        def act(contributions: list[Json]) -> Any:
            require_same_request(contributions)
            return self._backend_for(request).generate(**request)

        return self._group.agree(
            self._group.next_call_id("generate"),
            act,
            contribution=digest_of(request),
            error=self._get_refusal(),
            action_timeout_s=self._generation_s,
        )

    async def async_generate(self, request: Json) -> Any:
        """`generate` for an event loop. Many calls can be in flight."""

        async def act(contributions: list[Json]) -> Any:
            require_same_request(contributions)
            return await (await self._async_backend_for(request)).async_generate(**request)

        return await self._group.agree_async(
            self._group.next_call_id("async_generate"),
            act,
            contribution=digest_of(request),
            error=self._get_refusal(),
            action_timeout_s=self._generation_s,
        )

    async def _async_backend_for(self, request: Json) -> Servers:
        """The backend for a request. For a request with LoRA adapters, a thread may ask the servers for their names."""
        if request.get("lora_path") is None:
            return self._backend_for(request)
        return await asyncio.to_thread(self._backend_for, request)

    def stream(self, request: Json) -> Iterator[Json]:
        """The growing replies to one prompt, on all ranks: rank 0 sends each event of the backend to the others."""
        group, call = self._group, self._group.next_call_id("stream")
        events = group.open_stream(call)
        try:
            group.agree(call, require_same_request, contribution=digest_of(request), error=self._get_refusal())
            if group.rank == 0:
                with _end_of_stream(group, call):
                    for event in self._backend_for(request).generate_stream(**request):
                        group.publish_event(call, event)
                        yield event
            else:
                while "end" not in (event := events.get()):
                    yield event
                _raise_end(event)
        finally:
            group.close_stream(call)

    async def async_stream(self, request: Json) -> AsyncIterator[Json]:
        """`stream` for an event loop."""
        group, call = self._group, self._group.next_call_id("async_stream")
        events = group.open_stream(call)

        async def act(contributions: list[Json]) -> None:
            require_same_request(contributions)

        try:
            await group.agree_async(call, act, contribution=digest_of(request), error=self._get_refusal())
            if group.rank == 0:
                with _end_of_stream(group, call):
                    backend = await self._async_backend_for(request)
                    async for event in backend.async_generate_stream(**request):
                        group.publish_event(call, event)
                        yield event
            else:
                while "end" not in (event := await call_in_thread(events.get)):
                    yield event
                _raise_end(event)
        finally:
            group.close_stream(call)
            events.put({"end": None})  # ends the thread that waits for a stream that was cancelled


@contextlib.contextmanager
def _end_of_stream(group: RankCoordinator, call: str) -> Iterator[None]:
    """On rank 0: tells the other ranks how the stream in the body ended, also when it failed."""
    end: Json | None = None
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        end = to_peer_wire(error, group.rank)
        raise
    finally:
        group.publish_event(call, {"end": end})


def _raise_end(event: Json) -> None:
    """Raise the error that ended rank 0's stream, if there was one."""
    if event["end"] is not None:
        raise from_wire(event["end"])


# -- Lora -------------------------------------------------------------------------------------------
# Names of the LoRA adapters that an engine's servers have, on rank 0.
#
# The engine refuses requests for other names, because SGLang takes an unknown `lora_path` for a model on the Hugging
# Face Hub and tries to download it.


class LoraAdapters:
    """The LoRA adapters of one engine: loads, replaces and removes them by name."""

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        """`server_args`: SGLang's arguments of the servers, as far as the caller knows them."""
        self._names = set(lora_paths_by_name(server_args.get("lora_paths")))
        self._max_rank, self._targets = server_args.get("max_lora_rank"), server_args.get("lora_target_modules")

    def load(self, backend: Servers, name: str, tensors: Mapping[str, torch.Tensor], config: Json) -> None:
        """Load a LoRA adapter. A LoRA adapter of the same name is removed first, when no request uses it any more.

        This includes a LoRA adapter that the servers loaded when they started. When the load fails, no LoRA adapter has
        the name, and requests for it are refused. Raises BadInputError, and removes nothing, for a name that is no
        string or is empty, and for a LoRA adapter that is too large for the arguments of the servers.
        """
        if not isinstance(name, str) or not name:
            raise BadInputError(f"the name of a LoRA adapter must be a string, and not empty; got {name!r}")
        self._require_capacity(config)
        if name in self._names:
            self.unload(backend, name)
        backend.load_lora_adapter(name, tensors, config)
        self._names.add(name)

    def unload(self, backend: Servers, name: str) -> None:
        """Remove a LoRA adapter. Raises BadInputError when there is no LoRA adapter of that name."""
        self.require(backend, name)
        self._names.discard(name)
        backend.unload_lora_adapter(name)

    def _require_capacity(self, config: Json) -> None:
        """Raise BadInputError for a LoRA adapter that the servers refuse only after the one of its name is removed."""
        problem, argument, limit = "", "max_lora_rank", self._max_rank
        if is_whole_number(limit) and config["r"] > limit:
            problem = f"rank {config['r']}"
        elif is_list(self._targets) and "all" not in self._targets:
            served = {part for target in self._targets for part in fused_with(str(target).rpartition(".")[2])}
            if unserved := sorted(set(config["target_modules"]) - served):
                problem, argument, limit = f"the target modules {unserved}", "lora_target_modules", self._targets
        if problem:
            raise BadInputError(
                f"the LoRA adapter has {problem}, but the servers were started with {argument}={limit}",
                argument=argument,
            )

    def require(self, backend: Servers, lora_path: Any) -> None:
        """Raise BadInputError unless a request's LoRA adapters are all loaded. `lora_path`: a name or a list.

        The backend is asked for a name that this engine has not loaded: an earlier engine, or the start of a fleet, may
        have loaded it.
        """
        for name in lora_path if is_list(lora_path) else [lora_path]:
            if name is None or name in self._names:
                continue
            self._names |= backend.list_lora_adapters()
            if name not in self._names:
                raise BadInputError(
                    f"there is no LoRA adapter {name!r}; loaded are {sorted(self._names)}. "
                    "Load it with load_lora_adapter"
                )


# -- Verl engine ------------------------------------------------------------------------------------


class VerlEngine:
    """A rollout engine for RL training: generates with SGLang or vLLM and takes the trainer's weights.

    Create it on all trainer ranks of `device_mesh_cpu`; a process that is the only rank, such as a notebook, needs no
    mesh. These arguments choose the servers and exclude each other:

    * `launch_server=True` (the default): a server process on this machine (one on each of `nnodes` nodes).
    * `launch_server=False`: SGLang's in-process `Engine`.
    * `servers`: running servers. Weights go to all of them, prompts to one after the other. They keep running.
    * `fleet`, on rank 0: a `RolloutManager`. The caller shuts it down; another `VerlEngine` can use it afterwards.

    `weights`: how weights travel. `timeouts` to `server_python`: fields of `AdapterConfig`. `env`: variables of the
    server. Others: arguments of the server, SGLang's or those of docs/vllm.md. `tp_size`: default is the mesh's size.

    `shutdown`, `staging_tensors` and the properties are local to a rank. All ranks must call all other methods in the
    same order and get equal results or errors: PeerError or ServerDiedError in all calls after a rank or server ended.
    """

    @check_arguments(skip=("device_mesh_cpu", "servers", "fleet"))
    def __init__(
        self,
        device_mesh_cpu: DeviceMesh | None = None,
        nnodes: int = 1,
        *,
        launch_server: bool | None = None,
        servers: Sequence[RemoteServer] | None = None,
        fleet: RolloutFleet | None = None,
        weights: WeightsConfig | None = None,
        timeouts: Timeouts | None = None,
        log_dir: Path | str | None = None,
        router_ip: str | None = None,
        router_port: int | None = None,
        use_forkserver: bool = True,
        engine_kind: EngineKind | str | None = None,
        server_python: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        **server_args: Any,
    ) -> None:
        device_mesh_cpu = require_mesh(device_mesh_cpu)
        timeouts = self._timeouts = timeouts or Timeouts()
        config = AdapterConfig(
            timeouts, log_dir, router_ip=router_ip, router_port=router_port, use_forkserver=use_forkserver,
            engine_kind=engine_kind, server_python=server_python)  # fmt: skip
        server_args, self._tp_rank = with_common_names(config, server_args), device_mesh_cpu.get_local_rank()
        placement = compute_placement(self._tp_rank, device_mesh_cpu.size(), nnodes, server_args)
        source = BackendSource(launch_server, () if servers is None else servers, fleet)
        self._backend: Servers | None = None
        self._weights: WeightUpdater | None = None
        self._at_loss: weakref.finalize[..., Any] | None = None
        self._loras = LoraAdapters(server_args)
        _wait_for_lost_engines(2 * timeouts.stop_s)
        self._group = group = connect_coordinator(device_mesh_cpu, nnodes, timeouts.ranks_s)
        self._generation = RankGeneration(group, self._backend_for, self._get_refusal, timeouts.generation_s)
        try:
            self._backend = start_backend(group, placement, source, server_args, config, env or {}, group.fail_all)
            on_failure = weakref.WeakMethod(self._on_failure)  # the threads of the group do not keep the engine
            trainer_ranks = frozenset(device_mesh_cpu.mesh.flatten().tolist())

            def end(error: VerlServerError) -> None:
                engine_ended(group, trainer_ranks, error)
                if (call := on_failure()) is not None:
                    call(error)

            group.on_failure = end
            engine_started(group, trainer_ranks)
            if group.failure is not None:  # since before the start: it may not have been noted
                end(group.failure)
            group.raise_failure()
            ranks = EngineRanks(group, placement, trainer_ranks, self._backend, timeouts.weights_s)
            self._weights = start_weight_updater(ranks, server_args, weights or WeightsConfig())
            self._at_loss = weakref.finalize(self, _end_lost_engine, group, self._backend, self._weights)
            self._at_loss.atexit = False  # the warden ends servers
        except BaseException:
            self.shutdown()
            raise

    # -- generation ---------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt (returns a dict) or many prompts (returns a list of dicts).

        All ranks pass the same request, or the ranks other than 0 no prompt. The reply is SGLang's: `output_ids`, and
        `meta_info` with `output_token_logprobs` as `[logprob, token id, text]`, `finish_reason` and `weight_version`
        (an int). `stream=True` needs one prompt and returns an iterator of growing replies. `rid`: request id; many
        prompts need a list with one id for each.
        `fields`: further fields of SGLang's request; with a fleet, also those of `RolloutRouter.generate`.

        Raises BadInputError, NotReadyError (memory is released), TornWeightsError, ServerDiedError, PeerError.
        """
        request = generation_request(
            fields, rid=rid, prompt=prompt, sampling_params=sampling_params, input_ids=input_ids, image_data=image_data,
            return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob, lora_path=lora_path, custom_logit_processor=custom_logit_processor,
        )  # fmt: skip
        return self._generation.stream(request) if stream else self._generation.generate(request)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **fields: Any,
    ) -> Any:
        """`generate` for an event loop; many calls can be in flight. With `stream=True`: an asynchronous iterator."""
        request = generation_request(
            fields, rid=rid, prompt=prompt, sampling_params=sampling_params, input_ids=input_ids, image_data=image_data,
            return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob, lora_path=lora_path, custom_logit_processor=custom_logit_processor,
        )  # fmt: skip
        return self._generation.async_stream(request) if stream else await self._generation.async_generate(request)

    # -- weights ------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version of the weights that the servers last held whole, on every rank. A torn update does not change it."""
        return self._require_updater().weight_version

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        load_format: str | None = None,
        *,
        weight_version: int | None = None,
        verify: bool = True,
        check_finite: bool = False,
        pause_mode: PauseMode | str = PauseMode.RETRACT,
        flush_cache: bool = True,
    ) -> WeightUpdateResult:
        """Load `named_tensors`, tensors by Hugging Face parameter name or pairs of name and tensor, into all servers.

        Tensors are DTensors with any FSDP2 or TP placement, or full plain tensors. Of plain tensors those of rank 0
        count; other ranks may pass none. A generator is consumed one tensor at a time. Shapes are checked, and floating
        point types are cast to the server's. A part of the parameters may be pushed; `num_missing` counts the others.

        `load_format`: None or "auto", kept for the historical signature. `weight_version`: above the current version;
        None: the next number. `verify`: compare checksums of the staged tensors with those that every TP rank has read,
        and check that a whole update has written every parameter. `check_finite`: refuse NaN and infinity.
        `pause_mode`: what happens to running requests; `in_place` keeps the KV cache of the old weights and needs
        `flush_cache=False`.

        Raises WeightManifestError or BadInputError before the servers are involved (they keep serving the old weights),
        TornWeightsError when the update failed half-way (push all weights again), PeerError, ServerDiedError.
        """
        options = UpdateOptions(to_plain(weight_version), verify, check_finite, pause_mode, flush_cache)
        return self._require_updater().update(named_tensors, load_format, options)

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        """The staging memory as CPU tensors by Hugging Face name, with full shapes and the server's dtypes.

        Parameters kept in it (`parameter.data = tensors[name]`, or this rank's slice of a shard) are pushed without a
        copy. The ranks of one machine share it: write only your own part, and not during a push. The content before the
        first push is undefined. Raises UnsupportedError with a transport that stages only parts.
        """
        return self._require_updater().staging_tensors()

    def load_lora_adapter(
        self, name: str, named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], config: Json
    ) -> None:
        """Load a LoRA adapter, or replace the adapter of that name. Requests use it with `lora_path=name`.

        Names are PEFT's; tensors are DTensors or full tensors. `config` is the content of PEFT's `adapter_config.json`,
        or `LoraConfig.to_dict()`. The server needs `enable_lora=True`, `max_lora_rank`, `lora_target_modules`. A
        replacement waits for requests with the old adapter. Every TP rank checks SHA-256 sums of what it received.

        Raises BadInputError or WeightManifestError before the servers are involved, PeerError, ServerDiedError.
        """
        call_id, weights = self._group.next_call_id("load_lora_adapter"), self._require_updater()

        def load(_: list[Json]) -> None:
            self._loras.load(self._require_backend(), name, *weights.prepare_lora_adapter(tensors, config))

        with weights.exclusive(named_tensors):
            tensors, error = weights.gather_on_cpu(call_id, named_tensors)
            self._group.agree(call_id, load, error=error, action_timeout_s=2 * self._timeouts.weights_s)

    def unload_lora_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Returns when the requests that use it have ended."""
        self._group.agree(
            self._group.next_call_id("unload_lora_adapter"),
            lambda _: self._loras.unload(self._require_backend(), name),
            error=self._get_refusal(allow_torn=True),
            action_timeout_s=self._timeouts.weights_s,
        )

    # -- control ------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release memory of the servers. `tags`: values of `MemoryTag`; None: all. Generation is then refused.

        Raises ServerBusyError while requests run, BadInputError for a server on a GPU without `enable_memory_saver`.
        """
        self._on_servers("release_memory_occupation", lambda backend: backend.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take released memory back. None: all of it. Weights are then torn until all of them are pushed."""
        self._on_servers("resume_memory_occupation", lambda backend: backend.resume_memory_occupation(tags))

    def flush_cache(self) -> None:
        """Remove the prefix cache of the servers. Raises ServerBusyError while requests run."""
        self._on_servers("flush_cache", lambda backend: backend.flush_cache())

    def _on_servers(self, operation: str, action: Callable[[Servers], None]) -> None:
        """Run `action` on rank 0, and record on all ranks which memory is released afterwards, also when it failed.

        A release that fails may have released the memory of some of the servers. Possible while the weights are torn.
        """

        error: VerlServerError | None = None

        def act(_: list[Json]) -> Json:
            nonlocal error
            servers = self._require_backend()
            try:
                action(servers)
            except VerlServerError as failure:
                error = failure
            return {"released": sorted(servers.released_memory), "error": None if error is None else to_wire(error)}

        outcome = self._group.agree(
            self._group.next_call_id(operation),
            act,
            error=self._get_refusal(allow_torn=True),
            action_timeout_s=4 * self._timeouts.control_s,
        )
        self._require_updater().released_memory = frozenset(outcome["released"])
        if outcome["error"] is not None:
            raise error or from_wire(outcome["error"])

    # -- state --------------------------------------------------------------------------------------

    @property
    def tp_rank(self) -> int:
        """Index of this rank in the mesh. Rank 0 drives the servers."""
        return self._tp_rank

    @property
    def adapter(self) -> HttpServerEngineAdapter | None:
        """The adapter of this node's server, on the node's first rank; of one replica with a fleet. Otherwise None."""
        return None if self._backend is None else self._backend.adapter

    def _backend_for(self, request: Json) -> Servers:
        """Rank 0's backend. Raises BadInputError for a request with an unknown LoRA adapter."""
        backend = self._require_backend()
        self._loras.require(backend, request.get("lora_path"))
        return backend

    def _require_backend(self) -> Servers:
        assert self._backend is not None
        return self._backend

    def _require_updater(self) -> WeightUpdater:
        if self._weights is None:
            raise ShutDownError("the engine was shut down")
        return self._weights

    def _get_refusal(self, allow_torn: bool = False) -> VerlServerError | None:
        """The reason why this rank cannot take part in a call, or None. All ranks then raise it."""
        if self._weights is None:
            return ShutDownError("the engine was shut down")
        return None if allow_torn else self._weights.find_torn()

    def _on_failure(self, error: VerlServerError) -> None:
        """A rank or a server has ended: calls in flight fail now, before their deadline."""
        if self._backend is not None:
            self._backend.fail(error)

    def shutdown(self) -> None:
        """End the use of the servers and free the staging memory. Local to this rank; safe to call twice.

        Ends a server that this engine started. Running servers and a fleet keep running.
        """
        if self._at_loss is not None:
            self._at_loss.detach()
        backend, self._backend = self._backend, None
        weights, self._weights = self._weights, None
        _end_use(self._group, backend, weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _end_use(group: RankCoordinator, backend: Servers | None, weights: WeightUpdater | None) -> None:
    """End the use of the servers and free the staging memory."""
    try:
        group.close()
    finally:
        try:
            if backend is not None:
                backend.shutdown()
        finally:
            if weights is not None:
                weights.close()


def _end_lost_engine(group: RankCoordinator, backend: Servers | None, weights: WeightUpdater | None) -> None:
    """Called when nothing refers to an engine any more, for example because a notebook has made another one.

    The garbage collector calls it in any thread, also in one that `_end_use` waits for or that holds a lock. So another
    thread does the work. `threading` would take locks of its own to start it.
    """

    def end() -> None:
        logger.warning("a VerlEngine was lost without shutdown(): its server ends now")
        try:
            _end_use(group, backend, weights)
        finally:
            _ending.discard(group)

    _ending.add(group)
    _thread.start_new_thread(end, ())


_ending: set[RankCoordinator] = set()
"""Of the lost engines that are ending now. Without a lock: the garbage collector adds to it."""


def _wait_for_lost_engines(timeout_s: float) -> None:
    """Let the servers of lost engines end: the next server of this process may need their memory and ports."""
    deadline = time.monotonic() + timeout_s
    while _ending:
        if time.monotonic() > deadline:
            logger.warning("the server of a lost VerlEngine has not ended for %g s; the next one starts", timeout_s)
            return
        time.sleep(0.02)
