"""Checks of a model: its files, its architecture, whether the ranks divide it, and whether it fits into memory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from verl_server.adapter.model_files import (
    ModelFacts,
    find_model_file,
    read_facts,
    read_header,
    tokenizer_files,
    weight_files,
)
from verl_server.adapter.sglang.server_arguments import indivisible_sizes, tp_choices
from verl_server.config import EngineKind
from verl_server.doctor.machine import SERVER_BYTES, Hardware
from verl_server.doctor.report import Finding, fail, gib, ok, warn
from verl_server.platforms.limits import available_memory

# -- Weights ----------------------------------------------------------------------------------------
# Checks of a model's weight files: whether they are complete, and whether the weights fit into memory.

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
FLOATS = {"F64", "F32", "F16", "BF16"}
#: Share of a GPU's free memory that the weights may use. The KV cache, activations and CUDA graphs need the rest.
WEIGHTS_SHARE = 0.8


@dataclass(frozen=True)
class Weights:
    """Sizes of all weight files of a folder."""

    files: int
    """Number of files."""
    elements: int
    """Number of elements of the floating point tensors."""
    other_bytes: int
    """Bytes of all other tensors, which are served without conversion."""
    stored_bytes: int
    """Bytes of all tensors in the files."""


def serving_item_bytes(facts: ModelFacts, dtype: str, *, on_cpu: bool) -> int:
    """Bytes per element in the server. `auto` is the checkpoint's dtype; on a GPU, float32 becomes float16."""
    name = dtype
    if dtype == "auto":
        name = "float16" if facts.dtype == "float32" and not on_cpu else facts.dtype
    return ITEM_BYTES.get(name, 2)


def served_bytes(weights: Weights, facts: ModelFacts, item_bytes: int) -> int:
    """Bytes of the whole model in the server. Quantized weights are not converted."""
    if facts.quantized:
        return weights.stored_bytes
    return weights.elements * item_bytes + weights.other_bytes


def kv_bytes_per_token(facts: ModelFacts, tp: int, item_bytes: int) -> int:
    """Bytes of one token in the KV cache of one rank."""
    if facts.latent:
        return facts.layers * facts.latent * item_bytes
    return facts.layers * 2 * max(facts.kv_heads // tp, 1) * facts.head_dim * item_bytes


def check_fit(weights_bytes: int, kv_token: int, *, tp: int, free: int, on_cpu: bool, context: int) -> Finding:
    """Check whether the weights and a KV cache fit into the free memory.

    `free` is bytes of the machine on a CPU, where all ranks share the memory, otherwise of the GPU with the least
    free memory, which one rank uses. `kv_token` is bytes per token and rank; `context` is a number of tokens.
    """
    need = weights_bytes + SERVER_BYTES if on_cpu else weights_bytes // tp
    detail = (
        f"weights {gib(weights_bytes)}, free memory {gib(free)}"
        if on_cpu
        else f"weights per rank {gib(need)}, free memory per GPU {gib(free)}"
    )
    if need > free:
        return fail(
            "Fits",
            detail,
            symptom="while it loads the weights, the server ends with out of memory or `killed by SIGKILL`",
            fix="Use a smaller dtype (--dtype bfloat16), " + ("more memory" if on_cpu else f"more ranks than --tp {tp}")
            + ", or a smaller or quantized model.",
        )  # fmt: skip
    tokens = (free - need) // max(kv_token * (tp if on_cpu else 1), 1)
    detail += f"; KV cache {kv_token / 1024:.1f} KiB per token and rank, at most {tokens:,} tokens"
    if tokens < context or (not on_cpu and need > free * WEIGHTS_SHARE):
        return warn(
            "Fits",
            detail,
            symptom="the server reports too little memory for the KV cache, or queues most requests",
            fix=f"Use --context-length below {context}, a smaller dtype, or more ranks.",
        )
    return ok("Fits", detail)


def check_files(weights: Weights | None, problems: list[str]) -> Finding:
    """Check that the folder has weight files and that they are complete."""
    if problems:
        return fail(
            "Weight files",
            "; ".join(problems),
            symptom="the server ends during its start with SafetensorError (incomplete metadata, header too large)",
            fix="Download the named files again (git lfs pull, or hf download), and check the free space of the disk.",
        )
    if weights is None:
        return warn(
            "Weight files",
            "the folder has no .safetensors files",
            symptom="RuntimeError: Cannot find any model weights",
            fix="Download the weights, convert them to safetensors, or start with --load-format dummy.",
        )
    return ok("Weight files", f"{weights.files} complete, {gib(weights.stored_bytes)}")


def read_weights(folder: Path) -> tuple[Weights | None, list[str]]:
    """Read the headers of the safetensors files. Returns the sizes (None without files) and the problems."""
    names = weight_files(folder)
    elements = other = stored = 0
    problems = []
    for name in sorted(names):
        header, problem = read_header(folder / name)
        if problem:
            problems.append(f"{name} {problem}")
        for key, tensor in header.items():
            if key == "__metadata__":
                continue
            size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
            stored += size
            if tensor["dtype"] in FLOATS:
                elements += prod(tensor["shape"])
            else:
                other += size
    return (Weights(len(names), elements, other, stored) if names else None), problems


def weights_of_config(folder: Path) -> Weights | None:
    """The sizes of a model without weight files, from building the model on torch's meta device.

    This takes seconds. None if transformers cannot build the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, ImportError):
        return None
    elements = sum(int(parameter.numel()) for parameter in model.parameters())
    return Weights(0, elements, 0, 0)


# -- Model ------------------------------------------------------------------------------------------

#: Files that name the classes of an engine's models, in the folder of its package.
MODEL_FILES = {EngineKind.SGLANG: "srt/models/**/*.py", EngineKind.VLLM: "model_executor/models/registry.py"}


def find_folder(model: str) -> Path | None:
    """The folder of a model: a path, or the local cache of a model of the Hugging Face Hub. None without a folder."""
    folder = Path(model).expanduser()
    file = None if folder.is_dir() else find_model_file(model, "config.json")
    return folder if folder.is_dir() else None if file is None else file.parent


def check_missing(model: str) -> Finding:
    """The finding for a model whose folder `find_folder` did not find."""
    if model.count("/") == 1 and not model.startswith(("/", ".", "~")):
        return warn(
            "Model",
            f"{model} is not in the local cache: the first start downloads it, and it was not checked",
            symptom="the first start waits for the download and can exceed the start deadline",
            fix=f"Run `hf download {model}`, then run verl-server doctor again.",
        )
    return fail(
        "Model",
        f"{model} is not a folder",
        symptom="the server ends during its start",
        fix="Correct the path, or write a name on the Hugging Face Hub as organisation/name.",
    )


def read_config(folder: Path) -> tuple[ModelFacts | None, Finding]:
    """Read the model's `config.json`. Returns its facts (None if unreadable) and a finding about the file."""
    try:
        facts = read_facts(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return None, fail(
            "Model",
            f"config.json cannot be read: {error}",
            symptom="the server ends during its start",
            fix="Pass the folder that holds config.json: the folder that save_pretrained wrote, or the Hub snapshot.",
        )
    experts = f", {facts.experts} experts, {facts.experts_per_token} per token" if facts.experts else ""
    sizes = f"{facts.layers} layers, vocabulary {facts.vocab}, context {facts.context}, {facts.dtype}{experts}"
    return facts, ok("Model", f"{facts.architecture}: {sizes}")


def check_ranks(facts: ModelFacts, tp: int, *, on_cpu: bool) -> Finding:
    """Check whether the model can be split over `tp` ranks. The engines pad the vocabulary, so it is not checked.

    `on_cpu`: whether the server is one of SGLang on a CPU, which does not replicate KV heads.
    """
    title = f"Tensor parallel {tp}"
    if indivisible := indivisible_sizes(facts, tp, on_cpu=on_cpu):
        return fail(
            title,
            f"{tp} ranks cannot divide {', '.join(indivisible)}",
            symptom="the start of the server is refused, or it ends with AssertionError: ... is not divisible by ...",
            fix=f"--tp {' or '.join(map(str, tp_choices(facts, tp, on_cpu=on_cpu)))}",
        )
    replicated = facts.kv_heads and not facts.latent and tp > facts.kv_heads
    kv = f"{facts.kv_heads} KV heads" + (f", each on {tp // facts.kv_heads} ranks" if replicated else "")
    return ok(title, f"{facts.heads} heads, {kv}")


def check_devices(hardware: Hardware, tp: int) -> list[Finding]:
    """Check that there are at least as many accelerators as ranks."""
    if hardware.accelerator is None or tp <= hardware.devices:
        return []
    return [
        fail(
            "Devices",
            f"{tp} ranks, but only {hardware.devices} devices",
            symptom="the server ends during its start with: invalid device ordinal",
            fix=f"--tp {hardware.devices} or lower, or several nodes (--nnodes)",
        )
    ]


def check_architecture(facts: ModelFacts, kind: EngineKind, engine_folder: Path | None) -> list[Finding]:
    """Check whether a file of the engine names the model's class. `engine_folder`: that of the engine's package."""
    files = list(engine_folder.glob(MODEL_FILES[kind])) if engine_folder else []
    named = re.compile(rf"\b{re.escape(facts.architecture)}\b")
    if not files or (facts.architecture and any(named.search(file.read_text(encoding="utf-8")) for file in files)):
        return []
    problem = (
        f"{facts.architecture} is not a model of {kind.label}; its slower transformers backend can perhaps serve it"
    )
    return [
        warn(
            "Architecture",
            problem if facts.architecture else "config.json has no architecture",
            symptom="generation is slow, or the server ends with: Model architectures [...] are not supported for now",
            fix="Correct the architectures in config.json, or use another version of the engine or another model. For "
            "the backend, start the server with --model-impl transformers.",
        )
    ]


def check_tokenizer(folder: Path) -> Finding:
    """Check for tokenizer files."""
    if found := tokenizer_files(folder):
        return ok("Tokenizer", ", ".join(found))
    return warn(
        "Tokenizer",
        "the folder has no tokenizer file",
        symptom="the server ends during its start with OSError: Can't load tokenizer, or texts have wrong tokens",
        fix="Copy the tokenizer files of the original model into the folder, or serve token ids only with "
        "--skip-tokenizer-init.",
    )


def check_memory_of(folder: Path, facts: ModelFacts, hardware: Hardware, *, tp: int, dtype: str) -> list[Finding]:
    """Check the weight files and whether the weights fit into the free memory."""
    weights, problems = read_weights(folder)
    found = [check_files(weights, problems)]
    on_cpu = hardware.accelerator is None
    free = available_memory() if on_cpu else min((gpu.free for gpu in hardware.gpus[:tp]), default=0)
    if weights is None and not facts.own_code:
        weights = weights_of_config(folder)
    if weights is None or problems or not free:
        return found
    item = serving_item_bytes(facts, dtype, on_cpu=on_cpu)
    kv_token = kv_bytes_per_token(facts, tp, item)
    total = served_bytes(weights, facts, item)
    return [*found, check_fit(total, kv_token, tp=tp, free=free, on_cpu=on_cpu, context=facts.context)]


def examine_checkpoint(
    model: str, hardware: Hardware, *, tp: int, dtype: str, kind: EngineKind, engine_folder: Path | None
) -> list[Finding]:
    """Check a model against this machine and an engine. Starts no server and downloads nothing.

    `engine_folder`: the folder of the engine's package. None: the architecture is not checked.
    """
    if (folder := find_folder(model)) is None:
        return [check_missing(model)]
    facts, readable = read_config(folder)
    if facts is None:
        return [readable]
    is_sglang_on_cpu = kind is EngineKind.SGLANG and hardware.accelerator is None
    return [
        readable,
        *check_architecture(facts, kind, engine_folder),
        check_ranks(facts, tp, on_cpu=is_sglang_on_cpu),
        *check_devices(hardware, tp),
        check_tokenizer(folder),
        *check_memory_of(folder, facts, hardware, tp=tp, dtype=dtype),
    ]
