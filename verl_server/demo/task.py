"""The demo's task: "here are five digits, write them in ascending order, then stop".

Pure functions over token ids. The vocabulary has twelve tokens: the digits 0 to 9 (each digit is its own id),
`SORT` at the end of every prompt, and `END`, which the policy must write to stop. A policy that writes random
tokens gets about one position in twenty right.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

SORT = 10
END = 11
VOCAB_SIZE = 12

DIGITS = 5
PROMPT_LENGTH = DIGITS + 1
MAX_RESPONSE = DIGITS + 2
"""Tokens that a response may have: the right answer with its `END`, and one too many."""

Prompt = tuple[int, ...]


def draw_prompts(rng: random.Random, count: int, *, never: Collection[Prompt] = ()) -> list[Prompt]:
    """`count` random prompts (digits, then `SORT`), none of them in `never`."""
    prompts: list[Prompt] = []
    while len(prompts) < count:
        prompt = (*(rng.randrange(10) for _ in range(DIGITS)), SORT)
        if prompt not in never:
            prompts.append(prompt)
    return prompts


def answer(prompt: Prompt) -> tuple[int, ...]:
    """The one right response: the prompt's digits in ascending order, then `END`."""
    return (*sorted(prompt[:-1]), END)


def reward(prompt: Prompt, response: Sequence[int]) -> float:
    """Share of positions that are right, 0 to 1. Missing and superfluous positions count as wrong."""
    right = answer(prompt)
    hits = sum(got == wanted for got, wanted in zip(response, right, strict=False))
    return hits / max(len(right), len(response))


def show(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A rollout as a person would write it: `3 1 2 5 5 → 1 2 3 5 5 ■`."""
    names = {SORT: "→", END: "■"}
    return " ".join(names.get(token, str(token)) for token in (*prompt, *response))
