"""The caches of an SGLang scheduler that depend on its weights, and what keeps each from outliving them.

* Prefixes (radix tree, host memory of HiCache): `flush_cache` empties them, and a request matches only prefixes of the
  namespace of the present weights, see below. A load of a LoRA adapter has an id of its own, which is part of that.
* Embeddings of images, videos and sounds (`mm_schedule.embedding_cache`): nothing but `forget_weights` empties them.
* Tensors that a module of the model keeps in a dictionary, as vision towers do with interpolated position embeddings:
  nothing but `forget_weights` removes them.
* KV stores outside of the process, encoders of other servers, draft models: such servers take no weights
  (`adapter/sglang/pushable.py`).

What SGLang's tokenizer process keeps of images are pixels, which do not depend on weights.

An update that keeps the KV cache (`pause_mode="in_place"` with `flush_cache=False`) leaves prefixes in the cache that
were computed with earlier weights. Running requests need theirs, but no other request may be answered from them. SGLang
matches a prefix only within the same `extra_key`. Therefore each request gets an `extra_key` with the number of the
update before which its prefix is matched: requests that were queued before the update, too. A running request keeps its
key, and adds to the cache under that key what it has computed with both sets of weights.

The hooks run inside each scheduler, which computes nothing while one of the hooked methods runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

_num_updates = 0
"""Number of the weight updates of this process that have begun."""
_dictionaries: list[list[tuple[dict[Any, Any], frozenset[Any]]]] = []
"""Of each module of the model its dictionaries, and the keys that each had before the first request."""


def note_model(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after `Scheduler.init_model_worker`, which has loaded the model and captured its CUDA graphs."""
    watch_modules(scheduler.tp_worker.model_runner.model)


def watch_modules(model: torch.nn.Module) -> None:
    """Take the tensors that modules keep in dictionaries from now on for a cache. The present ones stay: CUDA graphs
    may read them.
    """
    _dictionaries.clear()
    for module in model.modules():
        own = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]
        _dictionaries.append([(value, frozenset(value)) for value in own if isinstance(value, dict)])


def forget_weights(*_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang's methods that change weights, with its own loaders or the loader of this library."""
    global _num_updates
    _num_updates += 1
    for module in ("mm_schedule", "mm_utils"):  # the second in earlier versions of SGLang
        cache = getattr(sys.modules.get(f"sglang.srt.managers.{module}"), "embedding_cache", None)
        if cache is not None:
            cache.clear()
    for dictionaries in _dictionaries:
        added = [(dictionary, dictionary.keys() - kept) for dictionary, kept in dictionaries]
        tensors = {key for dictionary, keys in added for key in keys if isinstance(dictionary[key], torch.Tensor)}
        for dictionary, keys in added:  # a module may count the uses of each tensor in a second dictionary
            for key in keys & tensors:
                del dictionary[key]


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
    # A sender may also write weights into the memory of the server, between the begin and the end of an update.
    sources = ("disk", "distributed", "ipc", "tensor")
    changes = ("end_weight_update", *(f"update_weights_from_{source}" for source in sources))
    return {
        f"{managers}.schedule_batch.Req.init_next_round_input": before_prefix_match,
        f"{managers}.schedule_policy.SchedulePolicy._compute_prefix_matches": before_queue_match,
        **{f"{updater}.{change}": forget_weights for change in changes},
    }
