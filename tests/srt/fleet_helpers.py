"""What the tests of fleets share: settings, states of replicas, and waiting for requests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from verl_server import RecoveryConfig, RolloutManager, RouterConfig
from verl_server.rollout.fleet import ReplicaState
from verl_server.rollout.manager import ReplicaView

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
RECOVERY = RecoveryConfig(stall_timeout_s=3.0)
#: Router processes that do not report for so long are replaced.
ROUTER = RouterConfig(report_timeout_s=4.0)
#: A start takes ten seconds, and minutes on a machine with other work. The tests do not measure it.
RESTART_S = 250.0


def states(fleet: RolloutManager) -> dict[str, str]:
    return {replica.name: replica.state.value for replica in fleet.replicas}


def healthy(fleet: RolloutManager) -> int:
    return sum(replica.state is ReplicaState.HEALTHY for replica in fleet.replicas)


def scheduler_pid(replica: ReplicaView) -> int:
    assert replica.pids is not None
    (pid,) = (pid for pid in replica.pids.workers if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def busy_replica(fleet: RolloutManager) -> ReplicaView:
    """The replica on which a request of the router in this process runs."""
    names = [replica.name for replica in fleet.status().replicas if replica.tokens_in_flight]
    return next(replica for replica in fleet.replicas if replica.name in names)


def tokens_in_flight(fleet: RolloutManager) -> int:
    return max((replica.tokens_in_flight for replica in fleet.status().replicas), default=0)


def running_requests(fleet: RolloutManager) -> int:
    return sum(replica.running_requests for replica in fleet.status().replicas)


async def until_tokens(fleet: RolloutManager, count: int, request: asyncio.Future[Any]) -> None:
    """Wait until one replica has `count` tokens in flight."""
    while tokens_in_flight(fleet) < count:
        await asyncio.sleep(0.005)
        assert not request.done(), request.result()


async def until_requests(fleet: RolloutManager, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while running_requests(fleet) < count:
        assert time.monotonic() < deadline, f"{running_requests(fleet)} of {count} requests run"
        await asyncio.sleep(0.02)
