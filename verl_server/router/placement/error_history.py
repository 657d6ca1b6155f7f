"""`ErrorHistory`: when a replica that answers with errors stops receiving requests, and when it is probed again."""

from __future__ import annotations

import enum

MAX_ERRORS_IN_A_ROW = 2
"""Maximum number of errors in a row of a replica that is trusted. One more error makes the replica suspect."""
FIRST_PROBE_DELAY_S = 0.5
"""Seconds before the first probe of a suspect replica. The delay doubles with each probe that fails."""
MAX_PROBE_DELAY_S = 60.0


class Trust(enum.Enum):
    """Whether a replica receives requests, as far as its errors decide it."""

    TRUSTED = enum.auto()
    """It receives requests."""
    SUSPECT = enum.auto()
    """It receives requests only when no other replica can."""
    PROBED = enum.auto()
    """It receives one request, the probe."""


class ErrorHistory:
    """The errors of one replica in a row. Pure: the caller starts the probe after the delay that it is told.

    A replica that fails at once always has the fewest tokens in flight. Without this history every request would go to
    it first.
    """

    def __init__(self) -> None:
        self.trust = Trust.TRUSTED
        self.has_probe = False
        """Whether the probe is running."""
        self.period = 0
        """Number of changes to SUSPECT and to PROBED. The outcome of a request that began in an earlier period does not
        count: 256 requests that fail together are one reason for suspicion."""
        self._errors_in_a_row = 0
        self._failed_probes = 0

    def start_request(self) -> int:
        """A request starts on the replica; returns the period, for the outcome of the request."""
        self.has_probe = self.has_probe or self.trust is Trust.PROBED
        return self.period

    def record_error(self, period: int) -> float | None:
        """A request of `period` has failed. Returns seconds until `begin_probe` when the replica becomes suspect."""
        if period != self.period or self.trust is Trust.SUSPECT:
            return None
        self._errors_in_a_row += 1
        if self._errors_in_a_row <= MAX_ERRORS_IN_A_ROW:
            return None
        delay_s: float = min(FIRST_PROBE_DELAY_S * 2.0**self._failed_probes, MAX_PROBE_DELAY_S)
        self._failed_probes += 1
        self._change(Trust.SUSPECT)
        return delay_s

    def begin_probe(self, period: int) -> None:
        """The delay of a replica that became suspect in `period` is over: the next request is the probe."""
        if period == self.period and self.trust is Trust.SUSPECT:
            self._change(Trust.PROBED)

    def record_progress(self, period: int) -> None:
        """A request of `period` has returned a token. The first token of the probe makes the replica trusted.

        The errors are still counted: until a request has finished, the next error makes the replica suspect again.
        """
        if period == self.period and self.trust is Trust.PROBED:
            self.trust, self.has_probe = Trust.TRUSTED, False

    def record_finish(self, period: int) -> None:
        """A request of `period` has finished."""
        if period == self.period:
            self.trust, self.has_probe = Trust.TRUSTED, False
            self._errors_in_a_row = self._failed_probes = 0

    def end_request(self, period: int) -> None:
        """A request of `period` has ended, also without an outcome. A probe without an outcome is repeated."""
        if period == self.period and self.trust is Trust.PROBED:
            self.has_probe = False

    def _change(self, trust: Trust) -> None:
        self.trust, self.has_probe = trust, False
        self.period += 1
