"""Cases of weight updates: read back, parts of the model, versions, model families, LoRA adapters."""

from __future__ import annotations

import torch

from verl_server.conformance.cases import Case, ModelKind, Trial
from verl_server.conformance.reference import LOGPROB_LIMIT, PROMPTS, Weights, describe_gap, require_gap
from verl_server.conformance.systems import CheckFailedError

_SEEDS_IN_A_ROW = (11, 12, 13)
#: Parts of the names of modules that no engine fuses with another: an attention, a norm, an MLP, the embedding.
_WHOLE_MODULES = ("layers.0.self_attn.", "layers.0.post_attention_layernorm.", "layers.1.mlp.", "embed_tokens.")


def read_back(trial: Trial) -> str:
    """Push all tensors, read all of them, and generate."""
    weights = trial.reference.weights(1)
    trial.system.update(weights)
    gap = trial.reference.require(trial.system, weights, "after the update")
    _require_served(trial, weights)
    return f"{len(weights)} tensors equal, {describe_gap(gap)}"


def several_in_a_row(trial: Trial) -> str:
    """Push different weights three times, with generations between the updates and without."""
    gaps: list[float] = []
    for seed in _SEEDS_IN_A_ROW:
        weights = trial.reference.weights(seed)
        trial.system.update(weights)
        gaps.append(trial.reference.require(trial.system, weights, f"after update {len(gaps) + 1}"))
    for seed in _SEEDS_IN_A_ROW:
        weights = trial.reference.weights(seed)
        trial.system.update(weights)
    gaps.append(trial.reference.require(trial.system, weights, "after three updates without a generation"))
    return describe_gap(max(gaps))


def some_tensors(trial: Trial) -> str:
    """Push all tensors, then every second tensor with other values. This separates parts that engines fuse."""
    before, after = trial.reference.weights(21), trial.reference.weights(22)
    pushed = {name: after[name] for name in list(after)[::2]}
    trial.system.update(before)
    trial.system.update(pushed)
    expected = {**before, **pushed}
    gap = trial.reference.require(trial.system, expected, "after an update of every second tensor")
    _require_served(trial, expected)
    return f"{len(pushed)} of {len(before)} tensors pushed, {describe_gap(gap)}"


def whole_modules(trial: Trial) -> str:
    """Push all tensors, then some modules. Parts that engines fuse are pushed together."""
    before, after = trial.reference.weights(23), trial.reference.weights(24)
    pushed = {name: after[name] for name in after if any(part in name for part in _WHOLE_MODULES)}
    trial.system.update(before)
    trial.system.update(pushed)
    gap = trial.reference.require(trial.system, {**before, **pushed}, "after an update of whole modules")
    return f"{len(pushed)} of {len(before)} tensors pushed, {describe_gap(gap)}"


def version(trial: Trial) -> str:
    """Compare the version that replies name with that of the update."""
    versions = []
    for seed in (31, 32):
        weights = trial.reference.weights(seed)
        trial.system.update(weights)
        reply = trial.system.generate(PROMPTS[0], 4)
        expected = trial.system.weight_version
        if reply.weight_version != expected:
            raise CheckFailedError(f"a reply names weight version {reply.weight_version}, not {expected}")
        require_gap(trial.reference.gap(weights, PROMPTS[0], reply), f"with weight version {expected}")
        versions.append(expected)
    if versions[0] == versions[1]:
        raise CheckFailedError(f"two updates have the same weight version {versions[0]}")
    return f"versions {versions[0]} and {versions[1]}"


def _require_served(trial: Trial, weights: Weights) -> None:
    """Raise CheckFailedError unless the server holds `weights`, bit by bit."""
    for name, tensor in weights.items():
        served = trial.system.read_tensor(name)[: len(tensor)]  # SGLang pads the vocabulary
        if not torch.equal(served.view(torch.int32), tensor.view(torch.int32)):
            raise CheckFailedError(f"the server returns other values for {name} than were pushed")


UPDATE_CASES = (
    Case(
        "read-back",
        "After an update of all tensors, the server returns each tensor bit by bit, and generates with them.",
        ("https://github.com/huggingface/trl/issues/5312", "https://github.com/sgl-project/sglang/issues/26032"),
        read_back,
    ),
    Case(
        "several-updates",
        "The second and later updates in a row return and take effect.",
        ("https://github.com/PrimeIntellect-ai/prime/issues/381", "https://github.com/sgl-project/sglang/pull/17870"),
        several_in_a_row,
    ),
    Case(
        "some-tensors",
        "An update of every second tensor changes these tensors and no other.",
        ("https://github.com/sgl-project/sglang/pull/38298", "https://github.com/pytorch/torchtitan/pull/3867"),
        some_tensors,
    ),
    Case(
        "whole-modules",
        "An update of some modules, each of them whole, changes these modules and no other.",
        (
            "https://github.com/PrimeIntellect-ai/prime-rl/pull/2714",
            "https://github.com/vllm-project/vllm/issues/48312",
        ),
        whole_modules,
    ),
    Case(
        "weight-version",
        "Replies name the version of the weights that generated them.",
        ("https://github.com/vllm-project/vllm/issues/54443", "https://github.com/rllm-org/rllm/pull/622"),
        version,
    ),
)


# -- Models -----------------------------------------------------------------------------------------
# Cases of models that engines store in another way than they load them: tied embeddings and mixtures of experts.

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


MODEL_CASES = (
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


# -- Lora -------------------------------------------------------------------------------------------
# The case of LoRA adapters: loaded, replaced, and separate from the base model.

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


LORA_CASES = (
    Case(
        "lora",
        "A LoRA adapter and its replacement take effect in the requests that name it, and in no other.",
        ("https://github.com/verl-project/verl/issues/7495",),
        adapters_reach_the_server,
        server_args={"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": TARGETS},
    ),
)
