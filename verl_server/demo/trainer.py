"""The training loop of one rank: rollout, advantages, optimizer steps, weight update.

Every rank runs the same program. All ranks receive all rollouts, each rank trains on its own part of the batch, and
FSDP2 averages the gradients.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

from verl_server import Timeouts, VerlEngine
from verl_server.demo.settings import SERVER_ENV, Exam, Ready, Report, Settings, StepMetrics
from verl_server.errors import VerlServerError
from verl_server.tiny import Architecture, make_config
from verl_server.training import (
    entropy_of,
    group_advantages,
    logprobs_of,
    policy_loss,
    response_logits,
    response_logprobs,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# -- Task -------------------------------------------------------------------------------------------
# The task of the demo: sort five digits in ascending order, then stop.
#
# Pure functions over token ids. The vocabulary has twelve tokens: the digits 0 to 9 (each digit is its own id),
# `SORT` at the end of every prompt, and `END`, which the policy must generate to stop. A policy that generates random
# tokens has about one correct position in twenty.

SORT = 10
END = 11
VOCAB_SIZE = 12

DIGITS = 5
PROMPT_LENGTH = DIGITS + 1
MAX_RESPONSE = DIGITS + 2
"""Maximum number of tokens of a response: the correct answer with its `END`, and one more."""

Prompt = tuple[int, ...]


def draw_prompts(rng: random.Random, count: int, *, never: Collection[Prompt] = ()) -> list[Prompt]:
    """`count` random prompts (digits, then `SORT`), none of them in `never`."""
    prompts: list[Prompt] = []
    while len(prompts) < count:
        prompt = (*(rng.randrange(10) for _ in range(DIGITS)), SORT)
        if prompt not in never:
            prompts.append(prompt)
    return prompts


def answer(prompt: Prompt) -> tuple[int, ...]:
    """The only correct response: the prompt's digits in ascending order, then `END`."""
    return (*sorted(prompt[:-1]), END)


def reward(prompt: Prompt, response: Sequence[int]) -> float:
    """Fraction of correct positions, 0 to 1. Missing and additional positions count as wrong."""
    expected = answer(prompt)
    correct = sum(got == token for got, token in zip(response, expected, strict=False))
    return correct / max(len(expected), len(response))


def show(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A prompt and its response as text: `3 1 2 5 5 → 1 2 3 5 5 ■`."""
    names = {SORT: "→", END: "■"}
    return " ".join(names.get(token, str(token)) for token in (*prompt, *response))


# -- Policy -----------------------------------------------------------------------------------------
# The policy: a tiny transformer with random weights, as a checkpoint and as an FSDP2 module of the trainer.

INITIAL_STD = 0.1
"""Standard deviation of the initial weights. The initial policy is close to uniform, so that it explores enough."""


def write_policy(folder: Path, seed: int) -> None:
    """Write the checkpoint of an untrained Qwen3 model with two layers and the vocabulary of the task."""
    from transformers import AutoModelForCausalLM

    config = make_config(Architecture.QWEN3, context_length=64, tie_word_embeddings=True)
    config.vocab_size = VOCAB_SIZE
    config.eos_token_id = config.pad_token_id = None
    config.initializer_range = INITIAL_STD
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def load_sharded(folder: Path, mesh: DeviceMesh) -> Any:
    """Load the checkpoint as a trainable module whose parameters are sharded over `mesh` (FSDP2)."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and DTensors of this rank, one at a time, as `update_weights_from_tensor` expects them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


# -- Samples ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoSample:
    """One prompt and one response of the policy, with its reward."""

    prompt: tuple[int, ...]  # token ids
    response: tuple[int, ...]  # token ids
    logprobs: tuple[float, ...]  # one per response token, from the rollout server
    reward: float  # 0 to 1
    advantage: float = 0.0


def make_batch(samples: Sequence[DemoSample]) -> TensorDict:
    """Samples as tensors with the names of `verl_server.trajectory.to_batch`. All prompts have the same length."""
    width = max(len(sample.response) for sample in samples)
    prompts = torch.tensor([sample.prompt for sample in samples])
    responses = torch.full((len(samples), width), END)
    mask, logprobs = torch.zeros(len(samples), width), torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        length = len(sample.response)
        responses[row, :length], mask[row, :length] = torch.tensor(sample.response), 1.0
        logprobs[row, :length] = torch.tensor(sample.logprobs)
    attention = torch.cat([torch.ones_like(prompts), mask.long()], dim=1)
    fields = {
        "prompts": prompts, "responses": responses, "response_mask": mask, "rollout_log_probs": logprobs,
        "input_ids": torch.cat([prompts, responses], dim=1), "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1, "advantage": torch.tensor([sample.advantage for sample in samples]),
    }  # fmt: skip
    return TensorDict(fields, batch_size=[len(samples)])


def gap_of(logprobs: torch.Tensor, batch: TensorDict) -> tuple[float, float]:
    """Maximum and sum of the absolute differences between trainer and server log probabilities."""
    gap = (logprobs - batch["rollout_log_probs"]).abs() * batch["response_mask"]
    return float(gap.max()), float(gap.sum())


# -- Trainer ----------------------------------------------------------------------------------------

COLLECTIVE_TIMEOUT_S = 120.0
ADVANTAGE_EPS = 1e-4
TIMEOUTS = Timeouts(start_s=300.0, ranks_s=300.0, generation_s=120.0, weights_s=120.0)


def train(rank: int, settings: Settings, workdir: Path, log_dir: Path, report: Callable[[Report], None]) -> None:
    """Run the whole training on one rank. `workdir` is a temporary folder of all ranks; rank 0 calls `report`."""
    started = time.monotonic()
    torch.set_num_threads(1)
    with _process_group(rank, settings.ranks, workdir / "rendezvous") as mesh:
        folder = workdir / "policy"
        if rank == 0:
            write_policy(folder, settings.seed)
        dist.barrier()
        with _engine(mesh, folder, settings, log_dir) as engine:
            trainer = Trainer(rank, settings, engine, load_sharded(folder, mesh))
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
        max_total_tokens=2 * samples * (PROMPT_LENGTH + MAX_RESPONSE),
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
        self._exam_prompts = draw_prompts(self._rng, settings.exam_prompts)

    def step(self, step: int) -> StepMetrics:
        """Run one training step and return its metrics."""
        start = time.monotonic()
        samples, version = self._rollout(step)
        rolled_out = time.monotonic()
        gap_max, gap_mean = self._train(samples, step)
        trained = time.monotonic()
        self.engine.update_weights_from_tensor(named_weights(self.model))
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
            example=show(samples[0].prompt, samples[0].response),
        )

    def exam(self) -> Exam:
        """Test the policy with greedy sampling on prompts that were not used for training."""
        samples, version = self._generate(self._exam_prompts, [{"temperature": 0.0}] * len(self._exam_prompts))
        return Exam(
            reward=fmean(sample.reward for sample in samples),
            solved=fmean(sample.reward == 1.0 for sample in samples),
            questions=len(samples),
            weight_version=version,
            examples=tuple(show(sample.prompt, sample.response) for sample in samples[:3]),
        )

    def _rollout(self, step: int) -> tuple[list[DemoSample], int]:
        """Generate a group of responses for each prompt. Returns samples with advantages, and their weight version."""
        settings = self.settings
        drawn = draw_prompts(self._rng, settings.prompts, never=frozenset(self._exam_prompts))
        prompts = [prompt for prompt in drawn for _ in range(settings.group)]
        params = [{"temperature": 1.0, "sampling_seed": self._rng.getrandbits(31)} for _ in prompts]
        samples, version = self._generate(prompts, params)
        if version != step:
            raise VerlServerError(f"step {step} expected rollouts of weight version {step}, got version {version}")
        rewards, groups = torch.tensor([sample.reward for sample in samples]), torch.arange(len(samples))
        advantages = group_advantages(rewards, groups // settings.group, eps=ADVANTAGE_EPS).tolist()
        return [replace(sample, advantage=a) for sample, a in zip(samples, advantages, strict=True)], version

    def _generate(self, prompts: Sequence[Prompt], params: Sequence[dict[str, Any]]) -> tuple[list[DemoSample], int]:
        """Generate one response per prompt. Returns samples with rewards, and the weight version of all responses."""
        common = {"max_new_tokens": MAX_RESPONSE, "stop_token_ids": [END]}
        replies = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[{**common, **own} for own in params],
            return_logprob=True,
        )
        versions = {reply["meta_info"]["weight_version"] for reply in replies}
        if len(versions) != 1:
            raise VerlServerError(f"one batch was generated with several weight versions: {sorted(versions)}")
        return [_make_sample(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)], versions.pop()

    def _train(self, samples: Sequence[DemoSample], step: int) -> tuple[float, float]:
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
    def _logprob_gap(self, samples: Sequence[DemoSample]) -> tuple[float, float]:
        """Maximum and mean logprob gap of the whole batch, while trainer and server have the same weights."""
        batch = self._make_own_batch(samples)
        largest, total = (torch.tensor(value) for value in gap_of(response_logprobs(self.model, batch), batch))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return float(largest), float(total) / _count_tokens(samples)

    def _update(self, samples: Sequence[DemoSample], entropy_weight: float) -> None:
        """Run one optimizer step on a minibatch; each rank computes its part."""
        settings, batch = self.settings, self._make_own_batch(samples)
        num_tokens, logits = _count_tokens(samples) / settings.ranks, response_logits(self.model, batch)
        logprobs, mask = logprobs_of(logits, batch["responses"]), batch["response_mask"]
        loss = policy_loss(
            logprobs, batch["rollout_log_probs"], batch["advantage"], mask, clip=settings.clip, num_tokens=num_tokens
        )
        loss = loss - entropy_weight * (entropy_of(logits) * mask).sum() / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _make_own_batch(self, samples: Sequence[DemoSample]) -> TensorDict:
        """This rank's part of the samples as tensors."""
        return make_batch(samples[self.rank :: self.settings.ranks])


def _count_tokens(samples: Sequence[DemoSample]) -> int:
    return sum(len(sample.response) for sample in samples)


def _make_sample(prompt: Prompt, reply: dict[str, Any]) -> DemoSample:
    token_logprobs = reply["meta_info"]["output_token_logprobs"]
    response = tuple(int(token) for _, token, *_ in token_logprobs)
    if list(response) != list(reply["output_ids"]):
        raise VerlServerError(f"the logprobs of the reply belong to other tokens than its output_ids: {reply}")
    return DemoSample(prompt, response, tuple(float(lp) for lp, *_ in token_logprobs), reward(prompt, response))
