"""Cases of models that engines store in another way than they load them: tied embeddings and mixtures of experts."""

from __future__ import annotations

import torch

from verl_server.conformance.case import Case, ModelKind, Trial
from verl_server.conformance.reference import Weights, describe_gap

_SEEDS = (25, 26)


def updates_take_effect(trial: Trial) -> str:
    """Push all tensors of a checkpoint twice, with other values, and generate after each update."""
    gaps: list[float] = []
    for seed in _SEEDS:
        weights = trial.reference.weights(seed)
        trial.system.update(with_checkpoint_names(weights))
        gaps.append(trial.reference.require(trial.system, weights, f"after update {len(gaps) + 1}"))
    return describe_gap(max(gaps))


def with_checkpoint_names(weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors as a checkpoint names them: transformers has all experts of a layer in two tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        prefix, separator, suffix = name.rpartition(".experts.")
        if not separator:
            tensors[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if suffix == "gate_up_proj":
                halves = expert.chunk(2)
                parts = {"gate_proj": halves[0], "up_proj": halves[1]}
            else:
                parts = {suffix: expert}
            for part, value in parts.items():
                tensors[f"{prefix}.experts.{number}.{part}.weight"] = value.contiguous()
    return tensors


CASES = (
    Case(
        "tied-embeddings",
        "Updates of a model whose output head has the weights of the embedding take effect.",
        ("https://github.com/vllm-project/vllm/pull/51665", "https://github.com/vllm-project/vllm/issues/48312"),
        updates_take_effect,
        model=ModelKind.TIED,
    ),
    Case(
        "experts",
        "Updates of a model with mixtures of experts take effect.",
        ("https://github.com/vllm-project/vllm/issues/42821", "https://github.com/NovaSky-AI/SkyRL/issues/1680"),
        updates_take_effect,
        model=ModelKind.EXPERTS,
    ),
)
