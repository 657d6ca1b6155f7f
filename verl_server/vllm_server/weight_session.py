"""What happened in one update on one worker."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from verl_server.weights.coverage import ReadTensors
from verl_server.weights.loader import MAX_ERROR_CHARACTERS, MAX_UNREAD_NAMES, MAX_UNWRITTEN_NAMES
from verl_server.weights.reports import Report


@dataclass
class WeightSession:
    """The outcome between `start_weight_update` and `finish_weight_update` on one worker."""

    error: str | None = None
    """Type and message of the first exception."""
    trace: str | None = None
    """End of the traceback of the first exception."""
    read: ReadTensors = field(default_factory=ReadTensors)
    """The tensors of the update, and which of them the model has read."""
    num_tensors: int = 0
    """Number of tensors that the model took."""
    is_unchanged: bool = False
    """Whether it is known that no module has new weights."""
    unwritten: list[str] = field(default_factory=list)
    """Modules with weights that keep their old weights: they got no tensor, or only a part of their tensors."""
    checksums: list[int] = field(default_factory=list)
    """Checksum of each tensor as this worker read it. Empty without verification."""

    @property
    def ok(self) -> bool:
        """Whether no step has failed."""
        return self.error is None

    def fail(self, error: BaseException) -> None:
        """Record an exception. Only the first one is kept."""
        if self.error is None:
            self.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
            self.trace = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARACTERS:]

    def report(self, update_id: str) -> Report:
        """The report for the trainer. Each worker verifies all tensors, as on SGLang's CPU path."""
        return Report(
            update_id,
            ok=self.ok,
            error=self.error,
            trace=self.trace,
            num_tensors=self.num_tensors,
            unwritten=self.unwritten[:MAX_UNWRITTEN_NAMES],
            num_unwritten=len(self.unwritten),
            unread=self.read.unread()[:MAX_UNREAD_NAMES],
        )
