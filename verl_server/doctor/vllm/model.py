"""Checks whether vLLM can serve a model. They read vLLM's source files and import nothing of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from verl_server.adapter.model_files import ModelFacts
from verl_server.doctor.finding import Finding, Level, fail, ok, warn
from verl_server.doctor.model import known_to_transformers
from verl_server.doctor.ranks import check_ranks
from verl_server.vllm_server.start_checks import explain_head_size

REGISTRY = Path("model_executor/models/registry.py")
CPU_ATTENTION = Path("v1/attention/backends/cpu_attn.py")
HEAD_SIZES = re.compile(r"def get_supported_head_sizes\(.*?return \[([\d, ]+)\]", re.DOTALL)


def known_to_vllm(folder: Path, architecture: str) -> bool | None:
    """Whether vLLM's registry names the class. None if there is no such file. `folder`: that of the package vllm."""
    registry = folder / REGISTRY
    return f'"{architecture}"' in registry.read_text(encoding="utf-8") if registry.is_file() else None


def read_head_sizes(folder: Path) -> list[int]:
    """The head sizes that vLLM's attention on a CPU computes. Empty if its source file does not list them."""
    source = folder / CPU_ATTENTION
    found = HEAD_SIZES.search(source.read_text(encoding="utf-8")) if source.is_file() else None
    return [int(size) for size in found[1].split(",") if size.strip()] if found else []


def check_architecture(facts: ModelFacts, folder: Path) -> Finding:
    """Check whether vLLM supports the architecture."""
    title, symptom = "Architecture", "the server ends with: Model architectures [...] are not supported for now"
    if facts.architecture and known_to_vllm(folder, facts.architecture) is not False:
        return ok(title, facts.architecture)
    if facts.architecture and (facts.own_code or known_to_transformers(facts.model_type)):
        return warn(
            title,
            f"{facts.architecture} is not a model of vLLM; its slower transformers backend can perhaps serve it",
            symptom=symptom,
            fix="Start the server with model_impl='transformers'"
            + (" and trust_remote_code=True. Weight updates of it are not tested." if facts.own_code else "."),
        )
    return fail(
        title,
        f"neither vLLM nor transformers supports {facts.architecture}"
        if facts.architecture
        else "config.json has no architecture",
        symptom=symptom,
        fix="Choose another model, or correct the architectures in config.json.",
    )


def check_head_size(facts: ModelFacts, sizes: list[int]) -> Finding | None:
    """Check the size of the model's attention heads on a CPU. None if it is not known which sizes vLLM computes."""
    if not sizes or not facts.head_dim:
        return None
    refusal = explain_head_size({"head_dim": facts.head_dim, "kv_lora_rank": facts.latent}, sizes)
    if refusal is None:
        return ok("Head size", f"{facts.head_dim} elements")
    detail, _, fix = refusal.rpartition(": ")
    return fail(
        "Head size",
        detail,
        symptom="BadInputError when a server starts. A server that is started without this library ends at its first "
        "token",
        fix=f"{fix[0].upper()}{fix[1:]}.",
    )


def examine(facts: ModelFacts, folder: Path | None, *, tp: int, on_cpu: bool) -> list[Finding]:
    """Check a model. `folder`: that of the package vllm; None if vLLM is not installed, which another check reports."""
    heads = check_head_size(facts, read_head_sizes(folder)) if folder is not None and on_cpu else None
    symptom = "the server ends during its start: must be divisible by tensor parallel size, or not divisible by"
    ranks = [
        finding if finding.level is Level.OK or finding.title == "Experts" else replace(finding, symptom=symptom)
        for finding in check_ranks(facts, tp, on_cpu=False)
    ]
    architecture = [] if folder is None else [check_architecture(facts, folder)]
    return [*architecture, *([heads] if heads else []), *ranks]
