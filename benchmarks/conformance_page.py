"""Copies results of `verl-server conformance` to `results/` and writes their tables into `docs/conformance.md`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from common import RESULTS, hardware_slug

from verl_server.conformance.report import as_markdown

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
BLOCK = re.compile(r"(?<=<!-- results -->\n).*(?=\n<!-- end of results -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results",
        nargs="?",
        type=Path,
        help="the conformance.json of a run (default: write the page again from the committed results)",
    )
    results = parser.parse_args().results
    committed = RESULTS / f"conformance-{hardware_slug()}.json"
    if results is not None:
        if not results.is_file():
            parser.error(f"there is no file {results}; write the path of the conformance.json of a run")
        shutil.copyfile(results, committed)
    report = json.loads(committed.read_text(encoding="utf-8"))
    machine = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    conditions = (
        f"Measured on {machine['date']}: {machine['system']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB of memory, {', '.join(machine['gpus']) or 'no GPU'}, load "
        f"{machine['load_1min']} at the start; {versions}. Raw figures: `benchmarks/results/{committed.name}`."
    )
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: f"\n{conditions}\n\n{as_markdown(report)}\n", page), encoding="utf-8")


if __name__ == "__main__":
    main()
