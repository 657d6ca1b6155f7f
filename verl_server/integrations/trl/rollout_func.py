"""`FleetRolloutFunc`: the `rollout_func` of a `GRPOTrainer` whose completions come from our servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadInputError
from verl_server.integrations.trl.completions import Completion
from verl_server.integrations.trl.generation import ServerGeneration, no_images
from verl_server.integrations.trl.sampling import require_free_params
from verl_server.integrations.trl.servers import RolloutServers, require_servers
from verl_server.integrations.trl.version import require_trl
from verl_server.type_checks import check_arguments


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
