"""The cases of the conformance suite. Each file has the cases of one topic."""

from __future__ import annotations

from verl_server.conformance.case import Case
from verl_server.conformance.cases import (
    killed,
    lora,
    memory,
    models,
    prefix_cache,
    refused,
    repeated,
    running,
    update,
)

#: All cases in the order in which they run. The server is started again for a case with other server arguments.
CASES: tuple[Case, ...] = (
    *update.CASES,
    *models.CASES,
    *running.CASES,
    *prefix_cache.CASES,
    *memory.CASES,
    *refused.CASES,
    *repeated.CASES,
    *killed.CASES,
    *lora.CASES,
)
