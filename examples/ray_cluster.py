"""Ray: replicas as actors on a cluster of two nodes (two raylets on this machine). A second job finds them by name.

On a real cluster, leave out `Cluster` and use `RayLauncher(address="auto")`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ray.cluster_utils import Cluster
from training import trainer

from verl_server import RolloutManager, RouterClient, VerlEngine
from verl_server.ray import RayLauncher, discover

OBJECT_STORE_BYTES = 80 << 20
SAMPLING_PARAMS = {"max_new_tokens": 8, "temperature": 0.0}


def second_job(address: str) -> None:
    """Another Ray job, which knows only the address of the cluster."""
    for name, server in sorted(discover(address).items()):
        reply = asyncio.run(generate(server.base_url, server.api_key))
        print(f"{name}: tokens {reply['output_ids']} of version {reply['meta_info']['weight_version']}")


async def generate(url: str, api_key: str | None) -> Mapping[str, Any]:
    async with RouterClient(url, api_key) as client:  # servers and routers take the same requests
        return await client.generate(input_ids=[1, 2, 3], sampling_params=SAMPLING_PARAMS)


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    try:
        with (
            trainer() as training,
            RolloutManager(
                2,
                mode="standalone",
                launcher=RayLauncher(cluster.address),
                model_path=training.model_path,
                dtype="float32",
                max_total_tokens=65536,
            ) as fleet,
            VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine,
        ):
            update = engine.update_weights_from_tensor(training.policy.state_dict().items())
            print(f"version {update.weight_version} is on both nodes, by {update.transport}")
            subprocess.run([sys.executable, __file__, cluster.address], check=True, timeout=300)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    second_job(sys.argv[1]) if len(sys.argv) > 1 else main()
