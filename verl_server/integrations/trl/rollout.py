"""`FleetRolloutWorker`: generates samples for an `AsyncGRPOTrainer` in a thread, while the trainer trains."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from verl_server.errors import BadInputError, DeadlineError, ShutDownError, VerlServerError
from verl_server.integrations.trl.generation import Completion, ServerGeneration, no_images, require_free_params
from verl_server.integrations.trl.groups import GroupMaker, RewardFunc, RewardFunctions, parse_reward_funcs
from verl_server.integrations.trl.servers import RolloutServers, require_one_gpu, require_servers, require_trl
from verl_server.integrations.trl.weights import PolicyVersions
from verl_server.validation import check_arguments, require_whole_number

logger = logging.getLogger(__name__)


# -- Rollout func -----------------------------------------------------------------------------------
# `FleetRolloutFunc`: the `rollout_func` of a `GRPOTrainer` whose completions come from our servers.


class FleetRolloutFunc:
    """Pushes the weights of a `GRPOTrainer` into the servers after each training step, and generates there.

    Pass it as `GRPOTrainer(rollout_func=...)` and leave `use_vllm` out. The tokens that the policy has sampled are
    trained as they are: no text is tokenized again. With `GRPOConfig(vllm_importance_sampling_correction=True)`, which
    is TRL's default, TRL corrects its loss by the log probabilities of the servers and logs their differences to those
    of its own model as `sampling/sampling_logp_difference/max`, as it does with vLLM. Reward functions get
    `weight_versions`: a list of spans with `version`, `start` and `end` for each completion.

    One object serves one trainer.
    """

    @check_arguments(skip=("servers",))
    def __init__(
        self, servers: RolloutServers, *, sampling_params: Mapping[str, Any] | None = None, seed: int | None = None
    ) -> None:
        """`sampling_params`: further parameters in SGLang's names. They win over those of the `GRPOConfig`.

        `seed`: seed of the sampling of the servers. None: other completions in each run.

        Raises UnsupportedError for another version of TRL, BadInputError.
        """
        require_trl()
        require_servers(servers)
        require_free_params(sampling_params or {})
        self._servers, self._more_params, self._seed = servers, dict(sampling_params or {}), seed
        self._trainer: Any = None
        self._generation: ServerGeneration | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One completion for each prompt. TRL calls it on every trainer rank with the prompts of the rank.

        Raises UnsupportedError or BadInputError for what the servers cannot do for this trainer, PeerError,
        ServerDiedError, TornWeightsError.
        """
        generation = self._generation or self._attach(trainer)
        if trainer is not self._trainer:
            raise BadInputError("this FleetRolloutFunc belongs to another trainer: make one for each trainer")
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise no_images()
        return _as_output(prompt_ids, generation.complete(prompt_ids))

    def _attach(self, trainer: Any) -> ServerGeneration:
        """Let the trainer use the servers where it uses vLLM, and push its present weights.

        From now on, TRL itself calls `sync_weights` before it calls this function in a new training step.
        """
        if trainer.args.use_vllm:
            raise BadInputError("use_vllm=True starts or needs vLLM of TRL: leave use_vllm out of the GRPOConfig")
        generation = ServerGeneration(trainer, self._servers, self._more_params, self._seed)
        generation.sync_weights()
        trainer.vllm_generation, trainer._last_loaded_step = generation, trainer.state.global_step
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.add_callback(_push_after_training(trainer))
        self._trainer, self._generation = trainer, generation
        return generation


def _as_output(prompt_ids: list[list[int]], completions: list[Completion]) -> dict[str, Any]:
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [completion.token_ids for completion in completions],
        "logprobs": [completion.log_probs for completion in completions],
        "weight_versions": [completion.weight_versions for completion in completions],
    }


def _push_after_training(trainer: Any) -> Any:
    """A callback of the trainer: the first generation after the end of a training pushes the weights.

    TRL compares the number of the step with that of the last push. The numbers can be equal although the weights
    differ: a second `train()` begins at step 0 again, and `load_best_model_at_end` loads other weights.
    """
    from transformers import TrainerCallback

    class PushAfterTraining(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            trainer._last_loaded_step = -1

    return PushAfterTraining()


# -- Rollout worker ---------------------------------------------------------------------------------

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
        start_index: int = 0,
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
        require_servers(servers)
        _require_trainer_args(args)
        if servers.fleet is None:
            raise BadInputError("FleetRolloutWorker needs the fleet, which is on rank 0: make the worker there")
        if not isinstance(train_dataset, Sized):
            raise BadInputError(
                "train_dataset must have rows and a length: load an IterableDataset into a Dataset, for example with "
                "Dataset.from_list(list(train_dataset))",
                argument="train_dataset",
            )
        _require_tokenizer(processing_class)
        require_whole_number("start_index", start_index, 0)
        self._engine, self._args, self._start_index = servers.engine, args, start_index
        self._dataset: Any = train_dataset
        self._versions = PolicyVersions()
        self._rewards = RewardFunctions(parse_reward_funcs(reward_funcs))
        self._maker = GroupMaker(
            servers.fleet.router, args, self._rewards, processing_class, self._versions, sampling_params or {}, seed,
            servers.max_tokens)  # fmt: skip
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
        self._versions.set(model_version, self._engine.weight_version)

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
        samples, metrics = await self._maker.make_group(row, group_id)
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


def _require_trainer_args(args: Any) -> None:
    """Raise BadInputError or UnsupportedError unless the worker can generate for a trainer with these arguments."""
    require_one_gpu(args)
    if args.token_budget is None:
        raise BadInputError(
            "without a token_budget, AsyncGRPOTrainer asks a vLLM server for it: set "
            "AsyncGRPOConfig(token_budget=...) to the context length of the servers, or to 0 for batches of "
            "per_device_train_batch_size samples",
            argument="args",
        )


def _require_tokenizer(processing_class: Any) -> None:
    """Raise BadInputError unless the tokenizer has a token that ends a completion."""
    if processing_class.eos_token_id is None:
        raise BadInputError(
            "the tokenizer in processing_class has no eos_token_id, so that no completion would end: set its eos_token",
            argument="processing_class",
        )
