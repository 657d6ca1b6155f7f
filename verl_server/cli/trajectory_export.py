"""The command `verl-server trajectory export`. The module imports pydantic only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_server.cli.output import print_line
from verl_server.cli.signals import exit_after_cleanup
from verl_server.trajectory.exports import ExportFormat


def export(
    source: Annotated[
        Path, typer.Argument(metavar="FILE_OR_RUN_DIR", help="File of a recorded session, or the run_dir of a run.")
    ],
    kind: Annotated[ExportFormat, typer.Option("--format", help="Format of the output.")],
    output: Annotated[
        Path,
        typer.Option(metavar="PATH", help="File, or folder (atif), to write. It must not exist."),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model. Sessions do not record it.")
    ] = None,
) -> None:
    """Export recorded sessions to the format of another program.

    verifiers: the traces.jsonl of PrimeIntellect's verifiers, one line for each session.
    atif: Harbor's Agent Trajectory Interchange Format 1.8, one JSON file for each trained path.
    litellm: LiteLLM's log of calls with token ids, one line for each turn.

    Examples:
      verl-server trajectory export sessions --format verifiers --output traces.jsonl
      verl-server trajectory export sessions/sum-0-0.jsonl --format atif --output trajectories
      verl-server trajectory export sessions --format litellm --output litellm-trajectory.jsonl
    """
    from verl_server.trajectory.exports.files import export_sessions

    with exit_after_cleanup():
        done = export_sessions(source, output, kind, model)
    noun = "files" if kind is ExportFormat.ATIF else "lines"
    print_line(f"Wrote {output} (sessions: {done.num_sessions}, {noun}: {done.num_documents})")
