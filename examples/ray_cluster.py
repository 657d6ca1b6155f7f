"""Ray: replicas as actors on a cluster of two nodes (two raylets of this machine), found by name by a second job.

On a real cluster leave `Cluster` out: `RayLauncher(address="auto")`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster
from training import trainer

from verl_server import VerlEngine
from verl_server.rollout import RolloutManager
from verl_server.rollout.ray_launcher import RayLauncher, discover
from verl_server.router.client import RouterClient

STORE = 80 << 20
PARAMS = {"max_new_tokens": 8, "temperature": 0.0}


def second_job(address: str) -> None:
    """Another driver: it knows the cluster's address only."""
    for name, server in sorted(discover(address).items()):
        reply = asyncio.run(_ask(server.base_url, server.api_key))
        print(f"{name}: tokens {reply['output_ids']} of version {reply['meta_info']['weight_version']}")


async def _ask(url: str, key: str | None) -> dict[str, Any]:
    async with RouterClient(url, key) as client:  # a server and a router are asked alike
        return await client.generate(input_ids=[1, 2, 3], sampling_params=PARAMS)


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    try:
        with trainer() as training:
            fleet = RolloutManager(
                2,
                mode="standalone",
                launcher=RayLauncher(cluster.address),
                model_path=training.model_path,
                dtype="float32",
                max_total_tokens=65536,
            )
            with VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine:
                update = engine.update_weights_from_tensor(training.policy.state_dict().items())
                print(f"version {update.weight_version} is on both nodes, by {update.transport}")
                subprocess.run([sys.executable, __file__, cluster.address], check=True, timeout=300)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    second_job(sys.argv[1]) if len(sys.argv) > 1 else main()
