"""TRL trains a policy with random weights to sort three digits; our servers generate. A few minutes on two cores.

The trainer's environment has TRL and needs no SGLang: give the interpreter of the servers with `--server-python`.

    python examples/trl_grpo.py --server-python .venv/bin/python                  # GRPOTrainer
    python examples/trl_grpo.py --server-python .venv/bin/python --trainer async  # AsyncGRPOTrainer
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from word_policy import END, SERVER_ARGUMENTS, UNKNOWN, fraction_correct, write_policy

from verl_server import AdapterConfig
from verl_server.integrations.trl import (
    FleetRolloutFunc,
    FleetRolloutWorker,
    FleetWeightTransfer,
    RolloutServers,
    enable_async_grpo_on_cpu,
    start_servers,
)

NUM_REPLICAS, NUM_TASKS, NUM_DIGITS, SEED = 2, 4000, 3, 0
VOCABULARY = [*(str(digit) for digit in range(10)), "<user>", "<assistant>", END, UNKNOWN]
#: Names of TRL's metrics. `GRPOTrainer` logs the first one, `AsyncGRPOTrainer` the second one.
GAP, STALENESS = "sampling/sampling_logp_difference/max", "sample/staleness_mean"
#: Arguments of TRL and transformers that both trainers have. Nothing of them is special for our servers.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": NUM_DIGITS + 2,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": SEED,
}


def make_tasks() -> Dataset:
    """Rows with a `prompt` of one message, and the column `answer` for the reward."""
    rng = random.Random(SEED)
    drawn = [[rng.randrange(10) for _ in range(NUM_DIGITS)] for _ in range(NUM_TASKS)]
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": join(digits)}], "answer": join(sorted(digits))} for digits in drawn
    ])  # fmt: skip


def join(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def sorted_fraction(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """A reward function of TRL: the fraction of correct positions of each completion."""
    texts = [messages[0]["content"].split() for messages in completions]
    return [fraction_correct(words, expected.split()) for words, expected in zip(texts, answer, strict=True)]


class Progress(TrainerCallback):  # type: ignore[misc]
    """Prints the mean reward of each tenth of the training, and keeps the largest log prob gap."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.largest_gap: float | None = None
        self._tenth: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """transformers calls it after each optimizer step with TRL's metrics; not every step has metrics of samples."""
        if "reward" in logs:
            self._tenth.append(logs)
        if state.global_step * 10 // state.max_steps > len(self.means) and self._tenth:
            self._print_tenth(state.global_step)

    def _print_tenth(self, step: int) -> None:
        self.means.append(fmean(logs["reward"] for logs in self._tenth))
        line = f"step {step}: reward {self.means[-1]:.3f}"
        if gaps := [logs[GAP] for logs in self._tenth if GAP in logs]:
            self.largest_gap = max(*gaps, self.largest_gap or 0.0)
            line += f", log prob gap {max(gaps):.1e}"
        if staleness := [logs[STALENESS] for logs in self._tenth if STALENESS in logs]:
            line += f", samples are {fmean(staleness):.2f} pushes old"
        print(line, flush=True)
        self._tenth = []


def make_grpo_trainer(servers: RolloutServers, model: str, folder: str, steps: int) -> Any:
    """Four optimizer steps for each generation: two halves of the samples, twice."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        folder, max_steps=steps, steps_per_generation=2, num_iterations=2, entropy_coef=0.05, beta=0.0, **COMMON
    )
    rollout_func = FleetRolloutFunc(servers, seed=SEED)
    return GRPOTrainer(
        model=model, reward_funcs=sorted_fraction, args=args, train_dataset=make_tasks(), rollout_func=rollout_func
    )


def make_async_trainer(servers: RolloutServers, model: str, folder: str, steps: int) -> Any:
    """The servers generate while the trainer trains: samples are at most two pushes old."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    enable_async_grpo_on_cpu()
    args = AsyncGRPOConfig(
        folder, max_steps=steps, token_budget=0, max_staleness=2, max_inflight_tasks=128, queue_maxsize=64, **COMMON
    )
    tasks, tokenizer = make_tasks(), AutoTokenizer.from_pretrained(model)
    return AsyncGRPOTrainer(
        model=model,
        args=args,
        train_dataset=tasks,
        rollout_worker=FleetRolloutWorker(servers, args, tasks, sorted_fraction, tokenizer, seed=SEED),
        weight_transfer=FleetWeightTransfer(servers),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("grpo", "async"), default="grpo")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--server-python", help="interpreter of the servers; without it, that of this program")
    options = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)  # tiny matrices gain nothing from threads
    config = AdapterConfig(server_python=options.server_python)
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        model = f"{folder}/policy"
        write_policy(Path(model), VOCABULARY, SEED)
        with start_servers(
            model, NUM_REPLICAS, config=config, env={"OMP_NUM_THREADS": "1"}, **SERVER_ARGUMENTS
        ) as servers:
            make_trainer = make_grpo_trainer if options.trainer == "grpo" else make_async_trainer
            trainer, progress = make_trainer(servers, model, folder, options.steps), Progress()
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(progress)
            trainer.train()
            print(f"reward: {progress.means[0]:.3f} -> {progress.means[-1]:.3f}")
            if progress.largest_gap is not None:
                print(f"largest difference between trainer and server log probs: {progress.largest_gap:.1e}")
            print("weight version of the servers:", servers.engine.weight_version)


if __name__ == "__main__":
    main()
