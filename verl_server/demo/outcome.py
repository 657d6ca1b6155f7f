"""`Outcome`: the measurements of a finished run, whether the run passed, and a summary in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from verl_server.demo.settings import Exam, Ready, Settings, StepMetrics

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
