"""`Finding`: the result of one check. Every check is a function from plain values to findings."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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


def gib(count: int) -> str:
    """A number of bytes as text, in GiB, MiB or KiB."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s), ("KiB", 2**10))
    return f"{count / size:.1f} {unit}"
