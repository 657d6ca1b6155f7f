"""A complete RL training run in minutes on any machine: `run` trains a tiny random transformer to sort digits.

All parts are real: a trainer of two FSDP2 ranks, an SGLang or vLLM server, GRPO, and a weight update in every step. The
policy starts from random weights and learns from rewards alone.

    settings.py  settings of a run, the reports of the trainer ranks, result of a run
    trainer.py   the training loop of one rank, with its model, task, advantages and loss
    launch.py    the processes of the ranks
    display.py   live progress, and the picture of the result

Importing this package imports neither torch nor sglang. Prompts, initial weights and sampling seeds depend on `seed`
only. Two runs on one machine give almost always the same curve. Differences remain because the server forms its batches
by time: logits are rounded differently in another batch, and a token changes when two candidates are closer than that.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from verl_server.demo.settings import Outcome, Settings

__all__ = ["run"]


def run(seed: int = 0, steps: int = 80, output_dir: Path | str = "demo_output") -> int:
    """Train the model, show the progress, and write `reward.png` and `metrics.json` into `output_dir`.

    Returns the exit code. 0: the mean reward of the last steps reached 0.8, and the trainer and the server agreed on
    the logprobs of all tokens within 1e-3. 1: the run missed one of these targets, or a rank or the server failed;
    the reason is printed. 130: interrupted. Raises BadInputError if `steps` is below 1 or the
    folder takes no files.
    """
    from rich.console import Console

    from verl_server.demo.display import draw
    from verl_server.demo.settings import Settings
    from verl_server.errors import BadInputError, VerlServerError
    from verl_server.validation import make_writable_folder

    if steps < 1:
        raise BadInputError(f"steps must be at least 1, got {steps}")
    console = Console(highlight=False)
    output = Path(os.path.expanduser(output_dir))
    log_dir = output / "logs"
    make_writable_folder("output", log_dir)
    try:
        outcome = _train(Settings(seed=seed, steps=steps), log_dir, console)
    except KeyboardInterrupt:
        console.print("Interrupted. All processes of the demo have ended.")
        return 130
    except VerlServerError as error:
        console.print(f"The demo failed: {error}\nLogs: {log_dir}", markup=False, style="red", soft_wrap=True)
        return 1
    values = asdict(outcome) | {"passed": outcome.passed}
    (output / "metrics.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    draw(outcome, output / "reward.png")
    console.print(outcome.summary(output), markup=False)
    return 0 if outcome.passed else 1


def _train(settings: Settings, log_dir: Path, console: Console) -> Outcome:
    """Run the trainer ranks until they end, and show their reports."""
    from verl_server.demo.display import Display
    from verl_server.demo.launch import Ranks, sigterm_as_interrupt
    from verl_server.demo.settings import Exam, Outcome, Ready, StepMetrics

    started = time.monotonic()
    ready: Ready | None = None
    exam: Exam | None = None
    steps: list[StepMetrics] = []
    with (
        sigterm_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="verl-server-demo-", ignore_cleanup_errors=True) as workdir,
        Display(settings, console) as display,
        Ranks(settings, Path(workdir), log_dir) as ranks,
    ):
        for report in ranks.reports():
            match report:
                case Ready():
                    ready = report
                    display.ready(report)
                case StepMetrics():
                    steps.append(report)
                    display.step(report)
                case Exam():
                    exam = report
            display.tick()
    assert ready is not None
    assert exam is not None
    return Outcome(settings, ready, tuple(steps), exam, time.monotonic() - started)
