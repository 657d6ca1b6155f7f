"""The tests of `test_demo.py` that need servers."""

from __future__ import annotations

import json
from pathlib import Path

from verl_server.demo import run


def test_four_real_steps(tmp_path: Path) -> None:
    """Two FSDP2 ranks and a real server: output files, equal logprobs, a new weight version in every step."""
    steps = 4
    assert run(seed=0, steps=steps, output_dir=tmp_path) == 1, "four steps are too few to reach the target"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [step["weight_version"] for step in metrics["steps"]] == list(range(steps))
    assert metrics["exam"]["weight_version"] == steps
    assert all(0 < step["gap_max"] < 1e-4 for step in metrics["steps"])
    assert all(step["gap_mean"] <= step["gap_max"] for step in metrics["steps"])
    assert metrics["steps"][0]["reward"] < 0.2
    assert not metrics["passed"]
