"""Export of recorded sessions to the formats of other programs, and import of these formats for inspection.

The module imports the standard library only: the command line needs the names of the formats.
"""

from __future__ import annotations

import enum


class ExportFormat(enum.StrEnum):
    """A format that recorded sessions can be exported to."""

    VERIFIERS = "verifiers"
    """`traces.jsonl` of verifiers: one file, one line for each session."""
    ATIF = "atif"
    """Harbor's Agent Trajectory Interchange Format: a folder, one JSON file for each path."""
    LITELLM = "litellm"
    """LiteLLM's log of calls: one file, one line for each turn."""
