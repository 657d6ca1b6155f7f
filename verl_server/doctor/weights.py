"""The weights of a model's folder: are the files whole, and does what they hold fit into memory?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from verl_server.doctor.finding import Finding, fail, gib, ok, warn
from verl_server.doctor.memory import SERVER_BYTES
from verl_server.doctor.model import ModelFacts

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
FLOATS = {"F64", "F32", "F16", "BF16"}
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
LARGEST_HEADER = 100 * 2**20  # the limit of the safetensors library
#: Of a GPU's free memory; the rest goes to the KV cache, activations and graphs.
SHARE_FOR_WEIGHTS = 0.8


@dataclass(frozen=True)
class Weights:
    """All weight files of a folder."""

    files: int
    elements: int
    """Of floating point tensors."""
    other_bytes: int
    """Of all other tensors: these are served as they are."""
    stored_bytes: int


def serving_item_bytes(facts: ModelFacts, dtype: str, *, on_cpu: bool) -> int:
    """Bytes of an element as it is served. `auto` keeps the checkpoint's, but makes float32 half on a GPU."""
    name = dtype
    if dtype == "auto":
        name = "float16" if facts.dtype == "float32" and not on_cpu else facts.dtype
    return ITEM_BYTES.get(name, 2)


def served_bytes(weights: Weights, facts: ModelFacts, item_bytes: int) -> int:
    """Bytes of the whole model in the server. Quantized weights stay as they are stored."""
    if facts.quantized:
        return weights.stored_bytes
    return weights.elements * item_bytes + weights.other_bytes


def kv_bytes_per_token(facts: ModelFacts, tp: int, item_bytes: int) -> int:
    """Bytes that one token takes in one rank's KV cache."""
    if facts.latent:
        return facts.layers * facts.latent * item_bytes
    return facts.layers * 2 * max(facts.kv_heads // tp, 1) * facts.head_dim * item_bytes


def check_fit(weights_bytes: int, kv_token: int, *, tp: int, free: int, on_cpu: bool, context: int) -> Finding:
    """`free`: bytes of the machine (CPU, all ranks share them) or of the fullest GPU (one rank)."""
    need, room = (weights_bytes + SERVER_BYTES, free) if on_cpu else (weights_bytes // tp, free)
    where = "of memory" if on_cpu else "a GPU"
    detail = (
        f"{gib(weights_bytes if on_cpu else need)} of weights{'' if on_cpu else ' a rank'}, {gib(free)} free {where}"
    )
    if need > room:
        return fail(
            "Fits",
            detail,
            symptom="out of memory, or `killed by SIGKILL`, while the weights are loaded",
            fix="A smaller dtype (--dtype bfloat16), " + ("more memory" if on_cpu else f"more ranks than --tp {tp}")
            + ", or a smaller or quantized model.",
        )  # fmt: skip
    tokens = (room - need) // max(kv_token * (tp if on_cpu else 1), 1)
    detail += f"; KV cache {kv_token / 1024:.1f} KiB a token and rank, room for {tokens:,} tokens at most"
    if tokens < context or (not on_cpu and need > room * SHARE_FOR_WEIGHTS):
        return warn(
            "Fits",
            detail,
            symptom="Not enough memory for the KV cache, or requests that wait for each other",
            fix=f"--context-length below {context}, a smaller dtype, or more ranks",
        )
    return ok("Fits", detail)


def check_files(weights: Weights | None, problems: list[str]) -> Finding:
    """Are there weight files, and are they whole?"""
    if problems:
        return fail(
            "Weight files",
            "; ".join(problems),
            symptom="SafetensorError (incomplete metadata, header too large) while the server loads the model",
            fix="Download the named files again (git lfs pull, or hf download); check the disk's free space.",
        )
    if weights is None:
        return warn(
            "Weight files",
            "the folder has no .safetensors files",
            symptom="RuntimeError: Cannot find any model weights",
            fix="Download the weights, convert them to safetensors, or start with --load-format dummy.",
        )
    return ok("Weight files", f"{weights.files} whole, {gib(weights.stored_bytes)}")


def read_weights(folder: Path) -> tuple[Weights | None, list[str]]:
    """What the headers of the safetensors files say, and what is wrong with the files."""
    names = {file.name for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")}
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
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


def read_header(file: Path) -> tuple[dict[str, Any], str]:
    """Header of a safetensors file (8 bytes of length, then JSON), or what is wrong with the file."""
    if not file.is_file():
        return {}, "is named by the index and missing"
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return {}, "is a git-lfs pointer, not the file"
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            return {}, "is cut off or not a safetensors file"
        opened.seek(8)
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError:
            return {}, "has a damaged header"
    end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    if size != 8 + length + end:
        return header, f"has {size} bytes and should have {8 + length + end}"
    return header, ""


def weights_of_config(folder: Path) -> Weights | None:
    """The model's size without its weights, by building it on torch's meta device (seconds)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, ImportError):
        return None  # not a model that transformers builds; the size is then unknown
    elements = sum(int(parameter.numel()) for parameter in model.parameters())
    return Weights(0, elements, 0, 0)
