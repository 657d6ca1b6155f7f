"""`FleetRolloutWorker`: samples for an `AsyncGRPOTrainer`, made in a thread while the trainer trains."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.agent.user_code import call_user_function
from verl_server.config import NotNegativeInt
from verl_server.errors import BadInputError, DeadlineError, ShutDownError, VerlServerError
from verl_server.integrations.trl.grpo import (
    SEED_BITS,
    Completion,
    completion_value,
    fit_into_context,
    parse_completion,
    prompt_token_ids,
    trainer_params,
)
from verl_server.integrations.trl.servers import RolloutServers, require_one_gpu, require_trl
from verl_server.validation import check_arguments, is_list

logger = logging.getLogger(__name__)

# -- Rewards ----------------------------------------------------------------------------------------
# Rewards and advantages of the completions of one prompt, as TRL's own rollout worker computes them.

RewardFunc = Callable[..., Any]
"""TRL's reward function: gets lists of prompts, completions and columns, and returns a reward or None for each."""

NUM_THREADS = 8
"""Maximum number of reward functions that run in threads at a time."""
EPSILON = 1e-8
"""Added to the standard deviation of a group, so that equal rewards have no advantage."""


@dataclass(frozen=True)
class Scores:
    """Rewards of one group of completions."""

    by_function: dict[str, list[float]]
    """Rewards by the name of the reward function. NaN where the function returned None."""
    rewards: list[float]
    """Sum of the rewards of each completion. NaN where all functions returned None."""
    advantages: list[float]
    """Rewards minus their mean, divided by their standard deviation. 0 where the reward is NaN."""
    std: float
    """Standard deviation of the rewards. NaN without rewards."""


class RewardFunctions:
    """The reward functions of a worker, and the calls that run now."""

    def __init__(self, functions: Sequence[RewardFunc]) -> None:
        self._functions = list(functions)
        self.names: list[str] = []
        """A name for each function. The second function of a name has the suffix `_2`."""
        for name in map(name_of, functions):
            suffixed = (f"{name}_{number}" for number in itertools.count(2))
            self.names.append(next(each for each in itertools.chain([name], suffixed) if each not in self.names))
        self._threads = asyncio.Semaphore(NUM_THREADS)
        self._running: dict[object, tuple[str, float]] = {}

    async def compute(self, columns: Mapping[str, Any]) -> list[list[float | None]]:
        """The values of each reward function. Its arguments are `columns`. Ordinary functions run in daemon threads.

        Raises VerlServerError for an error of a function, which is its cause, and for a result that is not a list with
        one number or None for each completion.
        """
        calls = zip(self.names, self._functions, strict=True)
        return await asyncio.gather(*(self._call(name, function, columns) for name, function in calls))

    def longest_call(self) -> tuple[str, float] | None:
        """The name of the function that runs for the longest time, and its seconds. None if no function runs."""
        started = min(list(self._running.values()), key=lambda call: call[1], default=None)
        return None if started is None else (started[0], time.monotonic() - started[1])

    async def _call(self, name: str, function: RewardFunc, columns: Mapping[str, Any]) -> list[float | None]:
        called: Any = function.func if isinstance(function, functools.partial) else function
        is_async = any(map(inspect.iscoroutinefunction, (called, called.__call__)))
        num_completions = len(columns["completions"])
        async with contextlib.nullcontext() if is_async else self._threads:
            call = object()
            self._running[call] = (name, time.monotonic())
            try:
                rewards = _as_rewards(await call_user_function(functools.partial(function, **columns)))
            except Exception as error:
                raise VerlServerError(f"reward function {name} failed: {type(error).__name__}: {error}") from error
            finally:
                del self._running[call]
        if len(rewards) != num_completions:
            raise VerlServerError(
                f"reward function {name} returned {len(rewards)} rewards for {num_completions} completions"
            )
        return rewards


def _as_rewards(result: Any) -> list[float | None]:
    """The rewards in the result of a function. Raises TypeError or ValueError for other results.

    The digits of a text or the keys of a dict would otherwise be taken for rewards, and the text "nan" for a number.
    """
    values: list[Any] = [result] if isinstance(result, (str, bytes, Mapping)) else list(result)
    for value in values:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError(f"it must return a list of numbers or None, got {value!r:.80}")
    return [None if value is None else float(value) for value in values]


def score_group(names: Sequence[str], values: Sequence[Sequence[Any]]) -> Scores:
    """Rewards and advantages of a group. `values`: the results of each reward function. `names`: their own names."""
    table = np.array([[np.nan if value is None else float(value) for value in column] for column in values])
    has_reward = ~np.isnan(table).all(axis=0)
    rewards = np.where(has_reward, np.nansum(table, axis=0), np.nan)
    advantages, std = np.zeros(len(rewards)), float("nan")
    if has_reward.any():
        known = rewards[has_reward]
        std = float(known.std())
        advantages[has_reward] = (known - known.mean()) / (std + EPSILON)
    by_function = dict(zip(names, table.tolist(), strict=True))
    return Scores(by_function, rewards.tolist(), advantages.tolist(), std)


def name_of(function: RewardFunc) -> str:
    """The name of a reward function: that of the function, of the wrapped function, or of the class of an object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


# -- Rollout worker ---------------------------------------------------------------------------------

#: Seconds before a generation is repeated.
REPEAT_S = 1.0
#: Columns of the data set that reward functions get under the same name from the worker.
RESERVED_COLUMNS = {"prompt", "prompts", "completion", "completions", "completion_ids", "weight_versions"}
STOPPED = "this FleetRolloutWorker was stopped: make a new trainer and worker"
MAX_METRICS = 4096
"""Maximum number of metrics that wait for the trainer."""
POLL_S = 0.05
"""Seconds between two attempts to put a sample into a full buffer, and at most between two heartbeats."""
STOP_TIMEOUT_S = 15.0
"""Seconds for the thread to end."""


class FleetRolloutWorker:
    """Generates and scores samples in a thread of the trainer. Implements TRL's `RolloutWorkerProtocol`.

    Pass it as `AsyncGRPOTrainer(rollout_worker=...)`, together with a `FleetWeightTransfer` for the same servers.
    Reward functions and data belong to this object; TRL ignores those of the trainer. A sample is as old as its oldest
    token. Its metrics tell the versions of its oldest and of its newest token.

    One object serves one trainer. TRL starts and stops it.
    """

    @check_arguments(skip=("servers", "reward_funcs"))
    def __init__(
        self,
        servers: RolloutServers,
        args: Any,
        train_dataset: Any,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        processing_class: Any,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        seed: int | None = None,
        start_index: NotNegativeInt = 0,
    ) -> None:
        """
        Args:
            servers: Servers that generate.
            args: `AsyncGRPOConfig` of the trainer. It needs a `token_budget`.
            train_dataset: Rows with a `prompt`, which is a text or a list of messages. Other columns go to the reward
                functions. The rows are used in their order, again and again.
            reward_funcs: TRL's reward functions. They need not be picklable.
            processing_class: Tokenizer with a chat template.
            sampling_params: Further sampling parameters in SGLang's names. They win over those of `args`.
            seed: Seed of the sampling. None: other completions in each run.
            start_index: Index of the first row, for a training that continues.

        Raises UnsupportedError for another version of TRL, BadInputError.
        """
        require_trl()
        require_one_gpu(args)
        if servers.fleet is None:
            raise BadInputError("FleetRolloutWorker needs the fleet, which is on rank 0: make the worker there")
        self._engine, self._args, self._start_index = servers.engine, args, start_index
        self._dataset: Any = train_dataset
        self._version_offset = 0
        """TRL's version of the servers' weights less that of the engine. Both rise by one with each sync."""
        if args.token_budget is None:  # TRL's default
            raise BadInputError(
                "without a token_budget, AsyncGRPOTrainer waits for a vLLM server and asks it: set "
                "AsyncGRPOConfig(token_budget=...) to the context length of the servers, or to 0 for batches of "
                "per_device_train_batch_size samples",
                argument="args",
            )
        functions: list[Any] = list(reward_funcs) if is_list(reward_funcs) else [reward_funcs]
        if not functions or any(not callable(each) or hasattr(each, "from_pretrained") for each in functions):
            raise BadInputError(
                "reward_funcs must be a function or a list of functions. For a reward model, write a function that "
                "calls it",
                argument="reward_funcs",
            )
        self._rewards = RewardFunctions(functions)
        self._router, self._tokenizer, self._max_tokens = servers.fleet.router, processing_class, servers.max_tokens
        self._params = trainer_params(args, [processing_class.eos_token_id], sampling_params or {})
        self._seeds = None if seed is None else random.Random(seed)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(max(args.queue_maxsize, 0))
        """Samples that the trainer takes."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(MAX_METRICS)
        """Metrics that the trainer logs."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._heartbeat = time.monotonic()

    # -- TRL's protocol, called in the trainer's main thread ---------------------------------------------

    def start(self) -> None:
        """Begin to generate. TRL calls it after the first push. Raises ShutDownError after `stop`."""
        if self._stopping.is_set():
            raise ShutDownError(STOPPED)
        if self._thread is None:
            self._heartbeat = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="trl rollouts", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the generation. Running requests are aborted. Safe to call twice."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(STOP_TIMEOUT_S)
            if thread.is_alive():
                logger.warning("the rollout worker has not ended within %g s", STOP_TIMEOUT_S)

    def update_model_version(self, model_version: int) -> None:
        """Tell the version of the weights that the servers have now, as TRL counts it."""
        self._version_offset = model_version - self._engine.weight_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error of the worker if it has failed, and ShutDownError after `stop`.

        Raises DeadlineError if the worker gives no sign of life for `stale_after_s` seconds, and if a reward function
        does not return for so long.
        """
        has_ended = self._thread is not None and not self._thread.is_alive()  # asked first: an error comes before it
        if self._error is not None:
            if isinstance(self._error, VerlServerError):
                raise self._error
            message = f"the rollout worker failed: {type(self._error).__name__}: {self._error}"
            raise VerlServerError(message) from self._error
        if self._stopping.is_set():
            raise ShutDownError(STOPPED)
        if self._thread is None:
            return
        if has_ended:
            raise VerlServerError("the thread of the rollout worker has ended without an error")
        age = time.monotonic() - self._heartbeat
        if age > stale_after_s:
            raise DeadlineError(
                f"the rollout worker has given no sign of life for {age:.0f} s", operation="rollout", seconds=age
            )
        name, running_s = self._rewards.longest_call() or ("", 0.0)
        if running_s > stale_after_s:
            raise DeadlineError(
                f"reward function {name} has not returned for {running_s:.0f} s. If it needs this time, raise "
                "AsyncGRPOConfig(heartbeat_stale_after_s=...)",
                operation=name,
                seconds=running_s,
            )

    # -- the thread of the worker ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._generate_until_stopped())
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
            logger.exception("the rollout worker failed")

    async def _generate_until_stopped(self) -> None:
        """Keep as many groups running as the limit of samples in flight allows."""
        group_size, next_group = self._args.num_generations, self._start_index
        groups: set[asyncio.Task[None]] = set()
        try:
            while not self._stopping.is_set():
                self._heartbeat = time.monotonic()
                while (len(groups) + 1) * group_size <= max(self._args.max_inflight_tasks, group_size):
                    row = self._dataset[next_group % len(self._dataset)]
                    groups.add(asyncio.create_task(self._make_and_deliver(row, next_group - self._start_index)))
                    next_group += 1
                done, _ = await asyncio.wait(groups, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for group in done:
                    group.result()  # raises the error of the group
                groups -= done
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def _make_and_deliver(self, row: dict[str, Any], group_id: int) -> None:
        """Generate and score the samples of one row, and put them into the buffer. Until then they are in flight."""
        samples, metrics = await self._make_group(row, group_id)
        for sample in samples:
            while True:
                sample.enqueued_at = time.time()
                try:
                    self.rollout_buffer.put_nowait(sample)
                    break
                except queue.Full:
                    await asyncio.sleep(POLL_S)
        try:
            self.metrics_queue.put_nowait(metrics)
        except queue.Full:
            logger.debug("the trainer takes no metrics: those of group %d are dropped", group_id)

    async def _make_group(self, row: dict[str, Any], group_id: int) -> tuple[list[Any], dict[str, Any]]:
        """Samples of a row, which are TRL's `RolloutSample`, and metrics of their generation.

        Raises BadInputError for a row without a prompt, and for a prompt that leaves no room for a completion.
        """
        if not row.get("prompt"):
            raise BadInputError(f"a row of train_dataset has no prompt; its columns are {sorted(row)}")
        started, prompt = time.monotonic(), row["prompt"]
        prompt_ids = prompt_token_ids(self._tokenizer, prompt, self._args.chat_template_kwargs or {})
        completions = await self._generate(prompt_ids)
        values = [completion_value(self._tokenizer, prompt, prompt_ids, each.token_ids) for each in completions]
        generated = time.monotonic()
        columns = {name: [value] * len(values) for name, value in row.items() if name not in RESERVED_COLUMNS}
        columns |= {
            "prompts": [prompt] * len(values),
            "completions": values,
            "completion_ids": [each.token_ids for each in completions],
            "weight_versions": [each.weight_versions for each in completions],
        }
        results = await self._rewards.compute(columns)
        scores = score_group(self._rewards.names, results)
        samples = [
            self._sample(prompt, prompt_ids, value, completion, scores, index, group_id)
            for index, (value, completion) in enumerate(zip(values, completions, strict=True))
        ]
        return samples, self._metrics(completions, generated - started, time.monotonic() - generated)

    async def _generate(self, prompt_ids: list[int]) -> list[Completion]:
        """`num_generations` completions of one prompt, at the same time."""
        params = fit_into_context(self._params, len(prompt_ids), self._max_tokens)
        calls = (self._generate_one(prompt_ids, dict(params)) for _ in range(self._args.num_generations))
        return await asyncio.gather(*calls)

    async def _generate_one(self, prompt_ids: list[int], params: dict[str, Any]) -> Completion:
        """One completion. A retryable error is raised only when `request_timeout` is over.

        For example, the servers are not ready when all of them have been started again and get their weights with the
        next push: the training goes on then.
        """
        if self._seeds is not None:
            params["sampling_seed"] = self._seeds.getrandbits(SEED_BITS)
        deadline = time.monotonic() + self._args.request_timeout
        while True:
            left_s = max(deadline - time.monotonic(), REPEAT_S)
            try:
                reply = await self._router.generate(
                    input_ids=prompt_ids, sampling_params=params, return_logprob=True, timeout_s=left_s
                )
                return parse_completion(reply)
            except VerlServerError as error:
                if not error.retryable or time.monotonic() + REPEAT_S >= deadline:
                    raise
                logger.warning("a generation is repeated after %s: %s", type(error).__name__, error)
                await asyncio.sleep(REPEAT_S)

    def _sample(
        self, prompt: Any, prompt_ids: list[int], value: Any, completion: Completion, scores: Scores, index: int,
        group_id: int,
    ) -> Any:  # fmt: skip
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        context, versions = len(prompt_ids), [int(span["version"]) for span in completion.weight_versions]
        oldest, newest = min(versions) + self._version_offset, max(versions) + self._version_offset
        metrics = {
            "reward": scores.rewards[index],
            "reward_std": scores.std,
            **{f"rewards/{name}": rewards[index] for name, rewards in scores.by_function.items()},
            "policy_version/oldest_token": float(oldest),
            "policy_version/newest_token": float(newest),
        }
        return RolloutSample(
            prompt=prompt,
            completion=value,
            input_ids=np.array(prompt_ids + completion.token_ids, dtype=np.int64),
            completion_mask=np.array([0] * context + [1] * len(completion.token_ids), dtype=np.int64),
            old_log_probs=np.array([0.0] * context + completion.log_probs, dtype=np.float32),
            advantage=scores.advantages[index],
            model_version=oldest,
            group_id=group_id,
            metrics=metrics,
        )

    def _metrics(self, completions: Sequence[Completion], generation_s: float, reward_s: float) -> dict[str, Any]:
        """Metrics as TRL reads them. A pair of numbers is a rate: TRL adds up both and divides."""
        lengths = [len(completion.token_ids) for completion in completions]
        ends = {*self._params["stop_token_ids"], self._tokenizer.pad_token_id}
        cut_off = sum(completion.token_ids[-1] not in ends for completion in completions)
        return {
            "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
            "completions/max_length": float(max(lengths)),
            "completions/min_length": float(min(lengths)),
            "completions/clipped_ratio": (float(cut_off), float(len(lengths))),
            "rollout/duration_s": generation_s,
            "rollout/score_s": reward_s,
        }
