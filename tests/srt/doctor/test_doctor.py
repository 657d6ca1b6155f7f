"""Tests of the doctor: the pure checks, and the command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_server.adapter.model_files import ModelFacts, read_facts
from verl_server.adapter.sglang.server_arguments import tp_choices
from verl_server.config import EngineKind
from verl_server.doctor import Level, engine, machine, model
from verl_server.doctor.machine import Gpu, Hardware, parse_gpus, visible
from verl_server.platforms.limits import available_memory, committable_memory, container_memory

GIB = 2**30
PLUGINS = ("verl_server.platforms:activate", "verl_server.platforms:register_hooks")
LAYOUT = ModelFacts("Qwen3ForCausalLM", layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, context=2048)


def run_doctor(*args: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "verl_server.cli", "doctor", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_real_machine_and_real_model(tiny: Callable[..., Path]) -> None:
    code, report = run_doctor(str(tiny("qwen3")))
    failed = [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert (code, report["ok"], failed) == (0, True, [])
    titles = {finding["title"] for finding in report["findings"]}
    assert {"SGLang", "SGLang platform", "Bytecode", "Staging memory", "Loopback", "Tokenizer", "Fits"} <= titles
    assert "Architecture" not in titles, "SGLang has the model"


def test_an_indivisible_number_of_ranks_fails_and_names_the_fix(tiny: Callable[..., Path]) -> None:
    code, report = run_doctor(str(tiny("qwen3")), "--tp", "3")
    (failed,) = [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert code == 1
    assert "4 attention heads" in failed["detail"]
    assert failed["fix"].startswith("--tp 2")


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.5.15", Level.OK),
        ("0.5.23", Level.OK),
        ("0.5.23.post1", Level.OK),
        ("0.5.14", Level.WARN),
        ("0.5.24", Level.WARN),
        ("0.6.0rc1", Level.WARN),
        (None, Level.FAIL),
    ],
)
def test_sglang_versions(version: str | None, level: Level) -> None:
    found = engine.check_sglang(version)
    assert found.level is level
    if version is not None:
        assert "tested: 0.5.23; supported, with probed capabilities: 0.5.15 to 0.5.23" in found.detail


def test_bytecode_that_python_cannot_write(tmp_path: Path) -> None:
    assert engine.check_bytecode(tmp_path, {}, python="python").level is Level.OK, "the first start writes it"
    missing = engine.check_bytecode(tmp_path, {"PYTHONDONTWRITEBYTECODE": "1"}, python="/opt/python")
    assert missing.level is Level.WARN
    assert missing.fix == f"/opt/python -m compileall -q -j 0 {tmp_path.parent}"
    (tmp_path / "__pycache__").mkdir()
    assert engine.check_bytecode(tmp_path, {"PYTHONDONTWRITEBYTECODE": "1"}, python="python").level is Level.OK


def test_packages_against_the_requirements_of_sglang() -> None:
    assert engine.check_package("torch", "2.14.1+cu130", "==2.14.1").level is Level.OK
    assert engine.check_package("torch", "2.9.0", "==2.14.1").level is Level.WARN
    assert engine.check_package("torch", None, "").level is Level.FAIL
    assert engine.check_package("flashinfer-python", None, "", needed=False).level is Level.OK
    assert engine.parse_requirements(["torch==2.14.1", "a_b>1", "x; python_version<'3'"]) == {
        "torch": "==2.14.1",
        "a-b": ">1",
    }


@pytest.mark.parametrize(
    ("hardware", "level", "expected"),
    [
        (Hardware("cuda", devices=1, torch_cuda="13.0", driver_cuda=(13, 0)), Level.OK, "torch for 13.0"),
        (Hardware(None, cores=8), Level.OK, "8 cores"),
        (Hardware(None, cores=1), Level.WARN, "one CPU core"),
        (Hardware(None, nvidia_device=True, hidden=True, cores=8), Level.OK, "CUDA_VISIBLE_DEVICES"),
        (Hardware(None, nvidia_device=True), Level.FAIL, "without CUDA"),
        (Hardware(None, nvidia_device=True, torch_cuda="13.0"), Level.FAIL, "libcuda"),
        (Hardware(None, nvidia_device=True, torch_cuda="13.0", driver_cuda=(12, 4)), Level.FAIL, "CUDA 12.4"),
        (Hardware(None, nvidia_device=True, torch_cuda="13.0", driver_cuda=(13, 1)), Level.FAIL, "cannot use"),
    ],
)
def test_accelerators(hardware: Hardware, level: Level, expected: str) -> None:
    finding = machine.check_accelerator(hardware)
    assert finding.level is level
    assert expected in finding.detail


def test_gpu_memory_that_is_in_use() -> None:
    gpus = parse_gpus("NVIDIA H200, 143771, 143000\nNVIDIA H200, 143771, 40000\nNVIDIA X, [N/A], [N/A]\n")
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200", "NVIDIA H200"]
    (in_use,) = machine.check_gpu_memory(gpus)
    assert (in_use.title, in_use.level) == ("GPU 1", Level.WARN)
    assert visible(gpus, "1") == (gpus[1],)
    assert visible(gpus, None) == visible(gpus, "GPU-1234") == gpus


@pytest.mark.parametrize(
    ("plugins", "environment", "device", "level"),
    [
        (PLUGINS, {}, None, Level.OK),
        (PLUGINS, {}, "cuda", Level.OK),
        (PLUGINS, {"SGLANG_PLATFORM": "verl_server_cpu"}, None, Level.OK),
        (PLUGINS, {"SGLANG_PLATFORM": "verl_server_cpu"}, "cuda", Level.WARN),
        (PLUGINS, {"SGLANG_PLATFORM": "verl_server_cpu", "SGLANG_USE_CPU_ENGINE": "1"}, None, Level.WARN),
        (PLUGINS, {"SGLANG_PLATFORM": "other"}, None, Level.WARN),
        (PLUGINS, {"SGLANG_USE_CPU_ENGINE": "1"}, None, Level.WARN),
        (PLUGINS, {"SGLANG_USE_CPU_ENGINE": "0"}, None, Level.OK),
        ((*PLUGINS, "other:activate"), {}, None, Level.OK),
        (PLUGINS[:1], {}, None, Level.FAIL),
        ((), {}, "cuda", Level.OK),
    ],
)
def test_platforms(plugins: tuple[str, ...], environment: dict[str, str], device: str | None, level: Level) -> None:
    assert engine.check_sglang_platform(plugins, environment, accelerator=device).level is level


def test_memory() -> None:
    assert machine.check_memory(GIB).level is Level.FAIL
    assert machine.check_memory(3 * GIB, 4 * GIB).level is Level.WARN
    assert machine.check_memory(64 * GIB).level is Level.OK
    assert machine.check_shared_memory(64 * 2**20, 64 * 2**20).level is Level.WARN
    assert machine.check_shared_memory(64 * GIB, 1024).level is Level.FAIL
    assert machine.check_shared_memory(64 * GIB, 60 * GIB).level is Level.OK
    assert available_memory() > 0


def test_the_memory_of_a_container_without_its_file_cache(tmp_path: Path) -> None:
    """Both versions of control groups. A limit above the machine's memory is none."""
    assert container_memory(tmp_path) is None
    v1 = tmp_path / "memory"
    v1.mkdir()
    (v1 / "memory.limit_in_bytes").write_text("1000000\n")
    (v1 / "memory.usage_in_bytes").write_text("700000\n")
    (v1 / "memory.stat").write_text("cache 500000\nactive_file 100000\ninactive_file 300000\nshmem 100000\n")
    assert container_memory(tmp_path) == (1_000_000, 300_000)
    for name, text in (
        ("max", "max"),
        ("current", "900000"),
        ("stat", "file 1\nactive_file 0\ninactive_file 400000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert container_memory(tmp_path) == (1_000_000, 300_000), "version 2 has no limit"
    (tmp_path / "memory.max").write_text("2000000\n")
    assert container_memory(tmp_path) == (2_000_000, 500_000)
    (tmp_path / "memory.max").write_text(str(2**60))
    (v1 / "memory.limit_in_bytes").write_text(str(2**60))
    assert container_memory(tmp_path) is None


def test_the_memory_of_a_job_below_the_root_of_the_control_groups(tmp_path: Path) -> None:
    """The job of SLURM, the unit of systemd or the container in which the process runs, and all their parents."""
    own = tmp_path / "own"
    job = tmp_path / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    for name, text in (("max", "1000000"), ("current", "400000"), ("stat", "inactive_file 100000")):
        (job / f"memory.{name}").write_text(text)
    own.write_text("0::/slurm/job_7/step_0\n")
    assert container_memory(tmp_path, own) == (1_000_000, 300_000)
    for name, text in (("max", "900000"), ("current", "800000"), ("stat", "inactive_file 0")):
        (job.parent / f"memory.{name}").write_text(text)
    assert container_memory(tmp_path, own) == (900_000, 800_000), "less memory is left in the parent"
    own.write_text("0::/other\n")
    assert container_memory(tmp_path, own) is None
    v1 = tmp_path / "memory" / "job_8"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("500000")
    (v1 / "memory.usage_in_bytes").write_text("400000")
    (v1 / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 300000\ntotal_active_file 0\n")
    own.write_text("5:cpu,cpuacct:/other\n4:memory:/job_8\n")
    assert container_memory(tmp_path, own) == (500_000, 100_000)


def test_memory_that_the_kernel_does_not_overcommit(tmp_path: Path) -> None:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nCommitLimit: 3000 kB\nCommitted_AS: 1000 kB\nHugePages: 0\n")
    for mode, expected in (("0", None), ("1", None), ("2", 2000 * 1024)):
        (tmp_path / "sys/vm/overcommit_memory").write_text(f"{mode}\n")
        assert committable_memory(tmp_path) == expected
    assert committable_memory(tmp_path / "nothing") is None


def test_orphans_differ_from_children_of_a_launcher() -> None:
    def tree(init: str) -> list[machine.Process]:
        return [
            machine.Process(1, 0, init),
            machine.Process(40, 1, "sglang::scheduler"),
            machine.Process(50, 1, "python3.11"),
            machine.Process(51, 50, "sglang::detokenizer"),
        ]

    orphaned = machine.check_orphans(tree("bash"))
    assert (orphaned.level, orphaned.fix) == (Level.WARN, "kill 40; if they live after 10 s, kill -9 40")
    assert "whose launcher has ended: 40" in orphaned.detail
    assert machine.check_orphans(tree("python3")).level is Level.OK
    assert any(process.pid == 1 for process in machine.processes())


def test_leftover_files(tmp_path: Path) -> None:
    for name in ("sglang_loads_x.shm", f"torch_{os.getpid()}_1", "torch_999999999_1", "somebody_else"):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    (tmp_path / "torch_999999999_2").write_bytes(b"young")
    assert set(machine.leftovers(tmp_path)) == {"sglang_loads_x.shm", "torch_999999999_1"}
    found = machine.check_leftovers({"torch_1": GIB, "torch_2": GIB})
    assert found.level is Level.WARN
    assert found.fix.startswith("If no other process uses them, also in a container that shares /dev/shm (as root: fus")
    assert found.fix.endswith("): rm /dev/shm/torch_1 /dev/shm/torch_2")
    assert "no process that this user can inspect maps them or has them open" in found.detail
    assert machine.check_leftovers({}).level is Level.OK


def test_an_open_file_is_not_a_leftover_file() -> None:
    """A process can map it later, so it must not be removed."""
    path = Path(f"/dev/shm/torch_999999999_{os.getpid()}")
    try:
        with path.open("wb") as opened:
            opened.write(b"x")
            opened.flush()
            os.utime(path, (time.time() - 3600,) * 2)
            assert path.name not in machine.leftovers()
        assert path.name in machine.leftovers()
    finally:
        path.unlink()


def test_limits() -> None:
    assert machine.check_open_files(1024).level is Level.FAIL
    assert machine.check_open_files(20000, hard=1048576).fix == "ulimit -n 65536"
    assert "20000" in machine.check_open_files(20000, hard=20000).fix
    assert machine.check_open_files(65536).level is machine.check_open_files(machine.UNLIMITED).level is Level.OK
    assert [machine.check_processes(count).level for count in (100, 1000, 96000)] == [Level.FAIL, Level.WARN, Level.OK]
    assert machine.check_processes(machine.UNLIMITED).level is Level.OK


def test_what_each_server_needs_of_the_system() -> None:
    assert [machine.check_probe(*probe).level for probe in machine.PROBES] == [Level.OK, Level.OK]

    def refuse() -> str:
        raise OSError("Network is unreachable")

    for title, _, symptom, fix in machine.PROBES:
        found = machine.check_probe(title, refuse, symptom, fix)
        assert (found.level, found.detail, bool(found.symptom and found.fix)) == (
            Level.FAIL,
            "Network is unreachable",
            True,
        )


@pytest.mark.parametrize(
    ("env", "level"),
    [
        ({}, Level.OK),
        ({"no_proxy": "localhost"}, Level.OK),
        ({"http_proxy": "http://user:secret@proxy:3128"}, Level.WARN),
        ({"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "localhost"}, Level.WARN),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "localhost, 127.0.0.1,.local"}, Level.OK),
        ({"all_proxy": "socks5://proxy", "no_proxy": "*"}, Level.OK),
    ],
)
def test_proxies(env: dict[str, str], level: Level) -> None:
    finding = machine.check_proxies(env)
    assert finding.level is level
    assert "secret" not in str(finding)


def test_ranks() -> None:
    assert model.check_ranks(LAYOUT, 1, on_cpu=False).level is Level.OK
    assert "each on 2 ranks" in model.check_ranks(LAYOUT, 4, on_cpu=False).detail
    assert tp_choices(LAYOUT, 3, on_cpu=False) == [2, 4]
    assert model.check_ranks(LAYOUT, 4, on_cpu=True).level is Level.FAIL
    assert tp_choices(LAYOUT, 4, on_cpu=True) == [2]
    latent = ModelFacts("A", heads=8, kv_heads=3, latent=48)
    assert model.check_ranks(latent, 8, on_cpu=True).level is Level.OK
    (too_many,) = model.check_devices(Hardware("cuda", devices=2), 4)
    assert (too_many.level, too_many.detail) == (Level.FAIL, "4 ranks, but only 2 devices")
    assert not model.check_devices(Hardware("cuda", devices=2), 2)
    assert not model.check_devices(Hardware(None), 2)


@pytest.mark.parametrize(
    ("kind", "file"),
    [(EngineKind.SGLANG, "srt/models/qwen3.py"), (EngineKind.VLLM, "model_executor/models/registry.py")],
)
def test_architectures(tmp_path: Path, kind: EngineKind, file: str) -> None:
    source = tmp_path / file
    source.parent.mkdir(parents=True)
    source.write_text("class Qwen3ForCausalLM: ...\nclass Qwen3MoeForCausalLMX: ...\n")
    assert not model.check_architecture(ModelFacts("Qwen3ForCausalLM"), kind, tmp_path)
    for name, expected in (("Qwen3MoeForCausalLM", f"is not a model of {kind.label}"), ("", "has no architecture")):
        (found,) = model.check_architecture(ModelFacts(name), kind, tmp_path)
        assert found.level is Level.WARN
        assert expected in found.detail
    assert not model.check_architecture(ModelFacts("Other"), kind, None), "the engine is not installed"


def test_facts_of_every_family(tiny: Callable[..., Path]) -> None:
    moe, readable = model.read_config(tiny("qwen3_moe"))
    assert moe is not None
    assert (moe.heads, moe.kv_heads, moe.experts, moe.experts_per_token) == (4, 2, 4, 2)
    assert readable.level is Level.OK
    vision = read_facts({"architectures": ["A"], "text_config": {"num_attention_heads": 8, "hidden_size": 64}})
    assert (vision.heads, vision.kv_heads, vision.head_dim) == (8, 8, 8)


def test_folders_without_a_model(tmp_path: Path) -> None:
    assert model.check_missing("/no/such/folder").level is Level.FAIL
    assert model.check_missing("nobody/no-such-model").level is Level.WARN
    facts, finding = model.read_config(tmp_path)
    assert (facts, finding.level) == (None, Level.FAIL)
    (tmp_path / "config.json").write_text("{")
    assert model.read_config(tmp_path)[1].level is Level.FAIL
    assert model.check_tokenizer(tmp_path).level is Level.WARN
    (tmp_path / "tekken.json").touch()
    assert model.check_tokenizer(tmp_path).level is Level.OK


def test_weights_are_counted_from_the_headers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny("qwen3")
    expected = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    weights, problems = model.read_weights(folder)
    assert weights is not None
    assert (weights.elements, problems) == (expected, [])
    assert model.served_bytes(weights, LAYOUT, 2) == 2 * expected
    without = model.weights_of_config(folder)
    assert without is not None
    assert without.elements == expected

    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    assert "should have" in model.read_weights(tmp_path)[1][0]
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git-lfs" in model.read_weights(tmp_path)[1][0]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    assert "missing" in model.read_weights(tmp_path)[1][0]


def test_whether_weights_fit() -> None:
    def fit(weights: int, *, tp: int = 1, free: int, on_cpu: bool = False) -> Level:
        return model.check_fit(weights, 1024, tp=tp, free=free, on_cpu=on_cpu, context=2048).level

    assert fit(140 * GIB, free=130 * GIB) is Level.FAIL
    assert fit(140 * GIB, tp=2, free=130 * GIB) is Level.OK
    assert fit(120 * GIB, free=130 * GIB) is Level.WARN
    assert fit(4 * GIB, free=5 * GIB, on_cpu=True) is Level.FAIL
    assert fit(4 * GIB, free=16 * GIB, on_cpu=True) is Level.OK
    assert model.kv_bytes_per_token(LAYOUT, 1, 2) == 2 * 2 * 2 * 16 * 2
    assert model.kv_bytes_per_token(LAYOUT, 4, 2) == 2 * 2 * 1 * 16 * 2
    assert model.serving_item_bytes(ModelFacts("A", dtype="float32"), "auto", on_cpu=False) == 2
    assert model.serving_item_bytes(ModelFacts("A", dtype="float32"), "auto", on_cpu=True) == 4


def test_every_problem_comes_with_symptom_and_fix() -> None:
    problems = [
        engine.check_sglang(None),
        machine.check_accelerator(Hardware(None, nvidia_device=True)),
        *machine.check_gpu_memory((Gpu("A", 100, 0),)),
        machine.check_memory(0),
        machine.check_open_files(10),
        model.check_ranks(LAYOUT, 3, on_cpu=False),
    ]
    assert all(problem.level is not Level.OK and problem.symptom and problem.fix for problem in problems)
