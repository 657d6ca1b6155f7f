"""The check of what this library uses of an engine (`tests/newest/engine_sources.py`), with a small engine in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_sources import Sources, find_problems

ENGINE = {
    "vllm/__init__.py": "",
    "vllm/new/__init__.py": "from .args import make_parser\n",
    "vllm/new/args.py": "def make_parser(parser, *, strict=False): ...\n",
    "vllm/engine.py": (
        "from abc import ABC, abstractmethod\nLIMIT = 3\nclass Engine(ABC):\n    def __init__(self, config): ...\n"
        "    @abstractmethod\n    def load(self, names, tensors): ...\n    @abstractmethod\n    def close(self): ...\n"
    ),
    "vllm/entrypoints/api.py": 'ROUTE = "/pause"\n',
}
RIGHT = """
from vllm import engine
from vllm.engine import Engine
from vllm.new import make_parser
try:
    import vllm.new.args as args
except ModuleNotFoundError:
    import vllm.old.args as args
PREFIX = "vllm.engine"
TARGET = f"{PREFIX}.Engine.load"
class Mine(Engine):
    def load(self, names, tensors): return engine.LIMIT
    def close(self): make_parser(1, strict=True)
Engine("config")
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("from vllm.new import make_parser", "from vllm.old import make_parser", "vllm has no vllm.old.make_parser"),
        ("from vllm.engine import Engine", "from vllm.engine import Engine, Other", "vllm has no vllm.engine.Other"),
        (
            "import vllm.new.args as args\nexcept",
            "import vllm.newer.args as args\nexcept",
            "vllm has no vllm.",
        ),
        ("engine.LIMIT", "engine.MAXIMUM", "vllm.engine has no MAXIMUM"),
        ("Engine.load", "Engine.read", "vllm has no vllm.engine.Engine.read"),
        ("strict=True", "strict=True, other=1", "it has no parameter other"),
        ("make_parser(1, ", "make_parser(", "it needs parser"),
        ('Engine("config")', "Engine(1, 2)", "2 positional arguments, it takes 1"),
        ("def load(self, names, tensors)", "def load(self, names)", "has the parameters self, names, tensors"),
        ("def close", "def end", "has the abstract methods close"),
        ("/pause", "/halt", "no route /halt"),
        ("", "", ""),
    ],
)
def test_what_an_engine_does_not_have_is_found(tmp_path: Path, right: str, wrong: str, problem: str) -> None:
    sources = Sources(write(tmp_path / "engine", ENGINE), "vllm")
    files = {"used.py": RIGHT, "adapter/vllm/requests.py": 'PAUSE = Endpoint("/pause")\n'}
    assert not right or any(right in text for text in files.values())
    package = write(
        tmp_path / "ours", {name: text.replace(right, wrong) if right else text for name, text in files.items()}
    )
    found = find_problems(sources, package)
    assert [line for line in found if problem in line] == found
    assert len(found) >= bool(problem)
