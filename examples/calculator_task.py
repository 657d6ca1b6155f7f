"""The task of `calculator.py`, pure: a question, a tool, what an answer is worth, and the words that it takes.

    <user> 4 7 + 3 8 <end> <assistant> <call> 4 7 + 3 8 </call> <end> <tool> 8 5 <end> <assistant> 8 5 <end>

A right answer is only worth something after a call of the tool: the policy must learn to ask, and to read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_server.agent.episode import Task, Turn
from verl_server.agent.loops import ToolAgentLoop
from verl_server.agent.runner import Sample
from verl_server.agent.tools import ToolCall, ToolResult

WORDS = (*"0123456789", "+", "?", "<call>", "</call>", "<user>", "<assistant>", "<tool>", "<end>")
"""One token each; `?` is what all other words are."""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_TURN = 9
"""Tokens that the policy may say in one turn: the right call, and one too many."""
MAX_RESPONSE = 24


def calculate(expression: str) -> str:
    """Adds two numbers: `4 7 + 3 8` is `8 5`."""
    left, plus, right = expression.replace(" ", "").partition("+")
    if not plus:
        raise ValueError("there is no +")
    return " ".join(str(int(left) + int(right)))


class CalculatorLoop(ToolAgentLoop):
    """`<call> ... </call>` instead of JSON, which is long for a policy that begins with nothing."""

    def calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        inner = call_in(turn.text)
        return [] if inner is None else [ToolCall("calculate", {"expression": inner})]


def call_in(text: str) -> str | None:
    """What stands between the marks."""
    _, opened, rest = text.partition("<call>")
    inner, closed, _ = rest.partition("</call>")
    return inner.strip() if opened and closed else None


def draw(rng: random.Random, count: int, prefix: str) -> list[Task]:
    """Questions with two numbers of two digits."""
    tasks = []
    for number in range(count):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        question = " ".join(f"{a}+{b}")
        tasks.append(Task(f"{prefix}-{number}", [{"role": "user", "content": question}], {"answer": str(a + b)}))
    return tasks


def reward(sample: Sample) -> float:
    """0 to 1: half for the right call, half for the right answer to what the tool said."""
    said = [[WORDS[token] for token in node.tokens] for node in sample.session.nodes if node.sampled]
    question = str(sample.task.messages[0]["content"]).split()
    worth = 0.5 * share(said[0], ["<call>", *question, "</call>", "<end>"])
    if used_tool(sample) and len(said) > 1:
        worth += 0.5 * share(said[1], [*sample.task.data["answer"], "<end>"])
    return worth


def show(sample: Sample) -> str:
    """All that was said, word by word."""
    return " ".join(WORDS[token] for node in sample.session.nodes for token in node.tokens)


def used_tool(sample: Sample) -> bool:
    """Whether the tool was called and could answer."""
    for node in sample.session.nodes:
        for message in (node.message or {}).get("messages", ()):
            if message["role"] == "tool":
                return not str(message["content"]).startswith("Error")
    return False


def share(said: Sequence[str], right: Sequence[str]) -> float:
    """Of positions that are right; missing and superfluous ones are wrong."""
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right), 1)


def make_tokenizer(folder: Path) -> Any:
    """Whole words. Saved into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
