"""The training loop of one rank: rollout, advantages, optimizer steps, weight update.

Every rank runs the same program. All ranks receive all rollouts, each rank trains on its own part of the batch, and
FSDP2 averages the gradients.
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

COLLECTIVE_TIMEOUT_S = 120.0
TIMEOUTS = Timeouts(start_s=300.0, ranks_s=300.0, generation_s=120.0, weights_s=120.0)


def train(rank: int, settings: Settings, workdir: Path, log_dir: Path, report: Callable[[Report], None]) -> None:
    """Run the whole training on one rank. `workdir` is a temporary folder of all ranks; rank 0 calls `report`."""
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
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
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
    """The policy, its optimizer and the rollout engine on one rank."""

    def __init__(self, rank: int, settings: Settings, engine: VerlEngine, model: Any) -> None:
        self.rank, self.settings, self.engine, self.model = rank, settings, engine, model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        # Equal on every rank, so that all ranks send the same prompts.
        self._rng = random.Random(settings.seed)
        self._exam_prompts = task.draw_prompts(self._rng, settings.exam_prompts)

    def step(self, step: int) -> StepMetrics:
        """Run one training step and return its metrics."""
        start = time.monotonic()
        samples, version = self._rollout(step)
        rolled_out = time.monotonic()
        gap_max, gap_mean = self._train(samples, step)
        trained = time.monotonic()
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
            train_s=trained - rolled_out,
            sync_s=synced - trained,
            weight_version=version,
            example=task.show(samples[0].prompt, samples[0].response),
        )

    def exam(self) -> Exam:
        """Test the policy with greedy sampling on prompts that were not used for training."""
        samples, version = self._generate(self._exam_prompts, [{"temperature": 0.0}] * len(self._exam_prompts))
        return Exam(
            reward=fmean(sample.reward for sample in samples),
            solved=fmean(sample.reward == 1.0 for sample in samples),
            questions=len(samples),
            weight_version=version,
            examples=tuple(task.show(sample.prompt, sample.response) for sample in samples[:3]),
        )

    def _rollout(self, step: int) -> tuple[list[grpo.GrpoSample], int]:
        """Generate a group of responses for each prompt. Returns samples with advantages, and their weight version."""
        settings = self.settings
        drawn = task.draw_prompts(self._rng, settings.prompts, never=frozenset(self._exam_prompts))
        prompts = [prompt for prompt in drawn for _ in range(settings.group)]
        params = [{"temperature": 1.0, "sampling_seed": self._rng.getrandbits(31)} for _ in prompts]
        samples, version = self._generate(prompts, params)
        if version != step:
            raise VerlServerError(f"step {step} expected rollouts of weight version {step}, got version {version}")
        advantages = grpo.group_advantages([sample.reward for sample in samples], settings.group)
        return [replace(sample, advantage=a) for sample, a in zip(samples, advantages, strict=True)], version

    def _generate(
        self, prompts: Sequence[task.Prompt], params: Sequence[dict[str, Any]]
    ) -> tuple[list[grpo.GrpoSample], int]:
        """Generate one response per prompt. Returns samples with rewards, and the weight version of all responses."""
        common = {"max_new_tokens": task.MAX_RESPONSE, "stop_token_ids": [task.END]}
        replies = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[{**common, **own} for own in params],
            return_logprob=True,
        )
        versions = {reply["meta_info"]["weight_version"] for reply in replies}
        if len(versions) != 1:
            raise VerlServerError(f"one batch was generated with several weight versions: {sorted(versions)}")
        return [_make_sample(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)], versions.pop()

    def _train(self, samples: Sequence[grpo.GrpoSample], step: int) -> tuple[float, float]:
        """Run the optimizer steps on this rank's part of the batch. Returns the logprob gap (maximum, mean)."""
        settings = self.settings
        gap = self._logprob_gap(samples)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        for _ in range(settings.epochs):
            for part in range(settings.minibatches):
                self._update(samples[part :: settings.minibatches], settings.entropy_weight_at(step))
        return gap

    @torch.no_grad()
    def _logprob_gap(self, samples: Sequence[grpo.GrpoSample]) -> tuple[float, float]:
        """Maximum and mean logprob gap of the whole batch, while trainer and server have the same weights."""
        batch = self._make_own_batch(samples)
        logprobs, _ = grpo.token_logprobs(policy.logits_of(self.model, batch.tokens), batch.tokens)
        largest, total = (torch.tensor(value) for value in grpo.logprob_gap(logprobs, batch))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return float(largest), float(total) / _count_tokens(samples)

    def _update(self, samples: Sequence[grpo.GrpoSample], entropy_weight: float) -> None:
        """Run one optimizer step on a minibatch; each rank computes its part."""
        settings, batch = self.settings, self._make_own_batch(samples)
        logprobs, entropy = grpo.token_logprobs(policy.logits_of(self.model, batch.tokens), batch.tokens)
        loss = grpo.policy_loss(
            logprobs,
            entropy,
            batch,
            clip=settings.clip,
            entropy_weight=entropy_weight,
            num_tokens=_count_tokens(samples) / settings.ranks,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _make_own_batch(self, samples: Sequence[grpo.GrpoSample]) -> grpo.Batch:
        """This rank's part of the samples as tensors."""
        return grpo.make_batch(samples[self.rank :: self.settings.ranks], pad=task.END)


def _count_tokens(samples: Sequence[grpo.GrpoSample]) -> int:
    return sum(len(sample.response) for sample in samples)


def _make_sample(prompt: task.Prompt, reply: dict[str, Any]) -> grpo.GrpoSample:
    token_logprobs = reply["meta_info"]["output_token_logprobs"]
    response = tuple(int(token) for _, token, *_ in token_logprobs)
    if list(response) != list(reply["output_ids"]):
        raise VerlServerError(f"the logprobs of the reply belong to other tokens than its output_ids: {reply}")
    return grpo.GrpoSample(
        prompt, response, tuple(float(lp) for lp, *_ in token_logprobs), task.reward(prompt, response)
    )
