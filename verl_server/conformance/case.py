"""`Case`, what it gets (`Trial`), and its result."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.conformance.reference import Reference
    from verl_server.conformance.systems.base import System


class Outcome(enum.StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    """The case had no result at its deadline."""
    NOT_OFFERED = "not offered"
    """The system has no operation for what the case needs."""


class ModelKind(enum.StrEnum):
    """A model that a case needs. The suite makes a small random model of each kind."""

    DENSE = "dense"
    """A Llama whose output head has weights of its own."""
    TIED = "tied"
    """A Qwen3 whose output head has the weights of the embedding."""
    EXPERTS = "experts"
    """A Qwen3 whose layers are mixtures of experts."""


@dataclass
class Trial:
    """One run of a case."""

    system: System
    """The system under test. A case may replace it with `restart`."""
    reference: Reference
    """Hugging Face's model, the weights to push, and the comparison of log probabilities."""
    start: Callable[..., System]
    """Starts another system of the same kind with the same model. Takes further server arguments, can be pickled."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further server arguments that the case needs."""
    updates: int = 10
    """Number of weight updates of the case that repeats updates."""
    figures: Json = field(default_factory=dict)
    """What the case has measured."""
    model: ModelKind = ModelKind.DENSE
    """The model that the system serves."""

    def restart(self) -> System:
        """End the system and start another."""
        self.system.close()
        self.system = self.start(**self.server_args)
        return self.system


@dataclass(frozen=True)
class Case:
    """One property of a system, and the function that checks it."""

    name: str
    claim: str
    """What every system should do, as one sentence."""
    issues: tuple[str, ...]
    """URLs of public issues and pull requests about systems with the same symptom."""
    run: Callable[[Trial], str]
    """Checks the claim and returns what was measured, in a few words. Raises CheckFailedError or NotOfferedError; any
    other exception is a failure as well. A function that can be pickled."""
    deadline_s: float = 180.0
    """Seconds after which the case counts as hung."""
    deadline_per_update_s: float = 0.0
    """Further seconds for each weight update of the case that repeats updates."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further server arguments that the case needs. The server is started again when they differ."""
    model: ModelKind = ModelKind.DENSE
    """The model that the server serves. The server is started again when it differs."""

    def seconds_until_hung(self, updates: int) -> float:
        """Seconds after which the case counts as hung, if it repeats `updates` updates."""
        return self.deadline_s + updates * self.deadline_per_update_s


@dataclass(frozen=True)
class CaseResult:
    """The result of one case with one system."""

    name: str
    """Name of the case."""
    outcome: Outcome
    detail: str
    """What was measured, or the reason why the case did not pass."""
    seconds: float
    """Duration, without the start of the server."""
    figures: Json = field(default_factory=dict)
    """What the case has measured."""
