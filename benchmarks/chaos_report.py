"""Checks and reports the measurements of `bench_chaos`: wrong replies, recovery times, tables and the plot."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import CONSOLE, Options, Target, show_table, show_targets, summarize, write_result
from plots import legend_below, new_figure, save_figure

from verl_server.types import Json

NAME = "bench_chaos"
KILLS = ("server", "scheduler", "router", "forkserver")
"""Faults that end a process with `kill -9`."""
WEIGHT_SETS = 3
"""Number of different weight sets. Weight version v has the tensors of set v modulo this number."""
RECOVERY_TARGET = 1.5
"""Maximum recovery time, as a multiple of one server start."""
BLOCKED_UPDATE_S = 60.0
"""Seconds after which a weight update counts as blocked by one replica."""
LOGIT_TOLERANCE = 1e-4
"""Maximum difference to the largest logit of a greedy token. Larger differences are not rounding errors."""


@dataclass
class Measurement:
    """Everything that one run has measured."""

    single_start_s: float = 0.0
    """Seconds of the start of one server alone."""
    loaded_start_s: float = 0.0
    """Seconds of the start of one more server under the load."""
    duration_s: float = 0.0
    faults: list[Json] = field(default_factory=list)
    """Injected faults: `time`, `fault`, `replica`."""
    events: list[Json] = field(default_factory=list)
    """State changes of the replicas."""
    update_s: list[float] = field(default_factory=list)
    """Seconds of each weight update."""
    sent: int = 0
    """Number of requests, without repetitions."""
    refused: int = 0
    """Number of times that the router refused a request because its queue was full. The request was sent again."""
    log_disk_free_bytes: int | None = None
    """Free bytes of the small disk of the logs at the end. None: this process may not mount a file system."""
    replies: list[Json] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong_replies: int = 0
    """Number of replies with a token that does not match the stated weights, or with a wrong length."""
    wrong_tokens: list[Json] = field(default_factory=list)
    """Tokens without the largest logit under the weights of their span."""
    duplicated_replies: int = 0
    orphaned_processes: list[str] = field(default_factory=list)
    """Command lines of processes that are left at the end."""
    leftover_files: list[str] = field(default_factory=list)
    """New files in `/dev/shm` after the end."""
    router_restarts: int = 0


def check_replies(measured: Measurement, folder: Path, sets: list[dict[str, torch.Tensor]]) -> None:
    """Every token must have the largest logit under the weights of its span. Every reply must exist once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    numbers = [reply["number"] for reply in measured.replies]
    measured.duplicated_replies = len(numbers) - len(set(numbers))
    wrong: set[int] = set()
    for index in range(WEIGHT_SETS):
        model.load_state_dict(sets[index], strict=False)
        for reply in measured.replies:
            expected = reply["max_new_tokens"]
            if len(reply["output"]) != expected or reply["spans"][-1]["end"] != expected:
                wrong.add(reply["number"])
            spans = [span for span in reply["spans"] if span["version"] % WEIGHT_SETS == index]
            wrong_tokens = _wrong_tokens(model, reply, spans) if spans else []
            measured.wrong_tokens += wrong_tokens
            if wrong_tokens:
                wrong.add(reply["number"])
    measured.wrong_replies = len(wrong)


def _wrong_tokens(model: Any, reply: Json, spans: list[Json]) -> list[Json]:
    """The tokens of these spans that do not have the largest logit, up to rounding errors."""
    with torch.no_grad():
        logits = model(torch.tensor([[*reply["prompt"], *reply["output"]]])).logits[0]
    wrong = []
    for span in spans:
        for position in range(span["start"], span["end"]):
            row = logits[len(reply["prompt"]) + position - 1]
            difference = float(row.max() - row[reply["output"][position]])
            if difference > LOGIT_TOLERANCE:
                wrong.append({
                    "request": reply["number"], "position": position, "spans": reply["spans"],
                    "attempts": reply["attempts"], "logit_difference": difference,
                })  # fmt: skip
    return wrong


def recovery_times_s(measured: Measurement) -> list[float]:
    """Seconds from each death of a replica to the moment when the replica is healthy again."""
    seconds, died_at = [], {}
    for event in measured.events:
        if event["after"] == "dead":
            died_at[event["replica"]] = event["time"]
        elif event["after"] == "healthy" and event["replica"] in died_at:
            seconds.append(event["time"] - died_at.pop(event["replica"]))
    return seconds


def report(options: Options, machine: Json, measured: Measurement, settings: Json) -> None:
    """Print the tables and write the result file and the plot."""
    recovery_s = recovery_times_s(measured)
    recovery = summarize(recovery_s)
    lost = measured.sent - len(measured.replies)
    blocked = sum(seconds > BLOCKED_UPDATE_S for seconds in measured.update_s)
    counts = Counter(fault["fault"] for fault in measured.faults)
    kills = [fault for fault in measured.faults if fault["fault"] in KILLS]
    updates = summarize(measured.update_s)
    rows = [
        ["replies", len(measured.replies)],
        ["replies with several attempts", sum(reply["attempts"] > 1 for reply in measured.replies)],
        ["replies with several weight versions", sum(len(reply["spans"]) > 1 for reply in measured.replies)],
        ["requests refused because of a full queue, sent again", measured.refused],
        ["answers with an injected error", sum(fault.get("answered", 0) for fault in measured.faults)],
        *([f"fault: {name}", count] for name, count in sorted(counts.items())),
        ["full disk of the logs", _describe_log_disk(measured)],
        ["restarts of the router process", measured.router_restarts],
        ["weight updates", len(measured.update_s)],
        ["weight update, s (median, maximum)", f"{updates.median:.1f}, {max(measured.update_s):.1f}"],
        ["seconds", f"{measured.duration_s:.0f}"],
        ["start of one server alone, s", f"{measured.single_start_s:.1f}"],
        ["start of one server under load, s", f"{measured.loaded_start_s:.1f}"],
        ["recovery of a replica, s (median, maximum)", f"{recovery.median:.1f}, {max(recovery_s):.1f}"],
    ]  # fmt: skip
    show_table("Faults under load", ["quantity", "value"], [[name, str(value)] for name, value in rows])
    for line in [*measured.errors[:10], *measured.orphaned_processes, *map(str, measured.wrong_tokens[:10])]:
        CONSOLE.print(line, style="red")
    targets = [
        Target("kills", len(kills), settings["kills"], True),
        Target("lost replies and other errors", max(lost, len(measured.errors)), 0, False),
        Target("duplicated replies", measured.duplicated_replies, 0, False),
        Target("replies with tokens that do not match the stated weights", measured.wrong_replies, 0, False),
        Target(f"updates that took longer than {BLOCKED_UPDATE_S:g} s", blocked, 0, False),
        Target("orphaned processes", len(measured.orphaned_processes), 0, False),
        Target("files left in shared memory", len(measured.leftover_files), 0, False),
        Target("recovery over the start of one server alone", recovery.median / measured.single_start_s,
               RECOVERY_TARGET, False),
        Target("recovery over the start of one server under load", recovery.median / measured.loaded_start_s,
               RECOVERY_TARGET, False),
    ]  # fmt: skip
    show_targets(targets)
    samples = {**asdict(measured), "replies": len(measured.replies), "recovery_s": recovery_s}
    figures = {
        "recovery_s": asdict(recovery),
        "single_start_s": measured.single_start_s,
        "loaded_start_s": measured.loaded_start_s,
    }
    write_result(options, NAME, machine, settings=settings, figures=figures, targets=targets, samples=samples)
    plot(options, samples, settings["replicas"])


def _describe_log_disk(measured: Measurement) -> str:
    if measured.log_disk_free_bytes is None:
        return "not run: this process may not mount a file system"
    return f"{measured.log_disk_free_bytes} bytes free at the end"


def plot(options: Options, samples: Json, replicas: int) -> None:
    """The state of each replica and the faults over time, from the samples of a result file."""
    figure, (axes,) = new_figure(
        1, f"{len(samples['faults'])} faults in {samples['duration_s']:.0f} s, {replicas} replicas"
    )
    names = sorted({event["replica"] for event in samples["events"]})
    origin = min(event["time"] for event in samples["events"])
    colours = {"healthy": "tab:green", "dead": "tab:red", "restarting": "tab:orange", "stale": "tab:blue"}
    for row, name in enumerate(names):
        events = [event for event in samples["events"] if event["replica"] == name]
        ends = [event["time"] for event in events[1:]] + [origin + samples["duration_s"] + samples["single_start_s"]]
        for event, end in zip(events, ends, strict=True):
            left, width = event["time"] - origin, end - event["time"]
            axes.barh(row, width, left=left, color=colours.get(event["after"], "tab:gray"), height=0.6)
    rows = [*names, "fleet"]
    for number, name in enumerate(sorted({fault["fault"] for fault in samples["faults"]})):
        faults = [fault for fault in samples["faults"] if fault["fault"] == name]
        axes.plot(
            [fault["time"] - origin for fault in faults],
            [rows.index(fault["replica"] or "fleet") for fault in faults],
            linestyle="",
            marker="ovs^PDX*<>"[number],
            color="black" if name in KILLS else "white",
            markeredgecolor="black",
            label=f"kill -9: {name}" if name in KILLS else name,
        )
    legend_below(figure, axes)
    axes.set(
        yticks=range(len(rows)),
        yticklabels=rows,
        xlabel="seconds",
        title="green: healthy; orange: restarting; blue: stale",
    )
    save_figure(figure, options.png)
