"""Cases of a server in use: updates while requests run, the prefix cache, released memory."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from verl_server.conformance.cases import Case, Trial
from verl_server.conformance.reference import LOGPROB_LIMIT, PROMPTS, describe_gap, require_gap
from verl_server.conformance.systems import CheckFailedError, Reply, System

RUNNING_TOKENS = 1800
"""Number of tokens of a request that is to run during an update."""
START_S = 0.2
"""Minimum number of seconds from the start of the requests to the update."""
MAX_ATTEMPTS = 4
"""Maximum number of attempts to update while all requests run."""
WARM_UP_TOKENS = 8
"""Number of tokens of generations that show how busy the machine is. The update begins after twice the shortest time:
the first generation of a server takes seconds."""


def _seconds_of_a_generation(system: System) -> float:
    started = time.monotonic()
    system.generate(PROMPTS[0], WARM_UP_TOKENS)
    return time.monotonic() - started


@contextmanager
def running_requests(system: System) -> Iterator[list[Future[Reply]]]:
    """Generations of `PROMPTS` that run at the beginning of the body."""
    start_s = max(START_S, 2 * min(_seconds_of_a_generation(system) for _ in range(3)))
    pool = ThreadPoolExecutor(len(PROMPTS))
    try:
        futures = [pool.submit(system.generate, prompt, RUNNING_TOKENS) for prompt in PROMPTS]
        time.sleep(start_s)
        if any(future.done() for future in futures):
            ended = next(future for future in futures if future.done())
            raise EndedEarlyError(f"a generation of {RUNNING_TOKENS} tokens ended after {start_s:.1f} s: {ended}")
        yield futures
    finally:
        pool.shutdown(wait=False)


class EndedEarlyError(CheckFailedError):
    """A running request has no token of the new weights: the system is wrong, or the request ended too early."""


def update_while_running(pause_mode: str, trial: Trial) -> str:
    """Push weights while three requests run. Once more if a request has ended early, as on a busy machine."""
    for _ in range(MAX_ATTEMPTS - 1):
        with contextlib.suppress(EndedEarlyError):
            return _update_while_running(pause_mode, trial)
    return _update_while_running(pause_mode, trial)


def _update_while_running(pause_mode: str, trial: Trial) -> str:
    """Push weights while three requests run, then check their tokens and those of new requests."""
    old, new = trial.reference.weights(41), trial.reference.weights(42)
    trial.system.update(old)
    with running_requests(trial.system) as futures:
        trial.system.update(new, pause_mode=pause_mode, flush_cache=pause_mode != "in_place")
        gap = trial.reference.require(trial.system, new, "in a request after the update")
        replies = [future.result() for future in futures]
    switches = []
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        old_gaps = trial.reference.token_gaps(old, prompt, reply)
        switch = next((at for at, value in enumerate(old_gaps) if value > LOGPROB_LIMIT), len(old_gaps))
        switches.append(switch)
        _check_end(pause_mode, reply, switch)
        if pause_mode == "retract":  # recomputed with the new weights, so all later tokens are exactly theirs
            later = trial.reference.token_gaps(new, prompt, reply)[switch:]
            if max(later) > LOGPROB_LIMIT:
                raise CheckFailedError(f"tokens after the update differ from both weights by {max(later):.1e}")
    trial.figures["tokens_with_old_weights"] = switches
    return f"{min(switches)} tokens with the old weights; in later requests {describe_gap(gap)}"


def _check_end(pause_mode: str, reply: Reply, switch: int) -> None:
    """Raise CheckFailedError unless a running request ended as its pause mode says."""
    tokens = len(reply.output_ids)
    if switch == 0:
        raise CheckFailedError("a running request has no token that the old weights generate")
    if reply.finish_reason == "length" and switch == tokens == RUNNING_TOKENS:
        raise EndedEarlyError("a running request generated all its tokens with the old weights")
    if pause_mode == "abort":
        if reply.finish_reason != "abort" or not 0 < tokens < RUNNING_TOKENS or switch != tokens:
            raise CheckFailedError(
                f"an aborted request ended with {reply.finish_reason!r} and {tokens} tokens, {switch} of old weights"
            )
    elif reply.finish_reason != "length" or tokens != RUNNING_TOKENS:
        raise CheckFailedError(f"a running request ended with {reply.finish_reason!r} and {tokens} tokens")


def _case(pause_mode: str, claim: str, *issues: str) -> Case:
    name = f"running-{pause_mode.replace('_', '-')}"
    return Case(name, claim, issues, functools.partial(update_while_running, pause_mode))


RUNNING_CASES = (
    _case(
        "retract",
        "Requests that are retracted for an update continue with all tokens, each of the old or of the new weights.",
        "https://github.com/sgl-project/sglang/issues/33783",
        "https://github.com/verl-project/verl/issues/7990",
    ),
    _case(
        "in_place",
        "An update during a pause in place returns, running requests continue, new requests use the new weights.",
        "https://github.com/sgl-project/sglang/pull/29670",
        "https://github.com/verl-project/verl/pull/7846",
        "https://github.com/NVIDIA-NeMo/RL/issues/2180",
    ),
    _case(
        "abort",
        "Requests that are aborted for an update return the tokens of the old weights and the reason `abort`.",
        "https://github.com/sgl-project/sglang/issues/12099",
    ),
)


# -- Prefix cache -----------------------------------------------------------------------------------
# Cases of the prefix cache: no request is answered with KV cache of earlier weights.

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


PREFIX_CACHE_CASES = (
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


# -- Memory -----------------------------------------------------------------------------------------
# The case of released memory: sleep, wake, and updates afterwards.

#: On a GPU, SGLang releases memory only if the server was started with this argument.
SERVER_ARGS = {"enable_memory_saver": True} if torch.accelerator.is_available() else {}


def updates_after_sleep(trial: Trial) -> str:
    """Release and resume all memory before each of three updates."""
    gaps: list[float] = []
    for seed in (71, 72, 73):
        weights = trial.reference.weights(seed)
        trial.system.release_memory()
        trial.system.resume_memory()
        trial.system.update(weights)
        gaps.append(trial.reference.require(trial.system, weights, f"after sleep and update {len(gaps) + 1}"))
    return describe_gap(max(gaps))


MEMORY_CASES = (
    Case(
        "sleep-and-update",
        "Generation is right after each of three updates that follow a release of all memory.",
        ("https://github.com/verl-project/verl/issues/7904", "https://github.com/sgl-project/sglang/issues/15246"),
        updates_after_sleep,
        server_args=SERVER_ARGS,
    ),
)
