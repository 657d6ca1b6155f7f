"""A namespace of SGLang's prefix cache for each set of weights. Runs inside each SGLang scheduler.

An update that keeps the KV cache (`pause_mode="in_place"` with `flush_cache=False`) leaves prefixes in the cache that
were computed with earlier weights. Running requests need theirs, but no other request may be answered from them. SGLang
matches a prefix only within the same `extra_key`. Therefore each request gets an `extra_key` with the number of the
update before which its prefix is matched: requests that were queued before the update, too. A running request keeps its
key, and adds to the cache under that key what it has computed with both sets of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_num_updates = 0
"""Number of the weight updates of this process that have begun."""


def begin_update(*_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang's methods that change weights, with its own loaders or the loader of this library."""
    global _num_updates
    _num_updates += 1


def enter_namespace(request: Any) -> None:
    """Set the `extra_key` of a request (SGLang's `Req`) to that of the present weights.

    The caller's own key stays at the end, because SGLang reads the id of a LoRA adapter there.
    """
    if _num_updates == 0:
        return
    if not hasattr(request, "verl_server_extra_key"):
        request.verl_server_extra_key = request.extra_key
    request.extra_key = f"weights {_num_updates}|{request.verl_server_extra_key or ''}"


def before_prefix_match(request: Any, tree_cache: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Hook before `Req.init_next_round_input`, which matches the prefix of a request if it gets the cache."""
    if tree_cache is not None:
        enter_namespace(request)


def before_queue_match(_policy: Any, waiting_queue: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
    """Hook before `SchedulePolicy._compute_prefix_matches`, which matches the prefixes of all queued requests."""
    for request in waiting_queue:
        enter_namespace(request)


def hooks() -> dict[str, Callable[..., None]]:
    """The functions of SGLang before which the hooks are called, by path."""
    managers = "sglang.srt.managers"
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    sources = ("disk", "distributed", "ipc", "tensor")
    return {
        f"{managers}.schedule_batch.Req.init_next_round_input": before_prefix_match,
        f"{managers}.schedule_policy.SchedulePolicy._compute_prefix_matches": before_queue_match,
        **{f"{updater}.update_weights_from_{source}": begin_update for source in sources},
    }
