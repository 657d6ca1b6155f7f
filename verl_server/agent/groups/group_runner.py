"""`GroupRunner`: runs the samples of groups, as many at a time as the concurrency of the runner allows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.trace import StatusCode

from verl_server.agent.groups.common_failure import CommonFailure
from verl_server.agent.phase_times import Phase, measure, measure_sample
from verl_server.agent.sample_runner import Outcome, SampleRunner, SampleSession
from verl_server.agent.samples import SampleGroup, Task
from verl_server.agent.tools.call_counts import count_calls
from verl_server.errors import BadInputError
from verl_server.tracing import span
from verl_server.trajectory.recorder import session_file


@dataclass
class RunnerCounters:
    """Counters of a runner since it was constructed."""

    num_running_samples: int = 0
    """Number of samples whose environment is set up, whose episode runs or whose rewards are computed."""
    num_finished_samples: int = 0
    """Number of finished samples, including failed samples."""
    num_failed_samples: int = 0
    """Number of finished samples with the stop reason `error`."""
    num_turns: int = 0
    """Number of replies of the engine, also of those that a weight update aborted."""
    num_sampled_tokens: int = 0
    """Number of tokens in these replies."""


def session_ids(group: str, n: int) -> list[str]:
    """The ids of the sessions of the samples of a group, after which their files are named."""
    return [f"{group}-{index}" for index in range(n)]


@dataclass(frozen=True)
class GroupRequest:
    """A group that is started."""

    number: int
    """Number of the task, see `TaskSource`."""
    task: Task
    name: str
    """Name of the group. The session of sample 3 is called `NAME-3`."""
    run_dir: Path | None
    """Folder of the recorded sessions. None keeps the sessions in memory."""
    is_load_only: bool = False
    """Whether the samples are recorded, and are only loaded."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose samples have finished."""

    request: GroupRequest
    group: SampleGroup
    failure: Exception | None
    """Exception of the first failed sample. None if at least one sample did not fail."""


class GroupRunner:
    """Runs groups of `n` samples for one iterator of a `RolloutRunner`.

    `max_concurrency`: maximum number of episodes that run at a time. With an `Environment` or a reward, at most twice
    as many samples are active, including those in setup, rewards and teardown. `logs_common_failure`: whether a failure
    of all samples is logged.
    """

    def __init__(
        self,
        samples: SampleRunner,
        counters: RunnerCounters,
        n: int,
        max_concurrency: int,
        *,
        logs_common_failure: bool,
    ) -> None:
        self.n = n
        has_other_phases = samples.agent.environment is not None or bool(samples.rewards)
        self.max_admitted_samples = max_concurrency * (2 if has_other_phases else 1)
        """Maximum number of active samples: in setup, episode, rewards or teardown."""
        self._samples, self._counters = samples, counters
        self.on_sample: Callable[[], None] = lambda: None
        """Called when a sample has finished or was cancelled."""
        self._admission, self._slots = asyncio.Semaphore(self.max_admitted_samples), asyncio.Semaphore(max_concurrency)
        self.failures = CommonFailure(n) if logs_common_failure else None
        self.num_unfinished_samples = 0
        """Number of samples of started groups that have not finished."""
        self._digests = samples.input_digests()

    async def run(self, request: GroupRequest) -> FinishedGroup:
        """Run the samples of a group. Raises the exception of a sample that cannot be recorded."""
        if self.failures is not None:
            self.failures.start(request.number)
        ids = session_ids(request.name, self.n)
        if request.is_load_only and request.run_dir is not None:
            _require_files(request.run_dir, ids)
        inputs = {} if request.run_dir is None else self._digests.of(request.task)
        self.num_unfinished_samples += self.n
        running = [
            asyncio.create_task(self._run_sample(request, index, session_id, inputs))
            for index, session_id in enumerate(ids)
        ]
        for sample_task in running:
            sample_task.add_done_callback(self._count_finished)  # also of a sample that is cancelled before it begins
        try:
            outcomes = await asyncio.gather(*running)
        except BaseException:  # a sample cannot be recorded, for example: cancel the other samples of the group
            for sample_task in running:
                sample_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        exceptions = [exception for _, exception in outcomes if exception is not None]
        group = SampleGroup(request.task, [sample for sample, _ in outcomes])
        return FinishedGroup(request, group, exceptions[0] if len(exceptions) == self.n else None)

    async def _run_sample(
        self, request: GroupRequest, index: int, session_id: str, inputs: Mapping[str, str]
    ) -> Outcome:
        session = SampleSession(session_id, request.run_dir, inputs, request.is_load_only)
        attributes: dict[str, str | int] = {"verl_server.task": request.task.id, "verl_server.sample_index": index}
        with measure_sample() as times, count_calls() as calls, span("sample", attributes, is_root=True) as opened:
            with measure(Phase.QUEUE):
                await self._admission.acquire()
            self._counters.num_running_samples += 1
            try:
                sample, exception = await self._samples.run(request.task.copy(), index, session, self._slots)
            finally:
                self._counters.num_running_samples -= 1
                self._admission.release()
            opened.set_attribute("verl_server.stop_reason", sample.stop_reason)
            if exception is not None:
                opened.record_exception(exception)
                opened.set_status(StatusCode.ERROR)
            if sample.reward is not None:
                opened.set_attribute("verl_server.reward", sample.reward)
        self._counters.num_finished_samples += 1
        self._counters.num_failed_samples += sample.stop_reason == "error"
        if self.failures is not None:
            self.failures.record(request.number, index, exception)
        return dataclasses.replace(sample, times=times, tool_counts=dict(calls)), exception

    def _count_finished(self, sample_task: asyncio.Task[object]) -> None:
        self.num_unfinished_samples -= 1
        self.on_sample()


def _require_files(run_dir: Path, ids: Sequence[str]) -> None:
    """Raise BadInputError if the record of a sample is missing. `ids`: those of the sessions of the samples."""
    for session_id in ids:
        if not session_file(run_dir, session_id).exists():
            raise BadInputError(
                f"the step is recorded, but the file of its session {session_id!r} is missing in {run_dir}; pass a "
                "later start_step, or another run_dir. Only folders of steps before start_step - max_staleness can be "
                "removed",
                argument="run_dir",
            )
