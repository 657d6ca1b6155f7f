"""The case of LoRA adapters: loaded, replaced, and separate from the base model."""

from __future__ import annotations

import torch

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.reference import LOGPROB_LIMIT, Weights, describe_gap

RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "peft_type": "LORA", "bias": "none"}


def adapters_reach_the_server(trial: Trial) -> str:
    """Load an adapter, replace it, push base weights, and compare with merged weights each time."""
    system, reference, gaps = trial.system, trial.reference, []
    base = reference.weights(61)
    system.update(base)
    for seed in (1, 2):
        adapter = random_adapter(base, seed)
        system.load_lora("tuned", adapter, CONFIG)
        gaps.append(reference.require(system, merged(base, adapter), f"with LoRA adapter {seed}", lora="tuned"))
        gaps.append(reference.require(system, base, "without the LoRA adapter"))
    if reference.measure(system, base, lora="tuned") <= LOGPROB_LIMIT:
        raise CheckFailedError("the LoRA adapter has no effect")
    other_base = reference.weights(62)
    system.update(other_base)
    expected = merged(other_base, adapter)
    gaps.append(reference.require(system, expected, "with a LoRA adapter after an update of the base", lora="tuned"))
    return describe_gap(max(gaps))


def random_adapter(weights: Weights, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA adapter with random values for all target modules, with PEFT's names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            outputs, inputs = tensor.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.1
    return tensors


def merged(weights: Weights, adapter: Weights) -> dict[str, torch.Tensor]:
    """The weights with the adapter added, in float64."""
    result = {name: tensor.double() for name, tensor in weights.items()}
    for name, lora_a in adapter.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            lora_b = adapter[name.replace(".lora_A.", ".lora_B.")]
            result[f"{module}.weight"] += ALPHA / RANK * (lora_b.double() @ lora_a.double())
    return result


CASES = (
    Case(
        "lora",
        "A LoRA adapter and its replacement take effect in the requests that name it, and in no other.",
        ("https://github.com/verl-project/verl/issues/7495",),
        adapters_reach_the_server,
        server_args={"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": TARGETS},
    ),
)
