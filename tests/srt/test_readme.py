"""The README's example runs as it stands, on two trainer ranks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code, *others = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for other in others:
        compile(other, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    script = tmp_path / "example.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tiny("qwen3"))], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("served now: 1") == 2
