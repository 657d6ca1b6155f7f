"""TRL: `GRPOTrainer` and `AsyncGRPOTrainer` with our servers instead of TRL's vLLM.

    version.py          the version of TRL that this folder works with
    mesh.py             the mesh of the trainer ranks
    servers.py          `start_servers`: the fleet and the engine of a trainer
    policy_weights.py   names and tensors of the trainer's model
    sampling.py         TRL's sampling arguments in SGLang's names
    completions.py      sampled tokens, log probabilities and weight versions of a reply
    generation.py       pushes and generations of a `GRPOTrainer`
    rollout_func.py     `FleetRolloutFunc`, the `rollout_func` of a `GRPOTrainer`
    weight_transfer.py  `FleetWeightTransfer` of an `AsyncGRPOTrainer`
    rollout_worker.py   `FleetRolloutWorker` of an `AsyncGRPOTrainer`: its thread and its queues
    group_maker.py      the samples of one prompt
    reward_columns.py   rewards and advantages of the samples of one prompt
    policy_versions.py  weight versions of the engine as model versions of TRL
    texts.py            prompts as token ids, completions as reward functions get them
    tree_attention.py   `AsyncGRPOTrainer` without a GPU: its attention in PyTorch

Importing this package does not import trl.
"""

from verl_server.integrations.trl.rollout_func import FleetRolloutFunc
from verl_server.integrations.trl.rollout_worker import FleetRolloutWorker
from verl_server.integrations.trl.servers import RolloutServers, start_servers
from verl_server.integrations.trl.tree_attention import enable_async_grpo_on_cpu
from verl_server.integrations.trl.weight_transfer import FleetWeightTransfer

__all__ = [
    "FleetRolloutFunc",
    "FleetRolloutWorker",
    "FleetWeightTransfer",
    "RolloutServers",
    "enable_async_grpo_on_cpu",
    "start_servers",
]
