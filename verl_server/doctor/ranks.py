"""Checks of the number of tensor parallel ranks against the model's sizes and the number of devices."""

from __future__ import annotations

from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.doctor.model import ModelFacts


def check_ranks(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[Finding]:
    """Check whether the model can be split over `tp` ranks. SGLang pads the vocabulary, so it is not checked."""
    title = f"Tensor parallel {tp}"
    indivisible = _indivisible(facts, tp, on_cpu=on_cpu)
    found = []
    if indivisible:
        found.append(
            fail(
                title,
                f"{tp} ranks cannot divide {', '.join(indivisible)}",
                symptom="the server ends during its start with AssertionError: ... is not divisible by ..., or "
                "RuntimeError: start (...) + length (...) exceeds dimension size",
                fix=f"--tp {' or '.join(map(str, tp_choices(facts, tp, on_cpu=on_cpu)))}",
            )
        )
    if facts.experts and not 0 < facts.experts_per_token <= facts.experts:
        found.append(
            fail(
                "Experts",
                f"{facts.experts_per_token} experts per token, but the model has {facts.experts} experts",
                symptom="the server ends at the first request (top-k out of range)",
                fix="Correct num_experts_per_tok in config.json.",
            )
        )
    return found or [ok(title, _describe_sizes(facts, tp))]


def tp_choices(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[int]:
    """The nearest lower and the nearest higher number of ranks that divide the model. One rank always does."""
    fitting = [n for n in range(1, max(facts.heads, 1) + 1) if not _indivisible(facts, n, on_cpu=on_cpu)]
    lower, higher = [n for n in fitting if n < tp], [n for n in fitting if n > tp]
    return lower[-1:] + higher[:1]


def _indivisible(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    """The sizes of the model that `tp` ranks cannot divide.

    On a CPU, SGLang pads a model (`configs/update_config.py`). This works for the intermediate size. For attention
    heads it fails when the weights are loaded, also for KV heads, which a GPU would replicate.
    """
    sizes = {"attention heads": facts.heads}
    if not on_cpu:
        sizes["intermediate elements"] = facts.intermediate
        sizes["intermediate elements of an expert"] = facts.moe_intermediate
    indivisible = [f"{count} {name}" for name, count in sizes.items() if count % tp]
    if facts.kv_heads and not facts.latent and facts.kv_heads % tp and (on_cpu or tp % facts.kv_heads):
        reason = "a CPU does not replicate them" if on_cpu else "and cannot replicate them evenly"
        indivisible.append(f"{facts.kv_heads} KV heads ({reason})")
    return indivisible


def _describe_sizes(facts: ModelFacts, tp: int) -> str:
    replicated = facts.kv_heads and not facts.latent and tp > facts.kv_heads
    kv = f"{facts.kv_heads} KV heads" + (f", each on {tp // facts.kv_heads} ranks" if replicated else "")
    moe = f", {facts.experts} experts, {facts.experts_per_token} per token" if facts.experts else ""
    return f"{facts.heads} heads, {kv}{moe}"


def check_devices(tp: int, *, accelerator: str | None, devices: int, cores: int) -> Finding | None:
    """Check that there are at least as many devices as ranks; on a CPU, as many cores."""
    if accelerator and tp > devices:
        return fail(
            "Devices",
            f"{tp} ranks, but only {devices} devices",
            symptom="the server ends during its start with: invalid device ordinal",
            fix=f"--tp {devices} or lower, or several nodes (--nnodes)",
        )
    if not accelerator and tp > cores:
        return warn(
            "Devices",
            f"{tp} ranks, but only {cores} CPU cores",
            symptom="generation is slower than with fewer ranks",
            fix=f"--tp {cores} or lower",
        )
    return None
