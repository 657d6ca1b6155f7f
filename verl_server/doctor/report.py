"""The report of the doctor, as text for a terminal and as JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

# -- Finding ----------------------------------------------------------------------------------------
# `Finding`: the result of one check. Every check is a function from plain values to findings.


class Level(enum.StrEnum):
    """Severity of a finding. Only FAIL changes the exit code of the command."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    title: str
    """Subject of the check, two or three words."""
    detail: str
    """Result of the check."""
    symptom: str = ""
    """What a user observes because of the problem."""
    fix: str = ""
    """How to solve the problem: a command or an instruction."""


def ok(title: str, detail: str) -> Finding:
    """A finding without a problem."""
    return Finding(Level.OK, title, detail)


def warn(title: str, detail: str, *, symptom: str, fix: str) -> Finding:
    """A problem with which servers run, but are slow or fail in some uses."""
    return Finding(Level.WARN, title, detail, symptom, fix)


def fail(title: str, detail: str, *, symptom: str, fix: str) -> Finding:
    """A problem with which servers do not start or weights cannot be updated."""
    return Finding(Level.FAIL, title, detail, symptom, fix)


def check_amount(
    title: str, detail: str, amount: float, *, minimum: float, recommended: float, symptom: str, fix: str
) -> Finding:
    """A finding about a resource of the machine: FAIL below `minimum`, WARN below `recommended`, otherwise OK."""
    if amount >= recommended:
        return ok(title, detail)
    return (fail if amount < minimum else warn)(title, detail, symptom=symptom, fix=fix)


def gib(count: int) -> str:
    """A number of bytes as text, in GiB, MiB or KiB."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s), ("KiB", 2**10))
    return f"{count / size:.1f} {unit}"


# -- Report -----------------------------------------------------------------------------------------

MARKS = {Level.OK: ("ok  ", "green"), Level.WARN: ("WARN", "yellow"), Level.FAIL: ("FAIL", "bold red")}
TITLE_WIDTH = 18
INDENT = 8


def failed(sections: Mapping[str, Sequence[Finding]]) -> bool:
    """Whether any finding is a FAIL."""
    return any(finding.level is Level.FAIL for findings in sections.values() for finding in findings)


def as_json(sections: Mapping[str, Sequence[Finding]]) -> str:
    """`{"ok": bool, "findings": [{"section", "level", "title", "detail", "symptom", "fix"}, ...]}`."""
    findings = [{"section": name, **asdict(item)} for name, items in sections.items() for item in items]
    return json.dumps({"ok": not failed(sections), "findings": findings}, indent=2)


def show(sections: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """Print all findings and a summary: one line for an OK, three lines for a WARN or a FAIL."""
    for name, findings in sections.items():
        console.print(Text(name, style="bold"))
        for finding in findings:
            _show_one(finding, console)
    all_levels = [finding.level for findings in sections.values() for finding in findings]
    counts = {level: all_levels.count(level) for level in Level}
    console.print(Text(f"{counts[Level.FAIL]} failed, {counts[Level.WARN]} warnings, {counts[Level.OK]} ok"))


def _show_one(finding: Finding, console: Console) -> None:
    mark, style = MARKS[finding.level]
    line = Text.assemble("  ", (mark, style), "  ", (f"{finding.title:<{TITLE_WIDTH}}", "bold"), " ", finding.detail)
    # Lines are not wrapped, because a fix is often a command to copy.
    console.print(line, soft_wrap=True)
    for label, text in (("symptom", finding.symptom), ("fix", finding.fix)):
        if text:
            console.print(Text(f"{'':{INDENT}}{label + ':':<8} {text}"), soft_wrap=True)
