"""`run_suite`: all cases with one or several engines, and the files of the results."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import platform
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import FORKSERVER_FOLDER, RemoteServer, shares_forkservers
from verl_server.conformance.cases import Case, CaseResult, ModelKind, Outcome, faults, serving, updates
from verl_server.conformance.other_processes import (
    VllmPython,
    find_vllm_python,
    process_context,
)
from verl_server.conformance.systems import SystemFactory, remove_processes, tree_of
from verl_server.conformance.systems.sglang import SglangSystem, VerlEngineSystem
from verl_server.conformance.systems.vllm import VllmSystem
from verl_server.conformance.worker import READY, Models, worker_main
from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.doctor import machine
from verl_server.doctor.engine import installed_version
from verl_server.errors import BadInputError, ServerError
from verl_server.tiny import Architecture, make_model
from verl_server.types import Json
from verl_server.validation import did_you_mean, make_writable_folder, require_http_url

logger = logging.getLogger(__name__)


# -- Runner -----------------------------------------------------------------------------------------
# Runs cases in worker processes, with a deadline for each case: a case that hangs does not stop the suite.

START_TIMEOUT_S = 400.0
"""Seconds for a worker to start a server."""
END_TIMEOUT_S = 60.0
"""Seconds for a worker to end its server after the last case."""


def run_cases(
    start: SystemFactory, cases: Sequence[Case], *, models: Models, updates: int, log: Path
) -> Generator[CaseResult]:
    """Run the cases with one system and yield their results.

    `start` starts the system, `models` has the folder of each model that it can serve. `updates` is the number of
    updates of the case that repeats updates, `log` the file for the output of the system.
    """
    worker: _Worker | None = None
    try:
        for case in cases:
            if worker is None:
                worker = _Worker(start, models, updates, log)
            result, is_alive = worker.run(case, case.seconds_until_hung(updates))
            if not is_alive:
                worker.kill()
                worker = None
            yield result
        if worker is not None:
            worker.end()
    finally:
        if worker is not None:
            worker.kill()


class _Worker:
    """A worker process as the runner sees it."""

    def __init__(self, start: SystemFactory, models: Models, updates: int, log: Path) -> None:
        context = process_context()
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(theirs, start, models, updates, log))
        self._process.start()
        theirs.close()
        self._tree: set[psutil.Process] = set()
        """The worker and the processes below it at the start of the cases. Some outlive a worker that crashes."""

    def run(self, case: Case, deadline_s: float) -> tuple[CaseResult, bool]:
        """Run one case. Returns its result, and whether the worker can run another case."""
        try:
            self._connection.send(case)
            if not self._connection.poll(START_TIMEOUT_S):
                detail = f"the server did not start within {START_TIMEOUT_S:g} s"
                return CaseResult(case.name, Outcome.HUNG, detail, START_TIMEOUT_S), False
            message = self._connection.recv()
            if message != READY:
                return message, True
            self._record_tree()
            if not self._connection.poll(deadline_s):
                detail = f"no result after {deadline_s:g} s; the log has the stacks of all threads"
                return CaseResult(case.name, Outcome.HUNG, detail, deadline_s), False
            return self._connection.recv(), True
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(END_TIMEOUT_S)
            detail = f"the process of the trainer ended with exit code {self._process.exitcode}"
            return CaseResult(case.name, Outcome.FAILED, detail, 0.0), False

    def end(self) -> None:
        """Let the worker end its system."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(None)
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode != 0:
            logger.warning(
                "the system was not closed, its server may hold other weights: exit code %s; read the log",
                self._process.exitcode,
            )

    def kill(self) -> None:
        """Kill the worker and all processes below it, and remove the files that they leave in shared memory."""
        self._record_tree()
        with remove_processes(self._tree):
            pass
        self._process.join()
        self._connection.close()

    def _record_tree(self) -> None:
        assert self._process.pid is not None
        self._tree |= tree_of(self._process.pid)


# -- Engines ----------------------------------------------------------------------------------------
# The engines that the suite knows by name, and running servers by URL.

#: Names of the engines that the suite can start.
ENGINE_NAMES = ("verl_server", "sglang", "verl_server_vllm", "vllm")
#: Names of the engines that need an interpreter with vLLM.
VLLM_ENGINES = ("verl_server_vllm", "vllm")
#: Arguments of all SGLang servers and of all vLLM servers that the suite starts.
SERVER_ARGS: Mapping[str, Any] = {"max_total_tokens": 16384}
VLLM_SERVER_ARGS: Mapping[str, Any] = {"max_running_requests": 16, "enforce_eager": True}


@dataclass(frozen=True)
class Engine:
    """A system that the suite can start or connect to."""

    name: str
    description: str
    start: SystemFactory
    models: Models
    """Folders of the models that the system can serve."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages in the environment of the server, if it is another one than that of this process."""


def require_known_engine(name: str) -> None:
    """Raise BadInputError for a name that `named_engine` does not know."""
    if name not in ENGINE_NAMES:
        raise BadInputError(
            f"unknown engine {name!r}: pass {', '.join(ENGINE_NAMES)}, or the URL of a server that `verl-server "
            f"launch` started{did_you_mean(name, ENGINE_NAMES)}"
        )


def named_engine(name: str, models: Models, vllm: VllmPython | None = None) -> Engine:
    """An engine that starts servers for `models`. `vllm`: the interpreter of the engines in `VLLM_ENGINES`.

    Raises BadInputError for an unknown name.
    """
    require_known_engine(name)
    if name == "sglang":
        start: SystemFactory = functools.partial(SglangSystem, **SERVER_ARGS)
        return Engine(name, "SGLang's HttpServerEngineAdapter with the server that it starts", start, models)
    if name not in VLLM_ENGINES:
        start = functools.partial(VerlEngineSystem, **SERVER_ARGS)
        return Engine(name, "VerlEngine with a server of its own", start, models)
    if vllm is None:
        raise BadInputError(f"the engine {name} needs an interpreter with vLLM")
    versions = {"vllm": vllm.version}
    if name == "vllm":
        start = functools.partial(VllmSystem, python=vllm.path)
        return Engine(name, "vLLM's own reload through its HTTP routes", start, models, versions)
    start = functools.partial(VerlEngineSystem, vllm_python=vllm.path, **VLLM_SERVER_ARGS)
    return Engine(name, "VerlEngine with a vLLM server of its own", start, models, versions)


def number_engines(engines: Sequence[Engine]) -> list[Engine]:
    """Number engines of the same name, for example two running servers: the results have the names of the engines."""
    names, numbered = Counter(engine.name for engine in engines), []
    for position, engine in enumerate(engines):
        number = 1 + sum(other.name == engine.name for other in engines[:position])
        numbered.append(replace(engine, name=f"{engine.name} {number}") if names[engine.name] > 1 else engine)
    return numbered


def running_server(
    url: str, api_key: str | None, admin_api_key: str | None, key_hint: str = "pass the keys of the server"
) -> Engine:
    """A `VerlEngine` for a server that already runs. `key_hint` says what to do when the server refuses a key.

    Raises BadInputError if the suite cannot test the server: its model is not a folder of this machine, or it does not
    compute in float32. Raises ServerError when the server refuses a key.
    """
    url = require_http_url("--engine", url, key_hint=key_hint)
    with HttpServerEngineAdapter.attach(url, api_key=api_key, admin_api_key=admin_api_key) as adapter:
        try:
            adapter.check_keys()
        except ServerError as error:
            if error.details.get("status") != 401:
                raise
            key = error.details["key"]
            message = f"the server at {url} replied that the {key} is missing or wrong (401); {key_hint}"
            raise ServerError(message, **error.details) from error
        info = adapter.get_server_info()
    model = Path(str(info.get("model_path")))
    if not model.is_dir():
        raise BadInputError(
            f"the server at {url} serves {model}, which is no folder of this machine; start the server with the "
            "absolute path of such a folder, because the suite compares the server with the model in it"
        )
    dtype = str(info.get("dtype"))
    if dtype not in ("float32", "float"):
        raise BadInputError(
            f"the server at {url} computes in {dtype}, and log probabilities are compared up to 1e-5; "
            "start it with --dtype float32"
        )
    start = functools.partial(VerlEngineSystem, remote=RemoteServer(url, api_key, admin_api_key))
    models = {ModelKind.DENSE: model}
    return Engine("running server", "VerlEngine connected to a running server", start, models)


# -- Environment ------------------------------------------------------------------------------------
# The machine on which the suite ran.

PACKAGES = ("verl-server", "sglang", "torch", "transformers")


def describe_environment(versions: Mapping[str, str] | None = None) -> Json:
    """Hardware and versions. `versions`: those of packages in other environments.

    Neither the name of the host nor a path is part of the result. Imports torch.
    """
    facts = machine.probe()
    here = {name: installed_version(name) for name in PACKAGES}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": facts.cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [gpu.name for gpu in facts.gpus],
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **here, **(versions or {})},
    }


# -- Report -----------------------------------------------------------------------------------------
# The results of the suite: as a table on the terminal, as JSON, and as Markdown.

STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.HUNG: "bold red", Outcome.NOT_OFFERED: "dim"}
PROBLEMS = (Outcome.FAILED, Outcome.HUNG)


@dataclass(frozen=True)
class SystemReport:
    """The results of one system."""

    name: str
    description: str
    results: tuple[CaseResult, ...]

    @property
    def has_problems(self) -> bool:
        """Whether a case has failed or hung."""
        return any(result.outcome in PROBLEMS for result in self.results)


def as_json(environment: Json, updates: int, cases: Sequence[Case], systems: Sequence[SystemReport]) -> Json:
    """Everything that the suite has measured."""
    return {
        "suite": "conformance",
        "environment": environment,
        "updates": updates,
        "cases": [{"name": case.name, "claim": case.claim, "issues": list(case.issues)} for case in cases],
        "systems": [asdict(system) for system in systems],
    }


def as_table(systems: Sequence[SystemReport]) -> Table:
    """All cases with the outcome and the detail of each system."""
    table = Table(Column("case", no_wrap=True), "system", Column("outcome", no_wrap=True), "detail", "seconds")
    for name in dict.fromkeys(result.name for system in systems for result in system.results):
        for system in systems:
            for result in system.results:
                if result.name == name:
                    style = STYLES[result.outcome]
                    outcome = f"[{style}]{result.outcome}[/{style}]"
                    table.add_row(name, system.name, outcome, escape(result.detail), f"{result.seconds:.1f}")
    return table


def as_markdown(report: Json) -> str:
    """The tables of a page: outcomes, what the outcomes mean in detail, and the figures of repeated updates.

    `report` is the result of `as_json`, perhaps read from a file.
    """
    systems: list[Json] = report["systems"]
    names = [system["name"] for system in systems]
    by_system = {system["name"]: {result["name"]: result for result in system["results"]} for system in systems}
    lines = [f"| Case | Claim | {' | '.join(f'`{name}`' for name in names)} |", f"|---|---|{'---|' * len(names)}"]
    for case in report["cases"]:
        results = (by_system[name].get(case["name"]) for name in names)
        outcomes = [_cell(result["outcome"]) if result else "" for result in results]
        lines.append(f"| `{case['name']}` | {case['claim']} | {' | '.join(outcomes)} |")
    lines += ["", "| Case | System | Outcome | Measured or reason |", "|---|---|---|---|"]
    for case in report["cases"]:
        for name in names:
            if result := by_system[name].get(case["name"]):
                cells = (f"`{case['name']}`", f"`{name}`", _cell(result["outcome"]), _escape(result["detail"]))
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| Case | Public reports of the same symptom |", "|---|---|"]
    for case in report["cases"]:
        lines.append(f"| `{case['name']}` | {', '.join(map(_link, case['issues']))} |")
    lines += ["", *_repeated(by_system)]
    return "\n".join(lines)


def _repeated(by_system: Mapping[str, Mapping[str, Json]]) -> list[str]:
    """The table of the case that repeats updates."""
    lines = [
        "| System | Updates | Largest gap | Median gap, first quarter | last quarter | Median ms per update "
        "| Memory | Open files | Files in shared memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in by_system.items():
        figures = results.get("repeated", {}).get("figures") or {}
        if not figures.get("gaps") or not figures.get("footprints"):
            continue
        gaps = [gap for _, gap in figures["gaps"]]
        quarter = max(1, len(gaps) // 4)
        first, last = figures["footprints"][0], figures["footprints"][-1]
        cells = (
            f"`{name}`",
            f"{figures['updates']:,}",
            f"{max(gaps):.1e}",
            f"{statistics.median(gaps[:quarter]):.1e}",
            f"{statistics.median(gaps[-quarter:]):.1e}",
            f"{1e3 * statistics.median(figures['update_s']):.0f}",
            f"{(last['resident_bytes'] - first['resident_bytes']) / 2**20:+.1f} MiB",
            f"{last['open_files'] - first['open_files']:+d}",
            f"{last['shared_memory_files'] - first['shared_memory_files']:+d}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(outcome: str) -> str:
    return f"**{outcome}**" if outcome in PROBLEMS else outcome


def _escape(text: str) -> str:
    """A text as the cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def _link(url: str) -> str:
    """A link to an issue or a pull request of GitHub: `owner/repository#number`."""
    repository, _, number = url.removeprefix("https://github.com/").replace("/issues/", "/pull/").rpartition("/pull/")
    return f"[{repository}#{number}]({url})"


# -- Suite ------------------------------------------------------------------------------------------

#: All cases in the order in which they run. The server is started again for a case with other server arguments.
CASES: tuple[Case, ...] = (
    *updates.UPDATE_CASES,
    *updates.MODEL_CASES,
    *serving.RUNNING_CASES,
    *serving.PREFIX_CACHE_CASES,
    *serving.MEMORY_CASES,
    *faults.REFUSED_CASES,
    *faults.REPEATED_CASES,
    *faults.KILLED_CASES,
    *updates.LORA_CASES,
)
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
        os.environ[FORKSERVER_FOLDER] = folder
        try:
            prepare_forkserver()
            yield
        finally:
            del os.environ[FORKSERVER_FOLDER]


# -- Command ----------------------------------------------------------------------------------------
# What `verl-server conformance` does: chooses the engines, runs the suite, and prints the results.

PIPE_WIDTH = 200


def run(
    engine_names: Sequence[str],
    case_names: Sequence[str],
    updates: int,
    output: Path,
    keys: tuple[str | None, str | None] = (None, None),
    key_hint: str = "pass the keys of the server",
    vllm_python: Path | None = None,
) -> bool:
    """Run the suite and print its results. Returns whether a case has failed or hung.

    `keys`: key for requests and key for administration of running servers. `key_hint`: the end of errors about keys.
    `vllm_python`: interpreter of vLLM servers; None: that of `.venv-vllm` in the current folder.

    Raises BadInputError for an unknown engine or case, for a missing interpreter of vLLM servers, for a server that
    cannot be checked, and for an output folder that takes no files. Raises ServerError when a server refuses a key.
    """
    start_quiet_resource_tracker()
    console = Console(highlight=False, width=None if Console().is_terminal else PIPE_WIDTH)
    cases = select_cases(case_names)
    if twice := [name for name, count in Counter(engine_names).items() if count > 1]:
        raise BadInputError(f"--engine {twice[0]} is given more than once; pass each engine once")
    folder = make_writable_folder("output", output)
    make_writable_folder("output", folder / "logs")

    def show(engine: str, result: CaseResult) -> None:
        style = STYLES[result.outcome]
        reason = f": {escape(result.detail)}" if result.outcome in PROBLEMS else ""
        console.print(f"{engine}: {result.name} [{style}]{result.outcome}[/{style}] ({result.seconds:.1f} s){reason}")

    urls = [name for name in engine_names if "://" in name]
    for name in engine_names:
        if name not in urls:
            require_known_engine(name)
    vllm = find_vllm_python(vllm_python) if set(VLLM_ENGINES) & set(engine_names) else None
    servers = {url: running_server(url, *keys, key_hint) for url in urls}
    with small_models(case.model for case in cases) as models:
        engines = [servers[name] if name in servers else named_engine(name, models, vllm) for name in engine_names]
        reports = run_suite(number_engines(engines), cases, updates=updates, output=folder, on_result=show)
    console.print(as_table(reports))
    console.print(f"Results: {folder / 'conformance.json'}, {folder / 'conformance.md'}", soft_wrap=True, markup=False)
    return any(report.has_problems for report in reports)


def start_quiet_resource_tracker() -> None:
    """Start the process with which `multiprocessing` removes semaphores, without its warnings about killed servers."""
    variable = "PYTHONWARNINGS"
    before = os.environ.get(variable)
    os.environ[variable] = "ignore:resource_tracker"
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before
