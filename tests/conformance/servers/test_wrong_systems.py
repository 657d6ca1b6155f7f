"""Every case can fail: a real engine behind a wrapper that does one thing wrong."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_server.conformance.cases import Case, CaseResult, Outcome, ServedWeights, Trial, faults
from verl_server.conformance.reference import Reference
from verl_server.conformance.suite import CASES
from verl_server.conformance.systems import CheckFailedError, Reply, System, without_paths
from verl_server.conformance.systems.sglang import VerlEngineSystem
from verl_server.conformance.worker import run_case

Tensors = Mapping[str, torch.Tensor]
UPDATES = 20


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", weight_std=0.07)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def engine(one_rank: DeviceMesh, model: Path) -> Iterator[VerlEngineSystem]:
    """A system that does everything right."""
    with contextlib.closing(VerlEngineSystem(model, max_total_tokens=16384)) as system:
        yield system


class Wrapper:
    """A system that passes everything on to another. Subclasses do one thing wrong."""

    def __init__(self, system: VerlEngineSystem) -> None:
        self.system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def update(self, tensors: Tensors, **options: Any) -> None:
        self.system.update(tensors, **options)

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        return self.system.generate(prompt, max_new_tokens, lora=lora)


class DropsATensor(Wrapper):
    def update(self, tensors: Tensors, **options: Any) -> None:
        super().update(dict(list(tensors.items())[:-1]), **options)


class PushesStaleWeights(Wrapper):
    """Pushes the tensors of the update before."""

    before: Tensors | None = None

    def update(self, tensors: Tensors, **options: Any) -> None:
        self.before, stale = tensors, self.before
        super().update(tensors if stale is None else stale, **options)


class RoundsToBfloat16(Wrapper):
    def update(self, tensors: Tensors, **options: Any) -> None:
        super().update({name: tensor.bfloat16().float() for name, tensor in tensors.items()}, **options)


class ReversesNorms(Wrapper):
    """Pushes the tensors with one dimension in reverse order."""

    def update(self, tensors: Tensors, **options: Any) -> None:
        reversed_norms = {name: tensor.flip(0) if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
        super().update(reversed_norms, **options)


class AlwaysAborts(Wrapper):
    def update(self, tensors: Tensors, **options: Any) -> None:
        super().update(tensors, **{**options, "pause_mode": "abort", "flush_cache": True})


class AlwaysRetracts(Wrapper):
    def update(self, tensors: Tensors, **options: Any) -> None:
        super().update(tensors, **{**options, "pause_mode": "retract", "flush_cache": True})


class AnswersFromMemory(Wrapper):
    """Answers a known prompt as before, as a stale cache does."""

    @functools.cached_property
    def known(self) -> dict[tuple[int, ...], Reply]:
        return {}

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        key = (*prompt, max_new_tokens)
        if key not in self.known:
            self.known[key] = super().generate(prompt, max_new_tokens, lora=lora)
        return self.known[key]


class NamesOneVersion(Wrapper):
    weight_version = "1"


class SwallowsErrors(Wrapper):
    def update(self, tensors: Tensors, **options: Any) -> None:
        with contextlib.suppress(Exception):
            super().update(tensors, **options)


class LosesLora(Wrapper):
    """Loads no LoRA adapter and generates without it."""

    def load_lora(self, name: str, tensors: Tensors, config: dict[str, Any]) -> None:
        pass

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        return super().generate(prompt, max_new_tokens)


class ForgetsUpdatesAfterSleep(Wrapper):
    """Keeps the weights of the first update after a release of memory."""

    first: Tensors | None = None

    def update(self, tensors: Tensors, **options: Any) -> None:
        self.first = self.first or tensors
        super().update(self.first, **options)


class LeaksFiles(Wrapper):
    @functools.cached_property
    def files(self) -> list[int]:
        return []

    def update(self, tensors: Tensors, **options: Any) -> None:
        self.files.append(os.open(os.devnull, os.O_RDONLY))
        super().update(tensors, **options)

    def clean(self) -> None:
        for file in self.files:
            os.close(file)


class LeaksSharedMemory(Wrapper):
    @functools.cached_property
    def names(self) -> list[Path]:
        return []

    def update(self, tensors: Tensors, **options: Any) -> None:
        self.names.append(Path(f"/dev/shm/torch_{os.getpid()}_{len(self.names)}"))
        self.names[-1].touch()
        super().update(tensors, **options)

    def clean(self) -> None:
        for name in self.names:
            name.unlink()


class DoesNotDie(Wrapper):
    def kill_server(self) -> None:
        pass


WRONG: dict[str, tuple[type[Wrapper], str]] = {
    "read-back": (DropsATensor, "log probabilities differ"),
    "several-updates": (PushesStaleWeights, "after update 2, log probabilities differ"),
    "some-tensors": (ReversesNorms, "log probabilities differ"),
    "whole-modules": (ReversesNorms, "log probabilities differ"),
    "tied-embeddings": (PushesStaleWeights, "after update 2, log probabilities differ"),
    "experts": (PushesStaleWeights, "after update 2, log probabilities differ"),
    "weight-version": (NamesOneVersion, "not 1"),
    "running-retract": (AlwaysAborts, "ended with 'abort'"),
    "running-in-place": (AlwaysAborts, "ended with 'abort'"),
    "running-abort": (AlwaysRetracts, "an aborted request ended with 'length' and 1800 tokens"),
    "prefix-cache-flushed": (AnswersFromMemory, "log probabilities differ"),
    "prefix-cache-kept": (AnswersFromMemory, "log probabilities differ"),
    "sleep-and-update": (ForgetsUpdatesAfterSleep, "after sleep and update 2, log probabilities differ"),
    "unknown-name": (SwallowsErrors, "the update returned without an error"),
    "wrong-shape": (SwallowsErrors, "the update returned without an error"),
    "nan": (SwallowsErrors, "the update returned without an error"),
    "repeated": (LeaksFiles, "the number of open files grew by 10 from update 10 to 20"),
    "server-killed": (DoesNotDie, "a request succeeded although its server was killed"),
    "lora": (LosesLora, "with LoRA adapter 1, log probabilities differ"),
}
"""The wrong system of each case, and a part of the reason. The other cases have tests of their own."""
OTHERS = {"trainer-killed-loading", "trainer-killed-finishing", "owner-killed"}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def no_start(**_: Any) -> System:
    raise AssertionError("the case starts no other server")


def run(case: Case, system: Any, reference: Reference) -> CaseResult:
    return run_case(case, Trial(system, reference, no_start, updates=UPDATES))


def test_every_case_has_a_wrong_system() -> None:
    assert set(WRONG) | OTHERS == {case.name for case in CASES}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_system_fails(
    name: str, engine: VerlEngineSystem, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "ERROR_S", 200.0)  # requests of a server that was not killed end before, by themselves
    wrong, reason = WRONG[name]
    system = wrong(engine)
    try:
        result = run(case_named(name), system, reference)
    finally:
        if isinstance(system, (LeaksFiles, LeaksSharedMemory)):
            system.clean()
    assert (result.outcome, result.name) == (Outcome.FAILED, name), result.detail
    assert reason in result.detail


def test_values_that_are_rounded_are_not_read_back(engine: VerlEngineSystem, reference: Reference) -> None:
    """Also if log probabilities are not compared, as for a tensor that hardly changes them."""

    class Tolerant(Reference):
        def require(self, *_: Any, **__: Any) -> float:
            return 0.0

    tolerant = Tolerant.__new__(Tolerant)
    tolerant.__dict__.update(reference.__dict__)
    result = run(case_named("read-back"), RoundsToBfloat16(engine), tolerant)
    assert result.outcome is Outcome.FAILED
    assert "the server returns other values for model.embed_tokens.weight than were pushed" in result.detail


def test_files_in_shared_memory_that_are_left_fail(engine: VerlEngineSystem, reference: Reference) -> None:
    system = LeaksSharedMemory(engine)
    try:
        result = run(case_named("repeated"), system, reference)
    finally:
        system.clean()
    assert result.detail == "the number of files in shared memory grew by 10 from update 10 to 20"


def test_a_growing_gap_fails() -> None:
    flat = list(itertools.repeat(1e-6, 40))
    faults._require_no_drift(flat)
    with pytest.raises(CheckFailedError, match=r"grew from 1\.0e-06 to 3\.0e-06"):
        faults._require_no_drift([*flat, *itertools.repeat(3e-6, 20)])


def test_a_mixture_of_weights_is_recognised(engine: VerlEngineSystem, reference: Reference) -> None:
    """What a trainer that is killed in the middle of its update must not leave."""
    old, new = reference.weights(1), reference.weights(2)
    engine.update(old)
    engine.update(dict(list(new.items())[: len(new) // 2]))
    trial = Trial(engine, reference, no_start)
    request = ServedWeights(trial)
    with pytest.raises(CheckFailedError, match="a mixture of weights"):
        request.describe({"the old weights": old, "the new weights": new})
    request.require_answer()
    engine.update(new)
    assert ServedWeights(trial).describe({"old": old, "new": new}) == "new"


class SurvivesItsOwner:
    """A "server" in a session of its own that nobody ends."""

    owns_server = True

    def __init__(self, **_: Any) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        self.process = subprocess.Popen(command, start_new_session=True)

    def server_pids(self) -> list[int]:
        return [self.process.pid]


def test_a_server_that_survives_its_owner_fails(
    engine: VerlEngineSystem, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KILLED_END_S", 0.5)
    trial = Trial(engine, reference, SurvivesItsOwner)  # type: ignore[arg-type] # only what the case needs
    result = run_case(case_named("owner-killed"), trial)
    assert result.detail == "1 processes of the server still run after 0.5 s"


def test_paths_of_the_machine_are_not_published() -> None:
    text = "HTTP 400 of http://127.0.0.1:30000/begin_weight_update for /home/user/models/policy/config.json\n  and more"
    assert without_paths(text) == "HTTP 400 of http://127.0.0.1:30000/begin_weight_update for config.json and more"
    assert len(without_paths("x" * 1000)) == 403
