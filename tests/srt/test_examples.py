"""Runs every example as a script and checks its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(900)


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_hybrid() -> None:
    output = run_example("hybrid.py")
    steps = re.findall(
        r"4 samples of weight versions \[(\d)\]; (\d+) MB while serving, (\d+) MB while released", output
    )
    assert [version for version, _, _ in steps] == ["1", "2", "3"]
    assert all(int(released) < 0.9 * int(serving) for _, serving, released in steps), output
    assert "weight version served now: 4" in output


def test_standalone() -> None:
    output = run_example("standalone.py")
    assert re.findall(r"version (\d) by (\w+)", output) == [(str(number), "distributed") for number in range(1, 5)]
    assert max(int(count) for count in re.findall(r"generated with (\d) version", output)) > 1, output


def test_colocated() -> None:
    output = run_example("colocated.py")
    steps = re.findall(r"(\d+) \+ (\d+) while it judges, (\d+) \+ (\d+) after", output)
    assert len(steps) == 3
    for policy_released, judge_serving, policy_serving, judge_released in steps:
        assert int(policy_released) < 0.9 * int(policy_serving), output
        assert int(judge_released) < 0.9 * int(judge_serving), output


def test_ray_cluster() -> None:
    output = run_example("ray_cluster.py")
    assert "version 1 is on both nodes, by distributed" in output
    found = re.findall(r"(verl_server_\d_0): tokens (\[.*\]) of version 1", output)
    assert [name for name, _ in found] == ["verl_server_0_0", "verl_server_1_0"]
    assert found[0][1] == found[1][1], "greedy decoding gives the same tokens on both nodes"


def test_calculator(tmp_path: Path) -> None:
    """Three steps: the reward does not rise yet, but the logprobs of trainer and server agree."""
    output = run_example("calculator.py", "--steps", "3", "--png", str(tmp_path / "curves.png"))
    steps = re.findall(r"step (\d): reward (\d\.\d+), tool used (\d\.\d+), log prob gap (\S+),", output)
    assert [step for step, *_ in steps] == ["0", "1", "2"]
    assert all(0 < float(reward) < 1 for _, reward, _, _ in steps)
    assert all(float(gap) < 1e-3 for *_, gap in steps)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
