"""What the demo is told and what it reports, as plain frozen data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

#: Environment of the rollout server. Tiny matrices gain nothing from threads, and threads that wait for each other on a
#: busy machine cost a lot.
SERVER_ENV = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Settings:
    """One run of the demo."""

    seed: int = 0
    steps: int = 80
    ranks: int = 2  # trainer processes
    prompts: int = 128  # different prompts per step
    group: int = 4  # rollouts per prompt
    epochs: int = 2  # passes over each batch of rollouts
    minibatches: int = 4  # optimizer steps per pass
    learning_rate: float = 3e-3
    warmup_steps: int = 5
    entropy_weight: float = 0.05  # falls to zero until the last step
    clip: float = 0.2
    max_grad_norm: float = 1.0
    exam_prompts: int = 256  # never trained on, asked once at the end

    wanted_reward: float = 0.8
    """The mean reward of the last steps that a successful run reaches."""
    tolerated_gap: float = 1e-3
    """The largest difference of a token's logprob between rollout engine and trainer, both float32."""

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then linearly down to a tenth."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * (1.0 - 0.9 * step / self.steps)

    def entropy_weight_at(self, step: int) -> float:
        return self.entropy_weight * (1.0 - step / self.steps)


@dataclass(frozen=True)
class Ready:
    """The server serves the untrained policy."""

    startup_s: float
    parameters: int


@dataclass(frozen=True)
class StepMetrics:
    """One step, measured on rank 0; reward and gap are over the whole batch."""

    step: int
    reward: float  # mean, 0 to 1
    solved: float  # share of responses that are right in every position
    response_tokens: float  # mean
    gap_max: float  # |trainer logprob - rollout logprob| of the sampled tokens
    gap_mean: float
    rollout_s: float
    train_s: float
    sync_s: float
    weight_version: str  # of the weights that wrote this step's rollouts, in the server's words
    example: str  # one rollout of this step


@dataclass(frozen=True)
class Exam:
    """Greedy answers of the trained policy to prompts that it was never trained on."""

    reward: float
    solved: float
    questions: int
    weight_version: str
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A rank's last words."""

    rank: int
    error: str  # type and message; the trace is in the rank's log


Report = Ready | StepMetrics | Exam | Failure
