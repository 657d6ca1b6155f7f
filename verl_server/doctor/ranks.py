"""Can a model be cut into this many tensor parallel ranks, and are there devices for them?"""

from __future__ import annotations

from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.doctor.model import ModelFacts


def check_ranks(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[Finding]:
    """Can the model be cut into `tp` pieces? (The vocabulary always can: SGLang pads it.)"""
    title = f"Tensor parallel {tp}"
    whole = _indivisible(facts, tp, on_cpu=on_cpu)
    found = []
    if whole:
        found.append(
            fail(
                title,
                f"{tp} ranks cannot share {', '.join(whole)}",
                symptom="AssertionError: ... is not divisible by ..., or RuntimeError: start (...) + length (...) "
                "exceeds dimension size, while the server starts",
                fix=f"--tp {' or '.join(map(str, tp_choices(facts, tp, on_cpu=on_cpu)))}",
            )
        )
    if facts.experts and not 0 < facts.experts_per_token <= facts.experts:
        found.append(
            fail(
                "Experts",
                f"{facts.experts_per_token} experts a token out of {facts.experts}",
                symptom="the first request ends the server (top-k out of range)",
                fix="Correct num_experts_per_tok in config.json.",
            )
        )
    return found or [ok(title, _ranks_words(facts, tp))]


def tp_choices(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[int]:
    """Numbers of ranks that work, near `tp`: the next lower and the next higher. One rank always works."""
    fitting = [n for n in range(1, max(facts.heads, 1) + 1) if not _indivisible(facts, n, on_cpu=on_cpu)]
    lower, higher = [n for n in fitting if n < tp], [n for n in fitting if n > tp]
    return lower[-1:] + higher[:1]


def _indivisible(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    """What `tp` ranks cannot share.

    On a CPU SGLang pads a model to fit (`configs/update_config.py`): that works for the intermediate size, and
    fails for heads while it loads them, also for KV heads that a GPU would repeat.
    """
    sizes = {"attention heads": facts.heads}
    if not on_cpu:
        sizes["intermediate elements"] = facts.intermediate
        sizes["intermediate elements of an expert"] = facts.moe_intermediate
    whole = [f"{count} {what}" for what, count in sizes.items() if count % tp]
    if facts.kv_heads and not facts.latent and facts.kv_heads % tp and (on_cpu or tp % facts.kv_heads):
        whole.append(f"{facts.kv_heads} KV heads" + (" (a CPU cannot repeat them)" if on_cpu else " (nor repeat them)"))
    return whole


def _ranks_words(facts: ModelFacts, tp: int) -> str:
    repeated = facts.kv_heads and not facts.latent and tp > facts.kv_heads
    kv = f"{facts.kv_heads} KV heads" + (f", each on {tp // facts.kv_heads} ranks" if repeated else "")
    moe = f", {facts.experts} experts, {facts.experts_per_token} a token" if facts.experts else ""
    return f"{facts.heads} heads, {kv}{moe}"


def check_devices(tp: int, *, accelerator: str | None, devices: int, cores: int) -> Finding | None:
    """Are there as many devices (cores, on a CPU) as ranks?"""
    if accelerator and tp > devices:
        return fail(
            "Devices",
            f"{tp} ranks and {devices} devices",
            symptom="invalid device ordinal, while the server starts",
            fix=f"--tp {devices} or less, or several nodes (--nnodes)",
        )
    if not accelerator and tp > cores:
        return warn(
            "Devices",
            f"{tp} ranks and {cores} CPU cores",
            symptom="each token takes longer with more ranks",
            fix=f"--tp {cores} or less",
        )
    return None
