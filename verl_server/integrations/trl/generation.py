"""What a `GRPOTrainer` uses of its inference engine: pushes of the weights, and generations for the prompts of a rank.

The methods `sync_weights` and `generate` are those of TRL's `VLLMGeneration`, so that TRL can use an object of this
class where it uses vLLM: in its loop of tool calls, and before it calls a `rollout_func`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import UnsupportedError
from verl_server.integrations.trl.completions import Completion, parse_completions
from verl_server.integrations.trl.mesh import require_one_gpu
from verl_server.integrations.trl.policy_weights import named_weights, require_mergeable, require_pushable
from verl_server.integrations.trl.sampling import fit_into_context, sampling_params
from verl_server.integrations.trl.servers import RolloutServers
from verl_server.types import Json, WeightUpdateResult

SEED_BITS = 31
RankPrompts = tuple[list[list[int]], int | None]
"""The prompts of a rank, and the `RolloutServers.max_tokens` of this rank."""


class ServerGeneration:
    """The servers of one `GRPOTrainer`. All trainer ranks make the same calls in the same order."""

    def __init__(self, trainer: Any, servers: RolloutServers, more_params: Mapping[str, Any], seed: int | None) -> None:
        """`more_params`: sampling parameters besides TRL's. `seed`: seed of the sampling seeds. None: no seeds.

        Raises UnsupportedError or BadInputError for a trainer that the servers cannot work for.
        """
        require_one_gpu(trainer.args)
        require_pushable(trainer.accelerator)
        require_mergeable(trainer.accelerator.unwrap_model(trainer.model))
        if trainer.tools and servers.mesh.size() > 1:
            raise UnsupportedError(
                "TRL's tools= and environment_factory= work with one trainer rank: the ranks would generate different "
                "numbers of turns, and all ranks must call the servers together"
            )
        self._trainer, self._servers = trainer, servers
        self._params = sampling_params(trainer.args, trainer.eos_token_ids, more_params)
        self._seeds = None if seed is None else random.Random(seed)
        self._max_tokens = servers.max_tokens
        self.last_update: WeightUpdateResult | None = None
        """Result of the last push."""

    def sync_weights(self) -> None:
        """Push the weights of the trainer's model into all servers."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self.last_update = self._servers.engine.update_weights_from_tensor(named_weights(model))

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """One completion for each prompt of this rank. Prompts are lists of token ids.

        Raises BadInputError on all ranks for a prompt that leaves no room in the context of the servers.
        """
        gathered = self._gather(([list(prompt) for prompt in prompts], self._max_tokens))
        every_rank, max_tokens = [of_rank for of_rank, _ in gathered], gathered[0][1]
        rank = self._servers.mesh.get_local_rank()
        all_prompts = [prompt for of_rank in every_rank for prompt in of_rank]
        if not all_prompts:
            return []
        replies = self._servers.engine.generate(
            input_ids=all_prompts,
            sampling_params=[self._params_of_prompt(len(prompt), max_tokens) for prompt in all_prompts],
            return_logprob=True,
        )
        start = sum(len(of_rank) for of_rank in every_rank[:rank])
        return parse_completions(replies[start : start + len(prompts)])

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Completions as TRL's `VLLMGeneration.generate` returns them.

        A prompt of a group of `num_generations` is already repeated in `prompts`. Raises UnsupportedError for images.
        """
        if images is not None:
            raise no_images()
        completions = self.complete(prompts)
        log_probs = [[[log_prob] for log_prob in completion.log_probs] for completion in completions]
        return prompts, [completion.token_ids for completion in completions], log_probs, None

    def _params_of_prompt(self, num_tokens: int, max_tokens: int | None) -> Json:
        params = fit_into_context(self._params, num_tokens, max_tokens)
        if self._seeds is None:
            return params
        return {**params, "sampling_seed": self._seeds.getrandbits(SEED_BITS)}

    def _gather(self, value: RankPrompts) -> list[RankPrompts]:
        """The values of all ranks, on all ranks."""
        import torch.distributed as dist

        mesh = self._servers.mesh
        every_rank: list[Any] = [None] * mesh.size()
        dist.all_gather_object(every_rank, value, group=mesh.get_group())
        return every_rank


def no_images() -> UnsupportedError:
    """The error of prompts with images."""
    return UnsupportedError(
        "images in prompts are not supported with TRL: verl_server.agent takes them, see docs/agents.md"
    )
