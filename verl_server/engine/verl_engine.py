"""`VerlEngine`: the rollout engine as every trainer rank sees it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from verl_server.config import AdapterConfig, PauseMode, RemoteServer, Timeouts, WeightsConfig
from verl_server.engine.backend import Backend
from verl_server.engine.commit import Order, first_version, order_of
from verl_server.engine.group import TpGroup
from verl_server.engine.lora import LoraAdapters
from verl_server.engine.placement import place
from verl_server.engine.start import WeightsSide, share_over, start_backend, start_weights_side
from verl_server.engine.streams import async_stream_of, stream_of
from verl_server.errors import (
    BadInputError,
    PeerError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    VerlServerError,
)
from verl_server.types import WeightUpdateResult

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Json = dict[str, Any]
R = TypeVar("R")


class VerlEngine:
    """One rollout engine for the trainer ranks of `device_mesh_cpu`, made on all of them.

    `launch_server=True` (the default) runs SGLang in a server process of its own, driven over HTTP by rank 0
    of the mesh; `launch_server=False` runs SGLang's in-process `Engine` there; with `servers` nothing is
    started, weights go to all of these and prompts to one after the other. Other keyword arguments are
    SGLang's `ServerArgs`, passed on verbatim; `tp_size` is the size of the mesh unless given. `timeouts`,
    `log_dir`, `router_ip`, `router_port` are settings of the adapter (`AdapterConfig`), `env` adds to the
    server's environment, `weights` says how weights travel.

    Every method except `shutdown` is a call of all ranks of the mesh, in the same order; all get the same
    result, or raise the same error. When a rank has died or a server has ended, every later call says so.
    """

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int = 1,
        *,
        launch_server: bool = True,
        servers: Sequence[RemoteServer] = (),
        weights: WeightsConfig | None = None,
        timeouts: Timeouts | None = None,
        log_dir: Any = None,
        router_ip: str | None = None,
        router_port: int | None = None,
        env: dict[str, str] | None = None,
        **server_args: Any,
    ) -> None:
        if device_mesh_cpu.ndim != 1:
            raise BadInputError(
                f"device_mesh_cpu must have one dimension, the ranks of this engine; got {device_mesh_cpu}"
            )
        self._timeouts = timeouts or Timeouts()
        self._config = AdapterConfig(
            timeouts=self._timeouts, log_dir=log_dir, router_ip=router_ip, router_port=router_port
        )
        self._tp_rank, size = device_mesh_cpu.get_local_rank(), device_mesh_cpu.size()
        self._placement = place(self._tp_rank, size, nnodes, server_args)
        self._backend: Backend | None = None
        self._weights: WeightsSide | None = None
        self._version = first_version(server_args)
        self._torn: TornWeightsError | None = None
        self._loras = LoraAdapters(server_args.get("lora_paths"))
        self._group = TpGroup.form(self._tp_rank, size, share_over(device_mesh_cpu), nnodes > 1, self._timeouts.ranks_s)
        try:
            self._backend = start_backend(
                self._group, self._placement, launch_server, servers, server_args, self._config, env or {}, self._fault
            )
            self._group.on_broken = self._on_broken
            ranks = frozenset(device_mesh_cpu.mesh.flatten().tolist())
            self._weights = start_weights_side(
                self._group,
                self._placement,
                server_args,
                ranks,
                self._backend,
                weights or WeightsConfig(),
                self._timeouts.weights_s,
            )
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
        return_logprob: bool | list[bool] | None = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt (returns a dict) or many (a list of dicts), the same on every rank.

        The reply is SGLang's: `output_ids`, and `meta_info` with `output_token_logprobs` as
        `[logprob, token id, text]`, `finish_reason` and `weight_version`. What rank 0 asks for is generated.
        With `stream=True` an iterator of replies that grow (one prompt only).

        Raises BadInputError, NotReadyError (memory released), TornWeightsError, ServerDiedError, PeerError.
        """
        request = _request(locals(), fields)
        if stream:
            return stream_of(self._group, lambda: self._head_for(request), request, self._refusal())
        call = self._group.next_call("generate")
        limit = self._timeouts.generation_s
        return self._group.agree(
            call, lambda _: self._head_for(request).generate(**request), error=self._refusal(), action_s=limit
        )

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] | None = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for an event loop; any number may be under way. With `stream=True` an async iterator."""
        request = _request(locals(), fields)
        if stream:
            return async_stream_of(self._group, lambda: self._head_for(request), request, self._refusal())
        call = self._group.next_call("async_generate")
        return await self._group.agree_async(
            call, lambda _: self._head_for(request).async_generate(**request), error=self._refusal()
        )

    # -- weights ------------------------------------------------------------------------------------

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        *,
        weight_version: int | str | None = None,
        verify: bool = True,
        check_finite: bool = False,
        pause_mode: PauseMode | str = PauseMode.RETRACT,
        flush_cache: bool = True,
    ) -> WeightUpdateResult:
        """Make the server serve `named_tensors`: pairs of Hugging Face parameter name and tensor.

        Tensors are DTensors (any FSDP2 or TP placement), or plain full ones (then rank 0's count, and other
        ranks may bring nothing). A generator is consumed one tensor at a time. Shapes are checked, float
        types are cast to the server's. A subset updates only that subset; `missing` in the result says how
        many parameters it left out. With `verify` every TP rank's checksums of what it read are compared with
        what was staged, and a whole update must have written every parameter of the server. `check_finite`
        refuses NaN and infinity. `pause_mode` is what becomes of requests in flight; `in_place` keeps their KV
        cache of the old weights, so it needs `flush_cache=False`. `weight_version` is a number that only grows;
        without it the next one is taken.

        Raises WeightManifestError or BadInputError before the server hears of it (old weights are served
        on), TornWeightsError when it failed half-way (push again), PeerError, ServerDiedError.
        """
        started = time.monotonic()
        call = self._group.next_call("update_weights")
        names, error, sharded = self._stage(named_tensors, load_format, check_finite)
        gather_s = time.monotonic() - started
        weights = self._weights_side()
        bring = weights.bring(names, sharded)
        wire = self._group.agree(
            call,
            lambda brought: self._commit(
                brought, names, order_of(self._version, weight_version, verify, pause_mode, flush_cache)
            ),
            bring=bring,
            error=error,
            action_s=4 * self._timeouts.weights_s,
        )
        self._version = int(wire["count"])
        self._torn = None if wire["torn"] is None else TornWeightsError(**wire["torn"])
        self._confirm(weights, wire, names)
        if self._torn is not None:
            raise self._torn
        return dataclasses.replace(WeightUpdateResult(**wire["result"]), gather_s=gather_s)

    def _stage(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], load_format: str | None, finite: bool
    ) -> tuple[list[str], VerlServerError | None, bool]:
        """This rank's part; any failure is carried to the agreement, so that all ranks learn of it."""
        refusal = self._refusal(allow_torn=True)
        if refusal is None and load_format not in (None, "auto"):
            refusal = BadInputError(
                f"load_format {load_format!r} is not needed: tensors are pushed by name (leave it out)"
            )
        if refusal is None and "weights" in self._asleep():
            refusal = BadInputError("the server's weights are released: resume_memory_occupation(['weights']) first")
        if refusal is not None:
            return [], refusal, False
        stage = self._weights_side().stage(self._group, self._timeouts.weights_s, finite)
        names, failure = self._reading(lambda: stage.write(named_tensors))
        return names or [], failure, stage.sharded

    def _reading(self, read: Callable[[], R]) -> tuple[R | None, VerlServerError | None]:
        """What `read` makes of the caller's tensors, or its failure as an error that every rank can be told."""
        try:
            return read(), None
        except VerlServerError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - the caller's iterator failed: every rank must learn of it
            wrapped = PeerError(
                f"reading named_tensors failed on rank {self._tp_rank}: {type(error).__name__}: {error}",
                ranks=[self._tp_rank],
            )
            wrapped.__cause__ = error
            return None, wrapped

    def _commit(self, brought: list[Json], names: list[str], order: Order) -> Json:
        count = int(order.weight_version)
        try:
            result = self._weights_side().commit(self._head(), brought, names, order, self._torn is not None)
        except TornWeightsError as error:
            wire = {"message": error.message, **error.details}
            return {"count": count, "torn": wire, "result": None, "update_id": None}
        return {"count": count, "torn": None, **result}

    def _confirm(self, weights: WeightsSide, wire: Json, names: list[str]) -> None:
        """With several nodes: every node's leader looks at the reports of its own node."""
        if self._placement.nnodes == 1 or wire["update_id"] is None:
            return
        error = weights.check(wire["update_id"], wire["verify"], names) if self._placement.is_node_leader else None
        try:
            self._group.agree(self._group.next_call("confirm"), lambda _: None, error=error, action_s=10.0)
        except VerlServerError as failure:
            self._torn = TornWeightsError(f"the weight update failed on a node: {failure.message}", **failure.details)

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        """The staging memory as CPU tensors, by Hugging Face name, full shapes, in the server's dtypes.

        Keep parameters in it (`parameter.data = tensors[name]`, or a rank's own slice for a shard) and pushing
        them copies nothing. All ranks of one machine share it: write your own part only, and not during a push.
        What is in it before the first push is undefined.
        """
        return self._weights_side().tensors()

    def load_lora_adapter(
        self, name: str, named_tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]
    ) -> None:
        """Load a LoRA adapter, or replace the one of that name; requests use it with `lora_path=name`.

        Tensors by PEFT's names (DTensors or whole ones), `config` as in PEFT's `adapter_config.json` (`r`,
        `lora_alpha`, `target_modules`). The server needs `enable_lora=True`, `max_lora_rank` and
        `lora_target_modules`. Replacing waits for the requests that use the old one. Every TP rank checks
        SHA-256 sums of what it received.

        Raises BadInputError or WeightManifestError before the server hears of it, PeerError, ServerDiedError.
        """
        call = self._group.next_call("load_lora")
        stage = self._weights_side().stage(self._group, self._timeouts.weights_s, finite=False)
        tensors, error = self._reading(lambda: stage.collect(named_tensors))

        def load(_: list[Json]) -> None:
            whole = tensors or {}
            self._weights_side().check_adapter(whole, config)
            self._loras.load(self._head(), name, whole, config)

        self._group.agree(
            call,
            load,
            error=error,
            action_s=2 * self._timeouts.weights_s,
        )

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter; returns when the requests that use it have ended."""
        self._group.agree(
            self._group.next_call("unload_lora"),
            lambda _: self._loras.unload(self._head(), name),
            error=self._refusal(allow_torn=True),
            action_s=self._timeouts.weights_s,
        )

    # -- control ------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give the server's memory back (`weights`, `kv_cache`, `cuda_graph`; None: all).

        Raises ServerBusyError while requests run. Afterwards generation is refused until `resume_...`.
        """
        self._control("release_memory", lambda head: head.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back (None: all that is released). Weights come back undefined: push them."""
        self._control("resume_memory", lambda head: head.resume_memory_occupation(tags))

    def flush_cache(self) -> None:
        """Forget the prefix cache. Raises ServerBusyError while requests run."""
        self._control("flush_cache", lambda head: head.flush_cache())

    def _control(self, operation: str, action: Callable[[Backend], None]) -> None:
        call = self._group.next_call(operation)

        def act(_: list[Json]) -> list[str]:
            action(self._head())
            return sorted(self._head().asleep)

        limit = 4 * self._timeouts.control_s
        asleep = self._group.agree(call, act, error=self._refusal(allow_torn=True), action_s=limit)
        self._weights_side().asleep = frozenset(asleep)

    # -- state --------------------------------------------------------------------------------------

    @property
    def tp_rank(self) -> int:
        """This rank's number in the mesh; 0 drives the server."""
        return self._tp_rank

    @property
    def adapter(self) -> Any:
        """On rank 0 with a server: its `HttpServerEngineAdapter` (URL, keys, every endpoint). Else None."""
        return getattr(self._backend, "adapter", None) if self._tp_rank == 0 else None

    def _head(self) -> Backend:
        assert self._backend is not None
        return self._backend

    def _head_for(self, request: Json) -> Backend:
        """Rank 0's backend. Raises BadInputError for a request that it must not see."""
        self._loras.require(request["lora_path"])
        return self._head()

    def _weights_side(self) -> WeightsSide:
        if self._weights is None:
            raise ShutDownError("the engine was shut down")
        return self._weights

    def _asleep(self) -> frozenset[str]:
        return self._weights_side().asleep

    def _refusal(self, allow_torn: bool = False) -> VerlServerError | None:
        """Why this rank cannot take part in a call now; it then fails on all ranks."""
        if self._weights is None:
            return ShutDownError("the engine was shut down")
        return None if allow_torn else self._torn

    def _fault(self, error: ServerDiedError) -> None:
        """The server of this rank's node has ended: every rank's calls fail now, not at a deadline."""
        self._group.fault(error)

    def _on_broken(self, error: VerlServerError) -> None:
        if self._backend is not None:
            self._backend.fail(error)

    def shutdown(self) -> None:
        """End the server and give everything back. Local to this rank; safe to call twice."""
        self._group.close()
        backend, self._backend = self._backend, None
        weights, self._weights = self._weights, None
        try:
            if backend is not None:
                backend.shutdown()
        finally:
            if weights is not None:
                weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _request(arguments: Json, fields: Json) -> Json:
    """The keyword arguments of a generate method, without those that are not SGLang's."""
    named = {name: value for name, value in arguments.items() if name not in ("self", "stream", "fields")}
    return {**named, **fields}
