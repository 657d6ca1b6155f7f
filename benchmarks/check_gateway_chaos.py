"""Checks that the gateway loses and doubles no turn: with kills of replicas and weight updates, and when it is killed.

A client makes conversations over HTTP in three dialects, streaming and not. It sends each request twice, drops every
third stream, and sends a request again after each failure. Afterwards, the records are compared with what the client
got and with what the engine generated. `test_gateway_chaos.py` checks fewer turns. The program exits with 1
on a violation.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import CONSOLE, start_check
from servers import free_port, one_rank_mesh, tiny_model

if TYPE_CHECKING:
    from gateway_chaos.running import Result

SERVER: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192}


def main() -> int:
    """Check the turns. Returns the exit code."""
    options = start_check("check_gateway_chaos", __doc__ or "", "turns", 1000, "number of turns of each part")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tiny_model() as model, one_rank_mesh() as mesh, tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        results = _check(model, mesh, Path(folder), options.turns, options.seed)
    return int(any(result.violations for result in results))


def _check(model: Path, mesh: Any, folder: Path, num_turns: int, seed: int) -> list[Result]:
    from gateway_chaos.faults import GatewayProcess
    from gateway_chaos.running import check_gateway_kills, check_replica_faults
    from helpers import change_weights, reference_model
    from transformers import AutoTokenizer

    from verl_server import RecoveryConfig, RolloutManager, VerlEngine
    from verl_server.trajectory import ChatRenderer

    models = [reference_model(model) for _ in range(2)]
    change_weights(models[1], seed=1)

    def weights(version: int) -> Any:
        return models[version % 2].state_dict().items()

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    recovery = RecoveryConfig(stall_timeout_s=20.0, max_restarts=1000)
    runs, results = folder / "fleet", list[Any]()
    with (
        RolloutManager(2, model_path=str(model), recovery=recovery, router_process=True, **SERVER) as fleet,
        VerlEngine(mesh, fleet=fleet, model_path=str(model), dtype=SERVER["dtype"]) as engine,
    ):
        engine.update_weights_from_tensor(weights(0))
        start = time.perf_counter()
        results.append(check_replica_faults(fleet, engine, weights, renderer, runs, num_turns=num_turns, seed=seed))
        _print("Killed replicas and weight updates", results[-1], time.perf_counter() - start)
        (runs := folder / "gateway").mkdir()
        process = GatewayProcess(runs, free_port(), fleet.router_url, fleet.router_key, model)
        start = time.perf_counter()
        results.append(check_gateway_kills(process, renderer, runs, num_turns=num_turns, seed=seed))
        _print("Killed gateway", results[-1], time.perf_counter() - start)
    return results


def _print(title: str, result: Result, seconds: float) -> None:
    CONSOLE.print(f"{title}: {seconds:.0f} s, {len(result.violations)} violations", style="bold")
    CONSOLE.print("\n".join(f"  {line}" for line in result.lines()), markup=False)
    for violation in result.violations[:20]:
        CONSOLE.print(f"  VIOLATION: {violation}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
