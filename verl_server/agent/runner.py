"""`RolloutRunner`: runs an agent on many tasks and yields groups of finished samples. It can resume after a crash.

Each sample has its own file `TASK-INDEX.jsonl` in `run_dir`. A sample whose file records its termination is loaded and
not generated again. A sample whose file has no termination is replayed up to its last turn, and then continues.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.agent.daemon_thread import run_in_daemon_thread
from verl_server.agent.episode import Episode, Task
from verl_server.agent.generate_fn import GenerateFn
from verl_server.agent.limits import RolloutLimits
from verl_server.agent.loops import AgentLoop, get_agent_loop
from verl_server.agent.samples import Sample, SampleGroup
from verl_server.errors import BadInputError, to_wire
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import Recorder, load_session, session_file
from verl_server.trajectory.rendering import ChatRenderer
from verl_server.types import Json

RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Computes the reward of a finished sample. A function that is not a coroutine function runs in a thread."""


@dataclass
class RunnerCounters:
    """Counters of a runner since it was constructed."""

    num_running_samples: int = 0
    """Number of samples whose episode runs."""
    num_finished_samples: int = 0
    """Number of finished samples, including failed samples."""
    num_failed_samples: int = 0
    """Number of finished samples with the stop reason `error`."""
    num_turns: int = 0
    """Number of generated turns."""
    num_sampled_tokens: int = 0
    """Number of tokens that the policy sampled."""


class RolloutRunner:
    """Runs one agent loop with one policy on any number of tasks.

    `loop`: an agent loop, or the name of a registered agent loop, which is constructed without tools. `reward`: called
    with every finished sample; if it raises an exception, the sample fails. `run_dir`: directory of the recorded
    sessions; None keeps sessions in memory only. `max_concurrency`: maximum number of samples that run at a time.
    """

    def __init__(
        self,
        loop: AgentLoop | str,
        generate: GenerateFn,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        sampling_params: Mapping[str, Any],
        *,
        reward: RewardFn | None = None,
        run_dir: Path | str | None = None,
        max_concurrency: int = 256,
    ) -> None:
        self._loop = get_agent_loop(loop)() if isinstance(loop, str) else loop
        self._generate, self._renderer = generate, renderer
        self._limits, self._sampling_params = limits, dict(sampling_params)
        self._reward, self._run_dir, self._max_concurrency = reward, run_dir, max_concurrency
        self.counters = RunnerCounters()

    async def run(
        self,
        tasks: Iterable[Task],
        n: int = 1,
        *,
        num_groups: int | None = None,
        group_filter: Callable[[SampleGroup], bool] | None = None,
    ) -> AsyncIterator[SampleGroup]:
        """Yield groups of `n` samples in the order in which they finish.

        `group_filter` decides which groups are yielded (None: all of them). After `num_groups` groups (None: all of
        them) the remaining samples are cancelled. Pass more tasks than `num_groups` to replace groups that the filter
        rejects. Raises BadInputError for two tasks with the same id, and the error of a sample that cannot be recorded.
        """
        slots = asyncio.Semaphore(self._max_concurrency)
        running = {asyncio.create_task(self._run_group(task, n, slots)) for task in _require_distinct(tasks)}
        num_kept = 0
        try:
            for finished in asyncio.as_completed(list(running)):
                group = await finished
                if group_filter is None or group_filter(group):
                    num_kept += 1
                    yield group
                if num_kept == num_groups:
                    return
        finally:
            for group_task in running:
                group_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_group(self, task: Task, n: int, slots: asyncio.Semaphore) -> SampleGroup:
        running = [asyncio.create_task(self._run_sample(task, index, slots)) for index in range(n)]
        try:
            return SampleGroup(task, await asyncio.gather(*running))
        except BaseException:  # a sample cannot be recorded, for example: cancel the other samples of the group
            for sample_task in running:
                sample_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def _run_sample(self, task: Task, index: int, slots: asyncio.Semaphore) -> Sample:
        async with slots:
            self.counters.num_running_samples += 1
            try:
                sample = await self._load_or_generate(task, index, f"{task.id}-{index}")
            finally:
                self.counters.num_running_samples -= 1
        self.counters.num_finished_samples += 1
        self.counters.num_failed_samples += sample.stop_reason == "error"
        return sample

    async def _load_or_generate(self, task: Task, index: int, session_id: str) -> Sample:
        """Load the sample if it is recorded with its termination. Generate or continue it otherwise."""
        if self._run_dir is None:
            return await self._generate_sample(task, index, TrajectoryGraph(session_id))
        if (recorded := self._load_finished(task, index, session_file(self._run_dir, session_id))) is not None:
            return recorded
        with Recorder(self._run_dir, session_id) as recorder:
            return await self._generate_sample(task, index, recorder)

    def _load_finished(self, task: Task, index: int, path: Path) -> Sample | None:
        """The recorded sample. None if there is no file, or if the file has no termination."""
        graph = load_session(path) if path.exists() else None
        if graph is None or not graph.terminations:
            return None
        termination = next(reversed(graph.terminations.values()))
        rewards = graph.rewards.get(termination.node)
        reward = None if rewards is None else rewards[-1]
        return Sample(task, index, graph, termination.node, termination.stop_reason, termination.error, reward)

    async def _generate_sample(self, task: Task, index: int, record: Recorder | TrajectoryGraph) -> Sample:
        schemas = self._loop.tools.schemas
        episode = Episode(
            task, record, self._generate_counted, self._renderer, self._limits, self._sampling_params, schemas
        )
        stop_reason = await self._loop.run_episode(episode)
        sample = Sample(task, index, episode.graph, episode.leaf, stop_reason, episode.error)
        if self._reward is not None and stop_reason != "error":
            try:
                reward = await _call_reward(self._reward, sample)
                if sample.leaf is not None:
                    record.set_rewards(sample.leaf, [reward])
            except Exception as error:  # noqa: BLE001 - a failure of the reward belongs to this sample
                sample = Sample(task, index, sample.graph, sample.leaf, "error", to_wire(error))
            else:
                sample = Sample(task, index, sample.graph, sample.leaf, stop_reason, None, reward)
        if sample.leaf is not None:  # the termination is written last: a file that contains it is complete
            record.terminate(sample.leaf, sample.stop_reason, sample.error)
        return sample

    async def _generate_counted(self, *, rid: str, session_id: str, **request: Any) -> Json:
        reply = await self._generate(rid=rid, session_id=session_id, **request)
        self.counters.num_turns += 1
        self.counters.num_sampled_tokens += len(reply["output_ids"])
        return reply


async def _call_reward(reward: RewardFn, sample: Sample) -> float:
    if inspect.iscoroutinefunction(reward):
        return float(await reward(sample))
    value = await run_in_daemon_thread(lambda: reward(sample))
    return float(await value if inspect.isawaitable(value) else value)


def _require_distinct(tasks: Iterable[Task]) -> list[Task]:
    """Raise BadInputError if two tasks have the same id, because their samples would share files."""
    tasks_by_id: dict[str, Task] = {}
    for task in tasks:
        if tasks_by_id.setdefault(task.id, task) is not task:
            raise BadInputError(f"two tasks have the id {task.id!r}; task ids must be unique")
    return list(tasks_by_id.values())
