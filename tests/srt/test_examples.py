"""Runs every example as a script and checks its output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import run_in_fork

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(900)


def run_example(name: str, output_folder: Path, *arguments: str) -> str:
    """Run an example. Returns its standard output."""
    return run_in_fork(EXAMPLES / name, arguments, output_folder, timeout_s=850)


def test_hybrid(tmp_path: Path) -> None:
    output = run_example("hybrid.py", tmp_path)
    steps = re.findall(
        r"4 samples of weight versions \[(\d)\]; (\d+) MB while serving, (\d+) MB while released", output
    )
    assert [version for version, _, _ in steps] == ["1", "2", "3"]
    assert all(int(released) < 0.9 * int(serving) for _, serving, released in steps), output
    assert "weight version served now: 4" in output


def test_standalone(tmp_path: Path) -> None:
    output = run_example("standalone.py", tmp_path)
    assert re.findall(r"version (\d) by (\w+)", output) == [(str(number), "distributed") for number in range(1, 5)]
    assert max(int(count) for count in re.findall(r"generated with (\d) version", output)) > 1, output


def test_colocated(tmp_path: Path) -> None:
    output = run_example("colocated.py", tmp_path)
    steps = re.findall(r"(\d+) \+ (\d+) while it judges, (\d+) \+ (\d+) after", output)
    assert len(steps) == 3
    for policy_released, judge_serving, policy_serving, judge_released in steps:
        assert int(policy_released) < 0.9 * int(policy_serving), output
        assert int(judge_released) < 0.9 * int(judge_serving), output


def test_ray_cluster(tmp_path: Path) -> None:
    output = run_example("ray_cluster.py", tmp_path)
    assert "version 1 is on both nodes, by distributed" in output
    found = re.findall(r"(verl_server_\d): tokens (\[.*\]) of version 1", output)
    assert [name for name, _ in found] == ["verl_server_0", "verl_server_1"]
    assert found[0][1] == found[1][1], "greedy decoding gives the same tokens on both nodes"


def test_calculator(tmp_path: Path) -> None:
    """Three steps: the reward does not rise yet, but the logprobs of trainer and server agree."""
    output = run_example("calculator.py", tmp_path, "--steps", "3", "--png", str(tmp_path / "curves.png"))
    steps = re.findall(r"step (\d): reward (\d\.\d+), tool used (\d\.\d+), log prob gap (\S+),", output)
    assert [step for step, *_ in steps] == ["0", "1", "2"]
    assert all(0 < float(reward) < 1 for _, reward, _, _ in steps)
    assert all(float(gap) < 1e-3 for *_, gap in steps)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
