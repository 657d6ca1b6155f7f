"""TRL's sampling arguments in SGLang's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json

FIXED_PARAMS = {
    "temperature": "set temperature in the trainer's arguments: its loss uses the same number",
    "max_new_tokens": "set max_completion_length in the trainer's arguments",
    "n": "set num_generations in the trainer's arguments",
    "sampling_seed": "pass seed=, from which each completion gets a seed of its own",
}
"""Sampling parameters that belong to the trainer, and what to write instead."""


def require_free_params(params: Mapping[str, Any]) -> None:
    """Raise BadInputError for `sampling_params` of the user that have a name in `FIXED_PARAMS`."""
    for name, cure in FIXED_PARAMS.items():
        if name in params:
            raise BadInputError(f"sampling_params must not have {name}: {cure}", argument="sampling_params")


def sampling_params(args: Any, eos_token_ids: Sequence[int], more: Mapping[str, Any]) -> Json:
    """Sampling parameters of a `GRPOConfig` or an `AsyncGRPOConfig`.

    `eos_token_ids`: tokens that end a completion. `more`: further parameters in SGLang's names, which win.

    Raises BadInputError for arguments that the servers cannot take over, and for names in `FIXED_PARAMS`.
    """
    require_free_params(more)
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
