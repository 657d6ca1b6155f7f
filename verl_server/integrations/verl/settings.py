"""`FleetSpec`: settings of one fleet, made from verl's configuration of a rollout and of a model.

Arguments of the server in `rollout.engine_kwargs.verl_server` have precedence over what is made from verl's
configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from verl_server.adapter.engine import with_common_names
from verl_server.config import AdapterConfig, EngineKind, MemoryTag, RolloutMode, Timeouts, WeightsConfig
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.types import Json
from verl_server.validation import require_whole_number

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
# `OwnSettings`: settings of this plugin in `rollout.engine_kwargs.verl_server`.
#
# The section has the fields of `OwnSettings`. All other names are arguments of the server.

SECTION = "verl_server"
"""Name of the own settings in `rollout.engine_kwargs`."""
_FULL_SECTION = f"engine_kwargs.{SECTION}"
ADDED_BY_VERL = {"max_logprobs"}
"""Options that verl itself writes into the sections of its engines."""
PARALLEL_SIZES = {
    "tp": "tensor_model_parallel_size", "tp_size": "tensor_model_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size", "dp": "data_parallel_size", "dp_size": "data_parallel_size",
    "ep": "expert_parallel_size", "ep_size": "expert_parallel_size", "pp": "pipeline_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size", "pipeline_parallel_size": "pipeline_model_parallel_size",
}  # fmt: skip
"""Arguments of the server that say how many GPUs it has, and the settings of verl that say it."""


@dataclass(frozen=True)
class OwnSettings:
    """Settings of this plugin in `rollout.engine_kwargs.verl_server`."""

    engine_kind: str | None = None
    """`AdapterConfig.engine_kind`: "sglang" (the default) or "vllm"."""
    server_python: str | None = None
    """`AdapterConfig.server_python`: interpreter of the environment that has the engine."""
    log_dir: str | None = None
    """Folder for the logs of the servers."""
    use_forkserver: bool = True
    """`AdapterConfig.use_forkserver`."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    """Fields of `Timeouts`, for example `start_s`: seconds until a server is ready."""
    transport: str = "auto"
    """`WeightsConfig.transport`."""
    folder: str | None = None
    """`WeightsConfig.folder`."""
    host: str | None = None
    """`WeightsConfig.host`: address of the trainer's machine as the servers reach it."""
    max_staging_bytes: int | None = None
    """`WeightsConfig.max_staging_bytes`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the servers."""

    @property
    def adapter_config(self) -> AdapterConfig:
        return AdapterConfig(
            timeouts=Timeouts(**self.timeouts),
            log_dir=self.log_dir,
            use_forkserver=self.use_forkserver,
            engine_kind=self.engine_kind,
            server_python=self.server_python,
        )

    @property
    def weights_config(self) -> WeightsConfig:
        return WeightsConfig(
            transport=self.transport, folder=self.folder, host=self.host, max_staging_bytes=self.max_staging_bytes
        )


def parse_own_settings(config: RolloutConfig) -> tuple[OwnSettings, Json]:
    """The settings of this plugin, and the arguments of the server that the user gives. Raises BadInputError.

    The engine and its interpreter are resolved here: other processes may have other environment variables. The names
    of the arguments are those of SGLang where both engines have the argument.
    """
    sections = config.engine_kwargs or {}
    if not isinstance(sections, Mapping):
        raise BadInputError(f"engine_kwargs must be a mapping of names and values, got {sections!r}")
    _refuse_other_sections(sections)
    section = sections.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise BadInputError(f"{_FULL_SECTION} must be a mapping of names and values, got {section!r}")
    arguments = {str(name): value for name, value in section.items()}
    own = {name: arguments.pop(name) for name in _own_names() if name in arguments}
    _refuse_parallel_sizes(arguments)
    for name in ("env", "timeouts"):
        given = own.get(name, {})
        if not isinstance(given, Mapping) or None in given.values():
            raise BadInputError(f"{_FULL_SECTION}.{name} must be a mapping of names and values, got {given!r}")
    if not isinstance(own.get("use_forkserver", True), bool):
        raise BadInputError(f"{_FULL_SECTION}.use_forkserver must be true or false, got {own['use_forkserver']!r}")
    own["env"] = {str(name): str(value) for name, value in own.get("env", {}).items()}
    settings = OwnSettings(**own)
    adapter, _ = settings.adapter_config, settings.weights_config  # raises BadInputError
    python = None if adapter.server_python is None else str(adapter.server_python)
    settings = dataclasses.replace(settings, engine_kind=str(adapter.engine_kind), server_python=python)
    return settings, with_common_names(adapter, arguments)


def _own_names() -> list[str]:
    return [each.name for each in dataclasses.fields(OwnSettings)]


def _refuse_other_sections(sections: Mapping[Any, Any]) -> None:
    """Raise BadInputError for a section that is not empty and not that of this plugin."""
    for name, section in sections.items():
        if name == SECTION or section in (None, "", {}):
            continue
        problem = f"engine_kwargs.{name} has no effect with the rollout {SECTION}"
        if not isinstance(section, Mapping):
            is_section = name in set(EngineKind)
            raise BadInputError(f"{problem}: write {_FULL_SECTION}.{'NAME' if is_section else name}=VALUE")
        if name in _own_names():
            raise BadInputError(f"{problem}: move it to {_FULL_SECTION}.{name}")
        given = set(map(str, section)) - (ADDED_BY_VERL if name in set(EngineKind) else set())
        if given:
            raise BadInputError(f"{problem}: move {sorted(given)} to {_FULL_SECTION}")


def _refuse_parallel_sizes(names: Iterable[str]) -> None:
    """Raise BadInputError for a number of GPUs, which verl's own setting says. Other names are left to the engine."""
    for name in names:
        if setting := name if name in PARALLEL_SIZES.values() else PARALLEL_SIZES.get(name):
            raise BadInputError(
                f"{_FULL_SECTION}.{name} is refused, because verl lends each server the GPUs that its own setting "
                f"says: set rollout.{setting}",
                argument=name,
            )


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
    shares_devices = mode is not RolloutMode.STANDALONE
    if own.transport == ("distributed_buckets" if shares_devices else "cuda_ipc"):
        needed, other = "devices of their own", "the devices of the trainer"
        needed, other = (needed, other) if shares_devices else (other, needed)
        raise UnsupportedError(
            f"the transport {own.transport} needs servers on {needed}, but these use {other}; leave "
            "engine_kwargs.verl_server.transport out"
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
    settings = {
        f"engine_kwargs.{SECTION}.context_length": given.get("context_length"),
        "rollout.max_model_len": config.max_model_len,
    }
    for name, length in settings.items():
        if length is not None:
            return require_whole_number(name, length)
    return _max_position_embeddings(model.hf_config)


def _max_position_embeddings(hf_config: Any) -> int | None:
    """The longest context of the model, in tokens."""
    for part in (hf_config, getattr(hf_config, "text_config", None), getattr(hf_config, "llm_config", None)):
        length = getattr(part, "max_position_embeddings", None)
        if length is not None:
            return int(length)
    return None
