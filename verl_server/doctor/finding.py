"""What a check says. Every check of this package is a function from plain values to findings."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad a finding is. Only FAIL changes the exit code."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    title: str
    """What was looked at, two or three words."""
    detail: str
    """What was found."""
    symptom: str = ""
    """What a user sees when this is wrong."""
    fix: str = ""
    """What to do about it."""


def ok(title: str, detail: str) -> Finding:
    """All is well; nothing to do."""
    return Finding(Level.OK, title, detail)


def warn(title: str, detail: str, *, symptom: str, fix: str) -> Finding:
    """Servers run, but something will be slow, or will break in some use."""
    return Finding(Level.WARN, title, detail, symptom, fix)


def fail(title: str, detail: str, *, symptom: str, fix: str) -> Finding:
    """Servers will not start, or weights cannot be updated."""
    return Finding(Level.FAIL, title, detail, symptom, fix)


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
