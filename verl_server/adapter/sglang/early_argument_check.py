"""Server arguments that SGLang refuses, found without an import of SGLang, which takes seconds.

The declarations in SGLang's source files say which names and choices SGLang has. Some arguments are settings of this
library or names of other programs: their errors say what was meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from verl_server.adapter.sglang.argument_table import SglangInstallation, find_sglang_here, read_options
from verl_server.config import AdapterConfig, RecoveryConfig, RouterConfig, Timeouts, WeightsConfig
from verl_server.errors import BadInputError
from verl_server.server.argument_check import BOOLS, describe_problems

#: SGLang's names of arguments that its command line, vLLM or transformers call otherwise.
SGLANG_NAMES = {
    "tp": "tp_size", "pp": "pp_size", "dp": "dp_size", "ep": "ep_size", "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size", "data_parallel_size": "dp_size", "model": "model_path",
    "model_name_or_path": "model_path", "tokenizer": "tokenizer_path", "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length", "max_num_seqs": "max_running_requests", "torch_dtype": "dtype",
    "seed": "random_seed",
}  # fmt: skip
#: Where the settings classes are passed.
_SETTINGS = {
    AdapterConfig: "config=AdapterConfig({name}=...) of an adapter or a RolloutManager",
    Timeouts: "timeouts=Timeouts({name}=...) of a VerlEngine, or config=AdapterConfig(timeouts=...) of an adapter or a "
    "RolloutManager",
    WeightsConfig: "weights=WeightsConfig({name}=...) of a VerlEngine",
    RecoveryConfig: "recovery=RecoveryConfig({name}=...) of a RolloutManager",
    RouterConfig: "router=RouterConfig({name}=...) of a RolloutManager",
}
#: Arguments of one constructor of this library that another constructor does not have.
_ARGUMENTS = {
    "weights": "weights=WeightsConfig(...) of a VerlEngine", "fleet": "fleet=RolloutManager(...) of a VerlEngine",
    "servers": "servers=[RemoteServer(...)] of a VerlEngine", "launch_server": "launch_server=... of a VerlEngine",
    "config": "config=AdapterConfig(...) of an adapter or a RolloutManager, or as timeouts=... and log_dir=... of a "
    "VerlEngine",
    "env": "env={...} of a VerlEngine, a RolloutManager or an adapter",
    "mode": "mode=RolloutMode... of a RolloutManager",
    "replicas": "replicas=... of a RolloutManager", "launcher": "launcher=... of a RolloutManager",
    "recovery": "recovery=RecoveryConfig(...) of a RolloutManager",
    "router": "router=RouterConfig(...) of a RolloutManager",
    "router_process": "router_process=True of a RolloutManager",
}  # fmt: skip
#: Names that SGLang's `ServerArgs` has too.
_SHARED_NAMES = frozenset({"host", "max_queued_requests"})
#: Where each misplaced argument belongs.
PLACES = {
    item.name: place.format(name=item.name)
    for settings, place in _SETTINGS.items()
    for item in fields(settings)
    if item.name not in _SHARED_NAMES
} | _ARGUMENTS


def refuse_misplaced_arguments(names: Iterable[str]) -> None:
    """Raise BadInputError for a name that is no server argument, with the name or the place that was meant."""
    for name in names:
        if name in SGLANG_NAMES:
            raise BadInputError(
                f"there is no server argument {name!r}; did you mean {SGLANG_NAMES[name]!r}?", argument=name
            )
        if name in PLACES:
            raise BadInputError(f"{name!r} is no argument of the server: pass it as {PLACES[name]}", argument=name)


def find_early_refusal(
    server_args: Mapping[str, Any], own_names: Mapping[str, str], sglang: SglangInstallation | None = None
) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no refusal is found.

    `own_names` are those of `describe_problems`. `sglang`: the SGLang of the server; None is that of this process's
    environment. Does not import SGLang: choices and names that plugins of SGLang can
    add are left to `find_refusal`.
    """
    declared: dict[str, Collection[Any] | None] = {}
    for option in read_options(sglang).values():
        if option.choices_of_constant is None:
            declared.setdefault(option.field, BOOLS if option.converter == "bool" else option.choices)
    installation = find_sglang_here() if sglang is None else sglang
    if not declared or installation.has_other_plugins:
        server_args = {name: value for name, value in server_args.items() if name in declared}
    return describe_problems(server_args, declared, own_names, installation.version)
