"""TRL's sampling arguments in SGLang's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json


def sampling_params(args: Any, eos_token_ids: Sequence[int], more: Mapping[str, Any]) -> Json:
    """Sampling parameters of a `GRPOConfig` or an `AsyncGRPOConfig`.

    `eos_token_ids`: tokens that end a completion. `more`: further parameters in SGLang's names, which win.

    Raises BadInputError for arguments that the servers cannot take over.
    """
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
