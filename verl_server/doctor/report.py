"""The report of the doctor, as text for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from verl_server.doctor.finding import Finding, Level

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
