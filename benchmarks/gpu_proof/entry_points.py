"""The entry points of this repository for a machine on which it is not installed, but only on `PYTHONPATH`."""

from __future__ import annotations

import ast
from pathlib import Path

from verl_server import __version__

SETUP = Path(__file__).parents[2] / "setup.py"


def declared_entry_points() -> dict[str, list[str]]:
    """The argument `entry_points` of setup.py: for each group its entries."""
    for node in ast.walk(ast.parse(SETUP.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            groups: dict[str, list[str]] = ast.literal_eval(node.value)
            return groups
    raise ValueError(f"{SETUP} has no argument entry_points")


def write_entry_points(folder: Path) -> None:
    """Write a minimal `.dist-info` folder of `verl-server` into `folder`, which must be on `PYTHONPATH`.

    SGLang finds plugins by the entry points of installed distributions. Without this folder, the servers of the proof
    would run without our plugin, which the servers of users have.
    """
    info = folder / f"verl_server-{__version__}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: verl-server\nVersion: {__version__}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    sections = ["\n".join([f"[{group}]", *entries, ""]) for group, entries in declared_entry_points().items()]
    (info / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
