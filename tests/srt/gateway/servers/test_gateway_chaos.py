"""The gateway under faults, with a client that repeats each request: one turn for each request, and none is lost.

The program `benchmarks/check_gateway_chaos.py` runs the same checks with 1,000 turns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_chaos.faults import GatewayProcess
from gateway_chaos.running import check_gateway_kills, check_replica_faults
from helpers import change_weights, free_port, reference_model
from transformers import AutoTokenizer

from verl_server import RolloutManager, VerlEngine
from verl_server.trajectory import ChatRenderer


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def test_killed_replicas_and_weight_updates_lose_and_double_no_turn(
    fleet_and_engine: tuple[RolloutManager, VerlEngine],
    tiny: Callable[..., Path],
    renderer: ChatRenderer,
    tmp_path: Path,
) -> None:
    models = [reference_model(tiny("qwen3")) for _ in range(2)]
    change_weights(models[1], seed=1)

    def weights(version: int) -> Any:
        return models[version % 2].state_dict().items()

    fleet, engine = fleet_and_engine
    result = check_replica_faults(
        fleet, engine, weights, renderer, tmp_path, num_turns=60, kill_interval_s=0.7, update_interval_s=0.3
    )
    print("\n".join(result.lines()))
    assert result.violations == []
    assert result.counts["turns"] == 60
    assert result.counts["kills of replicas"] >= 1
    assert result.counts["weight updates"] >= 1
    assert result.counts["dropped streams"] >= 10


def test_a_killed_gateway_loses_and_doubles_no_turn(
    fleet: RolloutManager, tiny: Callable[..., Path], renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = GatewayProcess(folder, free_port(), fleet.router_url, fleet.router_key, tiny("qwen3"))
    result = check_gateway_kills(process, renderer, folder, num_turns=40, kill_interval_s=0.5, max_kills=1)
    print("\n".join(result.lines()))
    assert result.violations == []
    assert result.counts["turns"] == 40
    assert result.counts["kills"] >= 1
    assert result.counts["failed attempts: ConnectError"] >= 1


def test_a_gateway_that_does_not_start_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_chaos.faults.START_TIMEOUT_S", 0.0)
    process = GatewayProcess(tmp_path / "run", free_port(), "http://127.0.0.1:9", "the-key-of-the-router", tmp_path)
    known = {child.pid for child in psutil.Process().children()}
    with pytest.raises(RuntimeError, match="did not start"):
        process.start()
    assert {child.pid for child in psutil.Process().children()} <= known
