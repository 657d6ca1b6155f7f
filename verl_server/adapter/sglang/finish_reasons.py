"""Finish reasons of aborted generations. Pure functions.

SGLang runs one more step for a request that it aborts, and the abort hides what that step has found: an end token, or
the maximum number of tokens. Such a generation is finished. To continue it would add tokens after its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_server.types import Json

DEFAULT_MAX_NEW_TOKENS = 128
"""`max_new_tokens` of SGLang for a request without it. None means no limit: the output may fill the context."""


ADDITIONAL_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens with which SGLang ends a generation if the tokenizer has added them."""


def find_tokenizer_end_tokens(tokenizer_config: Mapping[str, Any]) -> frozenset[int]:
    """The ids of the end tokens that `tokenizer_config.json` names. They may differ from those of the model."""
    token = tokenizer_config.get("eos_token")
    names = {token.get("content") if isinstance(token, dict) else token, *ADDITIONAL_END_TOKENS}
    added = tokenizer_config.get("added_tokens_decoder") or {}
    return frozenset(int(token_id) for token_id, item in added.items() if item.get("content") in names)


def find_end_tokens(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The ids of the end tokens that `config.json` and `generation_config.json` of a model name."""
    found: set[int] = set()
    for config in configs:
        for part in (config, config.get("text_config") or {}):
            value = part.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def correct_aborts(replies: Sequence[Json], sampling_params: Any, end_tokens: Collection[int]) -> None:
    """Give each reply that was aborted at its end the finish reason `stop` or `length`.

    `sampling_params` as they were sent: a dict, or a list with one dict for each prompt. Such a list with several
    samples for each prompt is left out.
    """
    if isinstance(sampling_params, list) and len(sampling_params) != len(replies):
        return
    for number, reply in enumerate(replies):
        params = sampling_params[number] if isinstance(sampling_params, list) else sampling_params
        reason = _reason_at_end(reply, params or {}, end_tokens)
        if reason is not None:
            reply["meta_info"]["finish_reason"] = reason


def _reason_at_end(reply: Json, params: Mapping[str, Any], end_tokens: Collection[int]) -> Json | None:
    reason, output_ids = reply["meta_info"].get("finish_reason") or {}, reply.get("output_ids")
    if reason.get("type") != "abort" or reason.get("status_code") or not output_ids:
        return None
    last, limit = output_ids[-1], params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    may_stop = not params.get("ignore_eos") and len(output_ids) >= (params.get("min_new_tokens") or 0)
    if may_stop and (last in end_tokens or last in (params.get("stop_token_ids") or ())):
        return {"type": "stop", "matched": last}
    if limit is not None and len(output_ids) >= limit:
        return {"type": "length", "length": limit}
    return None
