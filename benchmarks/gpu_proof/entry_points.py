"""The entry points of this repository for a machine on which it is not installed, but only on `PYTHONPATH`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETUP = Path(__file__).parents[2] / "setup.py"


def write_entry_points(folder: Path) -> None:
    """Write a minimal `.dist-info` folder of `verl-server` into `folder`, which must be on `PYTHONPATH`.

    SGLang finds plugins by the entry points of installed distributions. Without this folder, the servers of the proof
    would run without our plugin, which the servers of users have.
    """
    arguments = _setup_arguments()
    info = folder / f"verl_server-{arguments['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {arguments['name']}\nVersion: {arguments['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    groups: Mapping[str, Sequence[str]] = arguments["entry_points"]
    sections = ["\n".join([f"[{group}]", *entries, ""]) for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")


def _setup_arguments() -> dict[str, Any]:
    """The arguments of `setup` in setup.py that are literals."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(SETUP.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup":
            for keyword in node.keywords:
                if keyword.arg in ("name", "version", "entry_points"):
                    found[keyword.arg] = ast.literal_eval(keyword.value)
    return found
