"""`RolloutRunner`: tasks in, groups of finished samples out, as they finish; taken up again after a crash.

Every sample has a file of its own (`TASK-NUMBER.jsonl`). One that is on disk with its end is not made again; one that
is on disk without is played again up to its last turn, and goes on from there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.agent.episode import Budget, Generate, Rollout, Task
from verl_server.agent.loops import AgentLoop
from verl_server.agent.threads import in_thread
from verl_server.errors import BadInputError, to_wire
from verl_server.trajectory.graph import Session
from verl_server.trajectory.recorder import Recorder, file_of, read
from verl_server.trajectory.rendering import Renderer

Json = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One finished sample of a task."""

    task: Task
    number: int
    session: Session
    leaf: int | None
    """The end of its path; None when it failed before its first prompt."""
    reason: str
    """`done`, what of the budget was spent, or `error`."""
    error: Json | None = None
    reward: float | None = None

    @property
    def path(self) -> tuple[Session, int]:
        """For `trajectory.batch`. Raises BadInputError for a sample that has none."""
        if self.leaf is None:
            raise BadInputError(f"sample {self.number} of task {self.task.id!r} has no tokens: {self.error}")
        return self.session, self.leaf


@dataclass(frozen=True)
class Group:
    """All samples of one task."""

    task: Task
    samples: Sequence[Sample]


@dataclass
class Counts:
    """Of a runner, since it was made."""

    running: int = 0
    """Samples under way."""
    finished: int = 0
    failed: int = 0
    """Of the finished ones: their reason is `error`."""
    turns: int = 0
    tokens: int = 0
    """Sampled."""


Reward = Callable[[Sample], float | Awaitable[float]]


def keep_all(_: Group) -> bool:
    return True


class RolloutRunner:
    """One policy, one kind of agent, any number of tasks.

    `reward` is called with every finished sample (in a thread when it is no coroutine function); what it raises makes
    the sample a failed one. `folder`: where sessions are recorded; None keeps them in memory only. `at_once`: samples
    under way at a time.
    """

    def __init__(
        self,
        loop: AgentLoop,
        generate: Generate,
        renderer: Renderer,
        budget: Budget,
        sampling_params: Mapping[str, Any],
        *,
        reward: Reward | None = None,
        folder: Path | str | None = None,
        at_once: int = 256,
    ) -> None:
        self._loop, self._generate, self._renderer = loop, generate, renderer
        self._budget, self._params = budget, dict(sampling_params)
        self._reward, self._folder, self._at_once = reward, folder, at_once
        self.counts = Counts()

    async def run(
        self,
        tasks: Iterable[Task],
        samples: int = 1,
        *,
        groups: int | None = None,
        keep: Callable[[Group], bool] = keep_all,
    ) -> AsyncIterator[Group]:
        """Groups of `samples` as they finish, until `groups` of them were kept (None: all); the rest is cancelled.

        `keep` decides which groups count: give more tasks than `groups` to replace those that teach nothing.
        """
        room = asyncio.Semaphore(self._at_once)
        running = {asyncio.create_task(self._group(task, samples, room)) for task in _distinct(tasks)}
        kept = 0
        try:
            for finished in asyncio.as_completed(list(running)):
                group = await finished
                if keep(group):
                    kept += 1
                    yield group
                if kept == groups:
                    return
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _group(self, task: Task, samples: int, room: asyncio.Semaphore) -> Group:
        making = [asyncio.create_task(self._sample(task, number, room)) for number in range(samples)]
        try:
            return Group(task, await asyncio.gather(*making))
        except BaseException:  # one could not be recorded, say: the others must not go on without an owner
            for one in making:
                one.cancel()
            await asyncio.gather(*making, return_exceptions=True)
            raise

    async def _sample(self, task: Task, number: int, room: asyncio.Semaphore) -> Sample:
        async with room:
            self.counts.running += 1
            try:
                sample = await self._taken_up(task, number, f"{task.id}-{number}")
            finally:
                self.counts.running -= 1
        self.counts.finished += 1
        self.counts.failed += sample.reason == "error"
        return sample

    async def _taken_up(self, task: Task, number: int, name: str) -> Sample:
        """From the disk, if anything of it is there."""
        if self._folder is None:
            return await self._make(task, number, Session(name))
        if (known := self._recorded(task, number, name)) is not None:
            return known
        with Recorder(self._folder, name) as recorder:
            return await self._make(task, number, recorder)

    def _recorded(self, task: Task, number: int, name: str) -> Sample | None:
        """The sample that is on disk, with its end."""
        assert self._folder is not None
        path = file_of(self._folder, name)
        session = read(path) if path.exists() else Session(name)
        if not session.endings:
            return None
        ending = next(reversed(session.endings.values()))
        rewards = session.rewards.get(ending.node)
        return Sample(
            task, number, session, ending.node, ending.reason, ending.error, None if rewards is None else rewards[-1]
        )

    async def _make(self, task: Task, number: int, record: Recorder | Session) -> Sample:
        rollout = Rollout(
            task, record, self._counted, self._renderer, self._budget, self._params, self._loop.tools.schemas
        )
        reason = await self._loop.act(rollout)
        sample = Sample(task, number, rollout.session, rollout.leaf, reason, rollout.error)
        if self._reward is not None and reason != "error":
            try:
                reward = await _value(self._reward, sample)
                if sample.leaf is not None:
                    record.reward(sample.leaf, [reward])
            except Exception as error:  # noqa: BLE001 - it belongs to this sample
                sample = Sample(task, number, sample.session, sample.leaf, "error", to_wire(error))
            else:
                sample = Sample(task, number, sample.session, sample.leaf, reason, None, reward)
        if sample.leaf is not None:  # the end comes last: what is on disk with it is whole
            record.end(sample.leaf, sample.reason, sample.error)
        return sample

    async def _counted(self, **request: Any) -> Json:
        reply = await self._generate(**request)
        self.counts.turns += 1
        self.counts.tokens += len(reply["output_ids"])
        return reply


async def _value(reward: Reward, sample: Sample) -> float:
    if inspect.iscoroutinefunction(reward):
        return float(await reward(sample))
    value = await in_thread(lambda: reward(sample))
    return float(await value if inspect.isawaitable(value) else value)


def _distinct(tasks: Iterable[Task]) -> list[Task]:
    """Raises BadInputError for two tasks with one id: they would share a file."""
    found: dict[str, Task] = {}
    for task in tasks:
        if found.setdefault(task.id, task) is not task:
            raise BadInputError(f"two tasks have the id {task.id!r}")
    return list(found.values())
