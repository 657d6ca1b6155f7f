"""verl's own trainer with the rollout `verl_server`, in the environment `.venv-trainers` (`make setup-trainers`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from helpers import MARK, marked_processes, wait_until

ROOT = Path(__file__).parents[4]
VERL_PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VERL_PYTHON.exists(), reason="there is no environment with verl: run make setup-trainers"),
]

RUN_S = 600.0
STEPS, KILL_AFTER_STEP = 4, 2


def verl_environment(**variables: str) -> dict[str, str]:
    """The environment of a process with verl. Its servers have the environment of this process."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "VERL_SERVER_PYTHON": sys.executable, **variables}


def run_in_verl(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the environment of verl."""
    return subprocess.run(
        [VERL_PYTHON, "-c", code], env=verl_environment(**variables), capture_output=True, text=True, timeout=RUN_S
    )


def test_a_run_survives_the_kill_of_a_server(tmp_path: Path) -> None:
    """GRPO with two trainer ranks and two servers: exact probabilities in every step, also after a kill."""
    mark = uuid.uuid4().hex
    demo = subprocess.Popen(
        [VERL_PYTHON, ROOT / "examples" / "verl_demo.py", "--ranks=2", f"--steps={STEPS}", f"--output={tmp_path}"],
        env=verl_environment(**{MARK: mark}),
        stdout=subprocess.PIPE,
        text=True,
    )
    output = ""
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            output += line
            if re.match(rf"step +{KILL_AFTER_STEP} ", line):
                schedulers = [pid for pid, command in marked_processes(mark).items() if "scheduler" in command]
                assert len(schedulers) == 2, marked_processes(mark)
                os.kill(schedulers[0], signal.SIGKILL)
        demo.wait(RUN_S)
    finally:
        demo.kill()
        left = marked_processes(mark) if demo.returncode is None else {}
        for pid in left:  # verl has a process group of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    log = (tmp_path / "verl.log").read_text()
    steps = json.loads((tmp_path / "metrics.json").read_text())["steps"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), log[-5000:]
    assert max(step["probs_diff"] for step in steps) < 1e-5
    assert re.search(r"verl_server: replica_\d: healthy -> dead: the server at \S+ ended", log)
    assert len(set(re.findall(r"update_weights:([\d.]+)", log))) == STEPS
    wait_until(lambda: not marked_processes(mark), 60.0, "a process of the run is left")


REFUSALS = """
import json
import verl
from verl.utils.profiler import ProfilerConfig
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, PrometheusConfig, RolloutConfig
from verl_server.integrations.verl.verl_classes import group_places
from verl_server.config import RolloutMode
from verl_server.integrations.verl.settings import make_fleet_spec
from verl_server.tiny import make_model

folder = make_model(MODEL, "qwen2")
cpu = {"attn_implementation": "sdpa"}
outcomes = {}
for name, rollout, model in [
    ("plain", {}, {}),
    ("lora", {}, {"lora_rank": 8}),
    ("merged", {}, {"lora_rank": 8, "lora": {"merge": True}}),
    ("pattern", {}, {"lora_rank": 8, "target_modules": ".*_proj"}),
    ("quantization", {"quantization": "fp8"}, {}),
    ("replay", {"enable_rollout_routing_replay": True}, {}),
    ("checkpoint_engine", {"checkpoint_engine": CheckpointEngineConfig(backend="nccl")}, {}),
    ("unknown_transport", {"engine_kwargs": {"verl_server": {"transport": "carrier pigeon"}}}, {}),
    ("pipeline", {"pipeline_model_parallel_size": 2}, {}),
    ("prometheus", {"prometheus": PrometheusConfig(enable=True)}, {}),
    ("profiler", {"profiler": ProfilerConfig(enable=True)}, {}),
    ("old_section", {"engine_kwargs": {"sglang": {"attention_backend": "triton"}}}, {}),
    ("forkserver", {"engine_kwargs": {"verl_server": {"use_forkserver": "no"}}}, {}),
    ("timeout", {"engine_kwargs": {"verl_server": {"timeouts": {"start_s": -1}}}}, {}),
    ("own", {"engine_kwargs": {"verl_server": {"engine_kind": "sglang", "attention_backend": "triton"}}}, {}),
]:
    try:
        config = RolloutConfig(name="verl_server", **rollout)
        model_config = HFModelConfig(path=str(folder), override_config=cpu, **model)
        spec = make_fleet_spec(config, model_config, RolloutMode.HYBRID)
        tags = [str(tag) for tag in spec.sleep_tags]
        outcomes[name] = {"args": spec.server_args, "uses_lora": spec.uses_lora, "tags": tags}
    except Exception as error:
        outcomes[name] = {"error": f"{type(error).__name__}: {error}"}
nodes = [("a", ["4"]), ("a", ["5"]), ("b", ["0"]), ("b", ["1"])]
outcomes["places"] = {"args": [[place.node_id, place.devices] for place in group_places(nodes, 2)]}
try:
    group_places(nodes, 4)
except Exception as error:
    outcomes["split"] = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(outcomes))
"""


def test_settings(tmp_path: Path) -> None:
    """What verl's configuration becomes, and what is refused by name."""
    finished = run_in_verl(REFUSALS.replace("MODEL", repr(str(tmp_path))))
    assert finished.returncode == 0, finished.stderr
    found: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    plain = found["plain"]["args"]
    assert plain["model_path"] == str(tmp_path)
    assert {name: plain[name] for name in ("tp_size", "load_format", "dtype", "random_seed")} == {
        "tp_size": 2, "load_format": "dummy", "dtype": "bfloat16", "random_seed": 42,
    }  # fmt: skip
    assert found["plain"]["tags"] == ["kv_cache", "weights"]
    assert found["lora"]["args"]["lora_target_modules"] == ["all"]
    assert found["lora"]["tags"] == ["kv_cache"], "the base weights of an adapter are pushed once"
    assert not found["merged"]["uses_lora"]
    assert found["places"]["args"] == [["a", ["4", "5"]], ["b", ["0", "1"]]]
    assert found["own"]["args"]["attention_backend"] == "triton"
    assert "engine_kind" not in found["own"]["args"]
    errors = {
        "pattern": "UnsupportedError: model.target_modules='.*_proj' is a pattern",
        "quantization": "UnsupportedError: the rollout verl_server does not support rollout.quantization=fp8",
        "replay": "UnsupportedError: the rollout verl_server does not support rollout.enable_rollout_routing_replay",
        "checkpoint_engine": "checkpoint_engine.backend=nccl; use `verl_server`, or `naive`",
        "pipeline": "does not support rollout.pipeline_model_parallel_size=2",
        "prometheus": "does not support rollout.prometheus.enable=True",
        "profiler": "does not support rollout.profiler.enable=True",
        "old_section": "engine_kwargs.sglang has no effect with the rollout verl_server: move it (attention_backend)",
        "forkserver": "AdapterConfig.use_forkserver must be a valid boolean, got 'no'",
        "timeout": "Timeouts.start_s must be greater than 0",
        "split": "UnsupportedError: one server has 4 workers on each node, but Ray has placed these on several nodes",
        "unknown_transport": "BadInputError: WeightsConfig.transport must be one of",
    }
    for name, message in errors.items():
        assert message in found[name]["error"]


USE = """
import verl
from verl.workers.rollout.replica import RolloutReplicaRegistry
print(verl.utils.device.get_device_name())
RolloutReplicaRegistry.get("verl_server")
"""


def test_other_versions_of_verl_are_refused_when_they_are_used(tmp_path: Path) -> None:
    """verl hides the errors of plugins, so the error is raised by the first use of the rollout."""
    assert run_in_verl(USE).stdout.splitlines()[-1] == "cpu"
    (tmp_path / "verl-0.8.0.dist-info").mkdir()
    (tmp_path / "verl-0.8.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    finished = run_in_verl(USE, PYTHONPATH=str(tmp_path))
    assert finished.returncode != 0
    refusal = r"UnsupportedError: the rollout 'verl_server' cannot be used: verl 0\.8\.0 is.*pip install 'verl==0"
    assert re.search(refusal, finished.stderr)
