"""Cases of the prefix cache: no request is answered with KV cache of earlier weights."""

from __future__ import annotations

import functools

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.reference import describe_gap, require_gap

PROMPT = [1 + 7 * i % 249 for i in range(200)]
"""A long prompt, of which nearly all tokens can come from the cache."""


def same_prompt_after_updates(pause_mode: str | None, flush_cache: bool, trial: Trial) -> str:
    """The same prompt twice after each of three updates."""
    gaps, cached = [], []
    for seed in (51, 52, 53):
        weights = trial.reference.weights(seed)
        trial.system.update(weights, pause_mode=pause_mode, flush_cache=flush_cache)
        for number in (1, 2):
            reply = trial.system.generate(PROMPT, 4)
            gap = trial.reference.gap(weights, PROMPT, reply)
            when = f"in generation {number} after the update, with {reply.cached_tokens} cached tokens"
            gaps.append(require_gap(gap, when))
        cached.append(reply.cached_tokens)
    if min(cached) < len(PROMPT) // 2:
        raise CheckFailedError(f"the prefix cache does not work: {cached} cached tokens of a repeated prompt")
    return f"{min(cached)} cached tokens, {describe_gap(max(gaps))}"


CASES = (
    Case(
        "prefix-cache-flushed",
        "After an update that empties the prefix cache, a known prompt is computed with the new weights.",
        ("https://github.com/InternLM/lmdeploy/issues/4917", "https://github.com/RLinf/RLinf/pull/96"),
        functools.partial(same_prompt_after_updates, None, True),
    ),
    Case(
        "prefix-cache-kept",
        "After an update in place that keeps the prefix cache, new requests do not use KV cache of the old weights.",
        ("https://github.com/radixark/miles/pull/2782", "https://github.com/radixark/miles/pull/2783"),
        functools.partial(same_prompt_after_updates, "in_place", False),
    ),
)
