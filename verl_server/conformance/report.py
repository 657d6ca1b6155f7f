"""The results of the suite: as a table on the terminal, as JSON, and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Column, Table

from verl_server.conformance.case import Case, CaseResult, Outcome
from verl_server.types import Json

STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.HUNG: "bold red", Outcome.NOT_OFFERED: "dim"}
PROBLEMS = (Outcome.FAILED, Outcome.HUNG)


@dataclass(frozen=True)
class SystemReport:
    """The results of one system."""

    name: str
    description: str
    results: tuple[CaseResult, ...]

    @property
    def has_problems(self) -> bool:
        """Whether a case has failed or hung."""
        return any(result.outcome in PROBLEMS for result in self.results)


def as_json(environment: Json, updates: int, cases: Sequence[Case], systems: Sequence[SystemReport]) -> Json:
    """Everything that the suite has measured."""
    return {
        "suite": "conformance",
        "environment": environment,
        "updates": updates,
        "cases": [{"name": case.name, "claim": case.claim, "issues": list(case.issues)} for case in cases],
        "systems": [asdict(system) for system in systems],
    }


def as_table(systems: Sequence[SystemReport]) -> Table:
    """All cases with the outcome and the detail of each system."""
    table = Table(Column("case", no_wrap=True), "system", Column("outcome", no_wrap=True), "detail", "seconds")
    for name in dict.fromkeys(result.name for system in systems for result in system.results):
        for system in systems:
            for result in system.results:
                if result.name == name:
                    style = STYLES[result.outcome]
                    outcome = f"[{style}]{result.outcome}[/{style}]"
                    table.add_row(name, system.name, outcome, escape(result.detail), f"{result.seconds:.1f}")
    return table


def as_markdown(report: Json) -> str:
    """The tables of a page: outcomes, what the outcomes mean in detail, and the figures of repeated updates.

    `report` is the result of `as_json`, perhaps read from a file.
    """
    systems: list[Json] = report["systems"]
    names = [system["name"] for system in systems]
    by_system = {system["name"]: {result["name"]: result for result in system["results"]} for system in systems}
    lines = [f"| Case | Claim | {' | '.join(f'`{name}`' for name in names)} |", f"|---|---|{'---|' * len(names)}"]
    for case in report["cases"]:
        results = (by_system[name].get(case["name"]) for name in names)
        outcomes = [_cell(result["outcome"]) if result else "" for result in results]
        lines.append(f"| `{case['name']}` | {case['claim']} | {' | '.join(outcomes)} |")
    lines += ["", "| Case | System | Outcome | Measured or reason |", "|---|---|---|---|"]
    for case in report["cases"]:
        for name in names:
            if result := by_system[name].get(case["name"]):
                cells = (f"`{case['name']}`", f"`{name}`", _cell(result["outcome"]), _escape(result["detail"]))
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| Case | Public reports of the same symptom |", "|---|---|"]
    for case in report["cases"]:
        lines.append(f"| `{case['name']}` | {', '.join(map(_link, case['issues']))} |")
    lines += ["", *_repeated(by_system)]
    return "\n".join(lines)


def _repeated(by_system: Mapping[str, Mapping[str, Json]]) -> list[str]:
    """The table of the case that repeats updates."""
    lines = [
        "| System | Updates | Largest gap | Median gap, first quarter | last quarter | Median ms per update "
        "| Memory | Open files | Files in shared memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in by_system.items():
        figures = results.get("repeated", {}).get("figures") or {}
        if not figures.get("gaps") or not figures.get("footprints"):
            continue
        gaps = [gap for _, gap in figures["gaps"]]
        quarter = max(1, len(gaps) // 4)
        first, last = figures["footprints"][0], figures["footprints"][-1]
        cells = (
            f"`{name}`",
            f"{figures['updates']:,}",
            f"{max(gaps):.1e}",
            f"{statistics.median(gaps[:quarter]):.1e}",
            f"{statistics.median(gaps[-quarter:]):.1e}",
            f"{1e3 * statistics.median(figures['update_s']):.0f}",
            f"{(last['resident_bytes'] - first['resident_bytes']) / 2**20:+.1f} MiB",
            f"{last['open_files'] - first['open_files']:+d}",
            f"{last['shared_memory_files'] - first['shared_memory_files']:+d}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(outcome: str) -> str:
    return f"**{outcome}**" if outcome in PROBLEMS else outcome


def _escape(text: str) -> str:
    """A text as the cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def _link(url: str) -> str:
    """A link to an issue or a pull request of GitHub: `owner/repository#number`."""
    repository, _, number = url.removeprefix("https://github.com/").replace("/issues/", "/pull/").rpartition("/pull/")
    return f"[{repository}#{number}]({url})"
