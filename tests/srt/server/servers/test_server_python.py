"""Servers that run with another Python interpreter and other packages than the trainer (`server_python`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from environment_helpers import SITE_PACKAGES, make_environment
from gpu_proof.entry_points import declared_entry_points
from helpers import (
    adapter_of,
    assert_equals_reference,
    change_weights,
    no_new_shared_memory,
    reference_model,
    wait_until,
)
from test_lifecycle import Trainer
from torch.distributed.device_mesh import DeviceMesh

import verl_server
from verl_server import AdapterConfig, HttpServerEngineAdapter, RolloutManager, Timeouts, VerlEngine
from verl_server.adapter.sglang.server_arguments import SGLANG
from verl_server.cli.arguments import ADMIN_API_KEY, API_KEY
from verl_server.config import SERVER_PYTHON
from verl_server.cpu.forkserver import forkserver_pid
from verl_server.errors import BadInputError, DeadlineError, StartupError, VerlServerError
from verl_server.platforms import ENTRY_POINTS
from verl_server.server.environment import (
    PACKAGE_PATH,
    ServerPython,
    find_server_python,
    interpreter_path,
    make_package_folder,
)
from verl_server.server.interpreter_probe import MARK
from verl_server.server.warden.processes import start_time

SMALL_SERVER: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192}
#: Seconds within which an interpreter that cannot start a server is refused, on a busy machine.
REFUSED_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with SGLang and without this package."""
    return make_environment(tmp_path_factory.mktemp("environment") / "other")


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with all packages but SGLang and this package."""
    return make_environment(tmp_path_factory.mktemp("environment") / "without_engine", without=["sglang"])


def read_variables(pid: int) -> dict[str, str]:
    """The environment variables with which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)


def refusal(python: Path | str, **settings: Any) -> VerlServerError:
    """The error with which a server with this interpreter is refused, which must come soon."""
    started = time.monotonic()
    with pytest.raises(VerlServerError) as caught:
        HttpServerEngineAdapter("no-model", config=AdapterConfig(server_python=python, **settings))
    assert time.monotonic() - started < REFUSED_WITHIN_S
    return caught.value


# -- real servers ------------------------------------------------------------------------------------


def test_a_server_of_another_environment_takes_weights(
    one_rank: DeviceMesh, tiny: Callable[..., Path], other: Path
) -> None:
    folder = tiny("qwen3")
    model = reference_model(folder)
    with (
        no_new_shared_memory(),
        VerlEngine(
            one_rank, model_path=str(folder), server_python=other, use_forkserver=False, **SMALL_SERVER
        ) as engine,
    ):
        pid = adapter_of(engine).pids.main
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[:3] == [os.fsencode(other), b"-m", SGLANG.main_module.encode()]
        variables = read_variables(pid)
        assert variables["PYTHONPATH"] == str(make_package_folder())
        assert variables["PATH"].split(os.pathsep)[0] == str(other.parent)
        assert str(Path(sys.prefix, "bin")) not in variables["PATH"].split(os.pathsep)
        assert_equals_reference(engine, model)
        change_weights(model, seed=1)
        update = engine.update_weights_from_tensor(model.state_dict().items())
        assert update.weight_version == 1
        assert_equals_reference(engine, model)


def test_servers_of_another_environment_are_forked(tiny: Callable[..., Path], other: Path) -> None:
    """Each interpreter has a forkserver of its own. The second server of an interpreter starts without its imports."""
    own_before = forkserver_pid()
    times = []
    for _ in range(2):
        started = time.monotonic()
        with HttpServerEngineAdapter(
            tiny("qwen3"), config=AdapterConfig(server_python=other), **SMALL_SERVER
        ) as adapter:
            times.append(time.monotonic() - started)
            reply = adapter.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
            assert len(reply["output_ids"]) == 3
    pid = forkserver_pid(ServerPython(str(other)))
    assert pid is not None
    assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(os.fsencode(other))
    assert forkserver_pid() == own_before != pid
    assert times[1] < times[0], times


def test_killed_trainer_with_another_environment_leaves_nothing(
    tiny: Callable[..., Path], tmp_path: Path, other: Path
) -> None:
    with no_new_shared_memory():
        trainer = Trainer(tiny("qwen3"), tmp_path / "trainer", tp_size=1, server_python=other)
        trainer.wait_for("working")
        server = int((trainer.scratch / "url").read_text().split()[1])
        assert Path(f"/proc/{server}/cmdline").read_bytes().startswith(os.fsencode(other))
        trainer.kill_and_expect_nothing()


TRAINER_WITHOUT_ENGINE = """
import importlib.util, json, sys
from transformers import AutoModelForCausalLM
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import verl_server
from verl_server import StartupError, VerlEngine

folder, server_python, store = sys.argv[1:]
assert importlib.util.find_spec("sglang") is None
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
settings = {"model_path": folder, "dtype": "float32", "max_total_tokens": 4096}
errors = []
for launch_server in (True, False):
    try:
        VerlEngine(mesh, launch_server=launch_server, **settings)
    except StartupError as error:
        errors.append(error.message)
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with VerlEngine(mesh, server_python=server_python, use_forkserver=False, **settings) as engine:
    version = engine.update_weights_from_tensor(policy.state_dict().items()).weight_version
    reply = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "sglang")
print(json.dumps([errors, version, len(reply["output_ids"]), loaded]))
"""


def test_a_trainer_without_the_engine(
    tiny: Callable[..., Path], tmp_path: Path, other: Path, without_engine: Path
) -> None:
    """The trainer's environment has no SGLang. Without a `server_python`, the error names the extra and the setting."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_PATH.parent)}
    arguments = [str(tiny("qwen3")), str(other), str(tmp_path / "store")]
    done = subprocess.run(
        [str(without_engine), "-c", TRAINER_WITHOUT_ENGINE, *arguments],
        capture_output=True, text=True, timeout=240, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors, version, num_tokens, loaded = json.loads(done.stdout.splitlines()[-1])
    assert (version, num_tokens, loaded) == (1, 4, [])
    assert len(errors) == 2
    assert all("pip install 'verl-server[sglang]'" in error and "server_python=PATH" in error for error in errors)


# -- interpreters that cannot start a server ---------------------------------------------------------


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_paths_that_are_no_interpreter(tmp_path: Path, other: Path) -> None:
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone")
    plain = tmp_path / "plain"
    plain.write_text("text")
    old = json.dumps({MARK: [1], "python": [3, 9, 18]})
    cases: list[tuple[Path, str]] = [
        (tmp_path / "gone", "is no executable file"),
        (dangling, "is no executable file"),
        (other.parents[1], f"on the machine of the server, for example {other}"),
        (plain, "is no executable file"),
        (_script(tmp_path / "no-program", "\0\0"), "cannot be started: Exec format error"),
        (Path("/bin/true"), "is not a working Python interpreter: it ended with exit code 0 without the expected"),
        (_script(tmp_path / "broken", "#!/bin/sh\necho no libpython >&2; exit 127\n"), "127 and said 'no libpython'"),
        (
            _script(tmp_path / "old", f"#!/bin/sh\necho '{old}'\n"),
            "is Python 3.9.18, but verl_server needs Python 3.11",
        ),
    ]
    for python, expected in cases:
        error = refusal(python)
        assert isinstance(error, BadInputError), python
        assert expected in error.message
        assert str(python) in error.message
        assert error.details["argument"] == "server_python"


def test_an_interpreter_that_hangs_is_ended(tmp_path: Path) -> None:
    hanging = _script(tmp_path / "hangs", f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/pid; wait\n")
    error = refusal(hanging, timeouts=Timeouts(start_s=1.0))
    assert isinstance(error, DeadlineError)
    assert f"{hanging} did not answer within 1 s" in error.message
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: start_time(pid) is None, 5.0, "the child of the interpreter was not killed")


def test_environments_that_do_not_fit(tmp_path: Path, without_engine: Path) -> None:
    error = refusal(without_engine)
    assert isinstance(error, StartupError)
    assert f"{without_engine} has no package sglang" in error.message
    assert f"`{without_engine} -m pip install 'sglang>=0.5.15,<=0.5.23'`" in error.message
    rest = make_environment(tmp_path / "rest", without=["sglang"])
    next((tmp_path / "rest").glob("lib/python*/site-packages")).joinpath("sglang", "srt").mkdir(parents=True)
    assert "has no package sglang" in refusal(rest).message  # a folder that an uninstallation has left
    stale = make_environment(tmp_path / "stale", fake_version="0.0.9")
    error = refusal(stale)
    assert isinstance(error, StartupError)
    assert f"the trainer has verl_server {verl_server.__version__}" in error.message
    assert f"{stale} has verl_server 0.0.9" in error.message
    assert f"`{stale} -m pip uninstall verl-server`" in error.message


def test_the_server_refuses_a_trainer_with_another_version(tmp_path: Path) -> None:
    """The metadata of the environment says our version, but the code there has another version."""
    python = make_environment(tmp_path / "edited", fake_version=verl_server.__version__)
    site_packages = next((tmp_path / "edited").glob("lib/python*/site-packages"))
    shutil.copytree(PACKAGE_PATH, site_packages / "verl_server", ignore=shutil.ignore_patterns("__pycache__"))
    init = site_packages / "verl_server" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{verl_server.__version__}"', '"7.0.0"'))
    error = refusal(python, use_forkserver=False)
    assert isinstance(error, StartupError)
    assert error.message.startswith(f"the trainer has verl_server {verl_server.__version__}, but the environment of")
    assert f"{python} has verl_server 7.0.0" in error.message
    assert "pip uninstall verl-server" in error.message


def test_a_fleet_names_the_interpreter(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    with pytest.raises(BadInputError, match="gone is no executable file"):
        RolloutManager(1, model_path=str(tiny("qwen3")), config=AdapterConfig(server_python=tmp_path / "gone"))


# -- the setting, the environment and the package folder ---------------------------------------------


def test_the_setting_and_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path) -> None:
    assert AdapterConfig().server_python is None
    monkeypatch.setenv(SERVER_PYTHON, str(other))
    assert AdapterConfig().server_python == str(other)
    assert AdapterConfig(server_python="/another").server_python == "/another"
    monkeypatch.setenv("HOME", str(other.parents[2]))
    assert interpreter_path(f"~/{other.parents[1].name}/bin/python") == str(other)  # the link is not followed
    assert find_server_python(sys.executable, {}, SGLANG, 10.0) is None  # the interpreter of this process


def test_the_environment_of_a_server_has_nothing_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/trainer")
    monkeypatch.setenv("PYTHONHOME", "/trainer")
    monkeypatch.setenv("PYTHONPATH", "/trainer/packages")
    monkeypatch.setenv("CONDA_PREFIX", "/trainer")
    monkeypatch.setenv("PATH", "/trainer/bin:/usr/bin")
    monkeypatch.setenv("HF_HOME", "/cache")
    python = ServerPython("/server/bin/python", Path("/link"))
    variables = python.environment({"PYTHONPATH": "/plugins", "VIRTUAL_ENV": "/server"})
    assert variables["PYTHONPATH"] == "/link:/plugins"
    assert variables["PATH"] == "/server/bin:/usr/bin"
    assert variables["VIRTUAL_ENV"] == "/server"  # of the caller
    assert variables["HF_HOME"] == "/cache"
    assert not {"PYTHONHOME", "CONDA_PREFIX"} & variables.keys()
    assert "PYTHONPATH" not in ServerPython("/server/bin/python").environment({})


def test_the_package_folder_brings_this_package_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        (folder,) = set(pool.map(lambda _: make_package_folder(), range(8)))
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]  # no draft is left
    assert {entry.name for entry in folder.iterdir()} == {
        "verl_server",
        f"verl_server-{verl_server.__version__}.dist-info",
    }
    (found,) = metadata.distributions(name="verl-server", path=[str(folder)])
    assert found.version == verl_server.__version__
    (folder / "verl_server").unlink()  # a program that removes old temporary files
    assert (make_package_folder() / "verl_server").resolve() == PACKAGE_PATH
    folder.parent.chmod(0o777)
    with pytest.raises(StartupError, match="must be a folder of this user"):
        make_package_folder()


def test_the_entry_points_are_those_of_setup() -> None:
    declared = declared_entry_points()
    assert {group: entries for group, entries in declared.items() if group.startswith("sglang.")} == {
        group: [entry] for group, entry in ENTRY_POINTS.items()
    }


def test_an_installed_package_of_our_version_is_used(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "same", fake_version=verl_server.__version__)
    site_packages = next((tmp_path / "same").glob("lib/python*/site-packages"))
    found = find_server_python(python, {}, SGLANG, 30.0)
    assert found == ServerPython(str(python), make_package_folder())  # metadata without the package
    (site_packages / "verl_server").symlink_to(PACKAGE_PATH)
    assert find_server_python(python, {}, SGLANG, 30.0) == ServerPython(str(python), None)


# -- the command -------------------------------------------------------------------------------------


def run_command(python: Path | str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE_PATH.parent), **env}
    command = [str(python), "-m", "verl_server.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)


def test_launch_reads_the_options_of_the_other_sglang(
    tiny: Callable[..., Path], other: Path, without_engine: Path
) -> None:
    """The command itself has no SGLang. The interpreter comes from the option, or from the variable."""
    arguments = ["launch", str(tiny("qwen3")), "--dtype", "flot32"]
    keys = {API_KEY: "a-key-of-clients", ADMIN_API_KEY: "a-key-of-trainers"}
    for options, env in ((["--server-python", str(other)], {}), ([], {SERVER_PYTHON: str(other)})):
        done = run_command(without_engine, *arguments, *options, **keys, **env)
        assert done.returncode == 2, done.stderr
        assert "dtype must be one of auto, half" in done.stderr
    done = run_command(sys.executable, *arguments, "--server-python", str(without_engine), **keys)
    assert done.returncode == 1
    assert "has no package sglang" in done.stderr


def examine(python: Path | str, server_python: Path | str, **env: str) -> dict[str, dict[str, str]]:
    """The findings about the environment of a server, by title, and the exit code as `code`."""
    done = run_command(python, "doctor", "--json", "--server-python", str(server_python), **env)
    findings = json.loads(done.stdout)["findings"]
    return {item["title"]: item for item in findings if item["section"].startswith("Server ")} | {
        "code": {"code": str(done.returncode)}
    }


def test_doctor_checks_the_environment_of_the_server(tmp_path: Path, other: Path, without_engine: Path) -> None:
    found = examine(without_engine, other)
    levels = {title: item["level"] for title, item in found.items() if title != "code"}
    assert set(levels.values()) == {"ok"}, found
    assert {"Python", "verl_server", "SGLang", "torch", "transformers", "SGLang platform"} <= levels.keys()
    assert found["code"]["code"] == "0"
    found = examine(sys.executable, without_engine)
    assert found["SGLang"]["level"] == "fail"
    assert found["SGLang"]["fix"].startswith(f"{without_engine} -m pip install 'sglang")
    assert found["code"]["code"] == "1"
    stale = make_environment(tmp_path / "stale", fake_version="0.0.9")
    found = examine(sys.executable, stale)
    assert "0.0.9 there" in found["verl_server"]["detail"]
    assert found["verl_server"]["fix"].startswith(f"{stale} -m pip uninstall verl-server")
    found = examine(sys.executable, tmp_path / "gone")
    assert "is no executable file" in found["Interpreter"]["detail"]
    assert found["code"]["code"] == "1"


def test_the_helper_hides_packages(without_engine: Path) -> None:
    """Otherwise, the tests of this file would prove nothing."""
    code = (
        "import importlib.util as u; print(*[u.find_spec(n) is not None for n in ('sglang', 'verl_server', 'torch')])"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(without_engine), "-c", code], capture_output=True, text=True, timeout=60, env=env, cwd="/"
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    assert (SITE_PACKAGES / "sglang").is_dir()
