"""All checks of one model: its folder, its configuration, its weights, and whether they fit on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from verl_server.adapter.model_files import ModelFacts, read_facts
from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.doctor.hardware import Hardware
from verl_server.doctor.model import check_architecture, check_tokenizer, known_to_sglang, known_to_transformers
from verl_server.doctor.ranks import check_devices, check_ranks
from verl_server.doctor.server_environment import InstalledEngine
from verl_server.doctor.vllm import model as vllm_model
from verl_server.doctor.weights import (
    check_files,
    check_fit,
    kv_bytes_per_token,
    read_weights,
    served_bytes,
    serving_item_bytes,
    weights_of_config,
)
from verl_server.platforms.available_memory import available_memory


def find_folder(model: str) -> Path | None:
    """The folder of a model: a path, or the local cache of a model of the Hugging Face Hub. None without a folder."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `organisation/name` and is not a path."""
    return model.count("/") == 1 and not model.startswith(("/", ".", "~"))


def check_missing(model: str) -> Finding:
    """The finding for a model whose folder `find_folder` did not find."""
    if is_hub_name(model):
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
    sizes = f"{facts.layers} layers, vocabulary {facts.vocab}, context {facts.context}, {facts.dtype}"
    return facts, ok("Model", f"{facts.model_type}: {sizes}")


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


def examine(
    model: str, hardware: Hardware, *, tp: int, dtype: str, engine: InstalledEngine | None = None
) -> list[Finding]:
    """Check a model against this machine and an engine, by default SGLang. Starts no server and downloads nothing."""
    folder = find_folder(model)
    if folder is None:
        return [check_missing(model)]
    facts, readable = read_config(folder)
    if facts is None:
        return [readable]
    on_cpu = hardware.accelerator is None
    devices = check_devices(tp, accelerator=hardware.accelerator, devices=hardware.devices, cores=hardware.cores)
    if engine is not None and engine.kind == "vllm":
        of_engine = vllm_model.examine(facts, engine.folder, tp=tp, on_cpu=on_cpu)
    else:
        architecture = check_architecture(
            facts,
            in_sglang=known_to_sglang(facts.architecture),
            in_transformers=known_to_transformers(facts.model_type),
        )
        of_engine = [architecture, *check_ranks(facts, tp, on_cpu=on_cpu)]
    return [
        readable,
        *of_engine,
        *([devices] if devices else []),
        check_tokenizer({file.name for file in folder.iterdir()}),
        *check_memory_of(folder, facts, hardware, tp=tp, dtype=dtype),
    ]
