"""Checks of a model's configuration and tokenizer files. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.doctor.finding import Finding, fail, ok, warn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class ModelFacts:
    """The values of a `config.json` that the checks use. Sizes are numbers of elements; 0 if the file has no value."""

    architecture: str
    model_type: str = ""
    dtype: str = "bfloat16"
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    """Elements per token and layer that multi-head latent attention caches instead of keys and values."""
    intermediate: int = 0
    moe_intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    vocab: int = 0
    context: int = 0
    quantized: bool = False
    own_code: bool = False
    """Whether the folder contains its own modelling code (`auto_map`)."""


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Read the values of the language model from a Hugging Face config."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def number(*names: str) -> int:
        return next((int(text[name]) for name in names if isinstance(text.get(name), (int, float))), 0)

    heads = number("num_attention_heads", "n_head")
    hidden = number("hidden_size", "n_embd")
    rank = number("kv_lora_rank")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        architecture=(config.get("architectures") or [""])[0],
        model_type=str(config.get("model_type", "")),
        dtype=str(dtype or "bfloat16").removeprefix("torch."),
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or (hidden // heads if heads else 0),
        latent=rank + number("qk_rope_head_dim") if rank else 0,
        intermediate=number("intermediate_size", "n_inner"),
        moe_intermediate=number("moe_intermediate_size"),
        experts=number(*EXPERT_KEYS),
        experts_per_token=number("num_experts_per_tok", "num_experts_per_token"),
        vocab=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions"),
        quantized=bool(config.get("quantization_config")),
        own_code="auto_map" in config,
    )


def check_architecture(facts: ModelFacts, *, in_sglang: bool | None, in_transformers: bool) -> Finding:
    """Check whether SGLang supports the architecture.

    `in_sglang` is None when SGLang is not installed, which another check reports.
    """
    title, symptom = "Architecture", "the server ends with: Model architectures [...] are not supported for now"
    if not facts.architecture:
        return fail(
            title,
            "config.json has no architecture",
            symptom=symptom,
            fix='Add "architectures": ["..."] to config.json, with the value of the original model.',
        )
    if in_sglang is None or in_sglang:
        return ok(title, facts.architecture)
    if facts.own_code or in_transformers:
        return warn(
            title,
            f"{facts.architecture} is not a model of SGLang; its slower transformers backend can perhaps serve it",
            symptom=symptom,
            fix="Start the server with --model-impl transformers" + (" --trust-remote-code" if facts.own_code else ""),
        )
    return fail(
        title,
        f"neither SGLang nor transformers supports {facts.architecture}",
        symptom=symptom,
        fix="Upgrade SGLang to the newest tested version (see the SGLang line above), or choose another model.",
    )


def check_tokenizer(names: set[str]) -> Finding:
    """Check for tokenizer files. `names` are the files of the model's folder."""
    found = sorted(names & set(TOKENIZER_FILES))
    if found or any(name.endswith(".tiktoken") for name in names):
        return ok("Tokenizer", ", ".join(found) or "tiktoken")
    return warn(
        "Tokenizer",
        "the folder has no tokenizer file",
        symptom="the server ends during its start with OSError: Can't load tokenizer",
        fix="Copy the tokenizer files of the original model into the folder, or serve token ids only with "
        "--skip-tokenizer-init.",
    )


def known_to_sglang(architecture: str) -> bool | None:
    """Whether a file of SGLang's model folder names the class. None without SGLang. Does not import SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or not architecture:
        return None
    wanted = re.compile(rf"\b{re.escape(architecture)}\b")
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return any(wanted.search(file.read_text(encoding="utf-8")) for file in models.rglob("*.py"))


def known_to_transformers(model_type: str) -> bool:
    """Whether transformers has a folder for the model type. Does not import transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not model_type:
        return False
    return (Path(spec.submodule_search_locations[0]) / "models" / model_type.replace("-", "_")).is_dir()
