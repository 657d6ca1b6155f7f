"""Shared by the examples that train: a policy with random weights, one token per word, and a score for words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl_server.demo import trainer
from verl_server.tiny import Architecture, make_config

CONTEXT_LENGTH = 64
SERVER_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": CONTEXT_LENGTH,
    "max_total_tokens": 16384,
    "log_level": "warning",
}
END, UNKNOWN = "<end>", "?"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_policy(folder: Path, vocabulary: Sequence[str], seed: int) -> None:
    """Write an untrained Qwen3 with two layers, and a tokenizer.

    `vocabulary`: the words, among them `<end>`, which ends a turn, and `?`, which stands for all other words.
    """
    from transformers import AutoModelForCausalLM

    config = make_config(
        Architecture.QWEN3, context_length=CONTEXT_LENGTH, tie_word_embeddings=True, vocab_size=len(vocabulary)
    )
    config.eos_token_id = config.pad_token_id = vocabulary.index(END)
    config.initializer_range = trainer.INITIAL_STD
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(folder, vocabulary)


def make_tokenizer(folder: Path, vocabulary: Sequence[str]) -> Any:
    """A tokenizer with one token per word, saved into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {word: token for token, word in enumerate(vocabulary)}
    words = Tokenizer(models.WordLevel(tokens, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def fraction_correct(words: Sequence[str], expected: Sequence[str]) -> float:
    """Fraction of positions with the expected word. Missing and additional words count as wrong positions."""
    return sum(a == b for a, b in zip(words, expected, strict=False)) / max(len(words), len(expected))
