"""How good a policy is on tasks that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from verl_server.agent.runner import RolloutRunner
from verl_server.agent.samples import SampleGroup, Task
from verl_server.errors import BadInputError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that at least one of `k` samples of a task is correct, estimated without bias.

    `num_correct` of `num_samples` samples were correct (arXiv 2107.03374, equation 1). Raises BadInputError unless
    `0 <= num_correct <= num_samples` and `1 <= k <= num_samples`.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise BadInputError(f"no estimate for k={k} from {num_correct} correct of {num_samples} samples", argument="k")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    groups: Sequence[SampleGroup]
    """The groups of all tasks, in the order of the tasks. Failed samples are among them."""
    reward: float
    """Mean reward of all samples. That of a failed sample counts as 0."""
    correct: float
    """Fraction of samples with a reward of at least `threshold`: pass@1."""
    threshold: float
    """Smallest reward of a correct sample."""
    num_failed: int
    """Number of samples that failed. They are not correct."""

    def describe(self, num_examples: int = 8) -> str:
        """Lines for the console: the fraction of correct samples, and the first tasks with their first answers."""
        lines = [f"{self.correct:.1%} of {len(self.groups)} tasks are solved, for example:"]
        for group in self.groups[:num_examples]:
            question, answer = group.task.messages[-1]["content"], group.samples[0].text
            lines.append(f"    {question!r:.60} -> {answer!r:.60}")
        return "\n".join(lines)

    def pass_at(self, k: int) -> float:
        """pass@k, the mean over the tasks. Raises BadInputError for a `k` above the number of samples of a task."""
        return fmean(
            pass_at_k(len(group.samples), sum(is_correct(sample.reward, self.threshold) for sample in group.samples), k)
            for group in self.groups
        )


def is_correct(reward: float | None, threshold: float) -> bool:
    """Whether a sample with this reward is correct. A failed sample has the reward None."""
    return reward is not None and reward >= threshold


async def evaluate(runner: RolloutRunner, tasks: Sequence[Task], *, threshold: float = 1.0) -> Evaluation:
    """Run all tasks and rate the samples.

    `runner` has the agent, the reward and the sampling parameters: `{"temperature": 0}` for greedy answers with n=1,
    others with n=k samples or more for pass@k. Raises BadInputError without tasks, and for a runner with a `run_dir`,
    which would return the recorded samples of an older policy, with a `group_filter`, or without a reward; and the
    errors of `RolloutRunner.run`.
    """
    if not tasks:
        raise BadInputError("there are no tasks to evaluate", argument="tasks")
    if runner.has_group_filter:
        raise BadInputError("evaluate needs a runner without group_filter, which leaves groups out")
    if runner.run_dir is not None:
        raise BadInputError("evaluate needs a runner without run_dir: samples recorded there are not sampled again")
    by_id = {group.task.id: group async for group in runner.run(tasks)}
    groups = [by_id[task.id] for task in tasks]
    samples = [sample for group in groups for sample in group.samples]
    if all(sample.reward is None and sample.error is None for sample in samples):
        raise BadInputError("evaluate needs a runner with reward=, or an environment with a method @reward")
    rewards = [sample.reward for sample in samples]
    return Evaluation(
        groups=groups,
        reward=fmean(reward or 0.0 for reward in rewards),
        correct=fmean(is_correct(reward, threshold) for reward in rewards),
        threshold=threshold,
        num_failed=sum(reward is None for reward in rewards),
    )
