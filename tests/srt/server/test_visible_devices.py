"""The GPUs that servers see: those of all trainer ranks on a machine together, or those of `env`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from forbidden_calls import forbid

from verl_server import AdapterConfig, RolloutManager
from verl_server.errors import BadInputError, StartupError
from verl_server.rollout.launchers.local import LocalLauncher, count_accelerators
from verl_server.rollout.modes import ParallelConfig, require_devices
from verl_server.server.environment import (
    VISIBLE_DEVICES,
    SeenByRank,
    devices_of_ranks,
    gpus_needed,
    require_gpus,
    seen_by_server,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["3", "1", "0", "2"], "3,1,0,2"),
        (["0,1", "0,1"], "0,1"),
        (["GPU-5ae1", "GPU-77b0"], "GPU-5ae1,GPU-77b0"),
        ([None, None], None),
        ([None, "1"], None),
        (["1", None], "1"),
        (["", ""], ""),
        ([" 2, 3", "3,4 "], "2,3,4"),
        (["-1", "0,-1,2"], "0"),
    ],
)
def test_a_server_sees_the_gpus_of_all_ranks_of_its_machine(values: list[str | None], expected: str | None) -> None:
    assert devices_of_ranks(values) == expected


def test_a_server_that_sees_too_few_gpus_is_refused() -> None:
    assert gpus_needed({}, 4) == 4
    assert gpus_needed({"base_gpu_id": 2, "gpu_id_step": 2}, 3) == 7
    require_gpus(4, "3,1,0,2", 1)
    require_gpus(4, None, 4)
    require_gpus(4, "0", 0)  # a machine without GPUs
    with pytest.raises(BadInputError, match=r"needs 4 GPUs .* CUDA_VISIBLE_DEVICES=3 makes visible 1: .* env="):
        require_gpus(4, "3", 1)
    with pytest.raises(BadInputError, match=r"needs 4 GPUs .* this machine has 2"):
        require_gpus(4, None, 2)


def test_a_server_with_several_gpus_gets_no_mig_devices() -> None:
    """A process of CUDA sees only the first MIG device of CUDA_VISIBLE_DEVICES."""
    require_gpus(1, "MIG-aaaa,MIG-bbbb", 1)
    require_gpus(2, "GPU-aaaa,GPU-bbbb", 1)
    with pytest.raises(BadInputError, match=r"needs 2 GPUs .* has MIG-bbbb, .* one MIG device: use tp_size=1"):
        require_gpus(2, "GPU-aaaa,MIG-bbbb", 1)


def seen(visible: str | None, cores: list[int], machine: str | None, num_gpus: int = 1) -> SeenByRank:
    return SeenByRank(visible=visible, num_gpus=num_gpus, cores=cores, machine=machine)


def test_a_server_gets_nothing_of_ranks_on_other_machines() -> None:
    """The trainer ranks of one server (nnodes=1) may be on several machines, which number their GPUs alike."""
    here = [seen("0", [0, 1], "a"), seen("1", [2, 3], "a")]
    there = [seen("2", [8, 9], "b"), seen("3", [10, 11], "b")]
    assert seen_by_server([*here, *there], needed=2) == ("0,1", [0, 1, 2, 3])
    assert seen_by_server([here[0], there[0], here[1]], needed=2) == ("0,1", [0, 1, 2, 3])
    assert seen_by_server([seen("0", [0], None), seen("1", [1], None)], needed=2) == ("0,1", [0, 1])
    assert seen_by_server([*here, *there], needed=1, chosen="5") == ("5", [0, 1, 2, 3])
    with pytest.raises(BadInputError, match=r"needs 4 GPUs .* CUDA_VISIBLE_DEVICES=0,1 makes visible 2: .* nnodes"):
        seen_by_server([*here, *there], needed=4)


FORBIDDEN_CORES = f"""
from verl_server.engine.start import may_use_cores
from verl_server.server.environment import allowed_cores
{forbid("sched_getaffinity")}
assert allowed_cores() == set()
with may_use_cores([0]):
    print("went on")
"""


def test_a_sandbox_may_forbid_to_read_the_cores() -> None:
    """The server then has the cores of its trainer rank."""
    command = [sys.executable, "-c", FORBIDDEN_CORES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "went on\n", done.stderr


def test_the_gpus_of_a_fleet_are_those_of_its_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of the trainer's process. `tmp_path` stands for /dev with a GPU."""
    assert count_accelerators({VISIBLE_DEVICES: "0,1"}) is None, "this machine has no GPU"
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr("verl_server.server.environment.ACCELERATOR_FILES", [os.path.relpath(device, "/dev")])
    monkeypatch.setenv(VISIBLE_DEVICES, "0")
    assert count_accelerators({VISIBLE_DEVICES: "4,5,6"}) == 3
    assert count_accelerators({VISIBLE_DEVICES: "-1"}) is None
    launcher = LocalLauncher()
    launcher.reserve(ParallelConfig(), 3, {VISIBLE_DEVICES: "4,5,6"})
    with pytest.raises(BadInputError, match=r"there are 3, because CUDA_VISIBLE_DEVICES=4,5,6: pass env="):
        launcher.reserve(ParallelConfig(), 4, {VISIBLE_DEVICES: "4,5,6"})
    with pytest.raises(BadInputError, match=r"there are 1$"):
        require_devices(ParallelConfig(), 2, 1)


class _NamesEnvironment(LocalLauncher):
    """Starts no server: fails with the environment variables that it got."""

    def start_server(
        self, name: str, server_args: Mapping[str, Any], config: AdapterConfig, env: Mapping[str, str], check_abort: Any
    ) -> Any:
        raise StartupError(f"environment: {dict(env)}")


def test_a_fleet_passes_its_environment_to_its_servers(tiny: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match=r"environment: \{'NAME': 'value'\}"):
        RolloutManager(1, model_path=str(tiny("qwen3")), launcher=_NamesEnvironment(), env={"NAME": "value"})
