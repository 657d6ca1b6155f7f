"""Checks of a LoRA adapter against a model before the LoRA adapter is sent. Pure functions.

Tensors have PEFT's names: `base_model.model.<module>.lora_A.weight` of shape [rank, inputs], and
`base_model.model.<module>.lora_B.weight` of shape [outputs, rank]. SGLang ignores names that it does not know and would
then serve an incomplete LoRA adapter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from verl_server.adapter.model_files import ALL_LINEAR, PREFIX, plain_lora_config
from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import Json, TensorSpec
from verl_server.weights.manifest import CASTABLE_DTYPES, Manifest, fused_with

SUFFIXES = (".lora_A.weight", ".lora_B.weight")
MERGE = "merge the LoRA adapter into the weights and push them with update_weights_from_tensor"


def check_lora_adapter(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest) -> Json:
    """Check that the LoRA adapter's tensors fit its configuration and the model. Returns the configuration for SGLang.

    `config` is PEFT's `adapter_config.json` with `r`, `lora_alpha` and `target_modules`. Raises BadInputError for an
    invalid configuration or a configuration that SGLang does not support, and WeightManifestError for a tensor that
    does not fit or is missing.
    """
    plain_config = plain_lora_config(config, specs)
    targets = config["target_modules"]
    if not specs:
        raise BadInputError("the LoRA adapter has no tensors: pass its lora_A and lora_B tensors as named_tensors")
    modules = {_module_of(name) for name in specs}
    for module in sorted(modules):
        if not _is_target(module, targets):
            raise WeightManifestError(
                f"the LoRA adapter has tensors for {module!r}, which target_modules={_shown(targets)} do not match",
                name=module,
            )
        for suffix, shape in zip(SUFFIXES, _shapes(module, plain_config["r"], manifest), strict=True):
            _check_tensor(f"{PREFIX}{module}{suffix}", shape, specs)
    for target in () if isinstance(targets, str) else sorted(targets):
        if not any(_is_target(module, [target]) for module in modules):
            raise WeightManifestError(f"the LoRA adapter has no tensors for its target module {target!r}", name=target)
    return {**plain_config, "target_modules": sorted({module.rpartition(".")[2] for module in modules})}


def missing_fused_parts(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest
) -> dict[str, tuple[int, int]]:
    """Shapes by name of the tensors that SGLang needs in addition to those of a checked LoRA adapter. Send zeros.

    SGLang fuses `q_proj`, `k_proj` and `v_proj` of a layer, and other modules. It fails or stops if a LoRA adapter has
    only some of them, for example `q_proj` without `v_proj`. Zeros do not change what the LoRA adapter computes.
    """
    modules = {_module_of(name) for name in specs}
    missing: dict[str, tuple[int, int]] = {}
    for module in modules:
        parent, _, own_part = module.rpartition(".")
        for part in fused_with(own_part):
            other = f"{parent}.{part}"
            if other not in modules and f"{other}.weight" in manifest.tensors:
                shapes = _shapes(other, int(config["r"]), manifest)
                missing |= {f"{PREFIX}{other}{suffix}": s for suffix, s in zip(SUFFIXES, shapes, strict=True)}
    return missing


def _is_target(module: str, targets: Collection[str]) -> bool:
    """Whether `module` is among the targets, as in PEFT: names, the ends of paths, or one regular expression."""
    if isinstance(targets, str):
        try:
            return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
        except re.error as error:
            raise BadInputError(f"target_modules {targets!r} is no regular expression: {error}") from None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _shown(targets: Collection[str]) -> str:
    return repr(targets if isinstance(targets, str) else sorted(targets))


def _shapes(module: str, rank: int, manifest: Manifest) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the module's tensors lora_A and lora_B. Raises WeightManifestError if it is no linear layer."""
    weight = manifest.tensors.get(f"{module}.weight")
    if manifest.tied is not None and f"{module}.weight" == manifest.tied[0]:
        raise WeightManifestError(
            f"{module!r} cannot have a LoRA adapter: it is one parameter with the embedding {manifest.tied[1]!r} "
            "(tie_word_embeddings). Leave it out of target_modules, or train and serve a checkpoint with "
            f"tie_word_embeddings=false in its config.json and with its own {manifest.tied[0]!r}",
            name=module,
        )
    if weight is None:
        raise WeightManifestError(f"the model has no module {module!r}", name=module)
    if len(weight.shape) != 2:
        raise WeightManifestError(
            f"{module!r} cannot have a LoRA adapter: it is no linear layer, its weight has shape {list(weight.shape)}",
            name=module,
        )
    outputs, inputs = weight.shape
    return (rank, inputs), (outputs, rank)


def _module_of(name: str) -> str:
    """The module that a tensor of a LoRA adapter belongs to. Raises WeightManifestError for another name."""
    for suffix in SUFFIXES:
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)]
    if ".lora_embedding_" in name:
        raise WeightManifestError(
            f"{name!r} is the LoRA adapter of an embedding, which is not supported: leave the embedding out of "
            f"target_modules, or {MERGE}",
            name=name,
        )
    if ".lora_" not in name and name.startswith(PREFIX):
        raise WeightManifestError(
            f"{name!r} is a whole tensor of the model. PEFT adds that of an embedding or output head which was resized "
            "or is a target module: peft.get_peft_model_state_dict(model, save_embedding_layers=False) leaves it out. "
            f"If it was trained (modules_to_save), {MERGE}",
            name=name,
        )
    raise WeightManifestError(
        f"{name!r} is no tensor of a LoRA adapter: its tensors are called {PREFIX}<module>{SUFFIXES[0]} and "
        f"{PREFIX}<module>{SUFFIXES[1]}, as peft.get_peft_model_state_dict(model) returns them",
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
