"""What a renderer needs of a tokenizer."""

from __future__ import annotations

import os

from verl_server.errors import BadInputError

IDENTITY_TEXT = "The tokenizer splits 1234 words, also d\u00e9j\u00e0 vu.\n\n\u4f60\u597d"
"""Text by whose token ids tokenizers are told apart."""
TOKENIZER_METHODS = ("apply_chat_template", "encode", "decode")
"""Methods of a tokenizer that a renderer calls."""


def require_tokenizer(tokenizer: object) -> None:
    """Raise BadInputError unless `tokenizer` has the methods of a Hugging Face tokenizer."""
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        raise BadInputError(
            f"a renderer needs a tokenizer, got the path or name {path!r}; pass "
            f"transformers.AutoTokenizer.from_pretrained({path!r})"
        )
    if missing := [name for name in TOKENIZER_METHODS if not callable(getattr(tokenizer, name, None))]:
        inner = "; pass its attribute `tokenizer`" if hasattr(tokenizer, "tokenizer") else ""
        raise BadInputError(
            f"a renderer needs a Hugging Face tokenizer, but {type(tokenizer).__name__} has no {missing[0]}(){inner}"
        )
