"""Checks of a LoRA adapter against a model before the LoRA adapter is sent. Pure functions.

Tensors have PEFT's names: `base_model.model.<module>.lora_A.weight` of shape [rank, inputs], and
`base_model.model.<module>.lora_B.weight` of shape [outputs, rank]. SGLang ignores names that it does not know and would
then serve an incomplete LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import TensorSpec
from verl_server.validation import require_whole_number
from verl_server.weights.manifest import CASTABLE_DTYPES, Manifest

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def check_lora_adapter(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest) -> None:
    """Check that the LoRA adapter's tensors fit its configuration and the model.

    `config` is PEFT's `adapter_config.json` with `r`, `lora_alpha` and `target_modules`. Raises BadInputError for an
    invalid configuration, and WeightManifestError for a tensor that does not fit or is missing.
    """
    rank, targets = config.get("r"), config.get("target_modules")
    rank = require_whole_number("the LoRA rank `r` of the configuration", rank)
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise BadInputError(f"a LoRA configuration needs lora_alpha, a number; got {config.get('lora_alpha')!r}")
    if not isinstance(targets, (list, tuple)) or not targets:
        raise BadInputError(f"a LoRA configuration needs target_modules, a list of names; got {targets!r}")
    if not specs:
        raise BadInputError("the LoRA adapter has no tensors: pass its lora_A and lora_B tensors as named_tensors")
    modules = {_module_of(name) for name in specs}
    for module in sorted(modules):
        if module.rpartition(".")[2] not in targets:
            raise WeightManifestError(f"{module!r} is not among target_modules {list(targets)}", name=module)
        weight = manifest.tensors.get(f"{module}.weight")
        if weight is None:
            raise WeightManifestError(f"the model has no module {module!r}", name=module)
        outputs, inputs = weight.shape
        for suffix, shape in zip(SUFFIXES, ((rank, inputs), (outputs, rank)), strict=True):
            _check_tensor(f"{PREFIX}{module}{suffix}", shape, specs)
    unused_targets = set(targets) - {module.rpartition(".")[2] for module in modules}
    if unused_targets:
        name = min(unused_targets)
        raise WeightManifestError(f"the LoRA adapter has no tensors for its target module {name!r}", name=name)


def _module_of(name: str) -> str:
    """The module that a tensor of a LoRA adapter belongs to. Raises WeightManifestError for another name."""
    for suffix in SUFFIXES:
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)]
    raise WeightManifestError(
        f"{name!r} is no tensor of a LoRA adapter: its tensors are called {PREFIX}<module>{SUFFIXES[0]} and "
        f"{PREFIX}<module>{SUFFIXES[1]}",
        name=name,
    )


def _check_tensor(name: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> None:
    spec = specs.get(name)
    if spec is None:
        raise WeightManifestError(f"the LoRA adapter lacks {name!r}", name=name)
    if spec.shape != shape:
        raise WeightManifestError(
            f"{name!r} has shape {list(spec.shape)}, the model expects {list(shape)}",
            name=name,
            expected=list(shape),
            got=list(spec.shape),
        )
    if spec.dtype not in CASTABLE_DTYPES:
        raise WeightManifestError(
            f"{name!r} has dtype {spec.dtype}, but a LoRA adapter needs a dtype of {sorted(CASTABLE_DTYPES)}", name=name
        )
