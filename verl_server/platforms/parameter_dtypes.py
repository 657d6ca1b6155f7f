"""The dtypes of the parameters of a served model, as a server reports them in its reply to `/server_info`.

A server reports the dtype of most of its parameters, and the parameters that have another one: SGLang and vLLM keep
biases of routers and some other parameters of a bfloat16 model in float32. Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


class ServedDtypes:
    """The dtypes that the servers with these reports have for each of the tensors `names` of a checkpoint."""

    def __init__(self, reports: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
        self._reports = reports
        known = {_pattern_of(name) for name in names}
        self._by_module: defaultdict[str, set[str]] = defaultdict(set)
        """Dtypes of parameters that no tensor of the checkpoint is called like: SGLang computes Mamba's `mixer.A` from
        `mixer.A_log`. They count for all tensors that are directly in the same module."""
        for report in reports:
            for pattern in report["others"].keys() - known:
                self._by_module[pattern.rpartition(".")[0]].update(report["others"][pattern])

    def of(self, name: str) -> set[str]:
        """The dtypes of the parameters into which the tensor is loaded. Empty if no server reports its dtypes."""
        pattern = _pattern_of(name)
        found = set(self._by_module.get(pattern.rpartition(".")[0], ()))
        for report in self._reports:
            found.update(report["others"].get(pattern) or [report["main"]])
        return found - {None}


def widest_dtype(dtypes: Iterable[str]) -> str:
    """The smallest float dtype to which all of `dtypes` are cast without a loss."""
    found = set(dtypes)
    return "float32" if found == {"float16", "bfloat16"} else max(found, key=FLOAT_DTYPES.index)


def narrowest_dtype(dtypes: Iterable[str]) -> str:
    """The dtype with the smallest range."""
    return min(dtypes, key=FLOAT_DTYPES.index)


def _pattern_of(name: str) -> str:
    """The name from the first numbered list of modules on, without numbers: `layers.*.mlp.gate.weight`.

    The servers' names have other prefixes than those of checkpoints. Without a list, the last two parts of the name.
    """
    pattern = _NUMBER.sub(".*", name)
    found = _FIRST_LIST.search(pattern)
    return found[0] if found else ".".join(pattern.split(".")[-2:])
