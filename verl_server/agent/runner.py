"""`RolloutRunner`: runs an agent on many tasks and yields groups of finished samples, or training steps of groups.

With a `run_dir` it can resume after a crash. Each sample has its own file: `TASK-INDEX.jsonl`, or, for training steps,
`step-000012/TASK-NUMBER-INDEX.jsonl`. A sample whose file records its termination is loaded and not generated again. A
sample whose file has no termination, or that failed, is replayed up to its last turn, and then continues. A file has
digests of the inputs of its sample. A run with other inputs is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeElapsedColumn
from rich.progress import Task as RichTask
from rich.text import Text

from verl_server.agent.engines import (
    Engine,
    access_engine,
    require_sampling_params,
    with_reports,
    with_stop_tokens,
)
from verl_server.agent.environments import Environment, Reward, RewardFn, RewardOptions, as_agent, reward_of
from verl_server.agent.episode import require_token_limit
from verl_server.agent.limits import RolloutLimits
from verl_server.agent.loops import AgentLoop
from verl_server.agent.sample_runner import SampleRunner
from verl_server.agent.samples import SampleGroup
from verl_server.agent.steps.groups import (
    GroupFilter,
    GroupRunner,
    RunChecker,
    RunnerCounters,
    Tasks,
    has_variance,
    require_task,
    stream_groups,
)
from verl_server.agent.steps.journal import FILE_NAME as JOURNAL_NAME
from verl_server.agent.steps.stream import RolloutStep, StepOptions, StepStream
from verl_server.agent.tools.tool import Tool
from verl_server.config import NotNegativeInt, PositiveInt
from verl_server.errors import BadInputError
from verl_server.router.resumable_generation import OnTokens
from verl_server.server.process import raise_open_file_limit
from verl_server.trajectory.recorder import FILE_SUFFIX
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.validation import check_arguments, make_writable_folder

logger = logging.getLogger(__name__)
T = TypeVar("T", SampleGroup, RolloutStep)


NOT_IN_TRAINER = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "min_new_tokens", "regex",
    "json_schema", "ebnf", "structural_tag",
)  # fmt: skip
"""Sampling parameters that change the probabilities of tokens by more than the temperature."""


class RolloutRunner:
    """Runs one agent with one policy on any number of tasks.

    `agent`: a subclass of `Environment`, an agent loop, a list of tools for `ToolAgentLoop`, or the name of a
    registered agent loop, which is constructed without tools. `engine`: what generates: a `VerlEngine` on rank 0, a
    `RolloutManager`, an adapter, a `RouterClient`, or a function such as `fleet.router.generate`. `renderer`: None is
    the renderer of the engine's tokenizer; turns then end with the end token of its chat template. `limits`: None is
    `RolloutLimits()`. `sampling_params`: SGLang's sampling parameters of every turn.

    `n`: number of samples of each task. `reward`: called with every finished sample that did not fail, beside the
    rewards of the environment; if it raises an exception, the sample fails. It can have the decorator `reward`.
    `group_filter`: decides which groups are yielded: a function, or "has_variance" for groups whose rewards differ.
    None keeps all groups. `max_staleness`: maximum number of steps between the start and the delivery of a sample, for
    `steps` only. `run_dir`: directory of the recorded sessions, which is created; it belongs to one call of `run`, or
    to the steps of one training run. None keeps sessions in memory only. `max_concurrency`: maximum number of episodes
    that run at a time. With an `Environment` or a `reward`, at most `2 * max_concurrency` samples are active, including
    those in setup, rewards and teardown.
    `max_attempts`: maximum number of attempts at a sample that fails with `InfrastructureError`.
    `return_routed_experts`: whether the experts that a mixture-of-experts model chose for each token are recorded, for
    a trainer that replays them; the servers need `enable_return_routed_experts=True`.

    Raises BadInputError for an argument of a wrong type or value, for a `run_dir` in which no file can be created, for
    a chat template that drops the results of tools, for `renderer=None` with an engine that cannot be asked for its
    tokenizer, for limits without a maximum number of tokens with an engine that cannot be asked for its context length,
    and for a server that does not return routed experts; and the errors of `get_renderer` and of the request to the
    engine.
    """

    @check_arguments(skip=("agent", "engine", "sampling_params"))
    def __init__(
        self,
        agent: type[Environment] | AgentLoop | Sequence[Tool | Callable[..., Any]] | str,
        engine: Engine,
        *,
        renderer: ChatRenderer | None = None,
        limits: RolloutLimits | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        n: PositiveInt = 1,
        reward: RewardFn | None = None,
        group_filter: GroupFilter | Literal["has_variance"] | None = None,
        max_staleness: NotNegativeInt = 0,
        run_dir: Path | str | None = None,
        max_concurrency: PositiveInt = 256,
        max_attempts: PositiveInt = 2,
        return_routed_experts: bool = False,
    ) -> None:
        access = access_engine(engine)
        self._expert_layout = access.expert_layout() if return_routed_experts else None
        params = {} if sampling_params is None else sampling_params
        if renderer is None:
            renderer = access.make_renderer()
            params = with_stop_tokens(require_sampling_params(params), renderer)
        limits = RolloutLimits() if limits is None else limits
        completed_limits = access.complete_limits(limits)
        require_token_limit(completed_limits)
        require_sampling_params(params)
        if not_computed := sorted(name for name in NOT_IN_TRAINER if params.get(name)):
            logger.warning(
                "the servers' log probabilities contain the effect of %s, and a trainer computes its own without it: "
                "the ratio of both is not that of the policies. Only `temperature` is in the batch",
                ", ".join(not_computed),
            )
        self._n, self._max_staleness, self._max_concurrency = n, max_staleness, max_concurrency
        self._generate = access.generate
        self.run_dir = None if run_dir is None else make_writable_folder("run_dir", run_dir)
        """Directory of the recorded sessions."""
        if run_dir is not None:
            raise_open_file_limit()  # the file of each live sample is open
        self._samples = SampleRunner(
            agent=as_agent(agent),
            generate=self._generate_counted,
            renderer=renderer,
            limits=completed_limits,
            given_limits=limits,
            sampling_params=dict(params),
            rewards=[] if reward is None else [Reward("reward", reward, reward_of(reward) or RewardOptions())],
            max_attempts=max_attempts,
            return_routed_experts=return_routed_experts,
        )
        self._samples.agent.check_renderer(renderer)
        is_trained = any(options.weight for options in self._samples.reward_options.values())
        if group_filter == "has_variance" and (n == 1 or not is_trained):  # it would reject all groups, without an end
            raise BadInputError(
                "group_filter='has_variance' keeps no group; it needs groups of n=2 samples or more, and reward=... or "
                "an Environment with a method @reward, whose weight is not 0",
                argument="group_filter",
            )
        self._group_filter = has_variance if group_filter == "has_variance" else group_filter
        self.has_group_filter = group_filter is not None
        """Whether groups can be left out."""
        self.counters = RunnerCounters()

    @check_arguments(skip=("tasks",))
    def run(self, tasks: Tasks) -> AsyncGenerator[SampleGroup, None]:
        """Yield a group of `n` samples for each task, in the order in which the groups finish.

        `tasks`: an iterable or an asynchronous iterable. A task is read when a sample can run, so the tasks may be
        endless. If the groups are not taken, no more tasks are read when `2 * max_concurrency` samples wait (with an
        `Environment` or a `reward`: `4 * max_concurrency`). Samples that run then still finish.

        A sample whose agent loop or reward raises an exception has the stop reason `error` and the reward None, and the
        other samples go on. If all samples of the first 8 groups have failed, or all samples of a run of fewer groups,
        the last exception is logged once. The iterator raises only the error of a sample that cannot be recorded, and
        an exception of `group_filter` or of `tasks`.

        With `run_dir`, finished samples that are recorded there are loaded, and unfinished samples continue. This is
        logged as a warning, because a new policy needs a new `run_dir`. For training steps, see `steps`.

        Raises BadInputError for a value that is no task, for two tasks with the same id, for a task id that is no file
        name if there is a `run_dir`, and for a sample that is recorded there with other inputs (messages or data of the
        task, agent loop, tools, renderer, limits or sampling parameters): at once for a list, and for an iterator when
        it is read.
        """
        checker = RunChecker(self.run_dir, self._n, self._samples.input_digests())
        if isinstance(tasks, Sequence):
            for number, task in enumerate(tasks):
                checker.check(number, require_task(task, number))
        if self.run_dir is not None and (self.run_dir / JOURNAL_NAME).exists():
            raise BadInputError(f"run_dir {self.run_dir} belongs to the steps of a training run; pass another run_dir")
        if self._max_staleness:
            logger.warning("max_staleness=%d has no effect on `run`; it is for `steps`", self._max_staleness)
        return stream_groups(self._make_group_runner(), tasks, checker.check, self.run_dir, self._group_filter)

    @check_arguments(skip=("tasks",))
    def steps(
        self,
        tasks: Tasks,
        num_groups: PositiveInt,
        *,
        num_extra_groups: NotNegativeInt = 0,
        start_step: NotNegativeInt = 0,
    ) -> AsyncGenerator[RolloutStep, None]:
        """Yield training steps of `num_groups` groups that the `group_filter` keeps. The last step may have fewer.

        Update the weights between two steps. With `max_staleness=0`, all samples of a step are generated between two
        updates. Otherwise samples of later steps are generated while the body of the loop awaits something, for example
        `await asyncio.to_thread(lambda: train(step.batch()))`, and a step may have samples that were begun up to
        `max_staleness` steps earlier. A step waits for samples that would be too old in the next step. Without
        `num_extra_groups`, samples that take long are therefore as frequent in the steps as in the tasks.

        `tasks`: an iterable or an asynchronous iterable, which may be endless and may repeat tasks. A task is read when
        a sample can run. `num_extra_groups`: number of groups that are generated in addition, so that a step does not
        wait for the groups that replace rejected ones. Groups that remain after a step and would be too old in the next
        step are abandoned, and their tasks start again: short samples become more frequent. `start_step`: number of
        steps that the trainer has completed, according to its checkpoint.

        With `run_dir`, the run can be resumed: pass the same `tasks`, from the first on, and `start_step`. Steps from
        `start_step` on that were yielded before are yielded again with the same samples, and samples that were not
        finished continue. The sessions of the samples that were begun in step 12 are in the folder `step-000012`.

        A failed sample has the reward None. A group whose samples have all failed is not yielded. When at least 8 such
        groups with at least 64 samples have finished since the last group with a sample that did not fail, no new group
        starts; if the groups that still run fail, too, the iterator raises the last exception, of any type. It also
        does so if all tasks have failed. It also raises the error of a sample that cannot be recorded, exceptions of
        `group_filter` and `tasks`, BadInputError for wrong arguments and for a `run_dir` of a run with other tasks or
        inputs, and ServerBusyError if another iterator uses the `run_dir`.
        """
        if self.run_dir is not None and any(self.run_dir.glob(f"*{FILE_SUFFIX}")):
            raise BadInputError(f"run_dir {self.run_dir} belongs to a call of `run`; pass another run_dir")
        options = StepOptions(
            num_groups=num_groups,
            num_extra_groups=num_extra_groups,
            max_staleness=self._max_staleness,
            start_step=start_step,
            run_dir=self.run_dir,
            group_filter=self._group_filter,
            pad_token_id=self._samples.renderer.pad_token_id,
            expert_layout=self._expert_layout,
        )
        return StepStream(options, tasks, self._make_group_runner()).steps()

    def _make_group_runner(self) -> GroupRunner:
        return GroupRunner(self._samples, self.counters, self._n, self._max_concurrency)

    async def _generate_counted(
        self, *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any
    ) -> Mapping[str, Any]:
        generate = with_reports(self._generate, on_tokens)
        reply = await generate(rid=rid, session_id=session_id, **request)
        self.counters.num_turns += 1
        self.counters.num_sampled_tokens += len(reply["output_ids"])
        return reply


# -- Progress ---------------------------------------------------------------------------------------
# Live progress of a rollout on the terminal: finished groups, samples, turns, and sampled tokens per second.


async def with_progress(
    runner: RolloutRunner, groups: AsyncIterator[T], total: int | None = None, console: Console | None = None
) -> AsyncIterator[T]:
    """Yield the groups of `runner.run(...)` or the steps of `runner.steps(...)` and show a progress bar meanwhile.

    `total`: number of groups or steps that are expected. None shows no total. `console`: where the bar is shown; None
    is the standard output. The mean reward is that of all groups, or of the last step. Raises the exceptions of
    `groups`.
    """
    figures = _Figures(runner)
    columns = (BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        async for item in groups:
            rewards = [sample.reward for sample in item.samples if sample.reward is not None]
            if isinstance(item, RolloutStep):
                figures.rewards.clear()
            figures.rewards += rewards
            progress.advance(bar)
            yield item


class _Figures(ProgressColumn):
    """The text beside the bar. A thread of the bar renders it."""

    def __init__(self, runner: RolloutRunner) -> None:
        super().__init__()
        self._counters, self._start = runner.counters, time.monotonic()
        self._tokens_at_start = runner.counters.num_sampled_tokens
        self.rewards: list[float] = []

    def render(self, task: RichTask) -> Text:
        counters, seconds = self._counters, max(time.monotonic() - self._start, 1e-9)
        tokens_per_s = (counters.num_sampled_tokens - self._tokens_at_start) / seconds
        text = f"{counters.num_running_samples} samples running, {counters.num_finished_samples} finished, "
        text += f"{counters.num_failed_samples} failed; {counters.num_turns} turns, {tokens_per_s:.0f} tokens/s"
        if self.rewards:
            text += f"; mean reward {sum(self.rewards) / len(self.rewards):.3f}"
        return Text(text)
