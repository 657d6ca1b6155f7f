"""Names of one model in two spellings.

Checkpoints and SGLang name every expert of a mixture (`experts.3.gate_proj.weight`); transformers 5 keeps
all experts of a layer in two tensors (`experts.gate_up_proj` of shape [experts, 2 * intermediate, hidden],
`experts.down_proj` of shape [experts, hidden, intermediate]). Pure functions; views, never copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.types import TensorSpec

if TYPE_CHECKING:
    import torch

GATE_UP = ".experts.gate_up_proj"
DOWN = ".experts.down_proj"


def is_fused(name: str) -> bool:
    """Whether a tensor holds all experts of a layer."""
    return name.endswith((GATE_UP, DOWN))


def unfused_spec(name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """The checkpoint's tensors for one tensor of transformers."""
    if not is_fused(name):
        return {name: spec}
    experts, rows, columns = spec.shape
    if name.endswith(DOWN):
        return {_expert(name, e, "down_proj"): TensorSpec((rows, columns), spec.dtype) for e in range(experts)}
    half = TensorSpec((rows // 2, columns), spec.dtype)
    return {_expert(name, e, part): half for e in range(experts) for part in ("gate_proj", "up_proj")}


def unfused(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors for one tensor of transformers, as views of it."""
    if not is_fused(name):
        return [(name, tensor)]
    if name.endswith(DOWN):
        return [(_expert(name, e, "down_proj"), weight) for e, weight in enumerate(tensor)]
    found = []
    for e, both in enumerate(tensor):
        gate, up = both.chunk(2, dim=0)
        found += [(_expert(name, e, "gate_proj"), gate), (_expert(name, e, "up_proj"), up)]
    return found


def _expert(name: str, index: int, part: str) -> str:
    return f"{name.rpartition('.')[0]}.{index}.{part}.weight"
