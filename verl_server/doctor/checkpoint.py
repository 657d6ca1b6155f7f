"""All checks of one model: find its folder, read it, compare it with the machine."""

from __future__ import annotations

import json
from pathlib import Path

from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.doctor.hardware import Hardware
from verl_server.doctor.memory import available_memory
from verl_server.doctor.model import (
    ModelFacts,
    check_architecture,
    check_tokenizer,
    known_to_sglang,
    known_to_transformers,
    read_facts,
)
from verl_server.doctor.ranks import check_devices, check_ranks
from verl_server.doctor.weights import (
    check_files,
    check_fit,
    kv_bytes_per_token,
    read_weights,
    served_bytes,
    serving_item_bytes,
    weights_of_config,
)


def find_folder(model: str) -> Path | None:
    """The model's folder: a path, or a model of the hub that this machine has in its cache."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def is_hub_name(model: str) -> bool:
    """`organisation/name`, and not a path."""
    return model.count("/") == 1 and not model.startswith(("/", ".", "~"))


def check_missing(model: str) -> Finding:
    """The finding for a model that `find_folder` did not find."""
    if is_hub_name(model):
        return warn(
            "Model",
            f"{model} is not on this machine: it will be downloaded at the first start, and was not checked",
            symptom="the first start takes as long as the download, and may outlive the start deadline",
            fix=f"hf download {model}, then run this again",
        )
    return fail("Model", f"{model} is not a folder", symptom="the server ends while it starts", fix="Check the path.")


def read_config(folder: Path) -> tuple[ModelFacts | None, Finding]:
    """Facts from `config.json`, and a finding about the file."""
    try:
        facts = read_facts(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return None, fail(
            "Model",
            f"config.json cannot be read: {error}",
            symptom="the server ends while it starts",
            fix="Name the folder that save_pretrained wrote or the hub's snapshot; it holds config.json.",
        )
    sizes = f"{facts.layers} layers, vocabulary {facts.vocab}, context {facts.context}, {facts.dtype}"
    return facts, ok("Model", f"{facts.model_type}: {sizes}")


def check_memory_of(folder: Path, facts: ModelFacts, hardware: Hardware, *, tp: int, dtype: str) -> list[Finding]:
    """Weight files, and whether they fit."""
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


def examine(model: str, hardware: Hardware, *, tp: int, dtype: str) -> list[Finding]:
    """Look at a model's folder and at this machine. Starts nothing and downloads nothing."""
    folder = find_folder(model)
    if folder is None:
        return [check_missing(model)]
    facts, readable = read_config(folder)
    if facts is None:
        return [readable]
    architecture = check_architecture(
        facts,
        in_sglang=known_to_sglang(facts.architecture),
        in_transformers=known_to_transformers(facts.model_type),
    )
    devices = check_devices(tp, accelerator=hardware.accelerator, devices=hardware.devices, cores=hardware.cores)
    return [
        readable,
        architecture,
        *check_ranks(facts, tp, on_cpu=hardware.accelerator is None),
        *([devices] if devices else []),
        check_tokenizer({file.name for file in folder.iterdir()}),
        *check_memory_of(folder, facts, hardware, tp=tp, dtype=dtype),
    ]
