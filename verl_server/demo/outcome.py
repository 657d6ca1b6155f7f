"""What a finished run amounts to: did it pass, and the paragraph that says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from verl_server.demo.settings import Exam, Ready, Settings, StepMetrics

LAST_STEPS = 5
"""One step's mean reward is noisy; the last few together are what the run reached."""


@dataclass(frozen=True)
class Outcome:
    """Everything that was measured. `metrics.json` is this as JSON, plus `passed`."""

    settings: Settings
    ready: Ready
    steps: tuple[StepMetrics, ...]
    exam: Exam
    total_s: float

    @property
    def first_reward(self) -> float:
        return self.steps[0].reward

    @property
    def final_reward(self) -> float:
        return fmean(step.reward for step in self.steps[-LAST_STEPS:])

    @property
    def largest_gap(self) -> float:
        return max(step.gap_max for step in self.steps)

    @property
    def failures(self) -> list[str]:
        """Why the run did not pass, in words; empty when it did."""
        settings, found = self.settings, []
        if not self.final_reward >= settings.wanted_reward:
            found.append(f"the mean reward ended at {self.final_reward:.2f}, wanted {settings.wanted_reward}")
        if not all(step.gap_max <= settings.tolerated_gap for step in self.steps):  # NaN fails too
            found.append(f"logprobs differ by {self.largest_gap:.1e}, tolerated {settings.tolerated_gap:.0e}")
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    def seconds(self) -> dict[str, float]:
        """Where the time went."""
        return {
            "start-up": self.ready.startup_s,
            "rollout": sum(step.rollout_s for step in self.steps),
            "train": sum(step.train_s for step in self.steps),
            "sync": sum(step.sync_s for step in self.steps),
        }

    def summary(self, output_dir: Path) -> str:
        """One paragraph, and what went wrong if something did."""
        settings, exam, seconds = self.settings, self.exam, self.seconds()
        rollouts = len(self.steps) * settings.prompts * settings.group
        parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        text = (
            f"A transformer of {self.ready.parameters:,} random weights was trained to sort from rewards alone: mean "
            f"reward {self.first_reward:.2f} in the first step, {self.final_reward:.2f} in the last {LAST_STEPS} of "
            f"{len(self.steps)}, over {rollouts:,} rollouts. Asked {exam.questions} lists that it was never trained "
            f"on, it sorted {exam.solved:.0%} without a mistake. Trainer and rollout server never disagreed on a "
            f"token's logprob by more than {self.largest_gap:.1e}; new weights reached it {exam.weight_version} "
            f"times. {self.total_s:.0f} s in all: {parts}. Curve: {output_dir / 'reward.png'}, raw values: "
            f"{output_dir / 'metrics.json'}."
        )
        return "\n".join([text, *(f"NOT PASSED: {failure}" for failure in self.failures)])
