"""The result files of a proof: JSON, a plot and a log. Written after each item, so that nothing is lost."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import summarize
from plots import COLOURS, grouped_bars, new_figure, save_figure

from gpu_proof.runner import FAILED, NOT_RUN, RAN, ROOT, Outcome
from gpu_proof.settings import METHOD

NAME = "gpu_proof"
STATUS_COLOURS = {RAN: "#009e73", FAILED: "#d55e00", NOT_RUN: "#b8b8b8"}


class Report:
    """The files in `folder`. They contain neither host names nor absolute paths. `device`: name of the GPU."""

    def __init__(self, folder: Path, device: str, environment: dict[str, Any], budget_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._device, self._environment, self._budget_s = folder, device, environment, budget_s
        self._outcomes: list[Outcome] = []
        self._log = folder / f"{NAME}.log"
        self._log.write_text("", encoding="utf-8")

    def add(self, outcome: Outcome) -> None:
        """Add an outcome to the JSON file and to the log."""
        self._outcomes.append(outcome)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"===== {outcome.item.name}: {outcome.status}, {outcome.seconds:.1f} s\n")
            log.write(without_places(f"{outcome.output}\n{outcome.reason}\n".strip()) + "\n\n")
        content = {
            "proof": NAME,
            "device": self._device,
            "environment": self._environment,
            "budget_s": self._budget_s,
            "items": [_as_json(outcome) for outcome in self._outcomes],
        }
        (self._folder / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def plot(self) -> None:
        """Draw the time of each item, and the durations of weight updates by method."""
        sizes = measured_methods(self._outcomes)
        figure, axes = new_figure(1 + len(sizes), f"{NAME}: {self._device}", width=12)
        _draw_items(axes[0], self._outcomes)
        for axis, (size, methods) in zip(axes[1:], sizes.items(), strict=True):
            bars = {name: [summarize(seconds)] for name, seconds in methods.items()}
            colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(bars)}
            heading = f"{size}: seconds of one update (median; whiskers: quartiles)"
            grouped_bars(axis, [size], bars, title=heading, ylabel="seconds, logarithmic", colours=colours, digits=3)
            axis.set_yscale("log")
            axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        save_figure(figure, self._folder / f"{NAME}.png")


def measured_methods(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each update, by size of the model and by method, of all methods that were measured."""
    sizes: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for entry in outcome.records:
            if entry["name"] == METHOD and entry.get("seconds"):
                sizes.setdefault(entry["size"], {})[entry["method"]] = entry["seconds"]
    return sizes


def _as_json(outcome: Outcome) -> dict[str, Any]:
    item = outcome.item
    return {
        "item": item.name, "shows": item.shows, "status": outcome.status, "reason": without_places(outcome.reason),
        "started_s": round(outcome.started_s, 1), "seconds": round(outcome.seconds, 1), "deadline_s": item.deadline_s,
        "records": outcome.records,
    }  # fmt: skip


def _draw_items(axis: Any, outcomes: Sequence[Outcome]) -> None:
    for row, outcome in enumerate(outcomes):
        axis.barh(row, max(outcome.seconds, 0.5), left=outcome.started_s, color=STATUS_COLOURS[outcome.status])
        axis.text(outcome.started_s + outcome.seconds + 1, row, outcome.status, va="center", fontsize=7)
    axis.set_yticks(range(len(outcomes)), [outcome.item.name for outcome in outcomes], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_title("Items", fontsize=10, loc="left")
    axis.margins(x=0.1)
    axis.spines[["top", "right"]].set_visible(False)


def without_places(text: str) -> str:
    """`text` without this machine's name, folders and terminal control sequences."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if len(path) > 1]
    places = {str(ROOT): ".", str(Path.home()): "~", **dict.fromkeys([*python_path, sys.prefix], "PACKAGES")}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
