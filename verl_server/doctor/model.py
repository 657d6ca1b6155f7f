"""What a model's folder says: architecture, sizes, tokenizer. No server, no torch."""

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
    """What a `config.json` says. Sizes in elements; 0 where it says nothing."""

    architecture: str
    model_type: str = ""
    dtype: str = "bfloat16"
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    """Elements that multi-head latent attention caches per token and layer, instead of keys and values."""
    intermediate: int = 0
    moe_intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    vocab: int = 0
    context: int = 0
    quantized: bool = False
    own_code: bool = False
    """The folder brings its own modelling code (`auto_map`)."""


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of the language model in a Hugging Face config."""
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
    """Does SGLang know the model? None: it is not installed, which another check reports."""
    title, symptom = "Architecture", "the server ends with: Model architectures [...] are not supported for now"
    if not facts.architecture:
        return fail(
            title,
            "config.json names none",
            symptom=symptom,
            fix='Add "architectures": ["..."], as the original model has it.',
        )
    if in_sglang is None or in_sglang:
        return ok(title, facts.architecture)
    if facts.own_code or in_transformers:
        return warn(
            title,
            f"{facts.architecture} is not one of SGLang's models; its slower transformers fallback may serve it",
            symptom=symptom,
            fix="Try it, with --model-impl transformers" + (" --trust-remote-code" if facts.own_code else ""),
        )
    return fail(
        title,
        f"neither SGLang nor transformers knows {facts.architecture}",
        symptom=symptom,
        fix="Upgrade both (verl-server doctor names the tested versions), or choose another model.",
    )


def check_tokenizer(names: set[str]) -> Finding:
    """`names`: the files of the model's folder."""
    found = sorted(names & set(TOKENIZER_FILES))
    if found or any(name.endswith(".tiktoken") for name in names):
        return ok("Tokenizer", ", ".join(found) or "tiktoken")
    return warn(
        "Tokenizer",
        "the folder has no tokenizer file",
        symptom="OSError: Can't load tokenizer, while the server starts",
        fix="Copy the tokenizer of the original model here, or serve token ids only: --skip-tokenizer-init",
    )


def known_to_sglang(architecture: str) -> bool | None:
    """Whether a file of SGLang's model folder defines that class; None without SGLang. Imports nothing of it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations or not architecture:
        return None
    wanted = re.compile(rf"\b{re.escape(architecture)}\b")
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return any(wanted.search(file.read_text(encoding="utf-8")) for file in models.rglob("*.py"))


def known_to_transformers(model_type: str) -> bool:
    """Whether transformers has a folder for that model type. Imports nothing of it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not model_type:
        return False
    return (Path(spec.submodule_search_locations[0]) / "models" / model_type.replace("-", "_")).is_dir()
