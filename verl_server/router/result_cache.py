"""`ResultCache`: finished and aborted generations, for callers that send the same request id again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from verl_server.router.resumable_generation import INPUT_LOGPROB_LISTS, LOGPROB_LISTS, ResumableGeneration
from verl_server.types import Json

FIXED_BYTES = 4096
"""Estimated size of a request and its reply without tokens, log probabilities and texts."""
TOKEN_BYTES = 36
"""Size of one token id in a Python list: a pointer (8) and an integer object (28)."""
LOGPROB_BYTES = 150
"""Size of one log probability as SGLang returns it, the list `[logprob, token_id, text]`: a pointer (8), the list (88),
a float (24) and an integer (28), rounded up."""
ENTRY_BYTES = 32
"""Size of one entry of another list or of a dict: a pointer (8) and a float (24)."""
MAX_UNFINISHED_BYTES = 8 << 30
"""Maximum size of all aborted generations in bytes: about 10,000 generations of 4,600 tokens with log probabilities.
This many may run when an update aborts all of them. Those that no call repeats are removed when further ones come."""


_COUNTED = frozenset({"input_ids", "output_ids", "meta_info", *LOGPROB_LISTS, *INPUT_LOGPROB_LISTS})
"""Fields of a request, a reply and its `meta_info` that `estimate_bytes` measures in a way of their own."""


class ResultCache:
    """Generations by request id: finished ones, and those that the server aborted, which a repeated call continues.

    The oldest finished generations are removed when their estimated size exceeds `max_bytes`. The tokens of an aborted
    generation were returned to a caller and must not be sampled again. So finished generations never replace aborted
    ones, of which the oldest are removed when their estimated size exceeds MAX_UNFINISHED_BYTES.
    """

    def __init__(self, max_bytes: int) -> None:
        self._finished, self._unfinished = _BoundedGenerations(max_bytes), _BoundedGenerations(MAX_UNFINISHED_BYTES)

    @property
    def max_bytes(self) -> int:
        """Maximum of `size_bytes`."""
        return self._finished.max_bytes

    @property
    def size_bytes(self) -> int:
        """Estimated size of all finished generations in bytes (see `estimate_bytes`)."""
        return self._finished.size_bytes

    def __len__(self) -> int:
        """Number of finished generations."""
        return len(self._finished.by_rid)

    def add(self, rid: str, generation: ResumableGeneration) -> None:
        """Store a generation. A generation that is larger than all that may be stored is not stored."""
        self.remove(rid)
        (self._finished if generation.is_finished else self._unfinished).add(rid, generation)

    def get(self, rid: str) -> ResumableGeneration | None:
        """The generation with this request id. None when it is unknown or was removed."""
        found = self._finished.by_rid.get(rid) or self._unfinished.by_rid.get(rid)
        return None if found is None else found[0]

    def remove(self, rid: str) -> None:
        """Remove a generation if it is stored."""
        self._finished.remove(rid)
        self._unfinished.remove(rid)


class _BoundedGenerations:
    """Generations with their estimated sizes. The oldest are removed when the sum of the sizes exceeds `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.size_bytes = max_bytes, 0
        self.by_rid: OrderedDict[str, tuple[ResumableGeneration, int]] = OrderedDict()

    def add(self, rid: str, generation: ResumableGeneration) -> None:
        size_bytes = estimate_bytes(generation.request, generation.reply())
        if size_bytes > self.max_bytes:
            return
        self.by_rid[rid] = generation, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            self.remove(next(iter(self.by_rid)))

    def remove(self, rid: str) -> None:
        _, size_bytes = self.by_rid.pop(rid, (None, 0))
        self.size_bytes -= size_bytes


def estimate_bytes(request: Mapping[str, Any], reply: Json) -> int:
    """Estimated memory in bytes of a request and its reply.

    The estimate is FIXED_BYTES, plus TOKEN_BYTES for each prompt and output token, plus LOGPROB_BYTES for each log
    probability, plus the length of all texts (prompt, images as text, output), plus ENTRY_BYTES for each entry of other
    lists and dicts (hidden states, embeddings). Measuring every Python object exactly would take milliseconds for a
    long reply.
    """
    meta = reply["meta_info"]
    tokens = len(request.get("input_ids") or ()) + len(reply["output_ids"])
    logprobs = sum(_count_logprobs(meta.get(name)) for name in (*LOGPROB_LISTS, *INPUT_LOGPROB_LISTS))
    others = [value for part in (request, reply, meta) for name, value in part.items() if name not in _COUNTED]
    return FIXED_BYTES + TOKEN_BYTES * tokens + LOGPROB_BYTES * logprobs + sum(map(_estimate_value_bytes, others))


def _count_logprobs(entries: Any) -> int:
    """Number of log probabilities. Lists of top log probabilities have a list of entries for each token."""
    first = next((entry for entry in entries or () if entry), None)
    if first is not None and isinstance(first[0], (list, tuple)):
        return sum(len(entry or ()) for entry in entries)
    return len(entries or ())


def _estimate_value_bytes(value: Any) -> int:
    """Estimated memory in bytes of a JSON value: its texts, and ENTRY_BYTES for each entry of its lists and dicts."""
    size_bytes, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            size_bytes += len(item)
        elif isinstance(item, dict):
            size_bytes += ENTRY_BYTES * len(item)
            pending.extend((*item.keys(), *item.values()))
        elif isinstance(item, (list, tuple)):
            size_bytes += ENTRY_BYTES * len(item)
            if item and not isinstance(item[0], (int, float)):  # a list of numbers has nothing else to measure
                pending.extend(item)
    return size_bytes
