"""Checks that a fleet loses no request under faults, under load and during weight updates.

Faults: servers, schedulers and the router process are killed with `kill -9`, and the forkserver together with a server;
a replica answers with errors at once for ten seconds; a scheduler is stopped for some seconds, also during an update; a
burst of requests fills the router's queue; callers read streams slowly; the disk of the logs is full. Every reply is
greedy. It is compared afterwards, token by token, with Hugging Face and the weights that the reply states. The
benchmark counts lost, duplicated and wrong replies, blocked updates, orphaned processes and leftover files in shared
memory; all counts must be 0. It also measures the seconds from a death to the recovery of the replica, relative to the
start of one server alone and under the same load (servers and callers share the cores of the machine).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import itertools
import os
import queue
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from chaos_faults import FaultInjector, free_bytes, make_plan, small_log_disk
from chaos_report import NAME, WEIGHT_SETS, Measurement, check_replies, report
from common import CONSOLE, environment, parse_options
from servers import one_rank_mesh

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server import RolloutManager, RouterClient, VerlEngine

SERVER: Json = {"dtype": "float32", "max_total_tokens": 16384}
OUTPUT_TOKENS = (20, 120)
"""Minimum and maximum number of output tokens per request."""
UPDATE_INTERVAL_S = 3.0
QUEUED_REQUESTS, RUNNING_REQUESTS = 200, 32
"""Maximum number of queued requests of the router, and of running requests of a replica. A burst exceeds both."""
PROGRESS_INTERVAL_S = 30.0
"""Seconds between two lines of progress."""
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
    """Run the fleet, the load, the weight updates and the faults."""
    from chaos_proxy import ProxiedLauncher

    from verl_server import AdapterConfig, RecoveryConfig, RolloutManager, RouterConfig, VerlEngine

    measured, rng = Measurement(), random.Random(seed)
    os.environ[MARK] = "1"
    files_before = set(os.listdir("/dev/shm"))
    sets = weight_sets(folder)
    stop = threading.Event()
    launcher = ProxiedLauncher()
    recovery = RecoveryConfig(stall_timeout_s=20.0, max_restarts=kills + 1)
    router = RouterConfig(max_queued_requests=QUEUED_REQUESTS, max_running_requests_per_dp_rank=RUNNING_REQUESTS)
    with one_rank_mesh() as mesh, small_log_disk(folder.parent / "logs") as log_dir:
        torch.set_num_threads(1)
        started = time.monotonic()
        with RolloutManager(
            1,
            model_path=str(folder),
            launcher=launcher,
            config=AdapterConfig(log_dir=log_dir),
            recovery=recovery,
            router=router,
            router_process=True,
            on_event=measured.events.append,
            **SERVER,
        ) as fleet:
            measured.single_start_s = time.monotonic() - started
            for _ in range(replicas - 2):
                fleet.add_replica()
            with VerlEngine(mesh, fleet=fleet, model_path=str(folder), dtype=SERVER["dtype"]) as engine:
                engine.update_weights_from_tensor(sets[1].items(), weight_version=1)
                load = Load(fleet, measured, requests, seed)
                injector = FaultInjector(fleet, launcher, measured, load.add_burst)
                faults = threading.Thread(target=_inject_faults, args=(fleet, injector, measured, kills, rng, stop))
                updater = threading.Thread(target=_update_weights, args=(engine, sets, measured, stop))
                started = time.monotonic()
                faults.start()
                updater.start()
                asyncio.run(load.run(callers, faults))
                measured.duration_s = time.monotonic() - started
                stop.set()
                faults.join()
                updater.join()
                process = fleet.status().router_process
                assert process is not None
                measured.router_restarts = process.restarts
                measured.log_disk_free_bytes = None if log_dir is None else free_bytes(log_dir)
    time.sleep(1.0)
    measured.leftover_files = sorted(set(os.listdir("/dev/shm")) - files_before)
    measured.orphaned_processes = [" ".join(one.cmdline())[:200] for one in psutil.process_iter() if _is_orphan(one)]
    check_replies(measured, folder, sets)
    return measured


def _is_orphan(process: psutil.Process) -> bool:
    """Whether a process of the run is left. This process keeps its forkserver until it ends."""
    try:
        is_forkserver = process.ppid() == os.getpid() and any("forkserver" in part for part in process.cmdline())
        return process.pid != os.getpid() and MARK in process.environ() and not is_forkserver
    except psutil.Error:
        return False


def _inject_faults(
    fleet: RolloutManager,
    injector: FaultInjector,
    measured: Measurement,
    kills: int,
    rng: random.Random,
    stop: threading.Event,
) -> None:
    """Start the last replica under load, then inject the faults."""
    time.sleep(3.0)
    started = time.monotonic()
    fleet.add_replica()
    measured.loaded_start_s = time.monotonic() - started
    try:
        injector.run(make_plan(kills, rng), rng, stop)
    except Exception as error:  # noqa: BLE001 - recorded as an error of the run
        measured.errors.append(f"{type(error).__name__}: {error}")


def _update_weights(
    engine: VerlEngine, sets: list[dict[str, torch.Tensor]], measured: Measurement, stop: threading.Event
) -> None:
    version = 1
    while not stop.wait(UPDATE_INTERVAL_S):
        version += 1
        started = time.monotonic()
        try:
            engine.update_weights_from_tensor(sets[version % WEIGHT_SETS].items(), weight_version=version)
        except Exception as error:  # noqa: BLE001 - recorded as an error of the run
            measured.errors.append(f"update {version}: {type(error).__name__}: {error}")
            return
        finally:
            measured.update_s.append(time.monotonic() - started)


class Load:
    """Sends `requests` requests, and further ones until all faults are injected."""

    def __init__(self, fleet: RolloutManager, measured: Measurement, requests: int, seed: int) -> None:
        self._fleet, self._measured, self._requests, self._seed = fleet, measured, requests, seed
        self._numbers = itertools.count()
        self._bursts: queue.SimpleQueue[int] = queue.SimpleQueue()

    def add_burst(self, requests: int) -> None:
        """Send that many additional requests at once. Can be called from any thread."""
        self._bursts.put(requests)

    async def run(self, callers: int, faults: threading.Thread) -> None:
        """Send all requests with `callers` callers, and the bursts."""
        from verl_server import RouterClient

        async with RouterClient(self._fleet.router_url, self._fleet.router_key) as client:

            async def caller() -> None:
                while (number := next(self._numbers)) < self._requests or faults.is_alive():
                    await self._send(client, number)

            progress = asyncio.create_task(self._show_progress())
            callers_done = asyncio.gather(*(caller() for _ in range(callers)))
            bursts: list[asyncio.Task[None]] = []
            while not callers_done.done():
                with contextlib.suppress(queue.Empty):
                    for _ in range(self._bursts.get_nowait()):
                        bursts.append(asyncio.create_task(self._send(client, next(self._numbers))))
                await asyncio.sleep(0.05)
            await asyncio.gather(callers_done, *bursts)
            progress.cancel()

    async def _show_progress(self) -> None:
        """Print the counts every `PROGRESS_INTERVAL_S` seconds."""
        started, measured = time.monotonic(), self._measured
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            CONSOLE.print(
                f"{time.monotonic() - started:.0f} s: {measured.sent} requests sent, {len(measured.replies)} answered, "
                f"{measured.refused} times refused by a full queue, {len(measured.update_s)} weight updates, "
                f"{len(measured.faults)} faults, {len(measured.errors)} errors"
            )

    async def _send(self, client: RouterClient, number: int) -> None:
        """Send one request until the router accepts it, and record its reply."""
        from verl_server import ServerBusyError

        rng = random.Random(self._seed * 10**6 + number)
        prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(3, 40))]
        sampling = {"temperature": 0.0, "max_new_tokens": rng.randrange(*OUTPUT_TOKENS), "ignore_eos": True}
        self._measured.sent += 1
        while True:
            try:
                reply = await client.generate(
                    rid=f"request-{number}",
                    session_id=f"s{number % 40}",
                    input_ids=prompt,
                    sampling_params=sampling,
                )
                meta = reply["meta_info"]
                self._measured.replies.append({
                    "number": number, "prompt": prompt, "output": reply["output_ids"],
                    "max_new_tokens": sampling["max_new_tokens"],
                    "spans": meta["weight_versions"], "attempts": meta["attempts"],
                })  # fmt: skip
            except ServerBusyError:
                self._measured.refused += 1
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                continue
            except Exception as error:  # noqa: BLE001 - recorded as an error of the run
                self._measured.errors.append(f"request {number}: {type(error).__name__}: {error}")
            return


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="number of kills; default 20, quick 4")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    """Run the benchmark from the command line."""
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Random faults under load.", _add_options)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` prints the stacks of all threads
    kills = options.extra.kills or (4 if options.quick else 20)
    settings = {"replicas": 2 if options.quick else 3, "requests": 60 if options.quick else 5000, "kills": kills,
                "callers": 8, "seed": options.extra.seed}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        model = make_model(Path(folder) / "model", "qwen3")
        measured = run(model, **settings)
    report(options, environment(), measured, settings)


if __name__ == "__main__":
    main()
