"""Measures weight updates of a real verl run: shards of this library's plugin against verl's own gathered tensors.

One run of verl's trainer (GRPO, FSDP2, two ranks, two servers) with the rollout `verl_server`. The updates alternate:
after odd steps each rank pushes its shards, after even steps verl gathers every tensor on every rank first
(`FSDPEngine.get_per_tensor_param`), and the same servers take the gathered tensors. The seconds are verl's own,
`timing_s/update_weights`, and contain the resume of the servers' memory. `timing_s/step` is shown, too; it is at least
2 s, because verl's replay buffer polls every 2 s.

verl's own rollouts cannot be compared here: `rollout.name=sglang` ends on a machine without a GPU with
`ImportError: libcuda.so.1`, and `rollout.name=vllm` needs vLLM's build for GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    CONSOLE,
    Options,
    Target,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import grouped_bars, legend_below, new_figure, save_figure

from verl_server.tiny import make_model
from verl_server.types import Json

NAME = "bench_verl"
ROOT = Path(__file__).parents[1]
VERL_PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
SHARDS, GATHERED = "shards", "gathered by verl"
COLOURS = {SHARDS: "#0072b2", GATHERED: "#b8b8b8"}
RATIO_TARGET = 1.0
SIZES: dict[str, Any] = {
    "hidden_size": 768, "layers": 8, "heads": 12, "kv_heads": 4, "intermediate_size": 2048, "vocab_size": 16384,
}  # fmt: skip
RANKS = 2


def run(folder: Path, steps: int) -> list[dict[str, float]]:
    """Run verl with a model of 84 million parameters. Returns the values of each step."""
    model = make_model(folder / "policy", "qwen2", weight_std=0.02, **SIZES)
    variables = {
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "VERL_USE_EXTERNAL_MODULES": "verl_gather_toggle",
        "VERL_SERVER_PYTHON": sys.executable,
    }
    command: list[str | Path] = [
        VERL_PYTHON, ROOT / "examples" / "verl_demo.py", f"--ranks={RANKS}", f"--steps={steps}", f"--model={model}",
        f"--output={folder}", "--", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            CONSOLE.print(line.rstrip(), style="dim", markup=False)
        process.wait()
    finally:
        process.kill()
    values: list[dict[str, float]] = json.loads((folder / "metrics.json").read_text())["steps"]
    return values


def memcpy_seconds(num_bytes: int, rounds: int = 7) -> float:
    """Seconds of one copy of the model's bytes by one thread, with all pages resident: the physical limit."""
    import torch

    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def report(options: Options, machine: Json, steps: list[dict[str, float]], num_bytes: int) -> None:
    """Print the table and the target, and write the result files."""
    measured = steps[2:]  # the first update of each kind maps memory
    samples = {
        name: {
            SHARDS: [step[key] for step in measured if step["step"] % 2 == 1],
            GATHERED: [step[key] for step in measured if step["step"] % 2 == 0],
        }
        for name, key in (("update", "update_weights_s"), ("step", "step_s"))
    }
    memcpy = memcpy_seconds(num_bytes)
    summaries = {name: {kind: summarize(values) for kind, values in kinds.items()} for name, kinds in samples.items()}
    rows = [
        [name, kind, f"{summary.median:.3f}", f"{summary.q1:.3f} to {summary.q3:.3f}", str(summary.count)]
        for name, kinds in summaries.items()
        for kind, summary in kinds.items()
    ]
    show_table(f"Seconds; one copy of the {num_bytes / 1e6:.0f} MB takes {memcpy:.3f} s",
               ["", "tensors", "median", "quartiles", "samples"], rows)  # fmt: skip
    update = summaries["update"]
    ratio = update[SHARDS].median / update[GATHERED].median
    targets = [Target("update with shards over gathered", ratio, RATIO_TARGET, at_least=False)]
    show_targets(targets)
    write_result(
        options,
        NAME,
        machine,
        settings={"sizes": SIZES, "ranks": RANKS, "servers": RANKS, "num_bytes": num_bytes},
        figures={
            "memcpy_s": memcpy,
            "update_memcpys": {kind: summary.median / memcpy for kind, summary in update.items()},
            "ratio_of_medians": ratio,
            **{f"{name}: {kind}": asdict(s) for name, kinds in summaries.items() for kind, s in kinds.items()},
        },
        targets=targets,
        samples=samples,
    )
    title = f"verl {machine['versions']['verl']}, {RANKS} servers, {num_bytes / 1e6:.0f} MB of weights"
    figure, axes = new_figure(2, title, width=5.5)
    for axis, (name, kinds) in zip(axes, summaries.items(), strict=True):
        series = {kind: [summary] for kind, summary in kinds.items()}
        grouped_bars(axis, [""], series, title=f"seconds for each {name}", ylabel="seconds", colours=COLOURS)
    legend_below(figure, axes[0])
    save_figure(figure, options.png)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default 26, with --quick 6)")


def main() -> None:
    options = parse_options(NAME, "Measure weight updates of a verl run, with shards and gathered.", _more_options)
    if not VERL_PYTHON.exists():
        sys.exit("the environment of verl is not there: run make setup-trainers")
    machine = environment()
    version: list[str | Path] = [VERL_PYTHON, "-c", "from importlib.metadata import version; print(version('verl'))"]
    machine["versions"]["verl"] = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="verl-server-bench-") as name:
        folder = Path(name)
        steps = run(folder, options.extra.steps or (6 if options.quick else 26))
        num_bytes = sum(file.stat().st_size for file in (folder / "policy").glob("*.safetensors"))
        report(options, machine, steps, num_bytes)


if __name__ == "__main__":
    main()
