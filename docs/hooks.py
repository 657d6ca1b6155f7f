"""Hook of the documentation site: pictures that examples and benchmarks write are shown without a copy in `docs/`.

A page links to the file in the repository (`../examples/calculator.png`), which a code host shows. In the site, such a
link leads to `assets/`, where this hook puts the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Path of each picture in the repository.
PICTURES = (
    "examples/calculator.png",
    "examples/async_training.png",
    "examples/coding.png",
    "examples/train_claude_code.png",
    "examples/verl_demo.png",
    "benchmarks/results/bench_weight_sync-2cpu.png",
)


def _site_path(picture: str) -> str:
    return f"assets/{Path(picture).name}"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pictures to the files of the site."""
    for picture in PICTURES:
        files.append(File.generated(config, _site_path(picture), abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let the links of a page in `docs/` lead to the pictures in the site."""
    for picture in PICTURES:
        markdown = markdown.replace(f"](../{picture})", f"]({_site_path(picture)})")
    return markdown
