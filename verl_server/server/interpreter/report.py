"""What another interpreter has, found by `probe.py`, which runs in that interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_server.errors import BadInputError, DeadlineError, StartupError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.interpreter.probe import MARK

PROBE = Path(__file__).with_name("probe.py")
#: Seconds within which an interpreter answers. It needs a fraction of a second; a cold disk needs longer.
ANSWER_TIMEOUT_S = 30.0
MINIMUM_PYTHON = (3, 11)
#: Distribution and module of this package.
DISTRIBUTION, PACKAGE = "verl-server", "verl_server"
MAX_SHOWN_OUTPUT = 300


@dataclass(frozen=True)
class InterpreterReport:
    """What an interpreter has."""

    python: tuple[int, ...]
    """Version of Python."""
    folders: Mapping[str, str | None]
    """Modules that were looked for, and the folder of each. None: there is no such module."""
    versions: Mapping[str, str | None]
    """Distributions that were looked for, and the version of each. None: not installed."""
    plugins: Sequence[str]
    """Objects that SGLang's plugins name in their entry points, for example `verl_server.platforms:activate`."""
    requirements: Sequence[str]
    """Requirements of the installed engine, as in its metadata."""

    @property
    def has_package(self) -> bool:
        """Whether this package is installed in the interpreter's environment."""
        return self.versions.get(DISTRIBUTION) is not None and self.folders.get(PACKAGE) is not None


def interpreter_path(setting: Path | str) -> str:
    """The absolute path of an interpreter. `~` is the home of the user.

    A link is not followed: Python finds a virtual environment by the path with which the interpreter is started.
    Raises BadInputError for a path that is no executable file.
    """
    path = os.path.abspath(os.path.expanduser(setting))
    if os.path.isdir(path):
        inner = os.path.join(path, "bin", "python")
        raise BadInputError(
            f"server_python {path} is a folder; pass the interpreter of the environment, {inner}"
            + ("" if os.path.exists(inner) else ". There is no such file: create the environment first"),
            argument="server_python",
        )
    if not os.path.exists(path):
        what = "is a link to a file that does not exist" if os.path.islink(path) else "does not exist"
        raise BadInputError(
            f"server_python {path} {what}; pass the path of a Python interpreter on the machine of the server, for "
            "example /opt/sglang/bin/python",
            argument="server_python",
        )
    if not os.access(path, os.X_OK):
        raise BadInputError(
            f"server_python {path} is not executable; pass the path of a Python interpreter, or run chmod +x {path}",
            argument="server_python",
        )
    return path


def read_report(
    path: str,
    environment: Mapping[str, str],
    *,
    modules: Sequence[str],
    distributions: Sequence[str],
    engine: str,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> InterpreterReport:
    """Ask the interpreter at `path` what it has. `environment`: all environment variables of its process.

    `modules` and `distributions` are looked for, and `engine` is the distribution whose requirements are reported.
    Raises BadInputError for a program that is no Python interpreter or whose Python is too old, DeadlineError after
    `timeout_s`.
    """
    request = {
        "modules": [PACKAGE, *modules],
        "distributions": [DISTRIBUTION, *distributions],
        "groups": list(ENTRY_POINTS),
        "engine": engine,
    }
    code, output, errors = _run([path, str(PROBE), json.dumps(request)], environment, timeout_s)
    lines = output.strip().splitlines() or [""]
    values: object = None
    with contextlib.suppress(ValueError):
        values = json.loads(lines[-1])
    if code != 0 or not isinstance(values, dict) or MARK not in values:
        said = (errors.strip() or output.strip())[-MAX_SHOWN_OUTPUT:]
        raise BadInputError(
            f"server_python {path} is not a working Python interpreter: it ended with exit code {code}"
            + (f" and said {said!r}" if said else " without the expected answer")
            + f"; `{path} -c 'import sys; print(sys.version)'` must print a version of Python",
            argument="server_python",
        )
    python = tuple(values["python"])
    require_python(path, python)
    return InterpreterReport(
        python=python,
        folders={name: next(iter(found), None) for name, found in values["folders"].items()},
        versions={name: next(iter(found), None) for name, found in values["versions"].items()},
        plugins=values["plugins"],
        requirements=values["requirements"],
    )


def require_python(path: str, version: tuple[int, ...]) -> None:
    """Raise BadInputError for a version of Python below `MINIMUM_PYTHON`."""
    if version < MINIMUM_PYTHON:
        shown, minimum = (".".join(map(str, numbers)) for numbers in (version, MINIMUM_PYTHON))
        raise BadInputError(
            f"server_python {path} is Python {shown}, but verl_server needs Python {minimum} or newer; pass the "
            "interpreter of an environment with a newer Python",
            argument="server_python",
        )


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
    """Exit code, output and errors of a program. Its process group is killed when it does not end in time."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:  # for example "Exec format error"
            if isinstance(error, BlockingIOError):  # the limit of processes
                raise StartupError(
                    f"server_python {command[0]} cannot be started: {error}; check `ulimit -u`"
                ) from error
            raise BadInputError(
                f"server_python {command[0]} cannot be started: {error.strerror}; pass the path of a Python "
                "interpreter",
                argument="server_python",
            ) from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"server_python {command[0]} did not answer within {timeout_s:g} s; run `{command[0]} -c 'print(1)'` "
                "to see whether the interpreter starts",
                operation="start",
                seconds=timeout_s,
            ) from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, texts[0], texts[1]
