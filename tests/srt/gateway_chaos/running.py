"""Runs the client against a gateway under faults, and checks the records."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_chaos.checking import Generated, count_versions, find_violations
from gateway_chaos.client import Conversations
from gateway_chaos.faults import FleetFaults, GatewayProcess
from verl_server import RolloutManager, RouterClient, VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer

SAMPLING = {"temperature": 1.0, "max_new_tokens": 40}
LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1_000_000)


@dataclass
class Result:
    """What a run contained, and what was wrong."""

    violations: list[str]
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The counts as text."""
        return [f"{name}: {count}" for name, count in sorted(self.counts.items())]


def check_replica_faults(
    fleet: RolloutManager,
    engine: VerlEngine,
    weights: Callable[[int], Any],
    renderer: ChatRenderer,
    folder: Path,
    *,
    num_turns: int,
    num_sessions: int = 6,
    seed: int = 0,
    kill_interval_s: float = 15.0,
    update_interval_s: float = 2.0,
) -> Result:
    """Turns through a gateway in this process, while replicas are killed and weights are updated."""
    generated = Generated()
    router = RouterClient(fleet.router_url, fleet.router_key)

    async def generate(*, rid: str, session_id: str, **request: Any) -> Mapping[str, Any]:
        reply = await router.generate(rid=rid, session_id=session_id, **request)
        generated[tuple(request["input_ids"]), tuple(reply["output_ids"])] += 1
        return reply

    faults = FleetFaults(fleet, engine, weights, seed)
    with Gateway(generate, folder, renderer=renderer, limits=LIMITS) as gateway:
        keys = dict[str, str]()
        for number in range(num_sessions):
            info, key = gateway.create_session(f"s{number}", sampling_params=SAMPLING)
            keys[info.id] = key
        client = Conversations(gateway.url, keys, num_turns, seed)
        with faults.running(kill_interval_s, update_interval_s):
            asyncio.run(client.run())
    violations = [*client.violations, *faults.errors, *find_violations(folder, client.turns, renderer, generated)]
    counts = client.counts + Counter({
        "turns": len(client.turns), "kills of replicas": faults.num_kills, "weight updates": faults.num_updates,
        "turns with several weight versions": sum(
            count for versions, count in count_versions(folder).items() if versions > 1
        ),
    })  # fmt: skip
    return Result(violations, counts)


def check_gateway_kills(
    process: GatewayProcess,
    renderer: ChatRenderer,
    folder: Path,
    *,
    num_turns: int,
    num_sessions: int = 6,
    seed: int = 0,
    kill_interval_s: float = 15.0,
    max_kills: int = 1000,
) -> Result:
    """Turns through a gateway in a process of its own, which is killed and started again and again."""
    stop = threading.Event()
    process.start()
    try:
        keys = {f"s{number}": process.create_session(f"s{number}", SAMPLING) for number in range(num_sessions)}
        client = Conversations(process.url, keys, num_turns, seed)
        failures = list[str]()

        def kill() -> None:
            try:
                process.kill_and_restart(kill_interval_s, max_kills, stop)
            except Exception as error:  # noqa: BLE001 - reported as a violation
                failures.append(f"{type(error).__name__}: {error}")

        killing = threading.Thread(target=kill)
        killing.start()
        try:
            asyncio.run(client.run())
        finally:
            stop.set()
            killing.join()
    finally:
        process.kill()
    violations = [*client.violations, *failures, *find_violations(folder, client.turns, renderer)]
    return Result(violations, client.counts + Counter({"turns": len(client.turns), "kills": process.num_kills}))
