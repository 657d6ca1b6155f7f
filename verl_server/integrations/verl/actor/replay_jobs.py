"""`ReplayJobs`: asks the trainer to load the published weights into a server that was started again.

The trainer has the weights in its staging memory, and the actor of the fleet has the servers. A recovery thread of the
fleet adds a job and waits. A thread of trainer rank 0 takes the job, loads the weights, and reports the outcome.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from dataclasses import dataclass, field

from verl_server.errors import VerlServerError, from_wire
from verl_server.types import Json
from verl_server.weights.update.servers import UpdatableServers

OFFER_AGAIN_S = 15.0
"""Seconds until a job is offered again whose offer has not reached the trainer."""
TAKE_TIMEOUT_S = 120.0
"""Seconds until the trainer takes a job. It asks for jobs all the time, also while it computes."""


@dataclass
class _Job:
    publication: str
    """Id of the published weights."""
    servers: UpdatableServers
    offered_at: float = -math.inf
    """Time of the last offer to the trainer (`time.monotonic`)."""
    taken: threading.Event = field(default_factory=threading.Event)
    """Set by the first call of the trainer for this job."""
    done: threading.Event = field(default_factory=threading.Event)
    error: VerlServerError | None = None


class ReplayJobs:
    """Jobs between the threads of the fleet and the trainer. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: seconds until a job that the trainer has not finished fails."""
        self._timeout_s = timeout_s
        self._jobs: dict[str, _Job] = {}
        self._added = threading.Condition()

    def run(self, publication: str, servers: UpdatableServers) -> None:
        """Load the weights of `publication` into `servers`. Raises the error of the trainer.

        Raises VerlServerError, not DeadlineError, if the trainer does not answer: the server is well.
        """
        job_id, job = uuid.uuid4().hex, _Job(publication, servers)
        with self._added:
            self._jobs[job_id] = job
            self._added.notify()
        try:
            if not job.taken.wait(TAKE_TIMEOUT_S):
                raise VerlServerError(f"the trainer did not take the job to load weights within {TAKE_TIMEOUT_S:g} s")
            if not job.done.wait(self._timeout_s):
                raise VerlServerError(f"the trainer did not load the published weights within {self._timeout_s:g} s")
            if job.error is not None:
                raise job.error
        finally:
            with self._added:
                del self._jobs[job_id]

    def next(self, wait_s: float) -> tuple[str, str] | None:
        """The id and the publication of the next job. None if there is none within `wait_s` seconds.

        The answer may get lost. So a job is offered again until the trainer makes a call for it.
        """
        deadline = time.monotonic() + wait_s
        with self._added:
            while True:
                now = time.monotonic()
                for job_id, job in self._jobs.items():
                    if not job.taken.is_set() and now >= job.offered_at + OFFER_AGAIN_S:
                        job.offered_at = now
                        return job_id, job.publication
                if now >= deadline:
                    return None
                self._added.wait(min(1.0, deadline - now))

    def servers_of(self, job_id: str) -> UpdatableServers:
        """The servers of a job. Raises VerlServerError if the job has ended."""
        job = self._jobs.get(job_id)
        if job is None:
            raise VerlServerError("the job has ended: its server is not waiting for weights any more")
        job.taken.set()
        return job.servers

    def finish(self, job_id: str, error: Json | None) -> None:
        """Record the outcome of a job; `error` as `to_wire` converts it."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.error = None if error is None else from_wire(error)
            job.taken.set()
            job.done.set()
