"""The forkserver of the whole suite, and fixtures with servers that several tests use."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_engines import SharedEngines, model_of
from fleet_helpers import RECOVERY, RESTART_S, ROUTER, healthy, states
from gpu_proof.settings import device
from helpers import (
    Ranks,
    adapter_of,
    free_port,
    is_listening,
    mesh_of,
    no_new_shared_memory,
    reference_model,
    trainer_ranks,
    wait_until,
)
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, RolloutManager, VerlEngine
from verl_server.config import FORKSERVER_FOLDER
from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.pretrained import make_smollm2
from verl_server.tiny import make_model

#: Seconds of a test without an engine above which it needs the marker `slow`.
SLOW_S = 8.0
#: A test fails when it uses more CPU time than this without the marker: a busy machine, and the imports of the first
#: test of a process, stay below it.
FAILS_AT_CPU_S = 5 * SLOW_S


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-order", type=int, metavar="SEED", help="files and their tests in random order")


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes of the suite share one forkserver. With workers, pytest's main process owns it.

    A server is forked only when its environment equals the environment of the forkserver. So the variables are set
    once, and in the same way in the main process and in its workers.
    """
    settings.register_profile("srt", deadline=None)  # servers of other tests run on the same cores
    settings.load_profile("srt")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # With tiny models, a second OpenMP thread mostly spins in barriers: it doubles the CPU time of a generation.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Actors of Ray have the priority of the suite, so that the forkserver of the suite can fork their servers, too.
    os.environ.update(RAY_worker_niceness="0", RAY_worker_oom_score_adjustment="0")
    # Test modules import one another, and helpers, by their bare names: here, in actors and in other subprocesses.
    srt = Path(__file__).parent / "srt"
    folders = [str(srt), *sorted({str(path.parent) for path in srt.rglob("test_*.py")})]
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *folders)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *python_path])
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        del os.environ[name]
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailureList())
    if FORKSERVER_FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="verl-server-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[FORKSERVER_FOLDER] = folder
    if config.getoption("numprocesses"):
        prepare_forkserver()


#: The files that take longest. The workers begin with these files, so that all workers end at about the same time.
#: Files that need much memory are not side by side.
#: The tests of the documentation come first: most of them need no server while the forkserver imports SGLang.
LONG_FILES = (
    "test_docs_on_servers.py", "test_docs.py", "test_examples.py", "test_verl.py", "test_sglang_router_on_servers.py",
    "test_faults.py", "test_gateway_fleet.py", "test_vllm_loading.py", "test_benchmarks.py", "test_trl.py",
    "test_rl_wire.py", "test_gateway_work.py", "test_vllm_doctor.py", "test_both_engines_fleet.py",
    "test_rl_wire_admin.py", "test_platform_server.py", "test_server_python.py", "test_verl_fleet.py",
    "test_gateway_chaos.py", "test_vllm_server.py", "test_forkserver.py", "test_fleet.py", "test_weight_updates.py",
    "test_vllm_systems.py", "test_every_case.py", "test_cli_on_servers.py", "test_gateway_programs.py",
    "test_transports.py", "test_gpu_proof.py", "test_lifecycle.py", "test_ray.py", "test_ranks.py",
    "test_in_process.py", "test_verl_engine_server.py", "test_demo_on_servers.py", "test_long_prefill.py",
    "test_fleet_engine.py", "test_random_sessions.py",
)  # fmt: skip


def pytest_report_header() -> str | None:
    if torch.cuda.is_available():
        return None
    return "tests with the marker gpu are deselected: torch finds no NVIDIA GPU here. `make gpu-proof` runs them on one"


def _can_run(item: pytest.Item) -> bool:
    """Whether this machine can run a test: tests with the marker `gpu` need a GPU, or a rehearsal (`gpu_proof`)."""
    marker = item.get_closest_marker("gpu")
    is_rehearsed = device() == "cpu" and marker is not None and marker.kwargs.get("rehearsable", False)
    return marker is None or is_rehearsed or torch.cuda.is_available()


class _FailureList:
    """Names the failed tests last when pytest itself failed. Then pytest leaves out its summary."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(f"{report.when} of {report.nodeid}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.errors.append(str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if self.errors:
            print("failed tests:", *self.names, "pytest itself failed:", *self.errors[0].splitlines()[-12:], sep="\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if without_gpu := [item for item in items if not _can_run(item)]:
        config.hook.pytest_deselected(items=without_gpu)
        items[:] = [item for item in items if _can_run(item)]
    for item in items:
        if item.path.parent.name == "servers":
            item.add_marker("servers")
    places = {name: float(place) for place, name in enumerate(LONG_FILES)}
    if (seed := config.getoption("random_order")) is not None:
        generator = random.Random(seed)
        places = {name: generator.random() for name in sorted({item.path.name for item in items})}
        generator.shuffle(items)
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def _cpu_s() -> float:
    """CPU time of this process, and of those that it has waited for, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = _cpu_s()
    result = yield
    if not {"slow", "servers"} & item.keywords.keys() and (used := _cpu_s() - before) > FAILS_AT_CPU_S:
        pytest.fail(f"the test used {used:.0f} s of CPU time: make it faster, or mark it with pytest.mark.slow")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests of the fast layer that are slow. The wall time depends on the machine: so they do not fail."""
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.duration > SLOW_S]
    if slow := [report for report in reports if not {"slow", "servers"} & report.keywords.keys()]:
        terminalreporter.section(f"tests above {SLOW_S:.0f} s without the marker slow")
        for report in sorted(slow, key=lambda report: -report.duration):
            terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")


@pytest.fixture(scope="module", autouse=True)
def same_environment() -> Iterator[None]:
    """Undo changes of environment variables: ray and sglang set some when a test imports them.

    Servers of later files would not fit the forkserver of the suite, and would import SGLang again.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("qwen3", **sizes)`: the folder of a tiny model, made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(architecture: str, **sizes: Any) -> Path:
        key = architecture + "".join(f"-{name}{value}" for name, value in sorted(sizes.items()))
        if key not in made:
            made[key] = make_model(root / key, architecture, **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16. It is made once on a machine."""
    folder = Path.home() / ".cache" / "verl_server" / "smollm2-bfloat16"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make_smollm2(folder)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A process group of this process alone, and its mesh."""
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield mesh_of(1)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two trainer ranks for all tests in which none of them dies."""
    with trainer_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def shared_engine(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> Iterator[VerlEngine]:
    """A `VerlEngine` on one rank with a real server: Qwen3, float32. Leave it as you found it."""
    with VerlEngine(one_rank, model_path=str(tiny("qwen3")), dtype="float32", max_total_tokens=16384) as engine:
        yield engine


@pytest.fixture(scope="session")
def adapter(shared_engine: VerlEngine) -> HttpServerEngineAdapter:
    """The blocking adapter of the shared engine's server."""
    return adapter_of(shared_engine)


@pytest.fixture(scope="session")
def shared_engines(one_rank: DeviceMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Engines of both kinds, with servers of the same model. Leave them as you found them."""
    engines = SharedEngines(one_rank, model_of(tmp_path_factory.mktemp("both")))
    yield engines
    engines.shutdown()


@pytest.fixture(scope="session")
def sglang_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real `sglang-router`; its port."""
    port, log = free_port(), tmp_path_factory.mktemp("router") / "log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--disable-retries", "--disable-health-check"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: is_listening(port) or process.poll() is not None, 120, "the router does not listen")
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        process.kill()
        process.wait()


# -- a fleet and its engine, for each module that uses them ------------------------------------------


@pytest.fixture(scope="module")
def events() -> list[Any]:
    """Events of the fleet, in order."""
    return []


@pytest.fixture(scope="module")
def fleet_and_engine(
    one_rank: DeviceMesh, tiny: Callable[..., Path], events: list[Any]
) -> Iterator[tuple[RolloutManager, VerlEngine]]:
    """Two replicas, and an engine that has pushed weights into them once."""
    folder = str(tiny("qwen3"))
    with (
        no_new_shared_memory(),
        RolloutManager(
            2,
            model_path=folder,
            dtype="float32",
            max_total_tokens=8192,
            recovery=RECOVERY,
            router=ROUTER,
            router_process=True,
            on_event=events.append,
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        engine.update_weights_from_tensor(reference_model(folder).state_dict().items())
        yield fleet, engine


@pytest.fixture
def fleet(fleet_and_engine: tuple[RolloutManager, VerlEngine]) -> RolloutManager:
    """The fleet, with two healthy replicas."""
    fleet = fleet_and_engine[0]
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
    return fleet
