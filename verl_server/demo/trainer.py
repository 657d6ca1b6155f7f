"""One trainer rank: rollout, advantages, optimizer steps, weight push, and again.

Every rank runs this same program. All see all rollouts; each trains on its own slice of the batch, and FSDP2 averages
the gradients.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from verl_server import Timeouts, VerlEngine
from verl_server.demo import grpo, policy, task
from verl_server.demo.settings import SERVER_ENV, Exam, Ready, Report, Settings, StepMetrics
from verl_server.errors import VerlServerError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_S = 120.0
TIMEOUTS = Timeouts(start_s=300.0, ranks_s=300.0, generation_s=120.0, weights_s=120.0)


def train(rank: int, settings: Settings, workdir: Path, log_dir: Path, report: Callable[[Report], None]) -> None:
    """The life of one rank. `workdir` is a scratch folder that all ranks share; rank 0 reports."""
    started = time.monotonic()
    torch.set_num_threads(1)
    with _process_group(rank, settings.ranks, workdir / "rendezvous") as mesh:
        folder = workdir / "policy"
        if rank == 0:
            policy.write_policy(folder, settings.seed)
        dist.barrier()
        with _engine(mesh, folder, settings, log_dir) as engine:
            trainer = Trainer(rank, settings, engine, policy.load_sharded(folder, mesh))
            if rank == 0:
                parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
                report(Ready(time.monotonic() - started, parameters))
            for step in range(settings.steps):
                metrics = trainer.step(step)
                if rank == 0:
                    report(metrics)
            exam = trainer.exam()
            if rank == 0:
                report(exam)


@contextmanager
def _process_group(rank: int, ranks: int, rendezvous: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(seconds=COLLECTIVE_S)
    )
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _engine(mesh: DeviceMesh, folder: Path, settings: Settings, log_dir: Path) -> VerlEngine:
    samples = max(settings.prompts * settings.group, settings.exam_prompts)
    return VerlEngine(
        mesh,
        timeouts=TIMEOUTS,
        env=SERVER_ENV,
        log_dir=log_dir,
        model_path=str(folder),
        tp_size=1,
        dtype="float32",
        skip_tokenizer_init=True,
        context_length=64,
        max_running_requests=samples,
        max_total_tokens=2 * samples * (task.PROMPT_LENGTH + task.MAX_RESPONSE),
        random_seed=settings.seed,
        log_level="warning",
    )


class Trainer:
    """The policy, its optimizer and the engine that rolls it out, on one rank."""

    def __init__(self, rank: int, settings: Settings, engine: VerlEngine, model: Any) -> None:
        self.rank, self.settings, self.engine, self.model = rank, settings, engine, model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        # The same on every rank, so that all ask the engine the same questions.
        self._rng = random.Random(settings.seed)
        self._exam = task.draw_prompts(self._rng, settings.exam_prompts)

    def step(self, step: int) -> StepMetrics:
        """One step of GRPO."""
        start = time.monotonic()
        samples, version = self._rollout(step)
        rolled_out = time.monotonic()
        gap_max, gap_mean = self._learn(samples, step)
        learned = time.monotonic()
        self.engine.update_weights_from_tensor(policy.named_weights(self.model))
        synced = time.monotonic()
        return StepMetrics(
            step=step,
            reward=fmean(sample.reward for sample in samples),
            solved=fmean(sample.reward == 1.0 for sample in samples),
            response_tokens=fmean(len(sample.response) for sample in samples),
            gap_max=gap_max,
            gap_mean=gap_mean,
            rollout_s=rolled_out - start,
            train_s=learned - rolled_out,
            sync_s=synced - learned,
            weight_version=version,
            example=task.show(samples[0].prompt, samples[0].response),
        )

    def exam(self) -> Exam:
        """Ask the trained policy what it was never trained on, greedily."""
        asked, version = self._ask(self._exam, [{"temperature": 0.0}] * len(self._exam))
        return Exam(
            reward=fmean(sample.reward for sample in asked),
            solved=fmean(sample.reward == 1.0 for sample in asked),
            questions=len(asked),
            weight_version=version,
            examples=tuple(task.show(sample.prompt, sample.response) for sample in asked[:3]),
        )

    def _rollout(self, step: int) -> tuple[list[grpo.Sample], str]:
        """Sample a group of responses per prompt from the policy itself, and score them."""
        settings = self.settings
        drawn = task.draw_prompts(self._rng, settings.prompts, never=frozenset(self._exam))
        prompts = [prompt for prompt in drawn for _ in range(settings.group)]
        params = [{"temperature": 1.0, "sampling_seed": self._rng.getrandbits(31)} for _ in prompts]
        samples, version = self._ask(prompts, params)
        if version != str(step):
            raise VerlServerError(f"step {step} must be rolled out with weights {step}, the server has {version}")
        advantages = grpo.group_advantages([sample.reward for sample in samples], settings.group)
        return [replace(sample, advantage=a) for sample, a in zip(samples, advantages, strict=True)], version

    def _ask(self, prompts: Sequence[task.Prompt], params: Sequence[dict[str, Any]]) -> tuple[list[grpo.Sample], str]:
        """Responses of the served policy with their rewards, and the one weight version that wrote them."""
        common = {"max_new_tokens": task.MAX_RESPONSE, "stop_token_ids": [task.END]}
        replies = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[{**common, **own} for own in params],
            return_logprob=True,
        )
        versions = {str(reply["meta_info"]["weight_version"]) for reply in replies}
        if len(versions) != 1:
            raise VerlServerError(f"one batch was rolled out with several weights: {sorted(versions)}")
        return [_sample(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)], versions.pop()

    def _learn(self, samples: Sequence[grpo.Sample], step: int) -> tuple[float, float]:
        """Optimizer steps on the batch, of which this rank takes its share. Returns the logprob gap (max, mean)."""
        settings = self.settings
        gap = self._gap(samples)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        for _ in range(settings.epochs):
            for part in range(settings.minibatches):
                self._update(samples[part :: settings.minibatches], settings.entropy_weight_at(step))
        return gap

    @torch.no_grad()
    def _gap(self, samples: Sequence[grpo.Sample]) -> tuple[float, float]:
        """Trainer against rollout, over the whole batch, while both still hold the same weights."""
        batch = self._share(samples)
        logprobs, _ = grpo.token_logprobs(policy.logits_of(self.model, batch.tokens), batch.tokens)
        largest, total = (torch.tensor(value) for value in grpo.logprob_gap(logprobs, batch))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return float(largest), float(total) / _tokens(samples)

    def _update(self, samples: Sequence[grpo.Sample], entropy_weight: float) -> None:
        """One optimizer step on a minibatch of all ranks."""
        settings, batch = self.settings, self._share(samples)
        logprobs, entropy = grpo.token_logprobs(policy.logits_of(self.model, batch.tokens), batch.tokens)
        loss = grpo.policy_loss(
            logprobs,
            entropy,
            batch,
            clip=settings.clip,
            entropy_weight=entropy_weight,
            token_count=_tokens(samples) / settings.ranks,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _share(self, samples: Sequence[grpo.Sample]) -> grpo.Batch:
        """This rank's part of a batch that all ranks hold."""
        return grpo.make_batch(samples[self.rank :: self.settings.ranks], pad=task.END)


def _tokens(samples: Sequence[grpo.Sample]) -> int:
    return sum(len(sample.response) for sample in samples)


def _sample(prompt: task.Prompt, reply: dict[str, Any]) -> grpo.Sample:
    scored = reply["meta_info"]["output_token_logprobs"]
    response = tuple(int(token) for _, token, *_ in scored)
    if list(response) != list(reply["output_ids"]):
        raise VerlServerError(f"the server scored other tokens than it returned: {reply}")
    return grpo.Sample(prompt, response, tuple(float(lp) for lp, *_ in scored), task.reward(prompt, response))
