"""Code that all benchmarks use: options, description of the machine, statistics, targets, result files.

A benchmark measures and reports. Its exit code is 0 unless the measurement failed, also when a target is missed. The
JSON file contains the raw samples, so that all figures can be computed again. The file names contain the hardware,
because figures of different machines must not be mixed. The files contain neither host names nor absolute paths.
Plots are in `plots.py`, servers in `servers.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from verl_server.types import Json

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("verl-server", "sglang", "torch", "transformers", "aiohttp", "orjson", "uvloop")
#: 120 columns when the output is not a terminal, because rich would wrap the tables at 80 columns.
CONSOLE = Console(width=None if os.isatty(1) else 120, highlight=False)


# -- options -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of all benchmarks. `extra` holds the options of one benchmark."""

    quick: bool
    json: Path
    png: Path
    extra: argparse.Namespace


def named_after(options: Options, name: str, new_name: str) -> Options:
    """The options with default files of another name."""
    json, png = (path.with_name(path.name.replace(name, new_name)) for path in (options.json, options.png))
    return dataclasses.replace(options, json=json, png=png)


def parse_options(name: str, description: str, add: Callable[[argparse.ArgumentParser], None] | None = None) -> Options:
    """Read the command line.

    The default files are `results/<name>-<hardware>.json` and `.png`; with --quick their names end in `-quick`.
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(
        "--quick", action="store_true", help="measure for seconds instead of minutes; the figures are not reliable"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the raw samples and the figures")
    parser.add_argument("--png", type=Path, metavar="PATH", help="file for the plot")
    if add is not None:
        add(parser)
    arguments = parser.parse_args()
    stem = f"{name}-{hardware_slug()}" + ("-quick" if arguments.quick else "")
    return Options(
        quick=arguments.quick,
        json=arguments.json or RESULTS / f"{stem}.json",
        png=arguments.png or RESULTS / f"{stem}.png",
        extra=arguments,
    )


def start_check(name: str, description: str, counted: str, number: int, what: str) -> argparse.Namespace:
    """Read the options of a check that uses modules of the tests, and prepare the process for a tiny model.

    `counted`, `number`, `what`: name, default and explanation of the option that says how much is checked. Failures
    that the check causes are not logged.
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(f"--{counted}", type=int, default=number, metavar="N", help=what)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what the check chooses by chance")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "srt"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # with a tiny model, a second thread mostly spins
    logging.getLogger("verl_server").setLevel(logging.CRITICAL)
    return options


# -- the machine -------------------------------------------------------------------------------------


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    """Name of the processor. On some virtual machines and on ARM only the architecture is known."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """Names of all CUDA devices; empty without a device."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def hardware_slug() -> str:
    """Hardware as part of a file name: `2cpu`, or `16cpu-1xh200` with GPUs."""
    gpus = gpu_names()
    cpus = f"{cores()}cpu"
    if not gpus:
        return cpus
    model = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower().removeprefix("nvidia ")).strip("-")
    return f"{cpus}-{len(gpus)}x{model}"


def environment() -> Json:
    """Hardware and package versions of this run.

    `load_1min` is the load average at the start. Above zero, other programs used the machine.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


# -- statistics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of `count` samples, in the unit of the samples."""

    median: float
    q1: float
    q3: float
    count: int


def summarize(samples: Sequence[float]) -> Summary:
    """Median and quartiles. The quartiles of a single sample are the sample. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples to summarize")
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, q1, q3, len(samples))


@dataclass(frozen=True)
class Target:
    """One target and its measured value.

    With `at_least` the target is met when the value is at least the limit, otherwise when it is at most the limit.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the measured value meets the target."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


# -- output ------------------------------------------------------------------------------------------


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is text, the other columns are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def show_targets(targets: Sequence[Target]) -> None:
    """Print PASS or MISS for each target."""
    for target in targets:
        verdict, colour = ("PASS", "green") if target.met else ("MISS", "red")
        sign = ">=" if target.at_least else "<="
        CONSOLE.print(
            f"[{colour}]{verdict}[/{colour}]  {target.name}: {target.value:.3f}{target.unit} "
            f"(target {sign} {target.limit:g}{target.unit})"
        )


def write_result(
    options: Options,
    name: str,
    machine: Json,
    *,
    settings: Json,
    figures: Any,
    targets: Sequence[Target],
    samples: Any,
) -> None:
    """Write the result file. `machine` is the result of `environment` at the start of the measurement."""
    record = {
        "benchmark": name,
        "quick": options.quick,
        "environment": machine,
        "settings": settings,
        "figures": figures,
        "targets": [{**asdict(target), "met": target.met} for target in targets],
        "samples": samples,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    # Lists of numbers are written on one line; one number per line would make the file unreadable.
    text = re.sub(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    options.json.write_text(text + "\n", encoding="utf-8")
    CONSOLE.print(f"Samples and figures: {display_path(options.json)}")


def display_path(path: Path) -> str:
    """`path` relative to the current folder if it is inside of it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
