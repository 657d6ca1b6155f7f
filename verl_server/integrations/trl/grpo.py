"""`FleetRolloutFunc` of a `GRPOTrainer`, and the sampling arguments, completions and texts of both trainers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, ServerError, UnsupportedError
from verl_server.integrations.trl.servers import RolloutServers, require_one_gpu, require_trl
from verl_server.integrations.trl.weights import named_weights, require_mergeable, require_pushable
from verl_server.types import Json, WeightUpdateResult
from verl_server.validation import check_arguments

# -- Sampling ---------------------------------------------------------------------------------------
# TRL's sampling arguments in SGLang's names.

FIXED_PARAMS = {
    "temperature": "set temperature in the trainer's arguments: its loss uses the same number",
    "max_new_tokens": "set max_completion_length in the trainer's arguments",
    "n": "set num_generations in the trainer's arguments",
    "sampling_seed": "pass seed=, from which each completion gets a seed of its own",
}
"""Sampling parameters that belong to the trainer, and what to write instead."""


def trainer_params(args: Any, eos_token_ids: Sequence[int], more: Mapping[str, Any]) -> Json:
    """Sampling parameters of a `GRPOConfig` or an `AsyncGRPOConfig`.

    `eos_token_ids`: tokens that end a completion. `more`: further parameters in SGLang's names, which win.

    Raises BadInputError for arguments that the servers cannot take over, and for names in `FIXED_PARAMS`.
    """
    for name, cure in FIXED_PARAMS.items():
        if name in more:
            raise BadInputError(f"sampling_params must not have {name}: {cure}", argument="sampling_params")
    if getattr(args, "generation_kwargs", None):
        raise BadInputError(
            f"generation_kwargs={args.generation_kwargs!r} has the names of transformers or vLLM: pass these "
            "parameters in SGLang's names as sampling_params=, and leave generation_kwargs out"
        )
    params: Json = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,  # TRL writes 0 for no limit, and SGLang -1
        "stop_token_ids": list(eos_token_ids),
    }
    if args.min_p is not None:
        params["min_p"] = args.min_p
    if args.repetition_penalty != 1.0:
        params["repetition_penalty"] = args.repetition_penalty
    return {**params, **more}


def fit_into_context(params: Json, num_prompt_tokens: int, max_tokens: int | None) -> Json:
    """The parameters for a prompt, with the new tokens that the prompt leaves room for.

    `max_tokens`: maximum number of tokens of a prompt with its completion. None: not known, so that nothing changes.
    Raises BadInputError for a prompt that leaves no room.
    """
    if max_tokens is None:
        return params
    room = max_tokens - num_prompt_tokens
    if room < 1:
        raise BadInputError(
            f"a prompt has {num_prompt_tokens} tokens, with earlier turns and results of tools, and the servers take "
            f"{max_tokens} tokens of prompt and completion: start_servers(context_length=...) must be larger, or leave "
            "out rows with long prompts"
        )
    return {**params, "max_new_tokens": min(params["max_new_tokens"], room)}


# -- Completions ------------------------------------------------------------------------------------
# Completions of the servers: the tokens that the policy has sampled, and their log probabilities.


@dataclass(frozen=True)
class Completion:
    """One generation for one prompt."""

    token_ids: list[int]
    """Tokens that the policy has sampled, with the token that ended the completion."""
    log_probs: list[float]
    """Log probability of each token under the weights that sampled it, in nats, after the temperature."""
    weight_versions: list[Json]
    """Spans of tokens of one weight version: `version`, `start`, `end` (the first token after the span)."""


def parse_completion(reply: Mapping[str, Any]) -> Completion:
    """The completion of a server's reply. Raises ServerError for a reply without tokens, and if its log
    probabilities belong to other tokens.
    """
    meta, token_ids = reply["meta_info"], list(reply["output_ids"])
    if not token_ids:
        raise ServerError(
            f"a server has returned a completion without tokens (finish_reason: {meta.get('finish_reason')!r}): TRL "
            "cannot train on it. Read the log of the server"
        )
    entries = meta["output_token_logprobs"]
    if [token for _, token, *_ in entries] != token_ids:
        raise ServerError("the log probabilities of a reply belong to other tokens than its output_ids")
    whole = [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
    return Completion(token_ids, [float(log_prob) for log_prob, *_ in entries], meta.get("weight_versions") or whole)


# -- Texts ------------------------------------------------------------------------------------------
# Prompts as token ids, and completions as TRL's reward functions get them.

Messages = list[dict[str, Any]]


def prompt_token_ids(tokenizer: Any, prompt: str | Messages, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of a text, or of messages rendered by the chat template with `template_kwargs`."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template_kwargs)
    return list(ids)


def completion_value(
    tokenizer: Any, prompt: str | Messages, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> str | Messages:
    """A completion for reward functions: a text for a prompt that is a text, otherwise a list of one message.

    A tokenizer with a response template or schema splits the message into its thoughts and its content.
    """
    if isinstance(prompt, str):
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))
    names = ("response_template", "response_schema")
    if any(getattr(tokenizer, name, None) is not None for name in names):
        from trl.chat_template_utils import parse_response

        return [parse_response(tokenizer, list(token_ids), prefix=list(prompt_ids), tools=None)]
    return [{"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)}]


# -- Rollout func -----------------------------------------------------------------------------------

SEED_BITS = 31
RankPrompts = tuple[list[list[int]], int | None]
"""The prompts of a rank, and the `RolloutServers.max_tokens` of this rank."""


class FleetRolloutFunc:
    """Pushes the weights of a `GRPOTrainer` into the servers after each training step, and generates there.

    Pass it as `GRPOTrainer(rollout_func=...)` and leave `use_vllm` out. The tokens that the policy has sampled are
    trained as they are: no text is tokenized again. With `GRPOConfig(vllm_importance_sampling_correction=True)`, which
    is TRL's default, TRL corrects its loss by the log probabilities of the servers and logs their differences to those
    of its own model as `sampling/sampling_logp_difference/max`, as it does with vLLM. Reward functions get
    `weight_versions`: a list of spans with `version`, `start` and `end` for each completion.

    One object serves one trainer. All trainer ranks make the same calls in the same order. The methods `sync_weights`
    and `generate` are those of TRL's `VLLMGeneration`, so TRL can use the object where it uses vLLM: in its loop of
    tool calls, and before it calls a `rollout_func`.
    """

    @check_arguments(skip=("servers",))
    def __init__(
        self, servers: RolloutServers, *, sampling_params: Mapping[str, Any] | None = None, seed: int | None = None
    ) -> None:
        """`sampling_params`: further parameters in SGLang's names. They win over those of the `GRPOConfig`.

        `seed`: seed of the sampling of the servers. None: other completions in each run.

        Raises UnsupportedError for another version of TRL, BadInputError.
        """
        require_trl()
        self._servers, self._more_params = servers, dict(sampling_params or {})
        self._params: Json = {}
        self._seeds = None if seed is None else random.Random(seed)
        self._trainer: Any = None
        self.last_update: WeightUpdateResult | None = None
        """Result of the last push."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One completion for each prompt. TRL calls it on every trainer rank with the prompts of the rank.

        Raises UnsupportedError or BadInputError for what the servers cannot do for this trainer, PeerError,
        ServerDiedError, TornWeightsError.
        """
        if self._trainer is not None and trainer is not self._trainer:
            raise BadInputError("this FleetRolloutFunc belongs to another trainer: make one for each trainer")
        if getattr(trainer, "vllm_generation", None) is not self:
            self._attach(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        completions = self._complete(prompt_ids, images)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.log_probs for completion in completions],
            "weight_versions": [completion.weight_versions for completion in completions],
        }

    def _attach(self, trainer: Any) -> None:
        """Let the trainer use the servers where it uses vLLM, and push its present weights.

        From now on, TRL itself calls `sync_weights` before it calls this object in a new training step. Raises
        UnsupportedError or BadInputError for a trainer that the servers cannot work for.
        """
        if trainer.args.use_vllm:
            raise BadInputError("use_vllm=True starts or needs vLLM of TRL: leave use_vllm out of the GRPOConfig")
        require_one_gpu(trainer.args)
        model = trainer.accelerator.unwrap_model(trainer.model)
        require_pushable(trainer.accelerator, model)
        require_mergeable(model)
        if trainer.tools and self._servers.mesh.size() > 1:
            raise UnsupportedError(
                "TRL's tools= and environment_factory= work with one trainer rank: the ranks would generate different "
                "numbers of turns, and all ranks must call the servers together"
            )
        self._params = trainer_params(trainer.args, trainer.eos_token_ids, self._more_params)
        self._trainer = trainer
        self.sync_weights()
        trainer.vllm_generation, trainer._last_loaded_step = self, trainer.state.global_step
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.add_callback(_push_after_training(trainer))

    def sync_weights(self) -> None:
        """Push the weights of the trainer's model into all servers."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self.last_update = self._servers.engine.update_weights_from_tensor(named_weights(model))

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Completions as TRL's `VLLMGeneration.generate` returns them.

        A prompt of a group of `num_generations` is already repeated in `prompts`. Raises UnsupportedError for images.
        """
        completions = self._complete(prompts, images)
        log_probs = [[[log_prob] for log_prob in completion.log_probs] for completion in completions]
        return prompts, [completion.token_ids for completion in completions], log_probs, None

    def _complete(self, prompts: Sequence[Sequence[int]], images: Any) -> list[Completion]:
        """One completion for each prompt of this rank. Prompts are lists of token ids.

        Raises UnsupportedError for images, and BadInputError on all ranks for a prompt that leaves no room in the
        context of the servers.
        """
        if images is not None:
            raise UnsupportedError(
                "images in prompts are not supported with TRL: verl_server.agent takes them, see docs/agents.md"
            )
        gathered = self._gather(([list(prompt) for prompt in prompts], self._servers.max_tokens))
        every_rank, max_tokens = [of_rank for of_rank, _ in gathered], gathered[0][1]
        all_prompts = [prompt for of_rank in every_rank for prompt in of_rank]
        if not all_prompts:
            return []
        replies = self._servers.engine.generate(
            input_ids=all_prompts,
            sampling_params=[self._params_of_prompt(len(prompt), max_tokens) for prompt in all_prompts],
            return_logprob=True,
        )
        start = sum(len(of_rank) for of_rank in every_rank[: self._servers.mesh.get_local_rank()])
        return [parse_completion(reply) for reply in replies[start : start + len(prompts)]]

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


def _push_after_training(trainer: Any) -> Any:
    """A callback of the trainer: the first generation after the end of a training pushes the weights.

    TRL compares the number of the step with that of the last push. The numbers can be equal although the weights
    differ: a second `train()` begins at step 0 again, and `load_best_model_at_end` loads other weights.
    """
    from transformers import TrainerCallback

    class PushAfterTraining(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            trainer._last_loaded_step = -1

    return PushAfterTraining()
