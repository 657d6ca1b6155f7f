"""The task of the demo: sort five digits in ascending order, then stop.

Pure functions over token ids. The vocabulary has twelve tokens: the digits 0 to 9 (each digit is its own id),
`SORT` at the end of every prompt, and `END`, which the policy must generate to stop. A policy that generates random
tokens has about one correct position in twenty.
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
"""Maximum number of tokens of a response: the correct answer with its `END`, and one more."""

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
    """The only correct response: the prompt's digits in ascending order, then `END`."""
    return (*sorted(prompt[:-1]), END)


def reward(prompt: Prompt, response: Sequence[int]) -> float:
    """Fraction of correct positions, 0 to 1. Missing and additional positions count as wrong."""
    expected = answer(prompt)
    correct = sum(got == token for got, token in zip(response, expected, strict=False))
    return correct / max(len(expected), len(response))


def show(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A prompt and its response as text: `3 1 2 5 5 → 1 2 3 5 5 ■`."""
    names = {SORT: "→", END: "■"}
    return " ".join(names.get(token, str(token)) for token in (*prompt, *response))
