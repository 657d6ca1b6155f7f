"""`VerlEngine`: the rollout engine as every trainer rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from verl_server.config import AdapterConfig, PauseMode, RemoteServer, Timeouts, WeightsConfig
from verl_server.engine.backend import Backend
from verl_server.engine.lora import LoraAdapters
from verl_server.engine.start import share_over, start_backend, start_weight_updater
from verl_server.engine.streams import async_stream_of, stream_of
from verl_server.errors import BadInputError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.types import WeightUpdateResult
from verl_server.weights.update.updater import Ranks, UpdateOptions, WeightUpdater

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Json = dict[str, Any]


class VerlEngine:
    """One rollout engine for the trainer ranks of `device_mesh_cpu`, made on all of them.

    `launch_server=True` (the default) runs SGLang in a server process of its own, driven over HTTP by rank 0
    of the mesh; `launch_server=False` runs SGLang's in-process `Engine` there; with `servers` nothing is
    started, weights go to all of these and prompts to one after the other; `fleet` (on rank 0) is a `RolloutManager`
    with replicas of its own, which the engine shuts down. Other keyword arguments are
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
        fleet: Backend | None = None,
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
        self._placement = compute_placement(self._tp_rank, size, nnodes, server_args)
        self._backend: Backend | None = None
        self._weights: WeightUpdater | None = None
        self._loras = LoraAdapters(server_args.get("lora_paths"))
        self._group = RankCoordinator.connect(
            self._tp_rank, size, share_over(device_mesh_cpu), nnodes > 1, self._timeouts.ranks_s
        )
        try:
            self._backend = start_backend(
                self._group,
                self._placement,
                launch_server,
                servers,
                fleet,
                server_args,
                self._config,
                env or {},
                self._fault,
            )
            self._group.on_failure = self._on_broken
            numbers = frozenset(device_mesh_cpu.mesh.flatten().tolist())
            ranks = Ranks(self._group, self._placement, numbers, self._backend, self._timeouts.weights_s)
            self._weights = start_weight_updater(ranks, self._backend, server_args, weights or WeightsConfig())
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
        call = self._group.next_call_id("generate")
        limit = self._timeouts.generation_s
        return self._group.agree(
            call, lambda _: self._head_for(request).generate(**request), error=self._refusal(), action_timeout_s=limit
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
        call = self._group.next_call_id("async_generate")
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
        options = UpdateOptions(weight_version, verify, check_finite, pause_mode, flush_cache)
        return self._weight_updater().update(named_tensors, load_format, options)

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        """The staging memory as CPU tensors, by Hugging Face name, full shapes, in the server's dtypes.

        Keep parameters in it (`parameter.data = tensors[name]`, or a rank's own slice for a shard) and pushing
        them copies nothing. All ranks of one machine share it: write your own part only, and not during a push.
        What is in it before the first push is undefined.
        """
        return self._weight_updater().tensors()

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
        call = self._group.next_call_id("load_lora")
        weights = self._weight_updater()
        tensors, error = weights.collected(named_tensors)

        def load(_: list[Json]) -> None:
            weights.check_adapter(tensors, config)
            self._loras.load(self._head(), name, tensors, config)

        self._group.agree(call, load, error=error, action_timeout_s=2 * self._timeouts.weights_s)

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter; returns when the requests that use it have ended."""
        self._group.agree(
            self._group.next_call_id("unload_lora"),
            lambda _: self._loras.unload(self._head(), name),
            error=self._refusal(allow_torn=True),
            action_timeout_s=self._timeouts.weights_s,
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
        call = self._group.next_call_id(operation)

        def act(_: list[Json]) -> list[str]:
            action(self._head())
            return sorted(self._head().asleep)

        limit = 4 * self._timeouts.control_s
        asleep = self._group.agree(call, act, error=self._refusal(allow_torn=True), action_timeout_s=limit)
        self._weight_updater().asleep = frozenset(asleep)

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

    def _weight_updater(self) -> WeightUpdater:
        if self._weights is None:
            raise ShutDownError("the engine was shut down")
        return self._weights

    def _refusal(self, allow_torn: bool = False) -> VerlServerError | None:
        """Why this rank cannot take part in a call now; it then fails on all ranks."""
        if self._weights is None:
            return ShutDownError("the engine was shut down")
        return None if allow_torn else self._weights.torn

    def _fault(self, error: ServerDiedError) -> None:
        """The server of this rank's node has ended: every rank's calls fail now, not at a deadline."""
        self._group.fail_all(error)

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
