"""Cases of one and of a few weight updates: read back, several in a row, parts of the model, the version."""

from __future__ import annotations

import torch

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.reference import PROMPTS, Weights, describe_gap, require_gap

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


CASES = (
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
