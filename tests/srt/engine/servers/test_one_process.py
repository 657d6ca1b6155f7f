"""An engine in a process that is the only rank: a notebook, or a script without torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import run_in_fork

from verl_server import VerlEngine
from verl_server.errors import BadInputError

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
from verl_server import VerlEngine

policy = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for attempt in range(2):  # as in a notebook, whose cell runs again
    with VerlEngine(model_path=sys.argv[1]) as engine:
        reply = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        update = engine.update_weights_from_tensor(policy.state_dict().items())
        print(len(reply["output_ids"]), update.weight_version)
"""


def test_no_mesh_is_needed(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    assert run_in_fork(script, [str(tiny("qwen3"))], tmp_path, timeout_s=300).split() == ["4", "1", "4", "1"]


SIGNS_OF_LIFE = """
import logging, re, sys
from verl_server import VerlEngine
from verl_server.server import process

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
process.START_REPORT_S = 0.05
VerlEngine(model_path=sys.argv[1]).shutdown()
"""


def test_a_start_says_what_happens(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    script = tmp_path / "program.py"
    script.write_text(SIGNS_OF_LIFE)
    output = run_in_fork(script, [str(tiny("qwen3"))], tmp_path, timeout_s=300)
    (log,) = re.findall(r"^a server starts; its log is (\S+)$", output, re.MULTILINE)
    assert re.search(rf"^not ready after \d+ s; {log} ends with: \S", output, re.MULTILINE), output
    assert re.search(rf"^ready after \d+\.\d s: the server with the log {log}$", output, re.MULTILINE), output


@pytest.mark.smoke
def test_one_of_several_ranks_must_pass_its_mesh(tiny: Callable[..., Path]) -> None:
    """Otherwise each of them would start a server of its own."""
    code = f"from verl_server import VerlEngine; VerlEngine(model_path={str(tiny('qwen3'))!r})"
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "this process is one of 2 ranks: pass device_mesh_cpu" in done.stderr


@pytest.mark.smoke
def test_something_else_is_no_mesh() -> None:
    with pytest.raises(BadInputError, match="device_mesh_cpu must be a DeviceMesh"):
        VerlEngine("cuda:0", model_path="m")  # type: ignore[arg-type]
