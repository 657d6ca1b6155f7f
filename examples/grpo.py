"""GRPO with a language model of Hugging Face: questions with known answers, the reward is an exact answer.

    python examples/grpo.py MODEL                                   # the built-in task: sums of two numbers
    python examples/grpo.py MODEL --data train.jsonl --test test.jsonl
    torchrun --standalone --nproc-per-node 2 examples/grpo.py MODEL --replicas 2 --tp 2

A line of the files is {"question": "...", "answer": "..."}. On a machine with GPUs the same command uses them. A run
that was killed continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from pathlib import Path
from typing import Any

import peft
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server import AdapterConfig, RolloutManager, VerlEngine, training
from verl_server.agent import RolloutLimits, RolloutRunner, RolloutStep, Sample, SingleTurnLoop, Task, with_progress
from verl_server.trajectory import get_renderer

SETTINGS = ["model", "data", "test", "dtype", "groups", "samples", "max_tokens", "minibatches", "lr", "lora", "seed"]
"""The options that a run which continues must not change."""
CURVES = ["test/correct", "reward/mean", "train/logprob_gap"]
PRINTED = ["reward/mean", "train/logprob_gap", "train/time_s", "time/wait_s"]
LORA: dict[str, Any] = {"lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="folder or name of the model")
    add("--data", type=Path, help="questions and answers to train on")
    add("--test", type=Path, help="questions and answers to test with")
    add("--run-dir", type=Path, default=Path("grpo-run"), help="samples, checkpoints, metrics, plot")
    add("--engine", default="sglang", choices=["sglang", "vllm"])
    add("--server-python", help="interpreter of the servers, if it is not that of the trainer")
    add("--replicas", type=positive, default=1)
    add("--tp", type=positive, default=1, help="GPUs of each replica")
    add("--dtype", default="bfloat16", help="of the servers; the trainer has float32 weights")
    add("--steps", type=positive, default=20)
    add("--groups", type=positive, default=16, help="questions of a step")
    add("--samples", type=positive, default=8, help="answers to each question")
    add("--max-tokens", type=positive, default=16, help="of an answer")
    add("--rows", type=positive, default=32, help="answers of one backward pass")
    add("--minibatches", type=positive, default=2, help="optimizer steps of a step")
    add("--lr", type=float, default=2e-5)
    add("--lora", type=positive, metavar="RANK", help="train LoRA adapters of this rank (of q, k, v, o_proj)")
    add("--every", type=positive, default=5, help="steps between two tests, and between two checkpoints")
    add("--seed", type=int, default=0)
    add("--tensorboard", action="store_true")
    add("--wandb", metavar="PROJECT", help="of Weights & Biases")
    options = parser.parse_args()
    if (options.data is None) != (options.test is None):
        parser.error("--data and --test belong together")
    if options.samples == 1:
        parser.error("--samples 1: the advantage of an answer compares it with others to the same question")
    return options


def reward(sample: Sample) -> float:
    """1 for the answer itself, without words around it."""
    return float(sample.text.strip() == sample.task.data["answer"])


class Policy:
    """The model on one rank, its optimizer, and the servers that have its weights. All ranks make the same calls."""

    def __init__(self, options: argparse.Namespace, ranks: training.TrainerRanks, engine: VerlEngine) -> None:
        self.options, self.ranks, self.engine = options, ranks, engine
        self.model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(ranks.device)
        if options.lora:
            self.model = peft.get_peft_model(self.model, peft.LoraConfig(r=options.lora, **LORA))
        ranks.shard(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
        self.folder = options.run_dir / "checkpoints"
        self.completed_steps = training.load_checkpoint(self.folder, self.model, self.optimizer)
        self.push()

    def push(self) -> None:
        if self.options.lora:
            config = self.model.peft_config["default"].to_dict()
            self.engine.load_lora_adapter("policy", peft.get_peft_model_state_dict(self.model), config)
        else:
            self.engine.update_weights_from_tensor(self.model.named_parameters())

    def train(self, step: RolloutStep | None) -> dict[str, float]:
        """Train on the samples of rank 0, and give the servers the weights."""
        started, ranks, gaps = time.monotonic(), self.ranks, [torch.zeros(1)]
        batch: TensorDict = ranks.broadcast(None if step is None else step.batch())
        batch = training.pad_rows(batch, ranks.size * self.options.minibatches)
        batch["advantage"] = training.group_advantages(batch["reward"], batch["group_index"], batch["sample_index"])
        batch["weight"] = batch["response_mask"] * batch["loss_weight"][:, None]
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(self.completed_steps))
        for number, minibatch in enumerate(order.chunk(self.options.minibatches)):
            if (num_tokens := float(batch["weight"][minibatch].sum()) / ranks.size) == 0:
                continue
            for rows in minibatch.tensor_split(math.ceil(len(minibatch) / self.options.rows / ranks.size)):
                part = batch[rows[ranks.rank :: ranks.size]].to(ranks.device)
                with torch.autocast(ranks.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
                    logprobs = training.response_logprobs(self.model, part)
                old, mask = part["rollout_log_probs"], part["weight"]
                loss = training.policy_loss(logprobs, old, part["advantage"], mask, num_tokens=num_tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                if number == 0:  # later, the weights are no longer those of the servers
                    gaps.append(((logprobs - old) * part["response_mask"]).detach().abs().flatten().cpu())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.push()
        self.completed_steps += 1
        gap = ranks.max(float(torch.cat(gaps).max()))
        return {"train/logprob_gap": gap, "train/time_s": time.monotonic() - started}

    @property
    def is_due(self) -> bool:
        """Whether a test and a checkpoint follow the last step."""
        is_last = self.completed_steps == self.options.steps
        return bool(is_last or self.completed_steps % self.options.every == 0)

    def save(self) -> None:
        training.save_checkpoint(self.folder, self.completed_steps, self.model, self.optimizer)


async def run(
    options: argparse.Namespace, policy: Policy, fleet: RolloutManager, tasks: list[Task], questions: list[Task]
) -> None:
    """The loop of rank 0: test, roll out, train, save."""
    common: dict[str, Any] = {
        "engine": functools.partial(fleet.router.generate, lora_path="policy") if options.lora else fleet,
        "renderer": get_renderer(AutoTokenizer.from_pretrained(options.model)),
        "limits": RolloutLimits(max_response_tokens=options.max_tokens),
        "reward": reward,
    }
    tester = RolloutRunner(SingleTurnLoop(), sampling_params={"temperature": 0.0}, **common)
    runner = RolloutRunner(SingleTurnLoop(), n=options.samples, run_dir=options.run_dir / "samples", **common)

    async def test() -> dict[str, float]:
        result = await training.evaluate(tester, questions)
        print(result.describe(), flush=True)
        return {"test/correct": result.correct}

    done = policy.completed_steps
    settings = {name: str(value) for name, value in vars(options).items()}
    destinations: dict[str, Any] = {"tensorboard": options.tensorboard, "wandb_project": options.wandb}
    with training.MetricsWriter(
        options.run_dir, start_step=done + bool(done), config=settings, printed=PRINTED, **destinations
    ) as writer:
        if not done:
            writer.write(0, await test())
        steps = runner.steps(itertools.cycle(tasks), options.groups, start_step=done)
        shown = with_progress(runner, steps, total=options.steps - done)
        while policy.completed_steps < options.steps:
            step = await anext(shown)
            metrics = {**step.metrics, **await asyncio.to_thread(policy.train, step)}
            if policy.is_due:
                metrics |= await test()
            writer.write(policy.completed_steps, metrics)
            if policy.is_due:
                await asyncio.to_thread(policy.save)
    training.draw_curves(writer.path, png := options.run_dir / "curves.png", CURVES)
    print(f"wrote {png} and {writer.path}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = read_options()
    torch.manual_seed(options.seed)
    tasks, questions = training.sum_tasks()
    if options.data:
        tasks, questions = training.read_tasks(options.data), training.read_tasks(options.test)
    server: dict[str, Any] = {
        "model_path": options.model, "tp_size": options.tp, "dtype": options.dtype, "random_seed": options.seed,
    }  # fmt: skip
    if options.lora:
        server |= {"enable_lora": True, "max_lora_rank": options.lora, "lora_target_modules": LORA["target_modules"]}
    config = AdapterConfig(engine_kind=options.engine, server_python=options.server_python)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(training.trainer_ranks())
        fleet = None
        if ranks.rank == 0:
            training.keep_settings(options.run_dir, {name: getattr(options, name) for name in SETTINGS})
            fleet = stack.enter_context(RolloutManager(options.replicas, config=config, **server))
        engine = VerlEngine(ranks.mesh, fleet=fleet, engine_kind=options.engine, **server)
        policy = Policy(options, ranks, stack.enter_context(engine))
        if fleet is not None:
            asyncio.run(run(options, policy, fleet, tasks, questions))
        while policy.completed_steps < options.steps:
            policy.train(None)
            if policy.is_due:
                policy.save()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        training.save_pretrained(options.run_dir / "model", policy.model, tokenizer)


if __name__ == "__main__":
    main()
