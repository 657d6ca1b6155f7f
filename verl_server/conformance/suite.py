"""`run_suite`: all cases with one or several engines, and the files of the results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_server.conformance.case import Case, CaseResult, ModelKind
from verl_server.conformance.cases import CASES
from verl_server.conformance.engines import Engine
from verl_server.conformance.environment import describe_environment
from verl_server.conformance.report import SystemReport, as_json, as_markdown
from verl_server.conformance.runner import run_cases
from verl_server.errors import BadInputError
from verl_server.server.forkserver.shared_forkserver import prepare_forkserver
from verl_server.server.forkserver.socket_folder import FOLDER_VARIABLE, shares_forkservers
from verl_server.tiny import Architecture, make_model
from verl_server.validation import did_you_mean

#: Arguments of `make_model` for each model.
MODELS: Mapping[ModelKind, Mapping[str, Any]] = {
    ModelKind.DENSE: {"architecture": Architecture.LLAMA},
    ModelKind.TIED: {"architecture": Architecture.QWEN3, "tie_word_embeddings": True},
    ModelKind.EXPERTS: {"architecture": Architecture.QWEN3_MOE},
}
#: Attention heads of 32 elements: the smallest that vLLM computes on a CPU.
HEAD_SIZES: Mapping[str, Any] = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
OnResult = Callable[[str, CaseResult], None]
"""Called with the name of the engine and the result of a case."""


def select_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases with these names, in the order of the suite; all cases without a name.

    Raises BadInputError for an unknown name.
    """
    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            raise BadInputError(f"unknown case {name!r}; the cases are {', '.join(known)}{did_you_mean(name, known)}")
    return tuple(case for case in CASES if not names or case.name in names)


def run_suite(
    engines: Sequence[Engine], cases: Sequence[Case], *, updates: int, output: Path, on_result: OnResult
) -> list[SystemReport]:
    """Run the cases with each engine, and write `conformance.json`, `conformance.md` and the logs into `output`.

    The files are written after each case, so that they exist when a later case is interrupted.
    """
    environment = describe_environment({n: v for engine in engines for n, v in engine.versions.items()})
    reports: list[SystemReport] = []
    with shared_forkserver():
        for engine in engines:
            results: list[CaseResult] = []
            log = output / "logs" / f"{re.sub(r'[^a-z0-9_]+', '-', engine.name)}.log"
            running = run_cases(engine.start, cases, models=engine.models, updates=updates, log=log)
            with contextlib.closing(running):
                for result in running:
                    results.append(result)
                    report = SystemReport(engine.name, engine.description, tuple(results))
                    content = as_json(environment, updates, cases, [*reports, report])
                    (output / "conformance.json").write_text(as_text(content), encoding="utf-8")
                    (output / "conformance.md").write_text(as_markdown(content) + "\n", encoding="utf-8")
                    on_result(engine.name, result)
            reports.append(report)
    return reports


def as_text(content: object) -> str:
    """JSON with lists of numbers on one line; one number per line would make the file unreadable."""
    numbers = re.compile(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]")
    return numbers.sub(lambda match: "[" + " ".join(match[1].split()) + "]", json.dumps(content, indent=1)) + "\n"


@contextlib.contextmanager
def small_models(kinds: Iterable[ModelKind] = tuple(ModelKind)) -> Iterator[dict[ModelKind, Path]]:
    """Folders with random float32 models in one temporary folder. SGLang returns tensors of the Llama by name.

    The weights are small: rounding in float32 changes log probabilities by about 1e-6, a tenth of what is accepted.
    """
    with tempfile.TemporaryDirectory(prefix="verl-conformance-") as folder:
        with without_progress_bars():
            models = {
                kind: make_model(Path(folder) / kind, weight_std=0.07, **HEAD_SIZES, **MODELS[kind])
                for kind in dict.fromkeys(kinds)
            }
        yield models


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Let transformers show no progress of saved and loaded weights."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def shared_forkserver() -> Iterator[None]:
    """Let all processes of the suite share one forkserver, unless the environment names a folder already."""
    if shares_forkservers():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="verl-conformance-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            prepare_forkserver()
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
