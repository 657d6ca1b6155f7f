"""The task of `coding.py`: programs, the sandbox, the compaction and the rewards. A word is a token of the policy.

The user asks for a function: `write f : x plus 3`. The policy completes the program `return x ...` with `+ 3`. A test
runs the program in the sandbox, and the policy reads whether the result is right, too low or too high. Then it writes a
summary: the program that it believes to be right. The environment compacts the history to this summary, and the policy
writes its last program, which the hidden tests run. A sample with the full reward, as two segments:

    <user> write f : x plus 3 <end> <assistant> + 3 <end> <tool> pass <end> <user> summary <end> <assistant> + 3 <end>
    <user> + 3 <end> <assistant> + 3 <end>

The second segment knows of the first one only the summary. Both segments are trained with the reward of the sample.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from word_policy import fraction_correct

from verl_server.agent import (
    CommandResult,
    Environment,
    Episode,
    LocalSandbox,
    RolloutLimits,
    Sample,
    SandboxLimits,
    Task,
    reward,
)
from verl_server.trajectory import ForkReason

NUMBER = "3"
OPERATIONS = {"plus": ("+", operator.add), "times": ("*", operator.mul)}
"""Operator of each operation in a program, and its meaning."""
REQUEST = "write f : x {operation} {number}"
VOCABULARY = (
    *("write", "f", ":", "x", *OPERATIONS, NUMBER, *(symbol for symbol, _ in OPERATIONS.values())),
    *("pass", "low", "high", "error", "summary", "?", "<user>", "<assistant>", "<tool>", "<end>"),
)
"""Words of the task. `?` stands for all other words."""
LIMITS = RolloutLimits(max_response_tokens=32, max_turns=3)
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": 4}
"""4 tokens are the correct turn and one additional token."""
VISIBLE_INPUTS, HIDDEN_INPUTS = (4,), (5, 7, 8)
"""Values of x in the test that the policy sees, and in the tests of the reward."""
RUN_TESTS = """
import sys
names = {}
exec(open(sys.argv[1]).read(), names)
for test in sys.argv[2:]:
    x, expected = map(int, test.split("="))
    result = names["f"](x)
    print("low" if result < expected else "high" if result > expected else "pass")
"""
"""Program that runs a program of the policy on tests such as `5=8`. It prints a line for each test."""


class CodingEnvironment(Environment):
    """Two attempts at a program, with a test and a compaction between them. Each sample has a sandbox."""

    async def setup(self) -> None:
        self.turns: list[list[str]] = []
        """Words of each turn: the first program, the summary, and the last program."""
        self.solution = [self.task.data["operator"], NUMBER, "<end>"]
        self.box = LocalSandbox(SandboxLimits(memory_bytes=256 << 20, max_processes=16))
        await self.box.start()

    async def teardown(self) -> None:
        await self.box.close()

    async def run(self, episode: Episode) -> None:
        result = await self.run_tests("first.py", await self.generate(episode), VISIBLE_INPUTS)
        self.verdict = "error" if result.exit_code else result.stdout.strip()
        summary = await self.generate(
            episode, [{"role": "tool", "content": self.verdict}, {"role": "user", "content": "summary"}]
        )
        compacted = [{"role": "user", "content": summary}]
        episode.adopt(episode.new_root(compacted, reason=ForkReason.COMPACTED))
        self.program = await self.generate(episode)

    async def generate(self, episode: Episode, messages: Sequence[dict[str, str]] | None = None) -> str:
        """Let the policy generate a turn. Returns its text."""
        turn = await episode.generate(messages)
        self.turns.append([VOCABULARY[token] for token in turn.token_ids])
        return turn.text

    async def run_tests(self, file: str, program: str, inputs: Sequence[int]) -> CommandResult:
        """Write a program of the policy into a file of the sandbox, and test it with the values `inputs` of x."""
        await self.box.write_file(file, f"def f(x):\n    return x {program}\n")
        tests = [f"{x}={self.task.data['answers'][x]}" for x in inputs]
        return await self.box.run(["python3", "-I", "-S", "-c", RUN_TESTS, file, *tests], timeout_s=10)

    @reward(timeout_s=60)
    async def tests_pass(self, sample: Sample) -> float:
        """Fraction of the hidden tests that the last program passes."""
        result = await self.run_tests("last.py", self.program, HIDDEN_INPUTS)
        return result.stdout.split().count("pass") / len(HIDDEN_INPUTS)

    @reward(weight=0.5)
    async def visible_test_passes(self, sample: Sample) -> float:
        """Whether the first program passes the test whose result the policy sees."""
        return float(self.verdict == "pass")

    @reward(weight=0.5)
    async def summary_is_right(self, sample: Sample) -> float:
        """Whether the summary is the reference solution."""
        return float(self.turns[1] == self.solution)

    @reward(weight=2)
    async def similarity(self, sample: Sample) -> float:
        """Fraction of words of the three turns that agree with the reference solution.

        A policy with random weights gets this partial credit long before its programs run. Training on real
        repositories has such rewards too: SWE-RL (arXiv 2502.18449) compares the patch with that of the developers.
        """
        return sum(fraction_correct(turn, self.solution) for turn in self.turns) / len(self.turns)


def endless_tasks() -> Iterator[Task]:
    """A task for each operation in turn, so that each step has the same number of each."""
    for operation, (symbol, compute) in itertools.cycle(OPERATIONS.items()):
        request = REQUEST.format(operation=operation, number=NUMBER)
        answers = {x: compute(x, int(NUMBER)) for x in (*VISIBLE_INPUTS, *HIDDEN_INPUTS)}
        yield Task(operation, [{"role": "user", "content": request}], {"operator": symbol, "answers": answers})


def transcript(sample: Sample) -> str:
    """The words of all segments of a sample, in the order in which they began."""
    segments = sorted(sample.segments, key=lambda segment: segment.leaf)
    return " | ".join(
        " ".join(VOCABULARY[token] for token in sample.graph.token_ids(segment.leaf)) for segment in segments
    )
