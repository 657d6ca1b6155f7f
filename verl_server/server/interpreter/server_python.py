"""The Python interpreter of a server, which can be another one than the trainer's, with other packages.

The other environment needs the engine. It need not have this package: `package_folder.py` brings it there. If it has
this package, its version must be that of the trainer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_server import __version__
from verl_server.errors import StartupError
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.environment import inherited_environment
from verl_server.server.interpreter.package_folder import make_package_folder
from verl_server.server.interpreter.report import (
    ANSWER_TIMEOUT_S,
    DISTRIBUTION,
    InterpreterReport,
    interpreter_path,
    read_report,
)
from verl_server.server.server_main import explain_other_version

#: Variables of the trainer's environment that would lead another interpreter to the trainer's packages.
TRAINER_VARIABLES = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_PROMPT_MODIFIER", "CONDA_PYTHON_EXE",
)  # fmt: skip


@dataclass(frozen=True)
class ServerPython:
    """Another interpreter than this process's, for a server."""

    path: str
    """Absolute path of the interpreter."""
    package_folder: Path | None = None
    """Folder with a link to this package. None: this package is installed in the interpreter's environment."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """All environment variables of a server. `env` are those that the caller adds.

        The server inherits the variables of this process without `TRAINER_VARIABLES`. Programs of the interpreter's
        environment come before others, and those of this process's virtual environment are left out.
        """
        inherited = {n: value for n, value in inherited_environment().items() if n not in TRAINER_VARIABLES}
        inherited["PATH"] = _join(os.path.dirname(self.path), *_programs_of_others())
        added = dict(env)
        if self.package_folder is not None:
            added["PYTHONPATH"] = _join(str(self.package_folder), env.get("PYTHONPATH", ""))
        return {**inherited, **added}


def find_server_python(
    setting: Path | str | None, env: Mapping[str, str], profile: EngineProfile, timeout_s: float
) -> ServerPython | None:
    """The interpreter of a server, after checks. None: the interpreter of this process.

    `setting` is the path of the interpreter, `env` the variables that the caller adds for the server. Raises
    BadInputError for a path that is no Python interpreter of a supported version, DeadlineError for an interpreter that
    does not answer within `timeout_s`, and StartupError for an environment without the engine or with another version
    of this package.
    """
    path = None if setting is None else interpreter_path(setting)
    if path is None or is_own_interpreter(path):
        _require_engine_here(env, profile)
        return None
    report = read_environment(path, env, profile, timeout_s)
    require_packages(path, report, profile)
    return ServerPython(path, None if report.has_package else make_package_folder())


def is_own_interpreter(path: str) -> bool:
    """Whether `path`, an absolute path, is the interpreter of this process."""
    return path == os.path.abspath(sys.executable)


def read_environment(
    path: str,
    env: Mapping[str, str],
    profile: EngineProfile,
    timeout_s: float = ANSWER_TIMEOUT_S,
    distributions: Sequence[str] = (),
) -> InterpreterReport:
    """What the environment of the interpreter at `path` has of the engine. Raises the errors of `read_report`.

    `distributions`: further distributions whose versions are read.
    """
    return read_report(
        path,
        ServerPython(path).environment(env),
        modules=list(profile.modules),
        distributions=[profile.distribution, *distributions],
        engine=profile.distribution,
        timeout_s=timeout_s,
    )


def require_packages(path: str, report: InterpreterReport, profile: EngineProfile) -> None:
    """Raise StartupError for an environment without the engine, or with another version of this package."""
    version = report.versions.get(DISTRIBUTION)
    if version is not None and version != __version__:
        raise StartupError(explain_other_version(path, version, __version__), server_python=path)
    missing = [module for module in profile.modules if report.folders.get(module) is None]
    if missing:
        requirements = " ".join(f"'{profile.modules[module]}'" for module in missing)
        raise StartupError(
            f"the environment of server_python {path} has no package {' and no package '.join(missing)}: run "
            f"`{path} -m pip install {requirements}`, or pass the interpreter of another environment; "
            f"{profile.wrong_environment}",
            server_python=path,
        )


def _require_engine_here(env: Mapping[str, str], profile: EngineProfile) -> None:
    """Raise StartupError if this process's environment does not have the engine. `env` can bring it to the server."""
    specs = {module: importlib.util.find_spec(module) for module in profile.modules}
    missing = [module for module, spec in specs.items() if spec is None or spec.origin is None]  # as in `probe.py`
    if missing and "PYTHONPATH" not in env:
        raise StartupError(
            f"{profile.name} is not installed in the environment of {sys.executable} (no package "
            f"{', '.join(missing)}): {profile.installation}, or pass "
            "server_python=PATH (VERL_SERVER_PYTHON, --server-python) with the Python interpreter of an environment "
            f"that has {profile.name}"
        )


def _programs_of_others() -> list[str]:
    """The folders of `PATH` without that of this process's virtual environment."""
    own = {os.path.join(os.environ["VIRTUAL_ENV"], "bin")} if os.environ.get("VIRTUAL_ENV") else set()
    if sys.prefix != sys.base_prefix:
        own.add(os.path.join(sys.prefix, "bin"))
    return [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder not in own]


def _join(*folders: str) -> str:
    return os.pathsep.join(filter(None, folders))
