"""`TokenCodec` gives exactly what the methods of the tokenizer give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_server.trajectory.rendering.tokenizer import MAX_SHORT_CHARS, TokenCodec

WORDS = ["[UNK]", "a", "sen", "##tence", ".", "don", "'", "t", ",", "b", "<eot>"]


def word_pieces() -> Any:
    """A tokenizer whose texts lose spaces when they are decoded, as those of BERT do."""
    rust = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    rust.normalizer, rust.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, unk_token="[UNK]", eos_token="<eot>", clean_up_tokenization_spaces=True
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return [chat_tokenizer(tmp_path_factory.mktemp("tokenizer")), word_pieces()]


def require_equal(tokenizer: Any, text: str) -> None:
    codec = TokenCodec(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert codec.encode(text) == token_ids
    for skip in (False, True):
        assert codec.decode(token_ids, skip_special_tokens=skip) == tokenizer.decode(
            token_ids, skip_special_tokens=skip
        )


PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<eot>",
    "<think>",
    "é",
    "你",
    "\u200d",
    "\n",
    " ",
    "sentence",
    ".",
    "don't",
    ",",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=20).map("".join))
def test_texts_and_tokens_equal_those_of_the_tokenizer(tokenizers: list[Any], text: str) -> None:
    if not text.isascii():
        text = text.encode(errors="ignore").decode()
    for tokenizer in tokenizers:
        require_equal(tokenizer, text)


def test_long_texts_equal_those_of_the_tokenizer(tokenizers: list[Any]) -> None:
    for tokenizer in tokenizers:
        require_equal(tokenizer, "A sentence, don't. <|im_end|> " * MAX_SHORT_CHARS)


def test_settings_of_the_tokenizer_are_obeyed(tmp_path: Path) -> None:
    """They can change at any time: another part of the program may pad, truncate, or split special tokens."""
    tokenizer = chat_tokenizer(tmp_path)
    codec, text = TokenCodec(tokenizer), "<|im_start|>user\nhello<|im_end|>"
    whole = codec.encode(text)
    tokenizer(text, truncation=True, max_length=2, padding="max_length")
    assert codec.encode(text) == whole
    tokenizer.split_special_tokens = True
    assert codec.encode(text) == tokenizer.encode(text, add_special_tokens=False) != whole
    tokenizer.split_special_tokens = False
    assert codec.encode(text) == whole


def test_methods_of_a_subclass_are_called(tmp_path: Path) -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    tokenizer = Shouting(tokenizer_object=chat_tokenizer(tmp_path).backend_tokenizer)
    codec = TokenCodec(tokenizer)
    assert codec.decode(codec.encode("hello"), skip_special_tokens=False) == "HELLO"
