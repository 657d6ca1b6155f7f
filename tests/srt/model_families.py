"""Checkpoints of tiny random models of many families, for tests of what is pushed and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from verl_server.tiny import make_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
YARN: dict[str, Any] = {
    "type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2}
MROPE: dict[str, Any] = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def _config(name: str, **sizes: Any) -> Callable[[], Any]:
    """A function that makes the configuration of the class `name` of transformers."""
    return lambda: getattr(transformers, name)(**SIZES | sizes)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "qwen2_moe": _config("Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=16, **EXPERTS),
    "qwen3_next": _config(
        "Qwen3NextConfig", head_dim=16, **EXPERTS, num_hidden_layers=4, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config", **ROUTED_EXPERTS, **LATENT_ATTENTION, n_group=2, topk_group=1, rope_scaling=YARN
    ),
    "glm4_moe": _config("Glm4MoeConfig", head_dim=16, **ROUTED_EXPERTS, n_group=1, topk_group=1, use_qk_norm=True),
    "glm4_moe_lite": _config("Glm4MoeLiteConfig", **ROUTED_EXPERTS, **LATENT_ATTENTION, n_group=1, topk_group=1),
    "gpt_oss": _config(
        "GptOssConfig", head_dim=16, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64,
        sliding_window=64,
    ),
    "gemma": _config("GemmaConfig", head_dim=16, tie_word_embeddings=True),
    "gemma3": _config("Gemma3TextConfig", head_dim=16, tie_word_embeddings=True, sliding_window=64),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _config("OlmoeConfig", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=SIZES | {"rope_scaling": MROPE},
        vision_config=VISION | {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
        image_token_id=300, video_token_id=301, vision_start_token_id=302, vision_end_token_id=303,
    ),
}  # fmt: skip
"""The configuration of each family."""
IGNORING_FAMILY = "llama_mlp_bias"
"""A family with tensors that SGLang's model class ignores."""
RELEASED_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"full_attention_interval": 4},
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_scaling": None},
}
"""Fields that the `config.json` of released models has, and transformers does not write."""
ROUTER_BIAS = "e_score_correction_bias"


VLLM_SIZES: dict[str, Any] = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32768, "dtype": "float32",
}  # fmt: skip
"""Sizes of heads that vLLM computes on a CPU, and the context of the tests' vLLM servers."""
VLLM_FAMILIES: dict[str, Callable[[], Any]] = {
    "vllm_gpt_oss": _config(
        "GptOssConfig", **VLLM_SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=64
    ),
    "vllm_granitemoe": _config("GraniteMoeConfig", **VLLM_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "vllm_stablelm": _config("StableLmConfig", **VLLM_SIZES),
}
"""Configurations for vLLM servers on a CPU."""


def make_family_model(family: str, seed: int = 0) -> Any:
    """A random model of the family in bfloat16. Biases of routers are float32, as in released checkpoints."""
    config = (FAMILIES | VLLM_FAMILIES).get(family, _config("LlamaConfig", mlp_bias=True))()
    is_vision_model = hasattr(config, "vision_config")
    factory = transformers.AutoModelForImageTextToText if is_vision_model else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 20)
            for module in model.modules():
                if ROUTER_BIAS in dict(module.named_buffers(recurse=False)):
                    values = 12.5 + torch.randn(getattr(module, ROUTER_BIAS).shape) / 100
                    setattr(module, ROUTER_BIAS, values)
    return model


def save_family_model(model: Any, family: str, folder: Path) -> Path:
    """Save the model as a checkpoint that SGLang can load, and return the folder."""
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | RELEASED_FIELDS.get(family, {})))
    make_tokenizer(folder)
    return folder
