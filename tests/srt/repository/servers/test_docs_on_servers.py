"""The tests of `test_docs.py` that need servers."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn
from test_docs import Block, blocks, programs
from vllm_helpers import VLLM_PYTHON, needs_vllm

from verl_server import (
    VerlEngine,
)
from verl_server.agent import RolloutRunner, Sample

#: What each program prints, in the order of the page.
OUTPUT = {
    "README": [r"served now: 1", r"\] \[{.*'version': 1", r"^3 0\.0$"],
    "quickstart": [r"(?s)(weight version.*){2}"],
    "training": [r"^3 0\.0$"],
    "agents": [r"^\[(\(.*?, 0\.0\),? ?){8}\]$"],
    "fleet": [r"\] \[{.*'version': 1"],
    "gateway": [r"^$"],
    "vllm": [r"\] 0"],
}


def programs_with_output() -> Iterator[Any]:
    for page, expected in OUTPUT.items():
        found = [block for block in programs() if block.page.stem == page]
        for number, (block, output) in enumerate(zip(found, expected, strict=True)):
            yield pytest.param(block, output, marks=[needs_vllm] * (page == "vllm"), id=f"{page}-{number}")


def test_the_output_of_every_program_is_known() -> None:
    assert {block.page.stem for block in programs()} == set(OUTPUT)


@pytest.mark.parametrize(("block", "output"), list(programs_with_output()))
def test_a_program_of_the_pages_runs(block: Block, output: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    command = [sys.executable]
    if "init_process_group" in block.text:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tiny("qwen3")), str(VLLM_PYTHON)],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(output, done.stdout, re.MULTILINE), done.stdout


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
