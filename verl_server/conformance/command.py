"""What `verl-server conformance` does: chooses the engines, runs the suite, and prints the results."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from verl_server.conformance.case import CaseResult
from verl_server.conformance.report import PROBLEMS, STYLES, as_table
from verl_server.errors import BadInputError

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
    with console.status("Loading") if console.is_terminal else contextlib.nullcontext():
        from verl_server.conformance.engines import (
            VLLM_ENGINES,
            named_engine,
            number_engines,
            require_known_engine,
            running_server,
        )
        from verl_server.conformance.suite import run_suite, select_cases, small_models
        from verl_server.conformance.vllm_python import find_vllm_python
        from verl_server.validation import make_writable_folder

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
