"""TRL: `GRPOTrainer` and `AsyncGRPOTrainer` with our servers instead of TRL's vLLM.

    servers.py         `start_servers`: the fleet and the engine of a trainer, their mesh, the version of TRL
    grpo.py            `FleetRolloutFunc` of a `GRPOTrainer`; sampling arguments, replies and texts
    async_grpo.py      `FleetRolloutWorker` of an `AsyncGRPOTrainer`: samples, rewards and advantages
    weights.py         names and tensors of the trainer's model, its versions, `FleetWeightTransfer`

Importing this package does not import trl.
"""

from verl_server.cpu.trl_attention import enable_async_grpo_on_cpu
from verl_server.integrations.trl.async_grpo import FleetRolloutWorker
from verl_server.integrations.trl.grpo import FleetRolloutFunc
from verl_server.integrations.trl.servers import RolloutServers, start_servers
from verl_server.integrations.trl.weights import FleetWeightTransfer

__all__ = [
    "FleetRolloutFunc",
    "FleetRolloutWorker",
    "FleetWeightTransfer",
    "RolloutServers",
    "enable_async_grpo_on_cpu",
    "start_servers",
]
