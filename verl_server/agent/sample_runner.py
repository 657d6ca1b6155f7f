"""`SampleRunner`: generates one sample, or continues or loads a recorded one: environment, episode, rewards, record."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.agent.engines import GenerateFn
from verl_server.agent.environments import (
    RETRY_DELAY_S,
    Agent,
    Reward,
    RewardOptions,
    compute_rewards,
    rewards_of,
    total_reward,
)
from verl_server.agent.episode import Episode
from verl_server.agent.limits import Phase, RolloutLimits, measure
from verl_server.agent.loops import AgentLoop
from verl_server.agent.samples import Sample, Segment, Task, find_finished_sample
from verl_server.errors import BadInputError, InfrastructureError, ServerBusyError, to_wire
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import Recorder, attribute_input, digest
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer

Outcome = tuple[Sample, Exception | None]
"""A finished sample, and the exception of a failed sample."""


@functools.cache
def flush_pool() -> ThreadPoolExecutor:
    """Threads of their own: code of users may hold all threads of the event loop's pool."""
    return ThreadPoolExecutor(4, thread_name_prefix="verl-server-flush")


os.register_at_fork(after_in_child=flush_pool.cache_clear)  # threads do not exist in a child


@dataclass(frozen=True)
class SampleSession:
    """The session of a sample, and where it is recorded."""

    id: str
    """Id of the session, after which its file is named."""
    run_dir: Path | None
    """Folder of the file. None keeps the session in memory."""
    inputs: Mapping[str, str]
    """Digests of the inputs of the sample."""
    is_load_only: bool = False
    """Whether the recorded sample is loaded as it is, also if it has failed."""


@dataclass(frozen=True)
class SampleRunner:
    """What all samples of a runner have in common, and how one sample is generated."""

    agent: Agent
    generate: GenerateFn
    renderer: ChatRenderer
    limits: RolloutLimits
    given_limits: RolloutLimits
    """The limits without those of the engine, which can be others when a run is resumed."""
    sampling_params: Mapping[str, Any]
    rewards: Sequence[Reward]
    """Rewards beside those of the environment."""
    max_attempts: int
    """Maximum number of attempts at a sample that fails with InfrastructureError."""
    return_routed_experts: bool = False
    """Whether the routed experts of each turn are recorded."""

    def __post_init__(self) -> None:
        """Raises BadInputError if a reward has the name of a reward of the environment."""
        for item in self.rewards:
            if item.name in self.agent.reward_options:
                raise BadInputError(
                    f"the environment has a reward {item.name!r}, and so has the runner (reward=...); rename the method"
                )

    @property
    def reward_options(self) -> Mapping[str, RewardOptions]:
        """The options of all rewards by their names."""
        return {**self.agent.reward_options, **{item.name: item.options for item in self.rewards}}

    async def run(self, task: Task, index: int, session: SampleSession, slots: asyncio.Semaphore) -> Outcome:
        """Load the sample if it is recorded with its termination. Generate or continue it otherwise.

        `slots`: admits the episodes that run at a time.
        """
        graph = TrajectoryGraph(session.id)
        if session.run_dir is None:
            return await self._generate(task, index, graph, slots)
        try:
            recorder = Recorder(session.run_dir, session.id, inputs=session.inputs, sync=False)
        except ServerBusyError as error:  # another run has opened the record of this sample only
            if session.is_load_only:
                raise
            return Sample(task, index, graph, None, "error", to_wire(error)), error
        with recorder:
            if session.is_load_only:
                return self._load(task, index, recorder), None
            sample = find_finished_sample(task, index, recorder.graph)
            if sample is not None and (loaded := self._with_present_rewards(sample)) is not None:
                self._record_changes(sample, loaded, recorder)
                return loaded, None
            if sample is not None and self.agent.environment is None:  # recorded without a reward function
                outcome = await self._compute_rewards(self.agent.loop, sample)
                self._record(outcome[0], recorder)
            else:  # also a finished sample whose rewards need the environment in its last state: it is replayed
                outcome = await self._generate(task, index, recorder, slots)
            # Each write to the disk would block the event loop. What a killed process has written is not lost. After a
            # power failure, a sample may lack its last turns: they are generated again, unless the sample was yielded.
            await asyncio.get_running_loop().run_in_executor(flush_pool(), recorder.flush)
            return outcome

    def _load(self, task: Task, index: int, recorder: Recorder) -> Sample:
        """The recorded sample, with the rewards of this run if it has all of them."""
        sample = find_finished_sample(task, index, recorder.graph, with_failed=True)
        if sample is None:  # it has failed before its first prompt
            error = {"type": "Unknown", "message": "the failure is not recorded", "details": {}}
            return Sample(task, index, recorder.graph, None, "error", error)
        loaded = (self._with_present_rewards(sample) if sample.error is None else None) or sample
        self._record_changes(sample, loaded, recorder)
        return loaded

    def _record_changes(self, recorded: Sample, loaded: Sample, recorder: Recorder) -> None:
        """Record the termination of a loaded sample again if the file would give another sample.

        Weights of rewards may have changed, or a run that was killed has added nodes: a finished sample is replayed if
        its record lacks a reward.
        """
        has_other_rewards = (recorded.reward, recorded.rewards) != (loaded.reward, loaded.rewards)
        if has_other_rewards or recorder.graph.last_termination is None:
            self._record(loaded, recorder)
        recorder.record_all_rewards()  # a run that was killed may have written some

    def _with_present_rewards(self, sample: Sample) -> Sample | None:
        """A recorded sample with the rewards and weights of this run. None if the record lacks a reward.

        A run without rewards and metrics keeps those of the record.
        """
        options = self.reward_options
        if not options:
            return sample
        if not options.keys() <= sample.rewards.keys():
            return None
        values = {name: sample.rewards[name] for name in options}
        reward = total_reward(options, values)
        if not (reward is None and sample.reward is None):
            _set_reward(sample, reward)  # the weights may have changed
        return dataclasses.replace(sample, reward=reward, rewards=values)

    async def _generate(
        self, task: Task, index: int, record: Recorder | TrajectoryGraph, slots: asyncio.Semaphore
    ) -> Outcome:
        """Generate the sample, and again with another environment after a failure of the infrastructure."""
        for attempt in range(1, self.max_attempts + 1):
            sample, exception = await self._attempt(task.copy(), index, record, slots)
            if not isinstance(exception, InfrastructureError) or attempt == self.max_attempts:
                break
            await asyncio.sleep(RETRY_DELAY_S * 2 ** (attempt - 1))
        if exception is not None:
            self._record(sample, record)
        return sample, exception

    async def _attempt(
        self, task: Task, index: int, record: Recorder | TrajectoryGraph, slots: asyncio.Semaphore
    ) -> Outcome:
        graph = record if isinstance(record, TrajectoryGraph) else record.graph
        record.clear_rewards()  # those of an earlier attempt, which may have ended at another node
        try:
            async with self.agent.loop_for(task) as agent:
                with measure(Phase.QUEUE):
                    await slots.acquire()
                try:
                    episode = Episode(
                        task,
                        record,
                        self.generate,
                        self.renderer,
                        self.limits,
                        self.sampling_params,
                        agent.tools,
                        return_routed_experts=self.return_routed_experts,
                    )
                    with contextlib.closing(episode):  # the agent loop may have left branches that generate
                        stop_reason = await agent.run_episode(episode)
                finally:
                    slots.release()
                segments = episode.segments
                leaf = _find_end(episode.leaf, segments, graph)
                sample = Sample(task, index, graph, leaf, stop_reason, episode.error, segments=segments)
                if episode.exception is not None:
                    return sample, episode.exception
                sample, exception = await self._compute_rewards(agent, sample)
                if exception is None:
                    self._record(sample, record)  # before the teardown, which may take a minute
                return sample, exception
        except Exception as error:
            if isinstance(error, OSError) and isinstance(record, Recorder) and record.failure is not None:
                raise  # the sample cannot be recorded
            return Sample(task, index, graph, _find_end(None, (), graph), "error", to_wire(error)), error

    async def _compute_rewards(self, agent: AgentLoop, sample: Sample) -> Outcome:
        rewards = [*rewards_of(agent), *self.rewards]
        try:
            with measure(Phase.REWARD):
                values = await compute_rewards(rewards, sample)
            reward = total_reward({item.name: item.options for item in rewards}, values)
            if reward is not None:
                _set_reward(sample, reward)
            sample.graph.require_valid_rewards()  # code of users may have set rewards of turns
        except Exception as error:  # noqa: BLE001 - a failure of a reward belongs to this sample
            return dataclasses.replace(sample, stop_reason="error", error=to_wire(error)), error
        return dataclasses.replace(sample, reward=reward, rewards=values), None

    def _record(self, sample: Sample, record: Recorder | TrajectoryGraph) -> None:
        if sample.error is not None:
            try:
                sample.graph.require_valid_rewards()
            except BadInputError:
                record.clear_rewards()  # the sample has failed, perhaps because of these rewards
        if sample.graph.nodes:  # the termination is written last: a file that contains it is complete
            assert sample.leaf is not None
            segments = [(segment.leaf, segment.loss_weight) for segment in sample.segments]
            record.terminate(sample.leaf, sample.stop_reason, sample.error, sample.reward, segments, sample.rewards)

    def input_digests(self) -> Callable[[Task], dict[str, str]]:
        """A function that gives the digests of the inputs of a task's samples, by names that errors show.

        Those that all samples have in common are computed at its first call.
        """
        digest_shared = functools.cache(self._digest_shared_inputs)
        return lambda task: {**task.digests, **digest_shared()}

    def _digest_shared_inputs(self) -> dict[str, str]:
        """Digests of what all samples depend on, by names that errors show."""
        loop, tools = f"agent loop {type(self.agent.loop).__qualname__}", self.agent.loop.tools
        inputs = {
            "agent loop": loop,
            **{attribute_input(loop, name): value for name, value in self.agent.identity.items()},
            "tools": tools.names,
            **{f"tool {name!r}": schema for name, schema in zip(tools.names, tools.schemas, strict=True)},
            "renderer": self.renderer.identity,
            **{
                f"limits.{field.name}": getattr(self.given_limits, field.name)
                for field in dataclasses.fields(self.limits)
            },
            **{f"sampling_params[{name!r}]": value for name, value in self.sampling_params.items()},
            **({"return_routed_experts": True} if self.return_routed_experts else {}),
        }
        return {name: digest(value) for name, value in inputs.items()}


def _find_end(leaf: int | None, segments: Sequence[Segment], graph: TrajectoryGraph) -> int | None:
    """The last node of a sample whose first branch ends with the node `leaf`.

    A sample whose first branch ends without a turn ends with its last trained path: after a compaction, for example,
    the first turn may fail, or a limit may leave no token for this turn. Without a trained path, such a sample ends
    where its first branch ends, or with the first prompt, if there is one.
    """
    if segments and (leaf is None or graph.num_turns(leaf) == 0):
        return segments[-1].leaf
    return leaf if leaf is not None or not graph.nodes else 0


def _set_reward(sample: Sample, reward: float | None) -> None:
    """Set the reward of each segment, or of the last node of a sample without a turn. None removes it."""
    leaves = [segment.leaf for segment in sample.segments]
    if not leaves and sample.leaf is not None:
        leaves = [sample.leaf]
    for leaf in leaves:
        if reward is None:
            sample.graph.rewards.pop(leaf, None)
        else:
            sample.graph.set_rewards(leaf, [reward])
