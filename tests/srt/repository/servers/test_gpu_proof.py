"""The runner of `make gpu-proof` on a machine without a GPU: plan, deadlines, exit codes, files, a rehearsal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path

import psutil
import pytest
import torch
from gpu_proof import runner as runner_module
from gpu_proof.__main__ import SOME_FAILED, SOME_NOT_RUN, exit_code, planned_items, slug
from gpu_proof.entry_points import write_entry_points
from gpu_proof.items import ITEMS, TRANSPORTS, Item
from gpu_proof.report import Report, measured_methods
from gpu_proof.runner import FAILED, NOT_RUN, RAN, ROOT, Outcome, Runner, end_group
from gpu_proof.weight_sync import MODELS
from helpers import wait_until

from verl_server import __version__
from verl_server.tiny import make_config


def run_proof(*options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "gpu_proof", *options],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def item(name: str, code: str, deadline_s: float = 60.0, *, runs_on_cpu: bool = True, exclusive: bool = False) -> Item:
    """An item that runs a Python program."""
    return Item(name, f"shows {name}", ("-c", code), deadline_s, exclusive, runs_on_cpu)


RECORDS = "from gpu_proof.settings import record; record('method', size='1B', method='copy', seconds=[0.5, 0.25])"
SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3000)', 'of-an-item'])"
CRASHES = f"{RECORDS}; import os, signal; print('last words in', os.getcwd()); os.kill(os.getpid(), signal.SIGSEGV)"


def sleeping_children() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[-1] == "of-an-item":
            found.append(process.pid)
    return found


def run_items(items: Sequence[Item], budget_s: float, report: Report) -> list[Outcome]:
    return Runner("cpu", budget_s, report.add).run(items)


def test_every_item_is_reported_whatever_happens_to_it(tmp_path: Path) -> None:
    """An item that crashes or hangs neither ends the others nor leaves a process. Records before a crash are kept."""
    items = [
        item("measures", RECORDS),
        item("crashes", CRASHES),
        item("fails", "import sys; print('the reason'); sys.exit(7)"),
        item("needs a GPU", RECORDS, runs_on_cpu=False),
        item("hangs", SLEEPS, deadline_s=3.0, exclusive=True),
    ]
    report = Report(tmp_path, "a test", {"device": None}, 200.0)
    outcomes = run_items(items, 200.0, report)
    report.plot()
    assert [outcome.status for outcome in outcomes] == [RAN, FAILED, FAILED, NOT_RUN, FAILED]
    reasons = [outcome.reason for outcome in outcomes]
    assert reasons[0] == ""
    assert "exit code -11" in reasons[1]
    assert "last words" in reasons[1]
    assert reasons[2].startswith("ended with exit code 7:")
    assert reasons[2].endswith("the reason")
    assert reasons[3] == "needs an NVIDIA GPU"
    assert reasons[4].startswith("exceeded its deadline of 3 s")
    wait_until(lambda: not sleeping_children(), 10.0, "the child of an item still runs")
    assert measured_methods(outcomes) == {"1B": {"copy": [0.5, 0.25]}}

    content = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert [(entry["item"], entry["status"]) for entry in content["items"]] == [
        (outcome.item.name, outcome.status) for outcome in outcomes
    ]
    assert content["items"][1]["records"][0]["method"] == "copy"
    assert (tmp_path / "gpu_proof.png").read_bytes().startswith(b"\x89PNG")
    log = (tmp_path / "gpu_proof.log").read_text()
    assert "===== fails: failed" in log
    for text in (log, json.dumps(content)):
        assert str(ROOT) not in text
        assert socket.gethostname() not in text


def test_items_without_time_are_not_run(tmp_path: Path) -> None:
    items = [item("sleeps", "import time; time.sleep(2)"), item("comes too late", RECORDS)]
    outcomes = run_items(items, 21.0, Report(tmp_path, "a test", {}, 21.0))
    assert [outcome.status for outcome in outcomes] == [RAN, NOT_RUN]
    assert outcomes[1].reason == "the budget of 21 s was used up"


def test_an_interrupt_ends_the_items_that_run(tmp_path: Path) -> None:
    """Ctrl-C does not wait for the deadlines of the items."""
    report = Report(tmp_path, "a test", {}, 200.0)
    outcomes: list[Outcome] = []

    def finish(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report.add(outcome)

    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    started = time.monotonic()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores the signal in its workers
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Runner("cpu", 200.0, finish).run([item("sleeps", SLEEPS, deadline_s=20.0), item("comes later", RECORDS)])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - started < 10.0
    assert [(outcome.item.name, outcome.status) for outcome in outcomes] == [("sleeps", FAILED)]
    assert outcomes[0].reason.startswith("was interrupted")
    wait_until(lambda: not sleeping_children(), 10.0, "the child of an item still runs")


def test_a_process_that_cannot_be_ended_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals do not reach this process, because it leads no process group."""
    monkeypatch.setattr(runner_module, "TERMINATION_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    try:
        end_group(process)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


PRINTS_PLUGIN = """
import sys
from importlib.metadata import entry_points
sys.path.remove("")  # a server runs in a folder of its own
for plugin in entry_points(group="sglang.srt.plugins", name="verl_server_cpu"):
    print(plugin.value, plugin.dist.version, plugin.dist.locate_file("."))
"""


def test_the_servers_of_items_find_the_plugin_of_this_repository(tmp_path: Path) -> None:
    """Also where the repository is not installed: SGLang finds plugins by the metadata of distributions."""
    (outcome,) = run_items([item("prints", PRINTS_PLUGIN)], 60.0, Report(tmp_path, "a test", {}, 60.0))
    value, version, folder = outcome.output.split()
    assert (value, version) == ("verl_server.platforms:register_hooks", __version__)
    assert Path(folder).name.startswith("gpu-proof-")
    write_entry_points(tmp_path)
    (written,) = distributions(path=[str(tmp_path)])
    installed = distribution("verl-server")
    assert {(entry.group, entry.name, entry.value) for entry in written.entry_points} == {
        (entry.group, entry.name, entry.value) for entry in installed.entry_points
    }


@pytest.mark.parametrize(("files", "is_missing"), [(["norm.cu"], False), ([], True)])
def test_a_flashinfer_without_the_source_of_its_kernel_is_named(
    files: list[str], is_missing: bool, tmp_path: Path
) -> None:
    """SGLang compiles `norm.cu` at the first forward pass, unless nvidia-cutlass-dsl is there."""
    source = tmp_path / "flashinfer" / "data" / "csrc"
    source.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").touch()
    for name in files:
        (source / name).touch()
    program = "from gpu_proof.norm_kernel import missing_norm_kernel; print(missing_norm_kernel())"

    def run(*more: str) -> str:
        python_path = os.pathsep.join([str(ROOT / "benchmarks"), str(tmp_path), *more])
        environment = {**os.environ, "PYTHONPATH": python_path}
        command = [sys.executable, "-S", "-c", program]  # without site-packages
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout

    assert ("norm.cu" in run()) is is_missing
    (tmp_path / "dsl" / "cutlass").mkdir(parents=True)
    (tmp_path / "dsl" / "cutlass" / "__init__.py").touch()
    assert run(str(tmp_path / "dsl")) == "None\n"


def test_an_item_that_no_gpu_can_run_is_run_only_on_a_cpu(tmp_path: Path) -> None:
    only_cpu = Item("float32", "shows float32", ("-c", RECORDS), 60.0, cpu_only="no kernel has float32")
    assert [entry.name for entry in ITEMS if entry.cpu_only] == ["log-probs-float32"]
    assert "RMSNorm" in next(entry.cpu_only for entry in ITEMS if entry.cpu_only)
    report = Report(tmp_path, "a test", {}, 60.0)
    (outcome,) = Runner("cuda", 60.0, report.add).run([only_cpu])
    assert (outcome.status, outcome.reason) == (NOT_RUN, "no kernel has float32")
    assert [outcome.status for outcome in run_items([only_cpu], 60.0, report)] == [RAN]
    assert planned_items("cuda", None) == [entry for entry in ITEMS if not entry.cpu_only]
    assert planned_items("cuda", ["log-probs-float32"]) == [entry for entry in ITEMS if entry.cpu_only]
    assert planned_items("cpu", None) == [*ITEMS]


def test_exit_codes() -> None:
    assert exit_code([RAN, RAN]) == 0
    assert exit_code([RAN, NOT_RUN]) == SOME_NOT_RUN
    assert exit_code([NOT_RUN, FAILED]) == SOME_FAILED
    assert slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_the_plan_has_all_items() -> None:
    names = [entry.name for entry in ITEMS]
    assert len(set(names)) == len(names)
    assert {f"transport-{transport}" for transport in TRANSPORTS} <= set(names)
    measure_memory = {"device", "memory", "100-updates"}
    assert measure_memory <= {entry.name for entry in ITEMS if entry.exclusive}


@pytest.mark.parametrize(("size", "billions"), [("1.5B", 1.54), ("8B", 8.19)])
def test_the_sizes_are_those_of_released_models(size: str, billions: float) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(**MODELS[size]))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_without_a_gpu_the_plan_is_printed(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_proof("--out", str(tmp_path), timeout_s=120)
    assert done.returncode == 3, done.stderr
    assert all((entry.name in done.stdout) is not bool(entry.cpu_only) for entry in ITEMS)
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder_for_the_results(tmp_path: Path) -> None:
    """The exit code is that of a wrong option: 1 would mean that an item failed."""
    file = tmp_path / "file"
    file.touch()
    done = run_proof("--device", "cpu", "--items", "device", "--out", str(file), timeout_s=120)
    assert done.returncode == 2
    assert f"--out: no file can be created in the folder {file}: File exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rehearsal_runs_a_real_item(tmp_path: Path) -> None:
    done = run_proof(
        "--device", "cpu", "--items", "transport-buckets", "transport-cuda_ipc", "--out", str(tmp_path), timeout_s=250
    )
    assert done.returncode == SOME_NOT_RUN, done.stdout + done.stderr
    items = json.loads((tmp_path / "gpu_proof.json").read_text())["items"]
    assert {entry["item"]: entry["status"] for entry in items} == {
        "transport-buckets": RAN,
        "transport-cuda_ipc": NOT_RUN,
    }
    labels = [entry["label"] for entry in items[0]["records"] if entry["name"] == "log_probs"]
    assert labels == ["update 1", "update 2", "update 3", "a part of the tensors"]
