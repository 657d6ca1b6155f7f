"""`FleetSpec`: settings of one fleet, made from verl's configuration of a rollout and of a model.

Arguments of the server in `rollout.engine_kwargs.verl_server` have precedence over what is made from verl's
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from verl_server.adapter.engine import with_common_names
from verl_server.config import AdapterConfig, EngineKind, MemoryTag, RolloutMode, Timeouts, WeightsConfig
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.types import Json

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig


# -- Versions ---------------------------------------------------------------------------------------
# Versions of verl that this plugin supports.

SUPPORTED_VERSIONS = ("0.9.0", "0.9.1")
"""Versions whose interfaces were tested. Other versions have other interfaces under the same names."""


def require_supported_version() -> None:
    """Raise UnsupportedError for another version of verl."""
    version = metadata.version("verl")
    if version.split("+")[0] not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"verl {version} is installed, but the rollout `verl_server` supports verl "
            f"{' and '.join(SUPPORTED_VERSIONS)}; run pip install 'verl=={SUPPORTED_VERSIONS[-1]}'"
        )


# -- Own settings -----------------------------------------------------------------------------------
# `OwnSettings`: settings of this plugin in `rollout.engine_kwargs.verl_server`. All other names in this section are
# arguments of the server.

SECTION = "verl_server"
"""Name of the own settings in `rollout.engine_kwargs`."""
ADAPTER_SETTINGS = ("engine_kind", "server_python", "log_dir", "use_forkserver", "timeouts")
"""Fields of `AdapterConfig` in the section."""
WEIGHTS_SETTINGS = ("transport", "folder", "host", "max_staging_bytes")
"""Fields of `WeightsConfig` in the section."""
ADDED_BY_VERL = {"max_logprobs"}
"""Options that verl itself writes into the sections of its engines."""
PARALLEL_SIZES = {
    "tp": "tensor_model_parallel_size", "tensor_parallel": "tensor_model_parallel_size",
    "dp": "data_parallel_size", "data_parallel": "data_parallel_size",
    "ep": "expert_parallel_size", "expert_parallel": "expert_parallel_size",
    "pp": "pipeline_model_parallel_size", "pipeline_parallel": "pipeline_model_parallel_size",
}  # fmt: skip
"""Arguments of the server, without `_size`, that say how many GPUs it has, and the settings of verl that say it."""


@dataclass(frozen=True)
class OwnSettings:
    """Settings of this plugin in `rollout.engine_kwargs.verl_server`."""

    adapter_config: AdapterConfig = field(default_factory=AdapterConfig)
    weights_config: WeightsConfig = field(default_factory=WeightsConfig)
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the servers."""


def parse_own_settings(config: RolloutConfig) -> tuple[OwnSettings, Json]:
    """The settings of this plugin, and the arguments of the server that the user gives. Raises BadInputError.

    The engine and its interpreter are resolved here: other processes may have other environment variables. The names
    of the arguments are those of SGLang where both engines have the argument.
    """
    sections = dict(config.engine_kwargs or {})
    arguments = dict(sections.pop(SECTION, None) or {})
    for name, section in sections.items():
        names = sorted(map(str, section.keys() - ADDED_BY_VERL)) if isinstance(section, Mapping) else [name]
        if names and section not in (None, ""):
            raise BadInputError(  # without values, which may be keys
                f"engine_kwargs.{name} has no effect with the rollout {SECTION}: move it ({', '.join(names)}) into "
                f"engine_kwargs.{SECTION}"
            )
    for name in arguments:
        if setting := PARALLEL_SIZES.get(name.removesuffix("_size").replace("_model_", "_")):
            raise BadInputError(
                f"engine_kwargs.{SECTION}.{name} is refused, because verl lends each server the GPUs that its own "
                f"setting says: set rollout.{setting}",
                argument=name,
            )
    adapter, weights = (
        {name: arguments.pop(name) for name in names if name in arguments}
        for names in (ADAPTER_SETTINGS, WEIGHTS_SETTINGS)
    )
    adapter["timeouts"] = Timeouts(**adapter.get("timeouts", {}))
    env = {str(name): str(value) for name, value in arguments.pop("env", {}).items()}
    own = OwnSettings(AdapterConfig(**adapter), WeightsConfig(**weights), env)
    return own, with_common_names(own.adapter_config, arguments)


# -- Fleet spec -------------------------------------------------------------------------------------

LORA_NAME = "verl_actor"
"""Name of the policy's LoRA adapter in the servers."""


@dataclass(frozen=True)
class FleetSpec:
    """Everything that the actor of a fleet must know. Made in verl's processes, because the actor imports no verl."""

    mode: RolloutMode
    server_args: Json
    own: OwnSettings
    prompt_length: int
    """`rollout.prompt_length`: number of tokens."""
    response_length: int
    """`rollout.response_length`: number of tokens."""
    context_length: int | None
    """Maximum number of tokens of prompt and response. None: only the server knows it."""
    frees_memory: bool
    """Whether `sleep` frees memory: `rollout.free_cache_engine`, for servers that share their devices."""
    uses_lora: bool
    """Whether the policy is an adapter of the served model."""
    serves_http: bool
    """Whether other programs ask the fleet over HTTP, as they ask a reward model."""

    @property
    def sleep_tags(self) -> tuple[MemoryTag, ...]:
        """Memory tags that `sleep` releases. The base weights of an adapter stay: they are never pushed again."""
        if not self.frees_memory:
            return ()
        return (MemoryTag.KV_CACHE,) if self.uses_lora else (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS)


def make_fleet_spec(
    config: RolloutConfig, model: HFModelConfig, mode: RolloutMode, *, serves_http: bool = False
) -> FleetSpec:
    """The settings of a fleet. Raises BadInputError and UnsupportedError, before anything is started."""
    require_supported(config, model)
    own, given = parse_own_settings(config)
    transport = own.weights_config.transport
    if transport == ("cuda_ipc" if mode is RolloutMode.STANDALONE else "distributed_buckets"):
        needed = "the devices of the trainer" if mode is RolloutMode.STANDALONE else "devices of their own"
        raise UnsupportedError(
            f"the transport {transport} needs servers on {needed}; leave engine_kwargs.verl_server.transport out"
        )
    engine_kind = own.adapter_config.engine_kind
    assert isinstance(engine_kind, EngineKind)
    uses_lora = mode is not RolloutMode.COLOCATED and _uses_lora(model)
    if uses_lora and mode is RolloutMode.STANDALONE:
        raise UnsupportedError(
            "verl does not send LoRA adapters to servers with devices of their own, only the base weights; set "
            "model.lora.merge=True, which sends merged weights"
        )
    context_length = _context_length(config, model, given)
    args = _server_args(config, model, engine_kind)
    if uses_lora:
        args |= _lora_args(model)
    if mode is RolloutMode.STANDALONE:
        args["enable_memory_saver"] = False  # it keeps its devices
    return FleetSpec(
        mode=mode,
        server_args=args | given,
        own=own,
        prompt_length=int(config.prompt_length),
        response_length=int(config.response_length),
        context_length=context_length,
        frees_memory=bool(config.free_cache_engine) and mode is not RolloutMode.STANDALONE,
        uses_lora=uses_lora,
        serves_http=serves_http,
    )


def require_supported(config: RolloutConfig, model: HFModelConfig) -> None:
    """Raise UnsupportedError for settings of verl that this plugin does not have, with the name of the setting."""
    wanted = {
        "rollout.disaggregation.enabled=True": config.disaggregation.enabled,
        "rollout.mtp.enable_rollout=True": config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout,
        f"rollout.pipeline_model_parallel_size={config.pipeline_model_parallel_size}": (
            config.pipeline_model_parallel_size > 1
        ),
        "rollout.prometheus.enable=True": config.prometheus.enable,
        "rollout.profiler.enable=True": config.profiler is not None and config.profiler.get("enable", False),
        f"rollout.quantization={config.quantization}": config.quantization,
        "rollout.enable_rollout_routing_replay=True": config.enable_rollout_routing_replay,
        f"rollout.logprobs_mode={config.logprobs_mode}": config.logprobs_mode not in (None, "processed_logprobs"),
        "rollout.qat": (config.qat or {}).get("enable", False),
        f"rollout.checkpoint_engine.backend={config.checkpoint_engine.backend}": config.checkpoint_engine.backend
        not in ("naive", "verl_server"),
    }
    for setting, is_wanted in wanted.items():
        if is_wanted:
            hint = "; use `verl_server`, or `naive` for servers that share the devices of the trainer"
            raise UnsupportedError(
                f"the rollout verl_server does not support {setting}{hint if 'checkpoint_engine' in setting else ''}"
            )


def _server_args(config: RolloutConfig, model: HFModelConfig, engine_kind: EngineKind) -> Json:
    """verl's settings as arguments of the server, by the names that both engines have."""
    args: Json = {
        "model_path": model.local_path if "://" in model.path else model.path,
        "dtype": config.dtype,
        "tp_size": config.tensor_model_parallel_size,
        "load_format": config.load_format,
        "trust_remote_code": model.trust_remote_code,
        "max_running_requests": config.max_num_seqs,
        "mem_fraction_static": config.gpu_memory_utilization,
        "random_seed": config.seed,
    }
    if config.max_model_len is not None:
        args["context_length"] = config.max_model_len
    if engine_kind is EngineKind.SGLANG:
        args |= {
            "disable_radix_cache": not config.enable_prefix_caching,
            "disable_cuda_graph": config.enforce_eager,
            "skip_tokenizer_init": config.skip_tokenizer_init,
            "tp_size": config.tensor_model_parallel_size * config.data_parallel_size,
            "dp_size": config.data_parallel_size,
            "ep_size": config.expert_parallel_size,
        }
        return args
    if config.data_parallel_size > 1 or config.expert_parallel_size > 1:
        raise UnsupportedError(
            "a vLLM server of the rollout verl_server has data_parallel_size=1 and expert_parallel_size=1; use more "
            "replicas, or engine_kind=sglang"
        )
    return args | {
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enforce_eager": config.enforce_eager,
        "max_prefill_tokens": config.max_num_batched_tokens,
    }


def _uses_lora(model: HFModelConfig) -> bool:
    return _lora_rank(model) > 0 and not (model.lora or {}).get("merge", False)


def _lora_rank(model: HFModelConfig) -> int:
    """The rank of the adapter. FSDP has it in `model.lora_rank`, Megatron in `model.lora.rank`."""
    return max(int(model.lora_rank or 0), int((model.lora or {}).get("rank", 0) or 0))


def _lora_args(model: HFModelConfig) -> Json:
    modules = model.target_modules
    if isinstance(modules, str) and modules != "all-linear":
        raise UnsupportedError(
            f"model.target_modules={modules!r} is a pattern, which the servers cannot apply; list the names of the "
            "modules, or use all-linear, or model.lora.merge=True"
        )
    targets = ["all"] if isinstance(modules, str) or modules is None else list(modules)
    return {"enable_lora": True, "max_lora_rank": _lora_rank(model), "lora_target_modules": targets}


def _context_length(config: RolloutConfig, model: HFModelConfig, given: Json) -> int | None:
    """The longest context of the servers, in tokens. `given`: arguments of the server that the user gives."""
    for length in (given.get("context_length"), config.max_model_len):
        if length is not None:
            return int(length)
    for part in (model.hf_config, *(getattr(model.hf_config, name, None) for name in ("text_config", "llm_config"))):
        length = getattr(part, "max_position_embeddings", None)
        if length is not None:
            return int(length)
    return None
