"""Checks of the number of tensor parallel ranks against the model's sizes and the number of devices."""

from __future__ import annotations

from verl_server.adapter.model_files import ModelFacts
from verl_server.adapter.sglang.tensor_parallel import indivisible_sizes, tp_choices
from verl_server.doctor.finding import Finding, fail, ok, warn


def check_ranks(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[Finding]:
    """Check whether the model can be split over `tp` ranks. SGLang pads the vocabulary, so it is not checked."""
    title = f"Tensor parallel {tp}"
    indivisible = indivisible_sizes(facts, tp, on_cpu=on_cpu)
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
