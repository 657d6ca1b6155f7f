"""Replicas as actors on a Ray cluster of two raylets on this machine, which are two nodes to Ray."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import (
    assert_equals_reference,
    change_weights,
    no_new_shared_memory,
    reference_model,
    server_pid,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import AdapterConfig, RolloutManager, VerlEngine
from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.errors import BadInputError, ServerError
from verl_server.rollout.fleet import ReplicaState

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)

OBJECT_STORE_BYTES = 80 << 20
RESTART_S = 250.0
SERVER: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**nodes, "include_dashboard": False})
    try:
        cluster.add_node(**nodes)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


@pytest.fixture
def launcher(address: str) -> Any:
    """A launcher. The fleet that uses it closes it."""
    from verl_server.ray import RayLauncher

    return RayLauncher(address)


def healthy(fleet: Any) -> int:
    return sum(replica.state is ReplicaState.HEALTHY for replica in fleet.replicas)


def forkserver_of(replica: Any) -> psutil.Process:
    """The forkserver that has forked the warden of the replica's server."""
    forkserver = psutil.Process(server_pid(replica)).parents()[1]
    assert "forkserver_main" in " ".join(forkserver.cmdline())
    return forkserver


def test_a_missing_cluster_is_explained() -> None:
    """No test of this file has started the cluster yet. Ray finds the clusters of other processes of the suite too."""
    from verl_server.ray import RayLauncher, discover

    for call in (discover, RayLauncher):
        with pytest.raises(BadInputError, match="Invalid address format: here; pass the address as HOST:PORT"):
            call("here")
    if any(process.name() == "gcs_server" for process in psutil.process_iter()):
        pytest.skip("a Ray cluster runs on this machine")
    for call in (discover, RayLauncher):
        with pytest.raises(ServerError, match=r"no Ray cluster.*ray start --head.*HOST:PORT"):
            call()


def test_replicas_are_actors(launcher: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """They are found by name, are started again when their actor is killed, and leave nothing behind.

    Their servers are forked by the forkserver of the suite.
    """
    from verl_server.ray import discover
    from verl_server.rollout.launchers.ray_launcher import NAMESPACE

    prepare_forkserver()

    folder = str(tiny("qwen3"))
    model = reference_model(folder)
    with (
        no_new_shared_memory(),
        RolloutManager(2, launcher=launcher, model_path=folder, **SERVER) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        change_weights(model, seed=6)
        engine.update_weights_from_tensor(model.state_dict().items())
        assert_equals_reference(engine, model)
        found = discover()
        assert sorted(found) == ["verl_server_0", "verl_server_1"]
        assert {server.base_url for server in found.values()} == {replica.base_url for replica in fleet.replicas}
        assert all("127.0.0.1" not in server.base_url for server in found.values())

        first = fleet.replicas[0]
        assert first.pids is not None
        server = psutil.Process(first.pids.main)
        assert forkserver_of(fleet.replicas[0]) == forkserver_of(fleet.replicas[1]), "shared by the user's processes"
        actor = ray.get_actor("verl_server_0_0", namespace=NAMESPACE)
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        wait_until(lambda: healthy(fleet) < 2, 20.0, "the death of the actor is not detected")
        wait_until(lambda: not server.is_running(), 20.0, "the server outlives its actor")
        wait_until(lambda: healthy(fleet) == 2, RESTART_S, "the server is not started again")
        assert forkserver_of(fleet.replicas[0]) == forkserver_of(fleet.replicas[1])
        assert_equals_reference(first.adapter, model)
        assert discover()["verl_server_0"].base_url == first.base_url

        fleet.remove_replica("verl_server_1")
        assert sorted(discover()) == ["verl_server_0"]
    assert not ray.is_initialized()


def break_connections(name: str, stop: threading.Event, broken: list[int]) -> None:
    """Break all connections to the process of the actor `name` again and again, as a link does that is cut.

    The calls that run in the actor go on; their replies are lost. `broken` receives the number of connections.
    """
    from verl_server.rollout.launchers.ray_launcher import NAMESPACE

    while not stop.wait(0.2):
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
        except ValueError:  # the actor does not exist yet
            continue
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
        is_stopped = False
        while not is_stopped:
            for port in ports:
                command = ["ss", "-KHt", "state", "established", "dport", "=", f":{port}"]
                broken.append(len(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()))
            is_stopped = stop.wait(2.0)


def test_an_actor_that_cannot_be_reached_for_a_moment_is_not_dead(launcher: Any, tiny: Callable[..., Path]) -> None:
    """Its connections break while its server starts and while it serves. Its replies are asked for again."""
    from verl_server.ray import discover

    if os.geteuid() or not shutil.which("ss"):
        pytest.skip("only root may break the connections of other processes, with the program ss")
    stop = threading.Event()
    broken: list[int] = []
    link = threading.Thread(target=break_connections, args=("verl_server_0_0", stop, broken))
    link.start()
    try:
        with RolloutManager(1, launcher=launcher, model_path=str(tiny("qwen3")), **SERVER) as fleet:
            assert sum(broken), "no connection was broken while the server started"
            (replica,) = fleet.replicas
            pids, before = replica.pids, len(broken)
            wait_until(lambda: sum(count > 0 for count in broken[before:]) > 3, 30.0, "no connection breaks")
            assert discover()["verl_server_0"].base_url == replica.base_url
            assert (replica.state, replica.pids, replica.restarts) == (ReplicaState.HEALTHY, pids, 0)
    finally:
        stop.set()
        link.join()


#: Two fleets on one cluster.
TWO_FLEETS = """
import json, sys, time

from verl_server import RolloutManager
from verl_server.errors import StartupError
from verl_server.ray import RayLauncher

address, folder = sys.argv[1:]
server = {"model_path": folder, "dtype": "float32", "max_total_tokens": 4096}
with RolloutManager(1, launcher=RayLauncher(address), **server) as fleet:
    (replica,) = fleet.replicas
    pids, started = replica.pids, time.monotonic()
    try:
        RolloutManager(1, launcher=RayLauncher(address), **server)
    except StartupError as error:
        refusal = error.message
    found = {"refusal": refusal, "soon": time.monotonic() - started < 60.0}
    found |= {"state": replica.state.value, "same": replica.pids == pids, "restarts": replica.restarts}
    print(json.dumps(found))
"""


def test_a_name_of_another_fleet_is_refused_soon(address: str, tiny: Callable[..., Path]) -> None:
    """The other fleet goes on."""
    command = [sys.executable, "-c", TWO_FLEETS, address, str(tiny("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    refusal = found.pop("refusal")
    assert found == {"soon": True, "state": "healthy", "same": True, "restarts": 0}
    assert "another fleet uses the name verl_server_0_0" in refusal
    assert "RayLauncher(namespace=...)" in refusal


#: Ray is shut down under a fleet, and the process connects again while the fleet would still wait for an answer.
CONNECTS_AGAIN = """
import sys, time

import ray
from verl_server import RecoveryConfig, RolloutManager
from verl_server.ray import RayLauncher
from verl_server.rollout.launchers import ray_server

address, folder = sys.argv[1:]
ray_server.ANSWER_TIMEOUT_S = 3.0
recovery = RecoveryConfig(max_restarts=0)
server = {"model_path": folder, "dtype": "float32", "max_total_tokens": 4096}
fleet = RolloutManager(1, launcher=RayLauncher(address), recovery=recovery, **server)
for _ in range(5):
    ray.shutdown()
    ray.init(address, log_to_driver=False)
    ray.get(ray.util.placement_group([{"CPU": 1}]).ready())
    time.sleep(1.0)
fleet.shutdown()
print("alive", fleet.replicas)
"""


def test_a_process_that_shuts_ray_down_under_its_fleet_goes_on(address: str, tiny: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", CONNECTS_AGAIN, address, str(tiny("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout


def test_a_replica_on_two_nodes(launcher: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    folder = str(tiny("qwen3"))
    model = reference_model(folder)
    with (
        RolloutManager(
            1, launcher=launcher, mode="standalone", model_path=folder, tp_size=2, nnodes=2, **SERVER
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        actors = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        assert sorted(actors) == ["verl_server_0_0", "verl_server_0_1"]
        change_weights(model, seed=7)
        engine.update_weights_from_tensor(model.state_dict().items())
        assert_equals_reference(engine, model)


def test_the_interpreter_of_a_server_is_that_of_its_node(
    launcher: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = AdapterConfig(server_python=tmp_path / "gone")
    with pytest.raises(BadInputError, match="gone is no executable file"):
        RolloutManager(1, launcher=launcher, model_path=str(tiny("qwen3")), config=config)


def test_fleets_that_exceed_the_cluster_are_refused(launcher: Any, tiny: Callable[..., Path]) -> None:
    cases: list[tuple[int, dict[str, Any], str]] = [
        (1, {"tp_size": 4, "nnodes": 4}, "the cluster has 2"),
        (1, {"tp_size": 4}, "one replica takes 4 of CPU on a node; the largest node has 2"),
        (5, {}, "5 replicas of 1 devices each take 5; there are 4"),
    ]
    for replicas, sizes, message in cases:
        with pytest.raises(BadInputError, match=message):
            RolloutManager(replicas, launcher=launcher, model_path=str(tiny("qwen3")), **sizes)
    with pytest.raises(BadInputError, match="Ray chooses the GPUs of each replica: leave CUDA_VISIBLE_DEVICES out of"):
        RolloutManager(1, launcher=launcher, model_path=str(tiny("qwen3")), env={"CUDA_VISIBLE_DEVICES": "0"})
    launcher.close()
