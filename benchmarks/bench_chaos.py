"""Checks that a fleet loses no request when its processes are killed at random, under load and during weight updates.

Servers, schedulers and the router process are killed with `kill -9`. Every reply is greedy. It is compared afterwards,
token by token, with Hugging Face and the weights that the reply states. The benchmark counts lost, duplicated and wrong
replies, orphaned processes and leftover files in shared memory; all counts must be 0. It also measures the seconds from
a death to the recovery of the replica, relative to the start of one server alone and under the same load (servers and
callers share the cores of the machine).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from chaos_report import NAME, WEIGHT_SETS, Measurement, check_replies, report
from common import environment, parse_options
from servers import one_rank_mesh

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server import RolloutManager, VerlEngine

SERVER: Json = {"dtype": "float32", "max_total_tokens": 16384}
OUTPUT_TOKENS = (20, 120)
"""Minimum and maximum number of output tokens per request."""
KILL_INTERVAL_S = (2.0, 12.0)
"""Minimum and maximum number of seconds between two kills."""
UPDATE_INTERVAL_S = 3.0
MARK = "VERL_SERVER_CHAOS"
"""Environment variable that all started processes inherit."""


def weight_sets(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The model's weights with different random changes."""
    from safetensors.torch import load_file

    original = load_file(next(folder.glob("*.safetensors")))
    sets = []
    for seed in range(WEIGHT_SETS):
        generator = torch.Generator().manual_seed(seed)
        sets.append({name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in original.items()})
    return sets


def run(folder: Path, replicas: int, requests: int, kills: int, callers: int, seed: int) -> Measurement:
    """Run the fleet, the load, the weight updates and the kills."""
    from verl_server import RecoveryConfig, RolloutManager, VerlEngine

    measured, rng = Measurement(), random.Random(seed)
    os.environ[MARK] = "1"
    files_before = set(os.listdir("/dev/shm"))
    sets = weight_sets(folder)
    stop = threading.Event()
    recovery = RecoveryConfig(stall_timeout_s=20.0, max_restarts=kills + 1)
    with one_rank_mesh() as mesh:
        torch.set_num_threads(1)
        started = time.monotonic()
        with RolloutManager(
            1,
            model_path=str(folder),
            recovery=recovery,
            router_process=True,
            on_event=measured.events.append,
            **SERVER,
        ) as fleet:
            measured.single_start_s = time.monotonic() - started
            for _ in range(replicas - 2):
                fleet.add_replica()
            with VerlEngine(mesh, fleet=fleet, model_path=str(folder), dtype=SERVER["dtype"]) as engine:
                engine.update_weights_from_tensor(sets[1].items(), weight_version=1)
                killer = threading.Thread(target=_kill_processes, args=(fleet, measured, kills, rng, stop))
                updater = threading.Thread(target=_update_weights, args=(engine, sets, measured, stop))
                started = time.monotonic()
                killer.start()
                updater.start()
                asyncio.run(_send_requests(fleet, measured, requests, callers, seed, killer))
                measured.duration_s = time.monotonic() - started
                stop.set()
                killer.join()
                updater.join()
                process = fleet.status().router_process
                assert process is not None
                measured.router_restarts = process.restarts
    time.sleep(1.0)
    measured.leftover_files = sorted(set(os.listdir("/dev/shm")) - files_before)
    measured.orphaned_processes = sum(_is_marked(process) for process in psutil.process_iter())
    check_replies(measured, folder, sets)
    return measured


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and MARK in process.environ()
    except psutil.Error:
        return False


def _kill_processes(
    fleet: RolloutManager, measured: Measurement, kills: int, rng: random.Random, stop: threading.Event
) -> None:
    """Start the last replica under load. Then kill random processes while at least two replicas are healthy."""
    time.sleep(3.0)
    started = time.monotonic()
    fleet.add_replica()
    measured.loaded_start_s = time.monotonic() - started
    while len(measured.kills) < kills and not stop.wait(rng.uniform(*KILL_INTERVAL_S)):
        status = fleet.status()
        healthy = [one for one in status.replicas if one.state.value == "healthy" and one.pids is not None]
        if len(healthy) < 2:
            continue
        victim, target = rng.choice(healthy), rng.choice(["server", "scheduler", "router"])
        try:
            if target == "router":
                assert status.router_process is not None
                pid = status.router_process.pid
            elif target == "server":
                assert victim.pids is not None
                pid = victim.pids.main
            else:
                assert victim.pids is not None
                pid = next(pid for pid in victim.pids.workers if _is_scheduler(pid))
            os.kill(pid, signal.SIGKILL)
        except (psutil.Error, StopIteration, ProcessLookupError):
            continue  # it has ended already
        replica = None if target == "router" else victim.name
        measured.kills.append({"time": time.time(), "replica": replica, "process": target})


def _is_scheduler(pid: int) -> bool:
    return any("scheduler" in argument for argument in psutil.Process(pid).cmdline())


def _update_weights(
    engine: VerlEngine, sets: list[dict[str, torch.Tensor]], measured: Measurement, stop: threading.Event
) -> None:
    version = 1
    while not stop.wait(UPDATE_INTERVAL_S):
        version += 1
        try:
            engine.update_weights_from_tensor(sets[version % WEIGHT_SETS].items(), weight_version=version)
            measured.weight_updates += 1
        except Exception as error:  # noqa: BLE001 - recorded as an error of the run
            measured.errors.append(f"update {version}: {type(error).__name__}: {error}")
            return


async def _send_requests(
    fleet: RolloutManager, measured: Measurement, requests: int, callers: int, seed: int, killer: threading.Thread
) -> None:
    """Send `requests` requests, and further ones until all kills are done."""
    from verl_server import RouterClient

    numbers = iter(range(10**9))

    async def caller(client: RouterClient) -> None:
        for number in numbers:
            if number >= requests and not killer.is_alive():
                return
            rng = random.Random(seed * 10**6 + number)
            prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(3, 40))]
            sampling = {"temperature": 0.0, "max_new_tokens": rng.randrange(*OUTPUT_TOKENS), "ignore_eos": True}
            try:
                reply = await client.generate(
                    rid=f"request-{number}",
                    session_id=f"s{number % 40}",
                    input_ids=prompt,
                    sampling_params=sampling,
                )
            except Exception as error:  # noqa: BLE001 - recorded as an error of the run
                measured.errors.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            meta = reply["meta_info"]
            measured.replies.append({
                "number": number, "prompt": prompt, "output": reply["output_ids"],
                "max_new_tokens": sampling["max_new_tokens"],
                "spans": meta["weight_versions"], "attempts": meta["attempts"],
            })  # fmt: skip

    async with RouterClient(fleet.router_url, fleet.router_key) as client:
        await asyncio.gather(*(caller(client) for _ in range(callers)))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="number of kills; default 20, quick 2")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Run the benchmark from the command line."""
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Random kills under load.", _add_options)
    kills = options.extra.kills or (2 if options.quick else 20)
    settings = {"replicas": 2 if options.quick else 3, "requests": 60 if options.quick else 2000, "kills": kills,
                "callers": 8, "seed": options.extra.seed}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        model = make_model(Path(folder) / "model", "qwen3")
        measured = run(model, **settings)
    report(options, environment(), measured, settings)


if __name__ == "__main__":
    main()
