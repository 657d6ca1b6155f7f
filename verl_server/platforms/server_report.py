"""What the servers of this library add to their reply to `/server_info`: released memory, dtypes of parameters.

A server reports the dtype of most of its parameters, and the parameters that have another one: SGLang and vLLM keep
biases of routers and some other parameters of a bfloat16 model in float32. Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

RELEASED_MEMORY = "verl_server_released_memory"
"""Key of the released memory tags in each element of `internal_states` in a reply to `/server_info`."""
PARAMETER_DTYPES = "verl_server_parameter_dtypes"
"""Key of the report in each element of `internal_states` in a reply to `/server_info`."""
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that are cast to each other when a tensor is pushed, from the smallest range to the largest."""
_NUMBER = re.compile(r"\.\d+(?=\.)")
_FIRST_LIST = re.compile(r"[^.]+\.\*\..*")


def report_dtypes(parameters: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The report on named tensors: `main`, and in `others` the dtypes by the pattern of the name.

    Tensors without elements are left out: they do not have the dtype that the model's loader has filled.
    """
    sizes: Counter[str] = Counter()
    by_pattern: defaultdict[str, set[str]] = defaultdict(set)
    for name, tensor in parameters:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in FLOAT_DTYPES and tensor.numel():
            sizes[dtype] += tensor.numel()
            by_pattern[_pattern_of(name)].add(dtype)
    main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return {"main": main, "others": {name: sorted(found) for name, found in by_pattern.items() if found != {main}}}


def served_dtypes(reports: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, set[str]]:
    """By name of a checkpoint's tensor: the dtypes of the parameters into which the reporting servers load it.

    A reported parameter without a tensor of its name counts for all tensors that are directly in the same module:
    SGLang computes Mamba's `mixer.A` from `mixer.A_log`. If the checkpoint has no such module, it counts for all
    tensors in the module around it: SGLang's `self_attn.qkv_conv1d` is `q_conv1d`, `k_conv1d` and `v_conv1d`.
    """
    patterns = {name: _pattern_of(name) for name in names}
    known, found = frozenset(patterns.values()), {name: set[str]() for name in patterns}
    modules = {pattern.rpartition(".")[0] for pattern in known}
    for report in reports:
        others: Mapping[str, list[str]] = report["others"]
        by_module: defaultdict[str, set[str]] = defaultdict(set)
        around: defaultdict[str, set[str]] = defaultdict(set)
        for pattern in others.keys() - known:
            if (module := pattern.rpartition(".")[0]) in modules:
                by_module[module].update(others[pattern])
                continue
            while module and not any(each.startswith(f"{module}.") for each in known):
                module = module.rpartition(".")[0]
            around[f"{module}."].update(others[pattern] if module else ())
        main = () if report["main"] is None else (report["main"],)
        for name, pattern in patterns.items():
            found[name].update(others.get(pattern, main), by_module.get(pattern.rpartition(".")[0], ()))
            found[name].update(*(dtypes for prefix, dtypes in around.items() if pattern.startswith(prefix)))
    return found


def widest_dtype(dtypes: set[str]) -> str:
    """The smallest float dtype to which all of `dtypes` are cast without a loss."""
    return "float32" if dtypes == {"float16", "bfloat16"} else max(dtypes, key=FLOAT_DTYPES.index)


def _pattern_of(name: str) -> str:
    """The name from the first numbered list of modules on, without numbers: `layers.*.mlp.gate.weight`.

    The servers' names have other prefixes than those of checkpoints. Without a list, the last two parts of the name.
    """
    pattern = _NUMBER.sub(".*", name)
    found = _FIRST_LIST.search(pattern)
    return found[0] if found else ".".join(pattern.split(".")[-2:])
