"""The gateway in front of a fleet: replicas that die in a turn, and those of a Ray cluster, which come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fleet_helpers import busy_replica, states, tokens_in_flight
from gateway_commands import ADMIN_KEY, ask, create_session, gateway_command, is_ready
from helpers import server_pid, wait_until
from transformers import AutoTokenizer

from verl_server import RolloutManager
from verl_server.agent import RolloutLimits
from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.gateway import Gateway
from verl_server.rollout.fleet import ReplicaState
from verl_server.trajectory import ChatRenderer, Node, load_session

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


# -- a replica that dies in the middle of a turn ----------------------------------------------------------

LETTERS = {str(token): 100.0 for token in range(64, 90)}
MANY_TOKENS = {"temperature": 0.0, "max_new_tokens": 1200}


class StreamedTurn:
    """A chat that is streamed, and the text of the turn so far."""

    def __init__(self, gateway: Gateway, key: str, **headers: str) -> None:
        self._url, self._headers = f"{gateway.openai_url}/chat/completions", {"x-api-key": key, **headers}
        self.text = ""
        self.end: str | None = None
        """Why the turn has ended."""

    def run(self) -> StreamedTurn:
        """Read the stream to its end."""
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
        with httpx.stream("POST", self._url, json=body, headers=self._headers, timeout=120.0) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = orjson.loads(line[6:])["choices"]
                    self.text += choice["delta"].get("content") or ""
                    self.end = choice["finish_reason"] or self.end
        return self


def turn_of(gateway: Gateway, session_id: str) -> Node:
    """The only recorded turn of a session."""
    (turn,) = (node for node in load_session(gateway.config.run_dir / f"{session_id}.jsonl").nodes if node.sampled)
    return turn


@pytest.mark.parametrize(
    "sampling",
    [{"ignore_eos": True, "logit_bias": LETTERS}, {"regex": "[a-z]{1000}"}],
    ids=["continued", "started again"],
)
def test_a_stream_survives_the_death_of_its_replica(
    fleet: RolloutManager, tiny: Callable[..., Path], tmp_path: Path, sampling: dict[str, Any]
) -> None:
    """The client has the text of the one recorded turn, that of an undisturbed turn. The retry gets the same turn."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    limits = RolloutLimits(max_context_tokens=2000, max_turns=10)
    before, is_continued = fleet.status().router_counters, "regex" not in sampling
    with Gateway(fleet, tmp_path, renderer=renderer, limits=limits) as gateway, ThreadPoolExecutor(1) as pool:
        keys = [gateway.create_session(name, sampling_params={**MANY_TOKENS, **sampling})[1] for name in ("a", "b")]
        stream = StreamedTurn(gateway, keys[0])
        running = pool.submit(stream.run)
        wait_until(lambda: stream.text or not is_continued, 60.0, "no text arrives")
        wait_until(lambda: tokens_in_flight(fleet) > 100, 60.0, "no tokens are generated")
        os.kill(server_pid(busy_replica(fleet)), signal.SIGKILL)
        assert not running.done()
        running.result()
        retry = StreamedTurn(gateway, keys[0], **{"x-stainless-retry-count": "1"}).run()
        turn = turn_of(gateway, "a")
        undisturbed = StreamedTurn(gateway, keys[1]).run()
        expected = turn_of(gateway, "b")
    assert stream.text == retry.text == undisturbed.text == renderer.decode(turn.token_ids)
    assert stream.end == retry.end == undisturbed.end
    assert turn.token_ids == expected.token_ids
    assert max(abs(a - b) for a, b in zip(turn.logprobs, expected.logprobs, strict=True)) < 1e-4
    after = fleet.status().router_counters
    changes = [after.continued - before.continued, after.restarted - before.restarted]
    assert changes == ([1, 0] if is_continued else [0, 1])
    assert after.requests - before.requests == 2, "the retry needs no request"
    wait_until(lambda: healthy(fleet) == 2, RESTART_S, f"not healthy: {states(fleet)}")
