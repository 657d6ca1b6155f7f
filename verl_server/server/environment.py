"""The environment of a server: variables, visible devices, its folder, and its interpreter with the packages there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_server import __version__
from verl_server.errors import BadInputError, DeadlineError, StartupError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.interpreter_probe import MARK
from verl_server.server.server_main import explain_other_version

# -- Visible devices --------------------------------------------------------------------------------
# Which GPUs and cores a server may use. Trainer ranks often have one GPU each, while their server needs several.
#
# Workers of Ray, and ranks of launchers that isolate processes, have a `CUDA_VISIBLE_DEVICES` of their own. A server
# inherits the environment of one rank. Without a translation, it would see the GPU of that rank only. In the same way,
# launchers such as srun give each rank the cores next to its GPU.

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees, by number or UUID. Not set: all GPUs of the machine."""
DEVICES_SUFFIX = "_VISIBLE_DEVICES"
"""How the names of such variables end, for any kind of accelerator."""
#: Device files of NVIDIA, AMD, Intel, Ascend, Moore Threads and other accelerators. Without any of them, torch need not
#: be imported to know that there is no accelerator.
ACCELERATOR_FILES = ("nvidia*", "kfd", "dri/render*", "davinci*", "mtgpu*", "accel/*", "dxg")
MIG_PREFIX = "MIG-"
"""How the names of MIG devices begin: parts of a GPU that NVIDIA's driver shows as devices."""


@dataclass(frozen=True)
class SeenByRank:
    """What one trainer rank may use."""

    visible: str | None
    """Value of its `CUDA_VISIBLE_DEVICES`. None: not set."""
    num_gpus: int
    """Number of GPUs that torch finds in the process of the rank."""
    cores: Sequence[int]
    """Numbers of the cores that the rank may use. Empty: not known."""
    machine: str | None
    """Id of the machine of the rank, see `machine_id`. None: not known."""


def seen_by_server(ranks: Sequence[SeenByRank], needed: int, chosen: str | None = None) -> tuple[str | None, list[int]]:
    """The `CUDA_VISIBLE_DEVICES` of a server on the machine of the first of these ranks, and the cores of the server.

    They are those of the ranks on this machine together. A rank on another machine may have GPUs and cores with the
    same numbers. `needed`: number of GPUs that the server needs. `chosen`: the caller's `CUDA_VISIBLE_DEVICES` for the
    server. Raises BadInputError if the server would see too few GPUs.
    """
    beside = [rank for rank in ranks if rank.machine == ranks[0].machine]
    visible = devices_of_ranks([rank.visible for rank in beside]) if chosen is None else chosen
    require_gpus(needed, visible, ranks[0].num_gpus)
    return visible, sorted({core for rank in beside for core in rank.cores})


def allowed_cores() -> set[int]:
    """The cores that this thread may use. Empty if a sandbox forbids to read them."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()


def parse_devices(value: str) -> list[str]:
    """The devices that a value of `CUDA_VISIBLE_DEVICES` names. As in CUDA, -1 and what follows it name no device."""
    names = [device for part in value.split(",") if (device := part.strip())]
    return names[: names.index("-1")] if "-1" in names else names


def devices_of_ranks(values: Sequence[str | None]) -> str | None:
    """The `CUDA_VISIBLE_DEVICES` of a server, from those of the trainer ranks on its machine.

    These are the GPUs that the ranks see together, in the order of the ranks. None, which means all GPUs of the
    machine, if the first rank sees all GPUs.
    """
    if values[0] is None:
        return None
    return ",".join(dict.fromkeys(device for value in values for device in parse_devices(value or "")))


def gpus_needed(server_args: Mapping[str, Any], ranks_on_machine: int) -> int:
    """Number of GPUs that a server with these SGLang arguments must see to have `ranks_on_machine` TP ranks there."""
    first, step = (int(server_args.get(name) or default) for name, default in (("base_gpu_id", 0), ("gpu_id_step", 1)))
    return first + step * (ranks_on_machine - 1) + 1


def may_have_accelerator(environment: Mapping[str, str]) -> bool:
    """Whether a server with this `environment` may use an accelerator. Imports torch only if there are device files."""
    if not any(True for pattern in ACCELERATOR_FILES for _ in Path("/dev").glob(pattern)):
        return False
    if any(environment.get(name) != os.environ.get(name) for name in environment if name.endswith(DEVICES_SUFFIX)):
        return True  # the server sees other devices than this process
    import torch

    if getattr(torch.version, "musa", None) is not None or torch.cuda.device_count() > 0:  # starts no CUDA context
        return True
    return bool(torch.accelerator.is_available())


def require_gpus(needed: int, visible: str | None, num_gpus: int) -> None:
    """Raise BadInputError if a server sees fewer GPUs than it needs, or if it needs several and sees a MIG device.

    `visible`: its `CUDA_VISIBLE_DEVICES`. `num_gpus`: number of GPUs of the machine if that is None; 0 on a machine
    without GPUs, whose servers run on the CPU.
    """
    if num_gpus == 0:
        return
    found = num_gpus if visible is None else len(parse_devices(visible))
    if found < needed:
        where = "this machine has" if visible is None else f"{VISIBLE_DEVICES}={visible} makes visible"
        raise BadInputError(
            f"the server needs {needed} GPUs on this machine (its TP ranks; with SGLang also base_gpu_id and "
            f"gpu_id_step), but {where} {found}: use a smaller tp_size, nnodes=... (SGLang) if the trainer ranks are "
            f"on several machines, or pass env={{'{VISIBLE_DEVICES}': ...}} with GPUs for the server"
        )
    if needed > 1 and (mig := [name for name in parse_devices(visible or "") if name.startswith(MIG_PREFIX)]):
        raise BadInputError(
            f"the server needs {needed} GPUs on this machine (its TP ranks, base_gpu_id and gpu_id_step), but "
            f"{VISIBLE_DEVICES} has {', '.join(mig)}, and a process of CUDA can use only one MIG device: use "
            f"tp_size=1, or pass env={{'{VISIBLE_DEVICES}': ...}} with whole GPUs for the server"
        )


# -- Server folder ----------------------------------------------------------------------------------
# The temporary folder of one server: its working folder and, without a `log_dir`, its log.
#
# The warden removes the working folder when the server ends. A crashed server leaves its log for the user. At most
# `MAX_KEPT_LOGS` such logs of one user are kept on a machine: a replica that crashes for weeks would fill the disk.

PREFIX = "verl-server-"
LOG_NAME = "server.log"
WORKING_FOLDER = "tmp"
MAX_KEPT_LOGS = 20


def temporary_folder() -> Path:
    """The folder for temporary files of this process. Raises StartupError if no such folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise _not_writable(error) from error


def make_server_folder() -> Path:
    """A new folder with a working folder in it. Removes the oldest logs of crashed servers. Raises StartupError."""
    parent = temporary_folder()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        (folder / WORKING_FOLDER).mkdir()
    except OSError as error:
        raise _not_writable(error) from error
    for old in kept_logs(folder.parent)[MAX_KEPT_LOGS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _not_writable(error: OSError) -> StartupError:
    return StartupError(
        f"the server needs a folder for temporary files, and none can be written: {error}. Set the environment "
        "variable TMPDIR to a writable folder"
    )


def kept_logs(parent: Path) -> list[Path]:
    """The folders of this user's servers that have ended and left a log, the latest first."""
    found: list[tuple[float, Path]] = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it
            log = (folder / LOG_NAME).stat()
            if log.st_uid == os.geteuid() and not (folder / WORKING_FOLDER).exists():
                found.append((log.st_mtime, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


# -- Engine profile ---------------------------------------------------------------------------------
# What the launcher of servers knows about one inference engine. The engine's adapter provides the values.


@dataclass(frozen=True)
class EngineProfile:
    """Facts about an inference engine that `launch_server` needs to start its server and to see that it is ready.

    `adapter/sglang/server_arguments.py` defines the profile of SGLang, `adapter/vllm/server_arguments.py` that of vLLM.
    """

    name: str
    """Name of the engine, for messages."""
    main_module: str
    """Python module that the server process runs (`python -m`). It reads the server arguments from standard input."""
    secret_arguments: tuple[str, ...]
    """Names of the server arguments that hold keys. Their values are replaced by `***` in the server's log."""
    ready_paths: tuple[str, ...]
    """URL paths of the readiness probe, the preferred path first. A path that answers 404 does not exist in the
    engine's version; the next path is then requested. The server is ready when a path answers 200."""
    worker_node_ready_paths: tuple[str, ...]
    """URL paths of the readiness probe on the nodes after the first node of a multi-node server."""
    authenticated_path: str
    """URL path that answers 401 when the API key is wrong. It shows whether the server behind the port is our own."""
    port_taken_phrases: tuple[str, ...]
    """Lower-case phrases in the server's log that mean that another program listens on the server's port."""
    worker_prefix: str
    """Begin of the titles of the engine's worker processes. The server ends when one of them ends."""
    forked_module: str | None = None
    """Python module through which a forkserver imports the engine and runs its servers (`ForkedEngine` in
    `forkserver_main.py`). None: servers of the engine are never forked."""
    installation: str = ""
    """What to do where the environment of this process does not have the engine, for an error."""
    wrong_environment: str = ""
    """What to do where another environment does not have the engine: the last part of an error."""
    distribution: str = ""
    """Name of the engine's package for pip."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Python modules that the server process needs, and the requirement with which pip installs each."""


# -- Report -----------------------------------------------------------------------------------------
# What another interpreter has, found by `interpreter_probe.py`, which runs in that interpreter.

PROBE = Path(__file__).with_name("interpreter_probe.py")
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
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        inner = os.path.join(path, "bin", "python")  # of the folder of an environment
        raise BadInputError(
            f"server_python {path} is no executable file; pass the path of a Python interpreter on the machine of the "
            f"server, for example {inner if os.path.isfile(inner) else '/opt/sglang/bin/python'}",
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
    if python < MINIMUM_PYTHON:
        shown, minimum = (".".join(map(str, numbers)) for numbers in (python, MINIMUM_PYTHON))
        raise BadInputError(
            f"server_python {path} is Python {shown}, but verl_server needs Python {minimum} or newer; pass the "
            "interpreter of an environment with a newer Python",
            argument="server_python",
        )
    return InterpreterReport(
        python=python,
        folders={name: next(iter(found), None) for name, found in values["folders"].items()},
        versions={name: next(iter(found), None) for name, found in values["versions"].items()},
        plugins=values["plugins"],
        requirements=values["requirements"],
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


# -- Package folder ---------------------------------------------------------------------------------
# A folder that brings this package to another interpreter: a link to the package, and its entry points.
#
# The folder is an entry of the other interpreter's `PYTHONPATH`. The folder above this package would not do: it can be
# the `site-packages` of the trainer, whose other packages must not reach the server. SGLang finds our platform for
# machines without an accelerator by the entry points of an installed distribution, so the folder has one.
#
# The content depends on the path and on the version of this package only. All servers of a user share the folder, and
# it stays: a forkserver and its servers import from it as long as they live.

PACKAGE_PATH = Path(__file__).resolve().parents[1]


def make_package_folder() -> Path:
    """The folder, which is made if it is not there. Raises StartupError if it cannot be made."""
    parent = temporary_folder() / f"verl_server_packages_{os.getuid()}"
    name = hashlib.sha256(f"{PACKAGE_PATH}\n{__version__}\n{sorted(ENTRY_POINTS.items())}".encode()).hexdigest()[:16]
    folder = parent / name
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        _require_own_folder(parent)
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a program that removes old temporary files has been here
            _write(folder)
    except OSError as error:
        raise StartupError(
            f"the server needs a link to this package in {parent}, which cannot be written: {error}. Set the "
            "environment variable TMPDIR to a writable folder, or install verl_server for server_python"
        ) from error
    return folder


def _require_own_folder(folder: Path) -> None:
    """Raise StartupError for a folder in which another user could replace the package."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StartupError(
            f"{folder} must be a folder of this user with the mode 0700, because servers import this package from it; "
            "remove it, or set the environment variable TMPDIR to another folder"
        )


def _info(folder: Path) -> Path:
    return folder / f"{PACKAGE_PATH.name}-{__version__}.dist-info"


def _is_complete(folder: Path) -> bool:
    link, info = folder / PACKAGE_PATH.name, _info(folder)
    return link.is_symlink() and all((info / name).is_file() for name in ("METADATA", "entry_points.txt"))


def _write(folder: Path) -> None:
    """Write the folder under another name and rename it, because several processes may make it at the same time."""
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        (draft / PACKAGE_PATH.name).symlink_to(PACKAGE_PATH)
        info = _info(draft)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl-server\nVersion: {__version__}\n")
        sections = [f"[{group}]\n{entry}\n" for group, entry in ENTRY_POINTS.items()]
        (info / "entry_points.txt").write_text("\n".join(sections))
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not _is_complete(folder):  # otherwise another process was faster
            raise


# -- Environment ------------------------------------------------------------------------------------

#: Environment variables of the trainer's own rendezvous, which servers must not inherit. With those of torchrun,
#: SGLang's scheduler would connect to the trainer's store instead of creating its own (TORCHELASTIC_USE_AGENT_STORE).
RENDEZVOUS_VARIABLES = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
)  # fmt: skip


#: Variables with the settings of torch's allocator: the earlier and the present name, and that of AMD.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: Settings of the allocator with which memory of a server cannot be released: its pages do not come from `cudaMalloc`.
#: Trainers set the first for themselves.
UNRELEASABLE = re.compile(r"\s*(expandable_segments\s*:\s*\w+|backend\s*:\s*cudaMallocAsync)\s*(,|$)")
#: Variable with the names of the only plugins that SGLang loads, and the name of ours in `setup.py`.
PLUGINS, OWN_PLUGIN = "SGLANG_PLUGINS", "verl_server_cpu"


def server_environment(env: Mapping[str, str], python: ServerPython | None) -> dict[str, str]:
    """All environment variables of a server. `env` are those that the caller adds. `python`: see `ServerProcess`.

    Without `UNRELEASABLE` settings, and with this library's plugin for SGLang also where others are chosen.
    """
    all_variables = {**inherited_environment(), **env} if python is None else python.environment(env)
    for name in all_variables.keys() & set(ALLOCATOR_VARIABLES):
        all_variables[name] = UNRELEASABLE.sub("", all_variables[name]).strip(" ,")
        if not all_variables[name]:
            del all_variables[name]
    if plugins := all_variables.get(PLUGINS):
        all_variables[PLUGINS] = plugins if OWN_PLUGIN in plugins.split(",") else f"{plugins},{OWN_PLUGIN}"
    return all_variables


def inherited_environment() -> dict[str, str]:
    """The environment of every server: this process's variables and our defaults.

    Servers do not inherit `RENDEZVOUS_VARIABLES`, nor the OMP_NUM_THREADS that torchrun or Ray has set for a worker.
    Raises StartupError without a writable temporary folder.
    """
    left_out = (*RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS") if _has_threads_of_worker() else RENDEZVOUS_VARIABLES
    user_cache = temporary_folder() / f"torchinductor_{os.getuid()}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(left_out)},
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(user_cache)),  # shared, and kept
        "PYTHONUNBUFFERED": "1",
        # Idle OpenMP threads spin for about 50 us, which covers the gap between two tensors of a weight update, and
        # then sleep, because the trainer needs the cores. OMP_WAIT_POLICY=PASSIVE made loading a third slower.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    }


def _has_threads_of_worker() -> bool:
    """Whether torchrun or Ray has set OMP_NUM_THREADS: the number of threads of one worker, often 1.

    Both leave a number that the user has set. A worker of Ray sets the variable itself, torchrun in its own process.
    The programs that a worker starts inherit it; what the user has set is not known there.
    """
    if (raylet := os.environ.get("RAY_RAYLET_PID")) is not None:
        is_worker = raylet == str(os.getppid())
        return not is_worker or "OMP_NUM_THREADS" not in _variables_at_start("self")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = _variables_at_start(str(os.getppid()))
        return "TORCHELASTIC_RUN_ID" in parent or "OMP_NUM_THREADS" not in parent
    return False


def _variables_at_start(pid: str) -> set[str]:
    """Names of the variables that a process was started with. Empty for processes of other users."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()
    return {variable.partition(b"=")[0].decode(errors="replace") for variable in content.split(b"\0")}


def no_proxy_environment(host: str) -> dict[str, str]:
    """Variables that exclude the server from proxies: SGLang's warm-up calls its own server through `requests`."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [known, "127.0.0.1", "localhost", "::1", host]))
    return {"no_proxy": value, "NO_PROXY": value}


# -- Server python ----------------------------------------------------------------------------------
# The Python interpreter of a server, which can be another one than the trainer's, with other packages.
#
# The other environment needs the engine. It need not have this package, which `make_package_folder` brings there. If it
# has this package, its version must be that of the trainer.

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
    missing = [module for module, spec in specs.items() if spec is None or spec.origin is None]  # as in the probe
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
