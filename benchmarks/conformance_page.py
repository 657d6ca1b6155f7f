"""Copies results of `verl-server conformance` to `results/` and writes their tables into `docs/conformance.md`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, hardware_slug

from verl_server.conformance.suite import as_markdown, as_text
from verl_server.types import Json

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
BLOCK = re.compile(r"(?<=<!-- results -->\n).*(?=\n<!-- end of results -->)", re.DOTALL)


def merge(reports: Sequence[Json]) -> Json:
    """One report with the engines and cases of all runs, with the conditions of the first run and all versions.

    Results of a case in a later run replace those of an earlier run. The first run has all cases.
    """
    first = reports[0]
    versions = {name: value for report in reports for name, value in report["environment"]["versions"].items()}
    systems: dict[str, Json] = {}
    for system in (system for report in reports for system in report["systems"]):
        results = {result["name"]: result for result in systems.get(system["name"], system)["results"]}
        results |= {result["name"]: result for result in system["results"]}
        systems[system["name"]] = {**system, "results": list(results.values())}
    return {**first, "environment": {**first["environment"], "versions": versions}, "systems": list(systems.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="the conformance.json of a run, or of several runs: of other engines, or of cases that ran again "
        "(default: write the page again from the committed results)",
    )
    results = parser.parse_args().results
    committed = RESULTS / f"conformance-{hardware_slug()}.json"
    for file in results:
        if not file.is_file():
            parser.error(f"there is no file {file}; write the path of the conformance.json of a run")
    if results:
        merged = merge([json.loads(file.read_text(encoding="utf-8")) for file in results])
        committed.write_text(as_text(merged), encoding="utf-8")
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
