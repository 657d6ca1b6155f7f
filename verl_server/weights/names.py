"""Conversion of fused expert weights to the parameter names of checkpoints.

Checkpoints and SGLang have a tensor for every expert of a mixture (`experts.3.gate_proj.weight`). transformers 5 keeps
all experts of a layer in two tensors: `experts.gate_up_proj` of shape [experts, 2 * intermediate, hidden], and
`experts.down_proj` of shape [experts, hidden, intermediate]. Pure functions; tensors are views, never copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.errors import WeightManifestError
from verl_server.types import TensorSpec

if TYPE_CHECKING:
    import torch

GATE_UP_SUFFIX = ".experts.gate_up_proj"
DOWN_SUFFIX = ".experts.down_proj"


def is_fused(name: str) -> bool:
    """Whether the tensor `name` holds all experts of a layer."""
    return name.endswith((GATE_UP_SUFFIX, DOWN_SUFFIX))


def unfuse_spec(name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """The specs of the checkpoint's tensors, by name, for one tensor of transformers.

    Raises WeightManifestError for a fused tensor that has not three dimensions.
    """
    if not is_fused(name):
        return {name: spec}
    _require_all_experts(name, spec.shape)
    num_experts, rows, columns = spec.shape
    if name.endswith(DOWN_SUFFIX):
        down = TensorSpec((rows, columns), spec.dtype)
        return {_expert_name(name, expert, "down_proj"): down for expert in range(num_experts)}
    half = TensorSpec((rows // 2, columns), spec.dtype)
    return {
        _expert_name(name, expert, part): half for expert in range(num_experts) for part in ("gate_proj", "up_proj")
    }


def unfuse(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint's named tensors for one tensor of transformers, as views of it.

    Raises WeightManifestError for a fused tensor that has not three dimensions.
    """
    if not is_fused(name):
        return [(name, tensor)]
    _require_all_experts(name, tuple(tensor.shape))
    if name.endswith(DOWN_SUFFIX):
        return [(_expert_name(name, expert, "down_proj"), down) for expert, down in enumerate(tensor)]
    named_tensors = []
    for expert, gate_up in enumerate(tensor):
        gate, up = gate_up.chunk(2, dim=0)
        named_tensors += [
            (_expert_name(name, expert, "gate_proj"), gate),
            (_expert_name(name, expert, "up_proj"), up),
        ]
    return named_tensors


def _require_all_experts(name: str, shape: tuple[int, ...]) -> None:
    """Raise WeightManifestError unless the fused tensor `name` has a dimension for the experts and two for a matrix."""
    if len(shape) != 3:
        is_down = name.endswith(DOWN_SUFFIX)
        dimensions = "[experts, hidden, intermediate]" if is_down else "[experts, 2 * intermediate, hidden]"
        single = _expert_name(name, 0, "down_proj" if is_down else "gate_proj")
        raise WeightManifestError(
            f"{name!r} has shape {list(shape)}, but this name is that of the weights of all experts, which have the "
            f"shape {dimensions}. Push these, or the weights of each expert by their own names, for example {single!r}",
            name=name,
            got=list(shape),
        )


def _expert_name(name: str, expert: int, part: str) -> str:
    return f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
