"""verl's reply to a request, sent from a process that does not import verl.

The import of verl costs about 12 s of CPU time and 0.5 GB of memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from verl_server.types import Json


@dataclass(frozen=True)
class TokenOutput:
    """Becomes verl's `TokenOutput` (`verl/workers/rollout/replica.py`) in the process that receives it."""

    token_ids: list[int]
    log_probs: list[float] | None
    """Log probabilities of `token_ids` in nats."""
    stop_reason: str
    """SGLang's type of the end: "stop", "length" or "abort"."""
    num_preempted: int
    """Number of times that the generation was continued, on another server or after an update."""
    extra_fields: Json = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_token_output, (asdict(self),)


def _make_token_output(fields: Json) -> Any:
    from verl.workers.rollout import replica

    return replica.TokenOutput(**fields)
