"""Completions of the servers: the tokens that the policy has sampled, and their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.errors import ServerError
from verl_server.types import Json


@dataclass(frozen=True)
class Completion:
    """One generation for one prompt."""

    token_ids: list[int]
    """Tokens that the policy has sampled, with the token that ended the completion."""
    log_probs: list[float]
    """Log probability of each token under the weights that sampled it, in nats, after the temperature."""
    weight_versions: list[Json]
    """Spans of tokens of one weight version: `version`, `start`, `end` (the first token after the span)."""


def parse_completion(reply: Json) -> Completion:
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


def parse_completions(replies: Sequence[Json]) -> list[Completion]:
    """The completions of the replies to many prompts."""
    return [parse_completion(reply) for reply in replies]
