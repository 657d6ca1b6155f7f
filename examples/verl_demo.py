"""verl's own GRPO trainer with the rollout `verl_server`, on any machine: `make verl-demo`.

The policy is a tiny random transformer. Each question names a kind of characters, and the reward of an answer is the
share of its characters that are of this kind. verl runs unchanged: `python -m verl.trainer.main_ppo`, with one word of
configuration, `actor_rollout_ref.rollout.name=verl_server`. See docs/verl.md.

Run it with the environment that has verl. The servers have the environment of `VERL_SERVER_PYTHON`. Writes
`reward.png`, `metrics.json` and `verl.log` into the folder `--output`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAM = "verl.trainer.main_ppo"
KINDS = {"letters": str.islower, "digits": str.isdigit}
TARGET_REWARD, MAX_PROBS_DIFF = 0.8, 1e-4
NOT_COMPUTED = math.nan
"""Probability difference of a step in which verl's trainer takes the probabilities of the servers as they are."""
RESPONSE_TOKENS = 16
STEP_LINE = re.compile(r"step:(\d+) - ")
METRIC = re.compile(r"([\w/@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")
SHOWN = {
    "reward": "critic/rewards/mean",
    "probs_diff": "training/rollout_probs_diff_max",
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "update_actor_s": "timing_s/update_actor",
    "update_weights_s": "timing_s/update_weights",
    "validation": "val-core/characters/acc/mean@1",
}
"""Names of the values of a step, and verl's names of them."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's reward function: the share of the answer's characters that are of the kind `ground_truth`."""
    is_right = KINDS[ground_truth]
    return sum(character.isascii() and is_right(character) for character in solution_str) / max(1, len(solution_str))


def write_model(folder: Path, seed: int) -> Path:
    """Write a tiny random model."""
    from verl_server.tiny import make_model

    return make_model(folder, "qwen2", seed=seed, heads=2, kv_heads=2)  # heads of 32 elements: vLLM needs them


def write_questions(folder: Path, seed: int) -> None:
    """Write the questions for training and validation."""
    import pandas

    generator = random.Random(seed)
    for name, number in (("train", 1024), ("validation", 32)):
        rows = [_question(index, list(KINDS)[generator.randrange(len(KINDS))]) for index in range(number)]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def _question(index: int, kind: str) -> dict[str, Any]:
    return {
        "data_source": "characters",
        "prompt": [{"role": "user", "content": kind}],
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": kind},
        "extra_info": {"index": index},
    }


def verl_arguments(folder: Path, model: Path, ranks: int, steps: int, seed: int) -> list[str]:
    """The arguments of `verl.trainer.main_ppo`. Those of the second part are for machines without a GPU."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/validation.parquet",
        "data.train_batch_size=16",
        "data.dataloader_num_workers=0",
        f"data.seed={seed}",
        "data.max_prompt_length=64",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.actor.entropy_coeff=0.01",  # without it, a run may learn one answer for all questions
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.name=verl_server",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=20",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        f"hydra.run.dir={folder}/hydra",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
        *(cpu_arguments(ranks) if not _has_gpu() else []),
    ]


def cpu_arguments(ranks: int) -> list[str]:
    """Arguments for a machine without a GPU. Ray lends GPUs that do not exist, because verl counts ranks in GPUs."""
    return [
        "trainer.device=cpu",
        "ray_kwargs.ray_init.num_cpus=32",
        f"+ray_kwargs.ray_init.num_gpus={2 * ranks + 2}",
        "+ray_kwargs.ray_init.address=local",  # Ray would join another cluster of this machine
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "+actor_rollout_ref.rollout.engine_kwargs.verl_server.max_total_tokens=32768",
    ]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run_verl(arguments: Sequence[str], log: Path, program: str = PROGRAM) -> Iterator[dict[str, float]]:
    """Run verl and yield the values of each step. Raises RuntimeError if verl fails; the log has the reason."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ} if not _has_gpu() else dict(os.environ)
    command = [sys.executable, "-m", program, *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                if found := STEP_LINE.search(line):
                    values = dict(METRIC.findall(line))
                    yield {"step": float(found[1])} | {
                        name: float(values[key]) for name, key in SHOWN.items() if key in values
                    }
                elif "verl_server: " in line:
                    print("   ", line[line.index("verl_server: ") :].rstrip())
            if process.wait() != 0:
                end = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-12:])
                raise RuntimeError(f"verl ended with exit code {process.returncode}; its log {log} ends with:\n{end}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # Ray ends its actors
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def draw(steps: Sequence[dict[str, float]], path: Path, title: str) -> None:
    """Write a picture of the run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    reward, gap = figure.subplots(1, 2, width_ratios=(1.6, 1))
    numbers = [step["step"] for step in steps]
    reward.plot(numbers, [step["reward"] for step in steps], color="#2563eb", label="mean reward")
    reward.axhline(TARGET_REWARD, color="#6b7280", linestyle="--", linewidth=1, label="target")
    reward.set(xlabel="training step", ylim=(0, 1.02), title=title)
    reward.legend(frameon=False)
    gap.plot(numbers, [step.get("probs_diff", NOT_COMPUTED) for step in steps], color="#e11d48")
    gap.axhline(MAX_PROBS_DIFF, color="#6b7280", linestyle="--", linewidth=1)
    gap.set(xlabel="training step", yscale="log", ylim=(1e-9, 1e-2), title="largest difference of a probability")
    for axes in (reward, gap):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="verl's GRPO trainer with the rollout verl_server")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks, each with one server (default: 1)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of the questions (default: 0)")
    parser.add_argument("--model", type=Path, help="folder of another model than the tiny random one")
    parser.add_argument("--program", default=PROGRAM, help=f"module of verl that is run (default: {PROGRAM})")
    parser.add_argument("--output", type=Path, default=Path("demo_output/verl"), help="folder for the results")
    parser.add_argument("more", nargs="*", help="further arguments of verl, for example trainer.test_freq=5")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    model = options.model.resolve() if options.model else write_model(output / "model", options.seed)
    write_questions(output, options.seed)
    print(f"verl starts; its log is {output / 'verl.log'}. The first step takes one to three minutes, mostly imports.")
    arguments = [*verl_arguments(output, model, options.ranks, options.steps, options.seed), *options.more]
    steps = []
    for values in run_verl(arguments, output / "verl.log", options.program):
        if "reward" not in values:
            continue
        steps.append(values)
        print(
            f"step {values['step']:3.0f}  reward {values['reward']:.2f}  "
            f"probability difference {values.get('probs_diff', NOT_COMPUTED):.1e}  {values['step_s']:.1f} s",
            flush=True,
        )
    seconds = time.monotonic() - started
    reward, gap = steps[-1]["reward"], max(step.get("probs_diff", NOT_COMPUTED) for step in steps)
    passed = reward > TARGET_REWARD and not gap >= MAX_PROBS_DIFF
    outcome = {"passed": passed, "seconds": seconds, "ranks": options.ranks, "seed": options.seed, "steps": steps}
    (output / "metrics.json").write_text(json.dumps(outcome, indent=1))
    draw(steps, output / "reward.png", f"verl GRPO, {options.ranks} rank(s), {seconds:.0f} s in total")
    print(
        f"{'passed' if passed else 'FAILED'}: reward {steps[0]['reward']:.2f} -> {reward:.2f} "
        f"(target {TARGET_REWARD}), largest probability difference {gap:.1e} (limit {MAX_PROBS_DIFF:.0e}), "
        f"{seconds:.0f} s; {output / 'reward.png'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
