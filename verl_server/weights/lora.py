"""Checks of a LoRA adapter against a model before the LoRA adapter is sent. Pure functions.

Tensors have PEFT's names: `base_model.model.<module>.lora_A.weight` of shape [rank, inputs], and
`base_model.model.<module>.lora_B.weight` of shape [outputs, rank]. SGLang ignores names that it does not know and would
then serve an incomplete LoRA adapter. SGLang 0.5.23 reads only `peft_type`, `r`, `lora_alpha`, `target_modules` and
`use_dora` of the configuration (srt/lora/lora_config.py), and multiplies by `lora_alpha / r` (srt/lora/lora.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import Json, TensorSpec
from verl_server.validation import is_finite_number, require_whole_number
from verl_server.weights.manifest import CASTABLE_DTYPES, Manifest
from verl_server.weights.unknown_names import fused_with

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
ALL_LINEAR = "all-linear"
"""PEFT's value of `target_modules` for every linear layer except the output head."""
UNSUPPORTED_FIELDS = (
    "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "trainable_token_indices",
    "target_parameters", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Fields of PEFT's `LoraConfig` that change what a LoRA adapter computes, and that SGLang does not support. The other
fields choose the modules, which the names of the tensors show, or are used only for training."""


def check_lora_adapter(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest) -> Json:
    """Check that the LoRA adapter's tensors fit its configuration and the model. Returns the configuration for SGLang.

    `config` is PEFT's `adapter_config.json` with `r`, `lora_alpha` and `target_modules`. Raises BadInputError for an
    invalid configuration or a configuration that SGLang does not support, and WeightManifestError for a tensor that
    does not fit or is missing.
    """
    rank, alpha, targets = _checked_config(config)
    if not specs:
        raise BadInputError("the LoRA adapter has no tensors: pass its lora_A and lora_B tensors as named_tensors")
    modules = {_module_of(name) for name in specs}
    for module in sorted(modules):
        if not _is_target(module, targets):
            raise WeightManifestError(
                f"the LoRA adapter has tensors for {module!r}, which target_modules={_shown(targets)} do not match",
                name=module,
            )
        for suffix, shape in zip(SUFFIXES, _shapes(module, rank, manifest), strict=True):
            _check_tensor(f"{PREFIX}{module}{suffix}", shape, specs)
    for target in () if isinstance(targets, str) else sorted(targets):
        if not any(_is_target(module, [target]) for module in modules):
            raise WeightManifestError(f"the LoRA adapter has no tensors for its target module {target!r}", name=target)
    names = sorted({module.rpartition(".")[2] for module in modules})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names}


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


def _checked_config(config: Mapping[str, Any]) -> tuple[int, float, Collection[str]]:
    """The rank, the `lora_alpha` for SGLang, and the targets of a configuration: names, or a string as in PEFT."""
    if not isinstance(config, Mapping):
        raise BadInputError(
            "config must be a dict with the content of PEFT's adapter_config.json (LoraConfig.to_dict()), got "
            f"{type(config).__name__}",
            argument="config",
        )
    peft_type = config.get("peft_type")
    if str(getattr(peft_type, "value", peft_type) or "LORA").upper() != "LORA":
        raise BadInputError(f"only LoRA adapters can be served, but the configuration has peft_type={peft_type!r}")
    bias = config.get("bias")
    for field, value in [("bias", None if bias == "none" else bias), *((f, config.get(f)) for f in UNSUPPORTED_FIELDS)]:
        if value:
            raise BadInputError(
                f"SGLang does not support {field}={value!r} of a LoRA configuration, and would compute other outputs "
                "than the trainer. Train without it, or merge the LoRA adapter into the weights and push them with "
                "update_weights_from_tensor",
                argument=field,
            )
    rank = require_whole_number("the LoRA rank `r` of the configuration", config.get("r"))
    alpha, targets = config.get("lora_alpha"), config.get("target_modules")
    if not is_finite_number(alpha):
        raise BadInputError(f"a LoRA configuration needs lora_alpha, a number; got {alpha!r}")
    # PEFT multiplies the output of a rank-stabilized LoRA adapter by alpha / sqrt(r), SGLang by alpha / r.
    scaled_alpha = float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)
    is_list = isinstance(targets, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in targets)
    if not targets or not (is_list or isinstance(targets, str)):
        raise BadInputError(
            f"a LoRA configuration needs target_modules: a list of names, {ALL_LINEAR!r} or a regular expression; got "
            f"{targets!r}"
        )
    return rank, scaled_alpha, targets


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
