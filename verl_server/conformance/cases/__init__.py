"""The cases of the conformance suite. Each file has the cases of one topic."""

from __future__ import annotations

from verl_server.conformance.case import Case
from verl_server.conformance.cases import faults, serving, updates

#: All cases in the order in which they run. The server is started again for a case with other server arguments.
CASES: tuple[Case, ...] = (
    *updates.UPDATE_CASES,
    *updates.MODEL_CASES,
    *serving.RUNNING_CASES,
    *serving.PREFIX_CACHE_CASES,
    *serving.MEMORY_CASES,
    *faults.REFUSED_CASES,
    *faults.REPEATED_CASES,
    *faults.KILLED_CASES,
    *updates.LORA_CASES,
)
