"""Log probabilities, finish reasons and weight versions of a generation as vLLM returns them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from verl_server.router.resumable_generation import version_spans
from verl_server.types import Json

NO_LOGPROB = -9999.0
"""What vLLM sends for a log probability of minus infinity."""


def finish_of(reply: Json, stop_token_ids: Collection[int]) -> tuple[str, int | str | None]:
    """vLLM's `finish_reason` and `stop_reason`: the stop string or the token of `stop_token_ids` that has matched."""
    reason = reply["meta_info"].get("finish_reason") or {}
    matched = reason.get("matched")
    has_stopped = isinstance(matched, str) or (isinstance(matched, int) and matched in stop_token_ids)
    return str(reason.get("type") or "stop"), matched if has_stopped else None


def weight_spans(reply: Json) -> list[Json]:
    """The weight version of each part of the output. vLLM's versions are strings."""
    spans = [span for span in version_spans(reply) if span["end"] > span["start"]]
    return [{"version": str(span["version"]), "start": span["start"], "end": span["end"]} for span in spans]


def usage_of(replies: Sequence[Json]) -> Json:
    """The numbers of tokens of one prompt and all of its samples. Replicas of vLLM do not tell the cached ones."""
    prompt_tokens = int(replies[0]["meta_info"].get("prompt_tokens") or 0)
    output_tokens = sum(len(reply["output_ids"]) for reply in replies)
    cached = int(replies[0]["meta_info"].get("cached_tokens") or 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
    }


def output_logprobs(reply: Json, count: int) -> list[Json]:
    """One entry for each output token: the sampled token with its `count` most probable tokens, at least itself.

    The sampled token is the first of them. Each token has both of its names: the number `token_id`, which vLLM 0.32
    returns, and `token` in the form `token_id:N`, which the client `renderers` 0.1.12 requires.
    """
    meta = reply["meta_info"]
    sampled, tops = meta.get("output_token_logprobs") or (), meta.get("output_top_logprobs") or ()
    entries = list[Json]()
    for position, (logprob, token_id, *_) in enumerate(sampled):
        top = (tops[position] if position < len(tops) else None) or ()
        candidates = _candidates(logprob, token_id, top)
        entries.append({**candidates[0], "top_logprobs": candidates[: max(count, 1)]})
    return entries


def prompt_logprobs(reply: Json, count: int) -> list[Any]:
    """One entry for each token of the prompt: log probabilities by token id, that of the prompt's token first.

    None for the first token, which nothing precedes.
    """
    meta = reply["meta_info"]
    tokens, tops = meta.get("input_token_logprobs") or (), meta.get("input_top_logprobs") or ()
    entries = list[Any]()
    for position, (logprob, token_id, *_) in enumerate(tokens):
        if logprob is None:
            entries.append(None)
            continue
        top = (tops[position] if position < len(tops) else None) or ()
        kept = _candidates(logprob, token_id, top[:count])
        entries.append({
            str(each["token_id"]): {"logprob": each["logprob"], "rank": each["rank"], "decoded_token": None}
            for each in kept
        })  # fmt: skip
    return entries


def _candidates(logprob: float, token_id: int, top: Sequence[Any]) -> list[Json]:
    """The token itself and then the most probable other tokens. The rank is None for a token that is not among them."""
    ranks = {each[1]: rank for rank, each in enumerate(top, start=1)}
    own = _candidate(logprob, token_id, ranks.get(token_id))
    return [own, *(_candidate(each[0], each[1], ranks[each[1]]) for each in top if each[1] != token_id)]


def _candidate(logprob: float, token_id: int, rank: int | None) -> Json:
    value = NO_LOGPROB if logprob is None else max(float(logprob), NO_LOGPROB)
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value, "rank": rank}
