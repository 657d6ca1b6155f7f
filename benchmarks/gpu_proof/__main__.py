"""Runs the items of the proof and writes their results into one folder.

Exit codes: 0 all items ran, 1 an item failed, 2 a wrong option, 3 there is no NVIDIA GPU and nothing was run, 4 no item
failed but some were not run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import CONSOLE, RESULTS, display_path

from gpu_proof.items import ITEMS, Item
from gpu_proof.report import Report
from gpu_proof.runner import FAILED, RAN, Outcome, Runner
from verl_server.errors import BadInputError
from verl_server.validation import make_writable_folder

SOME_FAILED, NO_GPU, SOME_NOT_RUN = 1, 3, 4
BUDGET_S = 520.0
"""Seconds for all items: less than nine minutes with the plot."""
PROBE_TIMEOUT_S = 60.0


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    items = planned_items(options.device, options.items)
    environment = probe()
    if options.device == "cuda" and environment.get("device") is None:
        CONSOLE.print("This machine has no NVIDIA GPU that torch can use. On one, this would run:")
        _show_plan(items)
        return NO_GPU
    name = environment["device"] if options.device == "cuda" else "rehearsal on a CPU"
    folder = options.out or RESULTS / f"gpu-{slug(name)}"
    try:
        folder = make_writable_folder("--out", folder)
    except BadInputError as error:
        parser.error(str(error))
    report = Report(folder, name, environment, options.budget_s)

    def finish(outcome: Outcome) -> None:
        report.add(outcome)
        reason = f"  ({outcome.reason.splitlines()[0]})" if outcome.reason else ""
        CONSOLE.print(f"{outcome.item.name:24} {outcome.status:8} {outcome.seconds:6.1f} s{reason}", markup=False)

    outcomes = Runner(options.device, options.budget_s, finish).run(items)
    report.plot()
    CONSOLE.print(f"Results: {display_path(folder)}")
    return exit_code([outcome.status for outcome in outcomes])


def planned_items(device: str, names: Sequence[str] | None) -> list[Item]:
    """The items with these names. None: all items that this device ("cuda" or "cpu") can run or a GPU could run."""
    if names:
        return [item for item in ITEMS if item.name in names]
    return [item for item in ITEMS if device == "cpu" or not item.cpu_only]


def exit_code(statuses: Sequence[str]) -> int:
    """The exit code for the statuses of all items."""
    if FAILED in statuses:
        return SOME_FAILED
    return 0 if all(status == RAN for status in statuses) else SOME_NOT_RUN


def slug(name: str) -> str:
    """The name of a device as part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def probe() -> dict[str, Any]:
    """Hardware and versions, from a process of its own. `device` is None if that process finds no GPU or fails."""
    command = [sys.executable, "-m", "gpu_proof.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        end = (getattr(error, "stderr", None) or "").strip()[-2000:]
        CONSOLE.print(f"The hardware cannot be read: {error}\n{end}", markup=False)
        return {"device": None, "error": str(error)}
    return found


def _show_plan(items: Sequence[Item]) -> None:
    for item in items:
        alone = "alone" if item.exclusive else "with others"
        CONSOLE.print(
            f"  {item.name:24} at most {item.deadline_s:3.0f} s, {alone}: {item.shows}", markup=False, soft_wrap=True
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_proof", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for the results (default: by the name of the GPU)")
    parser.add_argument("--items", nargs="+", choices=[item.name for item in ITEMS], help="run only these items")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all items (default %(default)g)")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse the items that need no GPU"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
