"""The tests of `test_docs.py` that need servers."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn
from test_docs import blocks
from torch.distributed.device_mesh import DeviceMesh

from verl_server import (
    VerlEngine,
)
from verl_server.agent import RolloutRunner, Sample


def readme_examples() -> list[str]:
    """The Python examples of the README: one engine, a fleet, agents."""
    return [block.text for block in blocks("python") if block.page.name == "README.md"]


def test_the_first_example_of_the_readme_runs_on_two_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_examples()[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tiny("qwen3"))], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("served now: 1") == 2


def test_the_fleet_and_the_agents_of_the_readme_run(
    tiny: Callable[..., Path], one_rank: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents act through the fleet of the example before, so both run as one program."""
    from transformers import AutoModelForCausalLM

    _, fleet_example, agent_example = readme_examples()
    program = fleet_example + textwrap.indent(agent_example, "    ")
    model = tiny("qwen3")
    names = {
        "mesh": one_rank,
        "policy": AutoModelForCausalLM.from_pretrained(model),
        "train": lambda batch: None,
    }
    monkeypatch.chdir(tmp_path)
    code = compile(
        program.replace("/models/policy", str(model)), "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    asyncio.run(eval(code, names))
    reply = names["reply"]
    reason = reply["meta_info"]["finish_reason"]
    if reason["type"] == "stop":  # a random policy may sample its end token
        assert reply["output_ids"][-1] == reason["matched"]
    else:
        assert (reason["type"], len(reply["output_ids"])) == ("length", 8)
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == [1]
    assert names["batch"]["responses"].shape[0] == 8
    assert len(list((tmp_path / "sessions" / "step-000000").glob("sum-0-*.jsonl"))) == 8


def test_the_example_for_users_of_other_libraries_runs(
    shared_engine: VerlEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy with random weights does not find the number. A policy that counts from 1 finds the numbers up to 4."""
    (example,) = (block.text for block in blocks("python") if block.page.name == "migration.md")
    names: dict[str, Any] = {"fleet": shared_engine, "train": lambda batch: None}
    program = example.replace("max_response_tokens=1024", "max_response_tokens=256").replace("n=8", "n=2")
    asyncio.run(eval(compile(program, "migration.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names))
    assert len(capsys.readouterr().out.splitlines()) == 3
    samples = asyncio.run(play(names))
    assert [sample.reward for sample in samples] == [1.0] * 4 + [0.0] * 5
    assert [sample.rewards["num_guesses"] for sample in samples] == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert [sample.stop_reason for sample in samples] == ["done"] * 4 + ["max_turns"] * 5


async def play(names: dict[str, Any]) -> list[Sample]:
    """The samples of the environment of the example, in the order of its tasks."""
    renderer = names["runner"]._samples.renderer
    policy = ScriptedGenerateFn(renderer._tokenizer, lambda prompt: str(1 + prompt.count("higher")))
    runner = RolloutRunner(names["GuessNumber"], policy, renderer=renderer, limits=names["limits"])
    groups = {group.task.id: group async for group in runner.run(names["tasks"])}
    return [groups[task.id].samples[0] for task in names["tasks"]]
