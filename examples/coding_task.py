"""The task of `coding.py`: programs, the sandbox, the compaction and the rewards. A word is a token of the policy.

The policy completes the program `return x ...` with `+ 3` or `* 3`. Both tasks have the same prompt, `_ 3`, so the
policy can only guess the operator. It writes a program, reads from a test in the sandbox whether the result is too low
or too high, and writes a summary: the program that it believes to be right. The environment then compacts the history
to this summary, and the policy writes its last program. A sample with the full reward, as two segments:

    <user> _ 3 <end> <assistant> + 3 <end> <tool> low <end> <user> summary <end> <assistant> * 3 <end>
    <user> * 3 <end> <assistant> * 3 <end>

The second segment knows of the first one only the summary. Both segments are trained with the reward of the sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from verl_server.agent import CommandResult, Environment, Episode, LocalSandbox, Sample, SandboxLimits, Task, reward
from verl_server.trajectory import ForkReason

NUMBER, OPERATORS, RESULTS = "3", "+*", ("pass", "low", "high", "error")
VOCABULARY = (NUMBER, *OPERATORS, "_", *RESULTS, "summary", "?", "<user>", "<assistant>", "<tool>", "<end>")
"""Words of the task. `?` stands for all other words."""
MAX_TURN_TOKENS = 4
"""Maximum number of tokens of a turn: the correct turn with its `<end>`, and one additional token."""
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
        self.box = LocalSandbox(SandboxLimits(memory_bytes=256 << 20, max_processes=16))
        await self.box.start()

    async def teardown(self) -> None:
        await self.box.close()

    async def run(self, episode: Episode) -> None:
        result = await self.run_tests("first.py", await self.generate(episode), VISIBLE_INPUTS)
        verdict = "error" if result.exit_code else result.stdout.strip()
        summary = await self.generate(
            episode, [{"role": "tool", "content": verdict}, {"role": "user", "content": "summary"}]
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

    @reward(weight=2)
    async def has_format(self, sample: Sample) -> float:
        """Fraction of words of the correct kind in the three turns: an operator, the number, the end.

        A policy with random weights gets this partial credit long before its programs run. With a smaller weight it
        neglects the first program, whose words the other rewards do not see.
        """
        expected = [OPERATORS, NUMBER, ("<end>",)]
        return sum(fraction_correct(turn, expected) for turn in self.turns) / len(self.turns)

    @reward(weight=0.5)
    async def summary_is_right(self, sample: Sample) -> float:
        """Whether the summary is the correct program."""
        return float(self.turns[1] == [self.task.data["operator"], NUMBER, "<end>"])

    @reward(weight=0)
    async def first_passes(self, sample: Sample) -> float:
        """Whether the first program is correct. The policy can only guess the operator."""
        return float(self.turns[0] == [self.task.data["operator"], NUMBER, "<end>"])


def fraction_correct(words: Sequence[str], expected: Sequence[Collection[str]]) -> float:
    """Fraction of positions with one of the expected words. Missing and additional words count as wrong positions."""
    num_correct = sum(word in allowed for word, allowed in zip(words, expected, strict=False))
    return num_correct / max(len(words), len(expected))


def endless_tasks() -> Iterator[Task]:
    """Both tasks in turn, so that each step has the same number of each."""
    for operator in itertools.cycle(OPERATORS):
        answers = {
            x: x + int(NUMBER) if operator == "+" else x * int(NUMBER) for x in (*VISIBLE_INPUTS, *HIDDEN_INPUTS)
        }
        yield Task(
            f"x{operator}{NUMBER}",
            [{"role": "user", "content": f"_ {NUMBER}"}],
            {"operator": operator, "answers": answers},
        )


def transcript(sample: Sample) -> str:
    """The words of all segments of a sample, in the order in which they began."""
    segments = sorted(sample.segments, key=lambda segment: segment.leaf)
    return " | ".join(
        " ".join(VOCABULARY[token] for token in sample.graph.token_ids(segment.leaf)) for segment in segments
    )
