"""Settings of a run and the reports of the trainer ranks, as frozen dataclasses. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

#: Environment of the rollout server. Tiny matrices gain nothing from threads, and threads that wait for each other on a
#: busy machine cost a lot.
SERVER_ENV = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Settings:
    """Settings of one run."""

    seed: int = 0  # of prompts, weights and sampling
    steps: int = 80  # training steps
    ranks: int = 2  # trainer ranks
    prompts: int = 128  # different prompts per step
    group: int = 4  # rollouts per prompt
    epochs: int = 2  # passes over each batch of rollouts
    minibatches: int = 4  # optimizer steps per pass
    learning_rate: float = 3e-3
    warmup_steps: int = 5
    entropy_weight: float = 0.05  # decreases linearly to zero
    clip: float = 0.2  # range of the probability ratio
    max_grad_norm: float = 1.0
    exam_prompts: int = 256  # prompts of the final test; never used for training

    target_reward: float = 0.8
    """Mean reward of the last steps that a run must reach to pass."""
    max_logprob_gap: float = 1e-3
    """Maximum difference between the logprobs of a token in the server and in the trainer, both float32."""

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then linear decrease to a tenth."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * (1.0 - 0.9 * step / self.steps)

    def entropy_weight_at(self, step: int) -> float:
        """Entropy weight of a step: linear decrease to zero."""
        return self.entropy_weight * (1.0 - step / self.steps)


@dataclass(frozen=True)
class Ready:
    """Report: the server is ready and has the weights of the untrained policy."""

    startup_s: float  # seconds from the start of the rank
    parameters: int  # number of weights of the policy


@dataclass(frozen=True)
class StepMetrics:
    """Report of one training step by rank 0. Rewards and logprob gaps are those of the whole batch."""

    step: int
    reward: float  # mean, 0 to 1
    solved: float  # fraction of responses that are correct in every position
    response_tokens: float  # mean number of tokens per response
    gap_max: float  # maximum of |trainer logprob - server logprob| over the sampled tokens
    gap_mean: float  # mean of the same differences
    rollout_s: float  # seconds of generation
    train_s: float  # seconds of the optimizer steps
    sync_s: float  # seconds of the weight update
    weight_version: int  # version of the weights that generated the rollouts of this step
    example: str  # one prompt and its response


@dataclass(frozen=True)
class Exam:
    """Report of the final test: greedy answers to prompts that were not used for training."""

    reward: float  # mean, 0 to 1
    solved: float  # fraction of responses that are correct in every position
    questions: int  # number of prompts
    weight_version: int  # version of the weights that generated the answers
    examples: tuple[str, ...]  # some prompts with their answers


@dataclass(frozen=True)
class Failure:
    """Report of a rank that failed."""

    rank: int
    error: str  # type and message; the traceback is in the log of the rank


Report = Ready | StepMetrics | Exam | Failure


# -- Outcome ----------------------------------------------------------------------------------------
# `Outcome`: the measurements of a finished run, whether the run passed, and a summary in words.

FINAL_STEPS = 5
"""Number of last steps whose mean reward is the final reward. The reward of a single step is noisy."""


@dataclass(frozen=True)
class Outcome:
    """Settings and measurements of a finished run. `metrics.json` holds these fields and `passed`."""

    settings: Settings
    ready: Ready
    steps: tuple[StepMetrics, ...]
    exam: Exam
    total_s: float
    """Seconds of the whole run."""

    @property
    def first_reward(self) -> float:
        """Mean reward of the first step."""
        return self.steps[0].reward

    @property
    def final_reward(self) -> float:
        """Mean reward of the last `FINAL_STEPS` steps."""
        return fmean(step.reward for step in self.steps[-FINAL_STEPS:])

    @property
    def largest_gap(self) -> float:
        """Maximum logprob gap of all steps."""
        return max(step.gap_max for step in self.steps)

    @property
    def failures(self) -> list[str]:
        """The reasons why the run did not pass; empty if it passed."""
        settings, reasons = self.settings, []
        if not self.final_reward >= settings.target_reward:
            reasons.append(f"the final mean reward is {self.final_reward:.2f}, the target is {settings.target_reward}")
        if not all(step.gap_max <= settings.max_logprob_gap for step in self.steps):  # NaN fails too
            reasons.append(f"the logprob gap is {self.largest_gap:.1e}, the limit is {settings.max_logprob_gap:.0e}")
        return reasons

    @property
    def passed(self) -> bool:
        """Whether the run reached the target reward within the limit of the logprob gap."""
        return not self.failures

    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        return {
            "start-up": self.ready.startup_s,
            "rollout": sum(step.rollout_s for step in self.steps),
            "train": sum(step.train_s for step in self.steps),
            "weight update": sum(step.sync_s for step in self.steps),
        }

    def summary(self, output_dir: Path) -> str:
        """A paragraph about the run, followed by one line for each reason why it did not pass."""
        settings, exam, seconds = self.settings, self.exam, self.seconds()
        rollouts = len(self.steps) * settings.prompts * settings.group
        parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        text = (
            f"A transformer with {self.ready.parameters:,} random weights was trained to sort digits from rewards "
            f"alone. The mean reward was {self.first_reward:.2f} in the first step and {self.final_reward:.2f} in the "
            f"last {FINAL_STEPS} of {len(self.steps)} steps ({rollouts:,} rollouts). The trained model sorted "
            f"{exam.solved:.0%} of {exam.questions} new lists without an error. The logprobs of the trainer and the "
            f"server differed by at most {self.largest_gap:.1e} per token. The server received new weights "
            f"{exam.weight_version} times. The run took {self.total_s:.0f} s: {parts}. "
            f"Curve: {output_dir / 'reward.png'}. Raw values: {output_dir / 'metrics.json'}."
        )
        return "\n".join([text, *(f"NOT PASSED: {failure}" for failure in self.failures)])
