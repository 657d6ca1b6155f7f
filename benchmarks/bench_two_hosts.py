"""Measures weight updates over a slow network: the pause of generation, and the tokens that are generated meanwhile.

Two network namespaces are two hosts with a cable of `--rate` between them. The server runs in one, the trainer in the
other. Requests run all the time. For each transport: seconds of a whole update, seconds of its pause (`load_s`), and
tokens per second during the update over those without an update. `shared_memory` is the limit that no network can
beat: the namespaces have one memory. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    CONSOLE,
    Options,
    Target,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import grouped_bars, legend_below, new_figure, save_figure

from verl_server.types import Json

NAME = "bench_two_hosts"
TRANSPORTS = ("shared_memory", "distributed", "delta", "disk", "distributed_buckets")
STAGED = ("distributed", "delta", "disk")
RATES = ("200mbit", "unshaped")
PAUSE_TARGET, TOKENS_TARGET = 1.3, 0.8
ADDRESSES = ("10.78.0.1", "10.78.0.2")
NUM_REQUESTS = 4


# -- two hosts ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces and a cable. Raises CalledProcessError where the kernel forbids it."""
    names = [f"vsbench{uuid.uuid4().hex[:6]}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add e0 netns {names[0]} type veth peer name e0 netns {names[1]}"]
    for address, name in zip(ADDRESSES, names, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev e0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "e0")]
        if rate != "unshaped":
            commands += [f"ip netns exec {name} tc qdisc add dev e0 root tbf rate {rate} burst 256kb latency 50ms"]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def server_on(host: str, folder: Path, port: int, keys: dict[str, str], log: Path) -> Iterator[None]:
    """A server in one namespace, which has printed that it is ready."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "verl_server.cli", "launch", str(folder)]
    command += ["--host", ADDRESSES[1], "--port", str(port), "--max-total-tokens", "8192", "--dtype", "bfloat16"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **keys})
        try:
            deadline = time.monotonic() + 180.0
            while "eady" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


# -- the trainer, a process in the other namespace ---------------------------------------------------


def run_trainer(given: Json) -> None:
    """Update the server with each transport while requests run. Prints the measurements as JSON."""
    import torch
    from bench_weight_sync import weights_of

    from verl_server import RemoteServer, VerlEngine, WeightsConfig

    torch.set_num_threads(1)
    folder = Path(given["folder"])
    weights = weights_of(folder)
    remote = RemoteServer(given["url"], given["api_key"], given["admin_api_key"])
    measured: Json = {"bytes": sum(tensor.nbytes for tensor in weights.values()), "transports": {}}
    generator = torch.Generator().manual_seed(0)
    for transport in TRANSPORTS:
        config = WeightsConfig(transport=transport, folder=given["scratch"], host=ADDRESSES[0])
        with VerlEngine(servers=[remote], model_path=str(folder), dtype="bfloat16", weights=config) as engine:
            engine.update_weights_from_tensor(weights.items())  # opens the connections
            load = Load(engine)
            samples = []
            for _ in range(given["updates"]):
                alone = load.tokens_per_s(given["alone_s"])
                for tensor in weights.values() if transport == "delta" else ():
                    flat = tensor.view(-1)
                    flat[torch.randint(flat.numel(), (flat.numel() // 100,), generator=generator)] += 0.01
                before, started = load.num_tokens, time.monotonic()
                result = engine.update_weights_from_tensor(weights.items())
                total_s = time.monotonic() - started
                # The last tokens of the pause are reported when a generation goes on.
                tokens = (load.num_tokens - before) / total_s
                samples.append({"total_s": total_s, "pause_s": result.load_s, "tokens": tokens / alone})
            load.stop()
        measured["transports"][transport] = {"samples": samples, "sent_bytes": result.sent_bytes}
    print(json.dumps(measured), flush=True)


class Load:
    """Requests that run all the time: the tokens that the server has sent."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._ends = engine, threading.Event()
        self._counts = [0] * NUM_REQUESTS
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_REQUESTS)]
        for thread in self._threads:
            thread.start()

    @property
    def num_tokens(self) -> int:
        return sum(self._counts)

    def _run(self, number: int) -> None:
        sampling = {"max_new_tokens": 256, "temperature": 1.0, "ignore_eos": True}
        while not self._ends.is_set():
            received = 0
            for reply in self._engine.generate(input_ids=[5, 6, 7], sampling_params=sampling, stream=True):
                self._counts[number] += len(reply["output_ids"]) - received
                received = len(reply["output_ids"])
                if self._ends.is_set():
                    break

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens per second in the next `seconds`."""
        before, started = self.num_tokens, time.monotonic()
        time.sleep(seconds)
        return (self.num_tokens - before) / (time.monotonic() - started)

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


# -- report ------------------------------------------------------------------------------------------


def measure(rate: str, folder: Path, scratch: Path, updates: int, alone_s: float) -> Json:
    """The measurements of all transports at one rate."""
    keys = {"VERL_SERVER_API_KEY": uuid.uuid4().hex * 2, "VERL_SERVER_ADMIN_API_KEY": uuid.uuid4().hex * 2}
    with two_hosts(rate) as (trainer, server), server_on(server, folder, 30000, keys, scratch / f"{rate}.log"):
        given = {
            "folder": str(folder), "url": f"http://{ADDRESSES[1]}:30000", "api_key": keys["VERL_SERVER_API_KEY"],
            "admin_api_key": keys["VERL_SERVER_ADMIN_API_KEY"], "scratch": str(scratch), "updates": updates,
            "alone_s": alone_s,
        }  # fmt: skip
        command = ["ip", "netns", "exec", trainer, sys.executable, __file__, "--trainer"]
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer failed: {done.stderr[-3000:]}")
    measured: Json = json.loads(done.stdout.splitlines()[-1])
    return measured


def median_of(measured: Json, rate: str, transport: str, name: str) -> float:
    return summarize([sample[name] for sample in measured[rate]["transports"][transport]["samples"]]).median


def report(options: Options, machine: Json, measured: Json, settings: Json) -> None:
    rows, targets = [], []
    for rate in measured:
        limit = median_of(measured, rate, "shared_memory", "pause_s")
        for transport in TRANSPORTS:
            total, pause, tokens = (
                median_of(measured, rate, transport, name) for name in ("total_s", "pause_s", "tokens")
            )
            rows.append([rate, transport, f"{total:.3f}", f"{pause:.3f}", f"{pause / limit:.2f}", f"{tokens:.2f}"])
            if transport in STAGED:
                targets.append(
                    Target(f"{rate}, {transport}: pause over that of shared_memory", pause / limit, PAUSE_TARGET, False)
                )
        if rate != "unshaped":  # there, an update is not much longer than its pause
            targets.append(
                Target(
                    f"{rate}, distributed: tokens per second during an update over those without",
                    median_of(measured, rate, "distributed", "tokens"),
                    TOKENS_TARGET,
                    True,
                )
            )
    show_table(
        "Updates between two hosts, median",
        ["rate", "transport", "update (s)", "pause (s)", "pause over shared_memory", "tokens/s during an update"],
        rows,
    )
    show_targets(targets)
    figure, (axes,) = new_figure(1, "Weight updates between two hosts")
    series = {
        f"{rate}, {kind}": [
            summarize([sample[name] for sample in measured[rate]["transports"][transport]["samples"]])
            for transport in TRANSPORTS
        ]
        for rate in measured
        for kind, name in (("whole update", "total_s"), ("pause", "pause_s"))
    }
    grouped_bars(axes, list(TRANSPORTS), series, title="", ylabel="seconds")
    axes.set_yscale("log")
    legend_below(figure, axes)
    save_figure(figure, options.png)
    write_result(options, NAME, machine, settings=settings, figures={"table": rows}, targets=targets, samples=measured)


def main() -> None:
    if sys.argv[1:] == ["--trainer"]:
        run_trainer(json.loads(sys.stdin.readline()))
        return

    from bench_weight_sync import model_folder
    from weight_update_methods import MODELS, QUICK_MODELS

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--updates", type=int, default=5, help="updates of each transport")

    options = parse_options(NAME, __doc__ or "", add)
    machine = environment()
    updates = 2 if options.quick else options.extra.updates
    sizes = QUICK_MODELS["0.01 B"] if options.quick else MODELS["0.1 B"]
    measured: Json = {}
    with model_folder(sizes) as folder:
        for rate in RATES:
            measured[rate] = measure(rate, folder, folder.parent, updates, 2.0 if options.quick else 5.0)
            CONSOLE.print(f"{rate}: done", style="dim")
    report(options, machine, measured, {"updates": updates, "sizes": dict(sizes), "requests": NUM_REQUESTS})


if __name__ == "__main__":
    main()
