"""`RolloutRunner`: runs an agent on many tasks and yields groups of finished samples. It can resume after a crash.

Each sample has its own file `TASK-INDEX.jsonl` in `run_dir`. A sample whose file records its termination is loaded and
not generated again. A sample whose file has no termination, or that failed, is replayed up to its last turn, and then
continues. A file has digests of the inputs of its sample. A run with other inputs is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.agent.common_failure import CommonFailure
from verl_server.agent.episode import Episode, validate_episode_arguments
from verl_server.agent.generate_fn import GenerateFn, await_reply, require_generate_fn
from verl_server.agent.limits import RolloutLimits
from verl_server.agent.loops import AgentLoop, as_agent_loop, read_identity
from verl_server.agent.samples import Sample, SampleGroup, Task, find_finished_sample, validate_tasks
from verl_server.agent.user_code import call_user_function
from verl_server.errors import BadInputError, to_wire
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.inputs import attribute_input, digest
from verl_server.trajectory.recorder import Recorder, has_recorded_nodes, session_file
from verl_server.trajectory.rendering import ChatRenderer
from verl_server.types import Json
from verl_server.validation import make_writable_folder, require_callable, require_whole_number

logger = logging.getLogger(__name__)

RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Computes the reward of a finished sample, a finite number. A function that is not a coroutine function runs in a
thread."""


GroupFilter = Callable[[SampleGroup], bool | Awaitable[bool]]
"""Decides whether a group is yielded. May be a coroutine function."""


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


@dataclass(frozen=True)
class _Run:
    """What all samples of one call of `RolloutRunner.run` share."""

    slots: asyncio.Semaphore
    failures: CommonFailure
    inputs: Mapping[str, Mapping[str, str]]
    """Digests of the inputs of each task by the task's id. Empty without `run_dir`."""


class RolloutRunner:
    """Runs one agent loop with one policy on any number of tasks.

    `loop`: an agent loop, or the name of a registered agent loop, which is constructed without tools. `generate`: for
    example `fleet.router.generate`. `sampling_params`: SGLang's sampling parameters of every turn. `reward`: called
    with every finished sample that did not fail; if it raises an exception, the sample fails. `run_dir`: directory of
    the recorded sessions, which is created; it belongs to one run, for example to one training step. None keeps
    sessions in memory only. `max_concurrency`: maximum number of samples that run at a time. Raises BadInputError for
    an argument of a wrong type or value, and for a `run_dir` in which no file can be created.
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
        validate_episode_arguments(renderer, limits, sampling_params)
        require_generate_fn("generate", generate)
        if reward is not None:
            require_callable("reward", reward, "write `def reward(sample: Sample) -> float`", None)
        if run_dir is not None and (not isinstance(run_dir, (str, Path)) or Path(run_dir).is_file()):
            raise BadInputError(f"run_dir must be the path of a directory, got {run_dir!r}")
        require_whole_number("max_concurrency", max_concurrency)
        self._loop = as_agent_loop(loop)
        self._generate, self._renderer = generate, renderer
        self._limits, self._sampling_params = limits, dict(sampling_params)
        self._reward, self._max_concurrency = reward, max_concurrency
        self._run_dir = None if run_dir is None else make_writable_folder("run_dir", run_dir)
        self.counters = RunnerCounters()

    def run(
        self,
        tasks: Iterable[Task],
        n: int = 1,
        *,
        num_groups: int | None = None,
        group_filter: GroupFilter | None = None,
    ) -> AsyncIterator[SampleGroup]:
        """Yield groups of `n` samples in the order in which they finish. All `tasks` are read before the first sample.

        `group_filter` decides which groups are yielded (None: all of them). After `num_groups` groups (None: all of
        them) the remaining samples are cancelled. Pass more tasks than `num_groups` to replace groups that the filter
        rejects.

        A sample whose agent loop or reward raises an exception has the stop reason `error`, and the other samples go
        on. If the first sample of each of the first 8 tasks fails with the same type of exception at the same line,
        and no sample has succeeded, this exception is logged once. A run of fewer than 8 tasks also compares the second
        samples, and so on, up to 8 samples or all samples. The iterator raises only the error of a sample that cannot
        be recorded, and an exception of `group_filter`. A failed sample of a group has the reward None.

        With `run_dir`, finished samples that are recorded there are loaded, and unfinished samples continue. This is
        logged as a warning, because a new policy needs a new `run_dir`.

        Raises BadInputError at once for an argument of a wrong type or value, and for two tasks with the same id. With
        `run_dir`, also for a task id that is no file name, and for a sample that is recorded there with other inputs
        (messages or data of the task, agent loop, tools, renderer, limits or sampling parameters).
        """
        require_whole_number("n", n)
        if num_groups is not None:
            require_whole_number("num_groups", num_groups)
        if group_filter is not None:
            require_callable("group_filter", group_filter, "write `def keep(group: SampleGroup) -> bool`", None)
        checked = validate_tasks(tasks)
        if self._run_dir is not None:
            for task in checked:
                session_file(self._run_dir, _session_id(task, n - 1))
        inputs = self._check_records(checked, n)
        run = _Run(asyncio.Semaphore(self._max_concurrency), CommonFailure(checked, n), inputs)
        return self._iterate_groups(run, checked, n, num_groups, group_filter)

    async def _iterate_groups(
        self, run: _Run, tasks: Sequence[Task], n: int, num_groups: int | None, group_filter: GroupFilter | None
    ) -> AsyncIterator[SampleGroup]:
        running = {asyncio.create_task(self._run_group(run, task, n)) for task in tasks}
        num_kept = 0
        try:
            for finished in asyncio.as_completed(list(running)):
                group = await finished
                if group_filter is None or await _call_group_filter(group_filter, group):
                    num_kept += 1
                    yield group
                if num_kept == num_groups:
                    return
        finally:
            for group_task in running:
                group_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_group(self, run: _Run, task: Task, n: int) -> SampleGroup:
        running = [asyncio.create_task(self._run_sample(run, task, index)) for index in range(n)]
        try:
            return SampleGroup(task, await asyncio.gather(*running))
        except BaseException:  # a sample cannot be recorded, for example: cancel the other samples of the group
            for sample_task in running:
                sample_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def _run_sample(self, run: _Run, task: Task, index: int) -> Sample:
        task = task.copy()
        async with run.slots:
            self.counters.num_running_samples += 1
            try:
                sample, exception = await self._load_or_generate(task, index, run.inputs.get(task.id))
            finally:
                self.counters.num_running_samples -= 1
        self.counters.num_finished_samples += 1
        self.counters.num_failed_samples += sample.stop_reason == "error"
        run.failures.record(task, index, exception)
        return sample

    async def _load_or_generate(
        self, task: Task, index: int, inputs: Mapping[str, str] | None
    ) -> tuple[Sample, Exception | None]:
        """Load the sample if it is recorded with its termination. Generate or continue it otherwise.

        Returns the sample, and the exception of a failed sample.
        """
        if self._run_dir is None:
            return await self._generate_sample(task, index, TrajectoryGraph(_session_id(task, index)))
        with Recorder(self._run_dir, _session_id(task, index), inputs=inputs) as recorder:
            sample = find_finished_sample(task, index, recorder.graph)
            if sample is None:
                return await self._generate_sample(task, index, recorder)
            if sample.reward is None and self._reward is not None:  # recorded without a reward function
                return await self._finish_sample(sample, recorder, None)
            return sample, None

    async def _generate_sample(
        self, task: Task, index: int, record: Recorder | TrajectoryGraph
    ) -> tuple[Sample, Exception | None]:
        schemas = self._loop.tools.schemas
        episode = Episode(
            task, record, self._generate_counted, self._renderer, self._limits, self._sampling_params, schemas
        )
        stop_reason = await self._loop.run_episode(episode)
        sample = Sample(task, index, episode.graph, episode.leaf, stop_reason, episode.error)
        return await self._finish_sample(sample, record, episode.exception)

    async def _finish_sample(
        self, sample: Sample, record: Recorder | TrajectoryGraph, exception: Exception | None
    ) -> tuple[Sample, Exception | None]:
        """Compute and record the reward of a sample that did not fail, and record the termination."""
        if self._reward is not None and exception is None:
            try:
                reward = await _call_reward(self._reward, sample)
                if sample.leaf is not None:
                    sample.graph.set_rewards(sample.leaf, [reward])
                sample = dataclasses.replace(sample, reward=reward)
            except Exception as error:  # noqa: BLE001 - a failure of the reward belongs to this sample
                sample, exception = dataclasses.replace(sample, stop_reason="error", error=to_wire(error)), error
        if isinstance(record, Recorder):
            record.record_all_rewards()  # also those that the agent loop or the reward function set on the graph
        if sample.leaf is not None:  # the termination is written last: a file that contains it is complete
            record.terminate(sample.leaf, sample.stop_reason, sample.error, sample.reward)
        return sample, exception

    async def _generate_counted(self, *, rid: str, session_id: str, **request: Any) -> Json:
        reply = await await_reply(self._generate(rid=rid, session_id=session_id, **request))
        self.counters.num_turns += 1
        self.counters.num_sampled_tokens += len(reply["output_ids"])
        return reply

    def _check_records(self, tasks: Sequence[Task], n: int) -> dict[str, dict[str, str]]:
        """The digests of the inputs of each task. Raises BadInputError for a sample recorded with other inputs."""
        if self._run_dir is None:
            return {}
        num_recorded, inputs, shared = 0, {}, self._digest_shared_inputs()
        for task in tasks:
            digests = inputs[task.id] = {**task.digests, **shared}
            paths = (session_file(self._run_dir, _session_id(task, index)) for index in range(n))
            num_recorded += sum(has_recorded_nodes(path, digests) for path in paths)
        if num_recorded:
            logger.warning(
                "%d samples of this run are recorded in run_dir %s: finished samples are loaded, and the others "
                "continue. If this is another run, for example the next training step, pass another run_dir",
                num_recorded,
                self._run_dir,
            )
        return inputs

    def _digest_shared_inputs(self) -> dict[str, str]:
        """Digests of what all samples depend on, by names that errors show."""
        loop, tools = f"agent loop {type(self._loop).__qualname__}", self._loop.tools
        inputs = {
            "agent loop": loop,
            **{attribute_input(loop, name): value for name, value in read_identity(self._loop).items()},
            "tools": tools.names,
            **{f"tool {name!r}": schema for name, schema in zip(tools.names, tools.schemas, strict=True)},
            "renderer": self._renderer.identity,
            **{f"limits.{field.name}": getattr(self._limits, field.name) for field in dataclasses.fields(self._limits)},
            **{f"sampling_params[{name!r}]": value for name, value in self._sampling_params.items()},
        }
        return {name: digest(value) for name, value in inputs.items()}


def _session_id(task: Task, index: int) -> str:
    return f"{task.id}-{index}"


async def _call_group_filter(group_filter: GroupFilter, group: SampleGroup) -> bool:
    try:
        is_kept = group_filter(group)
        return bool(await is_kept if inspect.isawaitable(is_kept) else is_kept)
    except Exception as error:
        error.add_note(
            f"raised by group_filter for the group of task {group.task.id!r}; failed samples have the reward None"
        )
        raise


async def _call_reward(reward: RewardFn, sample: Sample) -> float:
    value = await call_user_function(reward, sample)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInputError(f"the reward function must return a number, got {value!r:.80}") from None
