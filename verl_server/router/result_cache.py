"""`ResultCache`: the results of finished generations, for callers that send the same request id again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from verl_server.router.resumable_generation import LOGPROB_LISTS, ResumableGeneration
from verl_server.types import Json

FIXED_BYTES = 4096
"""Estimated size of a request and its reply without tokens, log probabilities and texts."""
TOKEN_BYTES = 36
"""Size of one token id in a Python list: a pointer (8) and an integer object (28)."""
LOGPROB_BYTES = 150
"""Size of one log probability as SGLang returns it, the list `[logprob, token_id, text]`: a pointer (8), the list (88),
a float (24) and an integer (28), rounded up."""
INPUT_LOGPROB_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


class ResultCache:
    """Finished generations by request id. The oldest are removed when the estimated size exceeds `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        """Estimated size of all stored results in bytes (see `estimate_bytes`)."""
        self._results: OrderedDict[str, tuple[ResumableGeneration, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, rid: str, generation: ResumableGeneration) -> None:
        """Store a finished generation. A result that is larger than the whole cache is not stored."""
        self.remove(rid)
        size_bytes = estimate_bytes(generation.request, generation.reply())
        if size_bytes > self.max_bytes:
            return
        self._results[rid] = generation, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            self.remove(next(iter(self._results)))

    def get(self, rid: str) -> ResumableGeneration | None:
        """The generation with this request id. None when it is unknown or was removed."""
        found = self._results.get(rid)
        return None if found is None else found[0]

    def remove(self, rid: str) -> None:
        """Remove a generation if it is stored."""
        _, size_bytes = self._results.pop(rid, (None, 0))
        self.size_bytes -= size_bytes


def estimate_bytes(request: Mapping[str, Any], reply: Json) -> int:
    """Estimated memory in bytes of a request and its reply.

    The estimate is FIXED_BYTES, plus TOKEN_BYTES for each prompt and output token, plus LOGPROB_BYTES for each log
    probability, plus the length of all texts (prompt, images as text, output). Measuring every Python object exactly
    would take milliseconds for a long reply.
    """
    meta = reply["meta_info"]
    tokens = len(request.get("input_ids") or ()) + len(reply["output_ids"])
    logprobs = sum(_count_logprobs(meta.get(name)) for name in (*LOGPROB_LISTS, *INPUT_LOGPROB_LISTS))
    texts = sum(_text_length(value) for value in (*request.values(), *reply.values(), *meta.values()))
    return FIXED_BYTES + TOKEN_BYTES * tokens + LOGPROB_BYTES * logprobs + texts


def _count_logprobs(entries: Any) -> int:
    """Number of log probabilities. Lists of top log probabilities have a list of entries for each token."""
    first = next((entry for entry in entries or () if entry), None)
    if first is not None and isinstance(first[0], (list, tuple)):
        return sum(len(entry or ()) for entry in entries)
    return len(entries or ())


def _text_length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, list) and value and isinstance(value[0], (str, bytes)):
        return sum(len(item) for item in value)
    return 0
