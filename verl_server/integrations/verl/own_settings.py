"""`OwnSettings`: settings of this plugin in `rollout.engine_kwargs.verl_server`.

The section has the fields of `OwnSettings`. All other names are arguments of the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_server.adapter.engine import with_common_names
from verl_server.config import AdapterConfig, EngineKind, Timeouts, WeightsConfig
from verl_server.errors import BadInputError
from verl_server.types import Json

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

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
