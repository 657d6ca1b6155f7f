"""`make_model` writes the checkpoint of a tiny random model in a second, without a download.

The demo, the tests and the benchmarks use these models. The weights are random, but the architecture is that of a
released model family, so SGLang and Hugging Face transformers load the folder like that of a released model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB_SIZE = 320
"""Number of token ids of a tiny model whose tokenizer has a token for each byte."""


class Architecture(enum.Enum):
    """The supported model families. The value is the `model_type` of Hugging Face."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    LLAMA = "llama"
    QWEN3_MOE = "qwen3_moe"


def make_tokenizer(
    folder: Path,
    *,
    texts: Sequence[str] = (),
    vocab_size: int = BYTE_VOCAB_SIZE,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
) -> Any:
    """Make a byte-level tokenizer and save it in `folder`. Ids 0 to 255 are bytes; `special_tokens` follow.

    `texts`: text from which further tokens are learned, for long prompts. These are between the bytes and the special
    tokens, and the tokenizer has at most `vocab_size` tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(texts))
    if texts:
        num_tokens = vocab_size - len(special_tokens)
        make_trainer: Any = trainers.BpeTrainer
        trainer = make_trainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def make_config(
    architecture: Architecture | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = BYTE_VOCAB_SIZE,
    context_length: int = 2048,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
) -> Any:
    """A Hugging Face config of the given family.

    Sizes are numbers of elements. `head_dim` of Qwen3 models is `hidden_size // heads`, at least 32: on a
    CPU, vLLM computes no smaller heads.
    """
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    architecture = Architecture(architecture)
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "dtype": dtype,
    }
    if architecture is Architecture.QWEN2:
        return Qwen2Config(**common)
    if architecture is Architecture.LLAMA:
        return LlamaConfig(**common)
    common["head_dim"] = max(hidden_size // heads, 32)
    if architecture is Architecture.QWEN3:
        return Qwen3Config(**common)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": intermediate_size // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Qwen3MoeConfig(**common, **experts)


def make_model(
    folder: Path | str,
    architecture: Architecture | str = Architecture.QWEN3,
    *,
    seed: int = 0,
    weight_std: float = 0.2,
    texts: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """Write a random model and its tokenizer into `folder`, and return the folder.

    `texts`: see `make_tokenizer`. `sizes` are the arguments of `make_config`. `weight_std`: standard deviation of the
    weights. Its default is larger than that of transformers, so that the largest logit of a random model is clear and
    greedy decoding does not depend on rounding. A smaller value makes the rounding errors of log probabilities smaller.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(architecture, **sizes)
    tokenizer = make_tokenizer(folder, texts=texts, vocab_size=config.vocab_size)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, sizes.get("dtype", "float32")))
        randomize(model, weight_std)
    model.save_pretrained(folder)
    return folder


def randomize(model: Any, weight_std: float) -> None:
    """Set the weights to random values with the given standard deviation, and the biases to small ones."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, weight_std)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
