"""The public names of the package, and what importing them costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import verl_server
from verl_server import errors

LAZY_PACKAGES = ("adapter", "agent", "ray", "trajectory")


def test_every_public_name_imports() -> None:
    assert len(set(verl_server.__all__)) == len(verl_server.__all__)
    for name in verl_server.__all__:
        assert getattr(verl_server, name).__name__ == name
        assert name in dir(verl_server)
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module("verl_server").no_such_name  # noqa: B018 - the access itself raises


@pytest.mark.parametrize("name", ["verl_server", *(f"verl_server.{part}" for part in LAZY_PACKAGES)])
def test_lists_of_public_names_agree(name: str) -> None:
    """`__all__`, the imports for type checkers, and the lazy imports."""
    package = importlib.import_module(name)
    assert package.__file__ is not None
    found = set()
    for node in ast.parse(Path(package.__file__).read_text()).body:
        if isinstance(node, ast.If):
            found |= {
                (statement.module, alias.name)
                for statement in node.body
                if isinstance(statement, ast.ImportFrom)
                for alias in statement.names
            }
    assert sorted(exported for _, exported in found) == sorted(package.__all__)
    for module, exported in found:
        assert getattr(package, exported) is getattr(importlib.import_module(str(module)), exported)
        assert exported in dir(package)


def test_every_error_is_public() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    names = {cls.__name__ for cls in classes if issubclass(cls, errors.VerlServerError)}
    assert len(names) > 10
    assert names <= set(verl_server.__all__)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import verl_server",
        "import verl_server.ray",
        "import verl_server.agent",
        "import verl_server.trajectory",
        "import verl_server.training",
        "import verl_server.config, verl_server.errors, verl_server.types",
        "from verl_server import Timeouts",
    ],
)
def test_importing_the_package_is_light(statement: str) -> None:
    heavy = {"torch", "sglang", "ray", "transformers", "aiohttp", "numpy"}
    assert run_python(f"{statement}; import sys; print(sorted({heavy!r} & set(sys.modules)))").strip() == "[]"


def test_ray_names_without_ray_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from verl_server.errors import UnsupportedError\n"
        "import verl_server.ray\n"
        "for name in verl_server.ray.__all__:\n"
        "    try: getattr(verl_server.ray, name)\n"
        "    except UnsupportedError as error: print(error)\n"
    )
    lines = run_python(code).splitlines()
    assert len(lines) == 2
    assert all("pip install 'verl-server[ray]'" in line for line in lines)
