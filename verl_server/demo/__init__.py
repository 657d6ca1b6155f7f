"""RL from scratch in minutes on any machine: `run` trains a tiny random transformer until it can sort.

The parts are real: a trainer of two FSDP2 ranks, an SGLang server, GRPO, a weight push every step. The policy starts
from random weights and learns from rewards alone.

    task.py      what is asked and what an answer is worth
    policy.py    the model, made on the spot
    grpo.py      advantages and loss, pure functions
    trainer.py   one rank: rollout, learn, push
    launch.py    the ranks' processes
    display.py   live progress
    outcome.py   what the run amounts to    chart.py   the same as a picture

Importing this package imports neither torch nor sglang. Prompts, initial weights and sampling seeds follow from `seed`.
Two runs on one machine give the same curve, nearly always: logits round differently with the batch that the server
happens to form, and a token flips when two candidates are closer than that.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from verl_server.demo.outcome import Outcome
    from verl_server.demo.settings import Settings

__all__ = ["run"]


def run(seed: int = 0, steps: int = 80, output_dir: Path | str = "demo_output") -> int:
    """Train, show it live, write `reward.png` and `metrics.json` into `output_dir`. Returns the exit code.

    0: the mean reward of the last steps reached 0.8 and the logprob gap stayed within float32's rounding.
    1: it did not, or a rank or the server failed (the reason is printed). 130: interrupted.
    """
    from rich.console import Console

    from verl_server.demo.chart import draw
    from verl_server.demo.settings import Settings
    from verl_server.errors import BadInputError, VerlServerError

    if steps < 1:
        raise BadInputError(f"steps must be at least 1, got {steps}")
    console = Console(highlight=False)
    output = Path(output_dir)
    log_dir = output / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        outcome = _train(Settings(seed=seed, steps=steps), log_dir, console)
    except KeyboardInterrupt:
        console.print("interrupted; trainer and server are ended")
        return 130
    except VerlServerError as error:
        console.print(f"the demo failed: {error}\nlogs: {log_dir}", markup=False, style="red", soft_wrap=True)
        return 1
    values = asdict(outcome) | {"passed": outcome.passed}
    (output / "metrics.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    draw(outcome, output / "reward.png")
    console.print(outcome.summary(output), markup=False)
    return 0 if outcome.passed else 1


def _train(settings: Settings, log_dir: Path, console: Console) -> Outcome:
    """Run the ranks to their end and show what they report."""
    from verl_server.demo.display import Display
    from verl_server.demo.launch import Ranks, terminable
    from verl_server.demo.outcome import Outcome
    from verl_server.demo.settings import Exam, Ready, StepMetrics

    started = time.monotonic()
    ready: Ready | None = None
    exam: Exam | None = None
    steps: list[StepMetrics] = []
    with (
        terminable(),
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
