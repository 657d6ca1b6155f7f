"""The task of `calculator.py` and `async_training.py`: questions, tool, reward, vocabulary, limits.

A sample of the task, one token per word:

    <user> 4 7 + 3 8 <end> <assistant> <call> 4 7 + 3 8 </call> <end> <tool> 8 5 <end> <assistant> 8 5 <end>

A correct answer earns a reward only after a call of the tool. The policy must learn to call the tool and to read its
result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

from word_policy import fraction_correct

from verl_server.agent import Environment, Episode, FunctionTool, RolloutLimits, Sample, Task, reward

VOCABULARY = (*"0123456789", "+", "?", "<call>", "</call>", "<user>", "<assistant>", "<tool>", "<end>")
"""Words of the task, one token each. `?` stands for all other words."""
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 48, 6
LIMITS = RolloutLimits(max_response_tokens=24, max_turns=2, max_tool_tokens=4)
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": 9}
"""9 tokens are the correct call and one additional token."""


def calculate(expression: str) -> str:
    """Adds two numbers: `4 7 + 3 8` is `8 5`."""
    left, plus, right = expression.replace(" ", "").partition("+")
    if not plus:
        raise ValueError("the expression has no +")
    return " ".join(str(int(left) + int(right)))


class CalculatorEnvironment(Environment):
    """The agent answers, or calls the calculator and answers then. A call has the form `<call> ... </call>`.

    JSON would be too long for a policy with random weights. No prompt describes the calculator: the policy finds out
    by its rewards that there is one. Therefore the calculator is no tool of the environment.
    """

    calculator: ClassVar[FunctionTool] = FunctionTool(calculate)

    async def run(self, episode: Episode) -> None:
        turn = await episode.generate()
        while turn.finish_reason != "length" and (expression := parse_expression(turn.text)) is not None:
            result = await self.calculator.call({"expression": expression})
            turn = await episode.generate([result.message])

    @reward
    async def correct(self, sample: Sample) -> float:
        """From 0 to 1: half for the correct call, half for the correct answer after the tool's result."""
        turns = [[VOCABULARY[token] for token in node.token_ids] for node in sample.graph.nodes if node.sampled]
        question = str(self.task.messages[0]["content"]).split()
        value = 0.5 * fraction_correct(turns[0], ["<call>", *question, "</call>", "<end>"])
        if used_tool(sample) and len(turns) > 1:
            value += 0.5 * fraction_correct(turns[1], [*self.task.data["answer"], "<end>"])
        return value

    @reward(weight=0)
    async def used_tool(self, sample: Sample) -> float:
        return float(used_tool(sample))


def parse_expression(text: str) -> str | None:
    """The text between `<call>` and `</call>`. None if there is no complete call."""
    _, opened, rest = text.partition("<call>")
    expression, closed, _ = rest.partition("</call>")
    return expression.strip() if opened and closed else None


def endless_tasks(seed: int) -> Iterator[Task]:
    """Random additions of two numbers with two digits."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        yield Task(f"{a}+{b}", [{"role": "user", "content": " ".join(f"{a}+{b}")}], {"answer": str(a + b)})


def transcript(sample: Sample) -> str:
    """All tokens of a sample as words."""
    return " ".join(VOCABULARY[token] for node in sample.graph.nodes for token in node.token_ids)


def used_tool(sample: Sample) -> bool:
    """Whether the policy called the tool and the tool returned a result without an error."""
    for node in sample.graph.nodes:
        for message in (node.message or {}).get("messages", ()):
            if message["role"] == "tool":
                return not str(message["content"]).startswith("Error")
    return False
