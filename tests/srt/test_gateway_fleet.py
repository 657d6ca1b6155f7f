"""The gateway in front of a fleet: replicas on a Ray cluster that start after the gateway, end and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_commands import ADMIN_KEY, ask, create_session, gateway_command, is_ready
from helpers import wait_until

from verl_server import RolloutManager
from verl_server.gateway import Gateway
from verl_server.rollout.health import ReplicaState
from verl_server.server.forkserver.shared_forkserver import prepare_forkserver

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

RESTART_S = 250.0
NAMESPACE = "fleet-of-the-gateway"


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def healthy(fleet: RolloutManager) -> int:
    return sum(replica.state is ReplicaState.HEALTHY for replica in fleet.replicas)


def test_a_gateway_follows_a_fleet_by_its_ray_names(cluster: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """One gateway finds the replicas by their names, in another process. Another one has the fleet itself."""
    from verl_server.ray import RayLauncher

    address = str(cluster.address)
    prepare_forkserver()
    command = (str(tmp_path / "a"), "--fleet", NAMESPACE)
    with gateway_command(*command, RAY_ADDRESS=address, VERL_SERVER_GATEWAY_ADMIN_KEY=ADMIN_KEY) as url:
        key = create_session(url)
        assert ask(url, key).status_code == 503
        ready = httpx.get(f"{url}/health/readiness", timeout=60.0).json()
        assert ready["reasons"] == ["the gateway has found no server yet"]
        settings: dict[str, Any] = {"model_path": str(tiny("qwen3")), "dtype": "float32", "max_total_tokens": 4096}
        with (
            RolloutManager(1, launcher=RayLauncher(address, NAMESPACE), **settings) as fleet,
            Gateway(fleet, tmp_path / "b") as own,
        ):
            own_key = own.create_session(sampling_params={"max_new_tokens": 5})[1]
            wait_until(lambda: is_ready(url), 120, "the gateway does not find the fleet")
            assert [ask(url, key).status_code, ask(own.url, own_key).status_code] == [200, 200]
            before = fleet.replicas[0].base_url
            actor = ray.get_actor("verl_server_0_0", namespace=NAMESPACE)
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            wait_until(lambda: healthy(fleet) == 0, 20.0, "the death of the actor is not detected")
            wait_until(lambda: not is_ready(own.url), 20.0, "the gateway is ready without a replica")
            wait_until(lambda: healthy(fleet) == 1, RESTART_S, "the server is not started again")
            assert fleet.replicas[0].base_url != before
            wait_until(lambda: is_ready(url) and is_ready(own.url), 150, "the gateway does not follow the fleet")
            again = [{"role": "user", "content": "b"}]
            replies = [ask(url, key, messages=again), ask(own.url, own_key, messages=again)]
            assert [reply.status_code for reply in replies] == [200, 200]
        wait_until(lambda: not is_ready(url), 150, "the gateway is ready without a fleet")
        cluster.shutdown()  # Ray ends the processes that are connected to the cluster
        headers = {"x-api-key": ADMIN_KEY}
        wait_until(
            lambda: "Ray" in str(httpx.get(f"{url}/health", headers=headers, timeout=90.0).json()["engine"]["problem"]),
            150,
            "the gateway does not notice the end of the cluster",
        )
        assert ask(url, key).status_code == 503
