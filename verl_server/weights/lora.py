"""What a LoRA adapter must look like to fit a model, told before any byte moves. Pure.

Names are PEFT's: `base_model.model.<module>.lora_A.weight` of shape [rank, inputs] and `...lora_B.weight` of
shape [outputs, rank]. SGLang passes over names that it does not know, and would then serve half an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import TensorSpec
from verl_server.weights.manifest import CASTABLE, Manifest

PREFIX = "base_model.model."
ENDS = (".lora_A.weight", ".lora_B.weight")


def check_adapter(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest) -> None:
    """`config` is PEFT's `adapter_config.json`: `r`, `lora_alpha`, `target_modules`.

    Raises BadInputError for a configuration, WeightManifestError for a tensor that does not fit.
    """
    rank, targets = config.get("r"), config.get("target_modules")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise BadInputError(f"a LoRA configuration needs r, a whole number above 0; got {rank!r}")
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise BadInputError(f"a LoRA configuration needs lora_alpha, a number; got {config.get('lora_alpha')!r}")
    if not isinstance(targets, (list, tuple)) or not targets:
        raise BadInputError(f"a LoRA configuration needs target_modules, a list of names; got {targets!r}")
    if not specs:
        raise BadInputError("the adapter has no tensors")
    modules = {_module_of(name) for name in specs}
    for module in sorted(modules):
        if module.rpartition(".")[2] not in targets:
            raise WeightManifestError(f"{module!r} is not among target_modules {list(targets)}", name=module)
        weight = manifest.tensors.get(f"{module}.weight")
        if weight is None:
            raise WeightManifestError(f"the model has no module {module!r}", name=module)
        outputs, inputs = weight.shape
        for end, shape in zip(ENDS, ((rank, inputs), (outputs, rank)), strict=True):
            _check_one(f"{PREFIX}{module}{end}", shape, specs)
    idle = set(targets) - {module.rpartition(".")[2] for module in modules}
    if idle:
        raise WeightManifestError(f"the adapter has no tensors for its target module {min(idle)!r}", name=min(idle))


def _module_of(name: str) -> str:
    for end in ENDS:
        if name.startswith(PREFIX) and name.endswith(end):
            return name[len(PREFIX) : -len(end)]
    raise WeightManifestError(
        f"{name!r} is no tensor of an adapter; they are called {PREFIX}<module>{ENDS[0]} and {ENDS[1]}", name=name
    )


def _check_one(name: str, shape: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> None:
    spec = specs.get(name)
    if spec is None:
        raise WeightManifestError(f"the adapter lacks {name!r}", name=name)
    if spec.shape != shape:
        raise WeightManifestError(
            f"{name!r} has shape {list(spec.shape)}, the model wants {list(shape)}",
            name=name,
            expected=list(shape),
            got=list(spec.shape),
        )
    if spec.dtype not in CASTABLE:
        raise WeightManifestError(f"{name!r} has dtype {spec.dtype}, an adapter needs floats", name=name)
