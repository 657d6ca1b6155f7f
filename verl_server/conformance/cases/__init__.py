"""`Case`, what it gets (`Trial`), and its result. Each module of this folder has the cases of one topic."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.conformance.reference import LOGPROB_LIMIT, NEW_TOKENS, PROMPTS, Weights
from verl_server.conformance.systems import CheckFailedError, Reply
from verl_server.server.warden.processes import SHM_DIR, find_shared_memory
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.conformance.reference import Reference
    from verl_server.conformance.systems import System


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


# -- Footprint --------------------------------------------------------------------------------------
# What processes use: memory, open files, and files in shared memory.


@dataclass(frozen=True)
class Footprint:
    """Resources of several processes together."""

    resident_bytes: int
    """Anonymous resident memory, without shared memory."""
    open_files: int
    """Number of file descriptors."""
    shared_memory_files: int
    """Number of files in `/dev/shm` that the processes map or that carry the id of one of them."""

    @classmethod
    def of(cls, pids: Sequence[int]) -> Footprint:
        """The resources that these processes use now."""
        files = set(find_shared_memory(pids))
        if os.path.isdir(SHM_DIR):
            marks = tuple(f"_{pid}_" for pid in pids)
            files |= {name for name in os.listdir(SHM_DIR) if any(mark in name for mark in marks)}
        return cls(sum(map(_resident_bytes, pids)), sum(map(_open_files, pids)), len(files))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _open_files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


# -- Served -----------------------------------------------------------------------------------------
# What a server serves after something went wrong: whole weights, an error, or nothing.

WAIT_S = 2.0
"""Seconds without an answer after which a request counts as waiting."""
ANSWER_S = 30.0
"""Seconds after which a waiting request must have been answered, once weights are whole again."""
REFUSED, WAITS = "an error", "nothing, requests wait"


class ServedWeights:
    """One request, sent when the weights may not be whole, and what its answer tells."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[Reply] = self._pool.submit(trial.system.generate, PROMPTS[0], NEW_TOKENS)

    def describe(self, candidates: Mapping[str, Weights]) -> str:
        """What the server serves: the name of a candidate, `REFUSED` or `WAITS`.

        Raises CheckFailedError if the server generates with anything else.
        """
        try:
            reply = self._future.result(WAIT_S)
        except FutureTimeoutError:
            return REFUSED if self._future.done() else WAITS  # the system itself may raise a TimeoutError
        except Exception:  # noqa: BLE001 - boundary to the system under test: any error is a refusal
            return REFUSED
        gaps = {name: self._trial.reference.gap(weights, PROMPTS[0], reply) for name, weights in candidates.items()}
        for name, gap in gaps.items():
            if gap <= LOGPROB_LIMIT:
                return name
        text = " and ".join(f"by {gap:.1e} from {name}" for name, gap in gaps.items())
        raise CheckFailedError(f"the server generates with a mixture of weights: log probabilities differ {text}")

    def require_answer(self) -> None:
        """Raise CheckFailedError if the request is still waiting. Call this when the weights are whole again."""
        try:
            self._future.exception(ANSWER_S)
        except FutureTimeoutError:
            raise CheckFailedError(f"a waiting request was not answered within {ANSWER_S:g} s") from None
        finally:
            self._pool.shutdown(wait=False)
