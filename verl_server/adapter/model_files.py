"""A model's own configuration file, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def find_model_file(model_path: str, name: str) -> Path | None:
    """The file of that name in the model's folder, or in the local cache of the hub. None when it is not there."""
    file = Path(model_path) / name
    if file.is_file():
        return file
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_path, name) if model_path.count("/") == 1 else None
    return Path(cached) if isinstance(cached, str) else None


def read_model_config(model_path: str, name: str = "config.json") -> dict[str, Any]:
    """The model's `config.json`, or another JSON file, from a folder or from the local cache of the hub.

    An empty dict when it is not there.
    """
    file = find_model_file(model_path, name)
    return {} if file is None else dict(json.loads(file.read_text(encoding="utf-8")))


def read_model_configs(model_path: str, tokenizer_path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The files `config.json`, `generation_config.json` and `tokenizer_config.json`."""
    return (
        read_model_config(model_path),
        read_model_config(model_path, "generation_config.json"),
        read_model_config(tokenizer_path, "tokenizer_config.json"),
    )


@dataclass(frozen=True)
class ModelFacts:
    """The sizes and names in a model's `config.json`. Sizes are numbers of elements; 0 if the file has no value."""

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
