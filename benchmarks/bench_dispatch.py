"""Measures what the router itself costs: placements, bursts and remembered results, without servers and HTTP.

The replicas are objects in this process that hold every request until the end of the measurement, so that 10,000
requests are in flight. One placement is the end of one request and the placement of the next; half of the requests
belong to sessions, and running requests receive tokens in between. The baseline looks at every replica for each
placement. The settings of Python are those of the router process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
import uvloop
from common import (
    CONSOLE,
    Options,
    Summary,
    Target,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import grouped_bars, legend_below, new_figure, save_figure

from verl_server.config import RouterConfig
from verl_server.router.dispatcher import Dispatcher, ResultCache, estimate_bytes
from verl_server.router.placement import RoutingRequest, VersionRequirement
from verl_server.router.replica import RoutedReplica, Slot
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.replica_status import RouterCounters
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.tracing import collect_garbage_rarely
from verl_server.types import Json

NAME = "bench_dispatch"
REPLICAS = (4, 100, 1000)
INDEX, ALL = "index of loads", "comparison of all replicas"
BURST_TIMEOUT_S = 120.0
TOKEN_EVENTS = 4
"""Number of running requests that receive tokens between two placements."""
#: Number of tokens of the stored results, and whether they have log probabilities.
RESULTS = {"16 tokens": (16, False), "1,024 tokens, log probabilities": (1024, True),
           "16,384 tokens, log probabilities": (16384, True)}  # fmt: skip


class HeldServer:
    """A `GenerationServer` that holds all requests until `finish`."""

    base_url = "http://held"
    api_key: str | None = None

    def __init__(self, finish: asyncio.Event) -> None:
        self.finish = finish
        self.running_requests = 0

    async def generate(self, **request: Any) -> Any:
        self.running_requests += 1
        await self.finish.wait()
        return {"output_ids": [1], "meta_info": {"weight_version": 0, "finish_reason": {"type": "stop"}}}

    def generate_stream(self, **request: Any) -> Any:
        raise AssertionError("requests of a few tokens are not streamed")


# -- placements --------------------------------------------------------------------------------------


class Load:
    """A pool with `in_flight` running requests of random lengths."""

    def __init__(self, replicas: int, in_flight: int) -> None:
        self.in_flight, self.rng = in_flight, random.Random(replicas)
        self.pool = ReplicaPool(RouterConfig(max_running_requests_per_dp_rank=10 * in_flight), RouterCounters())
        for number in range(replicas):
            self.pool.add_replica(f"replica_{number}", HeldServer(asyncio.Event()), 0)
        self.slots: list[Slot] = []

    def request(self) -> RoutingRequest:
        rng = self.rng
        session_id = f"session-{rng.randrange(self.in_flight)}" if rng.random() < 0.5 else None
        return RoutingRequest(session_id=session_id, prompt_tokens=rng.randrange(1, 4000))

    async def fill(self) -> None:
        self.slots = [await self.pool.acquire(self.request()) for _ in range(self.in_flight)]

    async def place(self, placements: int) -> float:
        """Microseconds per placement."""
        pool, slots, rng, seconds = self.pool, self.slots, self.rng, 0.0
        for _ in range(placements):
            for _ in range(TOKEN_EVENTS):
                grown = rng.choice(slots)
                pool.record_progress(grown, grown.tokens + 16)
            position, request = rng.randrange(len(slots)), self.request()
            started = time.perf_counter()
            pool.release(slots[position])
            slots[position] = await pool.acquire(request)
            seconds += time.perf_counter() - started
        return seconds / placements * 1e6

    def compare_all(self, placements: int) -> float:
        """Microseconds per choice of a rule that looks at every replica."""
        replicas = list(self.pool.replicas.values())
        started = time.perf_counter()
        for _ in range(placements):
            _least_loaded(replicas)
        return (time.perf_counter() - started) / placements * 1e6


def _least_loaded(replicas: Sequence[RoutedReplica]) -> RoutedReplica:
    fit = [replica for replica in replicas if replica.admitted and not replica.is_full]
    return min(fit, key=lambda replica: replica.load)


async def measure_placements(rounds: int, placements: int, in_flight: int) -> Json:
    """Microseconds per placement of each round, by number of replicas."""
    loads = {replicas: Load(replicas, in_flight) for replicas in REPLICAS}
    for load in loads.values():
        await load.fill()
        await load.place(placements // 10)
    samples: Json = {INDEX: {str(n): [] for n in REPLICAS}, ALL: {str(n): [] for n in REPLICAS}}
    for _ in range(rounds):
        for replicas, load in loads.items():
            samples[INDEX][str(replicas)].append(await load.place(placements))
            samples[ALL][str(replicas)].append(load.compare_all(placements // 20))
    waiting = await measure_beside_waiting_requests(loads[REPLICAS[-1]], rounds, placements)
    return {"placement_us": samples, "placement_beside_waiting_us": waiting}


async def measure_beside_waiting_requests(load: Load, rounds: int, placements: int) -> list[float]:
    """Microseconds per placement while as many requests wait for a weight version as are in flight."""
    load.pool.add_replica("starts", HeldServer(asyncio.Event()), 1, admitted=False)
    needs_update = RoutingRequest(VersionRequirement(weight_version=1), prompt_tokens=100)
    waiting = [asyncio.create_task(load.pool.acquire(needs_update)) for _ in range(load.in_flight)]
    await asyncio.sleep(0)
    assert load.pool.queued_requests == load.in_flight
    samples = [await load.place(placements) for _ in range(rounds)]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert load.pool.queued_requests == 0
    return samples


# -- bursts ------------------------------------------------------------------------------------------


async def measure_burst(replicas: int, requests: int, is_queued: bool) -> float:
    """Seconds until all requests of a burst have been sent to a replica. `is_queued`: they wait in the queue first."""
    dispatcher, finish = Dispatcher(RouterConfig(max_running_requests_per_dp_rank=requests)), asyncio.Event()
    servers = [HeldServer(finish) for _ in range(replicas)]
    for number, server in enumerate(servers):
        dispatcher.pool.add_replica(f"replica_{number}", server, 0, admitted=not is_queued)
    request = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 4}}
    gc.collect()
    started = time.perf_counter()
    calls = [asyncio.create_task(dispatcher.generate(request)) for _ in range(requests)]
    async with asyncio.timeout(BURST_TIMEOUT_S):
        if is_queued:
            while dispatcher.pool.queued_requests < requests:
                await asyncio.sleep(0)
            started = time.perf_counter()
            for number in range(replicas):
                dispatcher.pool.update_replica(f"replica_{number}", admitted=True)
        while sum(server.running_requests for server in servers) < requests:
            await asyncio.sleep(0)
    seconds = time.perf_counter() - started
    finish.set()
    await asyncio.gather(*calls)
    return seconds


async def measure_bursts(rounds: int, requests: int) -> Json:
    """Seconds of each burst, by number of replicas."""
    samples: Json = {"sent_s": {str(n): [] for n in REPLICAS}, "opened_s": {str(n): [] for n in REPLICAS}}
    for _ in range(rounds):
        for replicas in REPLICAS:
            samples["sent_s"][str(replicas)].append(await measure_burst(replicas, requests, is_queued=False))
            samples["opened_s"][str(replicas)].append(await measure_burst(replicas, requests, is_queued=True))
    return samples


# -- remembered results ------------------------------------------------------------------------------


def make_generation(tokens: int, has_logprobs: bool, seed: int) -> ResumableGeneration:
    """A finished generation whose reply was decoded from JSON, as replies of servers are."""
    rng = random.Random(seed)
    output_ids = [rng.randrange(1000, 150_000) for _ in range(tokens)]
    meta: Json = {
        "id": f"sample-{seed}~0~0123abcd", "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": 512,
        "completion_tokens": tokens, "cached_tokens": 0, "weight_version": 7, "e2e_latency": rng.random(),
        "weight_versions": [{"version": 7, "start": 0, "end": tokens}],
    }  # fmt: skip
    if has_logprobs:
        meta["output_token_logprobs"] = [[-rng.random(), token, None] for token in output_ids]
    reply = orjson.loads(orjson.dumps({"text": "x" * 4 * tokens, "output_ids": output_ids, "meta_info": meta}))
    prompt = [rng.randrange(1000, 150_000) for _ in range(512)]
    generation = ResumableGeneration({"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens}})
    generation.begin_attempt()
    generation.record_event(reply)
    return generation


def measure_results(total_tokens: int) -> Json:
    """Allocated and estimated bytes of one stored result, by its kind."""
    found: Json = {}
    for kind, (tokens, has_logprobs) in RESULTS.items():
        count = max(4, min(1000, total_tokens // tokens))
        cache = ResultCache(max_bytes=1 << 40)
        gc.collect()
        tracemalloc.start()
        for number in range(count):
            cache.add(f"sample-{number}", make_generation(tokens, has_logprobs, number))
        gc.collect()
        allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        last = make_generation(tokens, has_logprobs, 0)
        estimated = estimate_bytes(last.request, last.reply())
        found[kind] = {"count": count, "allocated_bytes": allocated / count, "estimated_bytes": estimated}
    return found


# -- report ------------------------------------------------------------------------------------------


def _over(samples: Json, first: int, second: int) -> Summary:
    """Samples with `first` replicas over those with `second` replicas in the same round."""
    pairs = zip(samples[str(first)], samples[str(second)], strict=True)
    return summarize([one / other for one, other in pairs])


def report(options: Options, machine: Json, samples: Json, settings: Json) -> None:
    """Print the tables and write the result file and the plot."""
    few, many = REPLICAS[0], REPLICAS[-1]
    placements, bursts, results = samples["placement_us"], samples["bursts"], samples["results"]
    columns = ["replicas", "placement, us", f"{ALL}, us", "burst sent, s", "burst opened, s"]
    measured = (placements[INDEX], placements[ALL], bursts["sent_s"], bursts["opened_s"])
    rows = [[str(n), *(f"{summarize(one[str(n)]).median:.3g}" for one in measured)] for n in REPLICAS]
    show_table(f"{settings['in_flight']:,} requests in flight, bursts of {settings['burst']:,} requests", columns, rows)
    columns = ["result", "stored", "allocated, KiB", "estimated, KiB"]
    rows = [
        [kind, str(one["count"]), f"{one['allocated_bytes'] / 1024:.1f}", f"{one['estimated_bytes'] / 1024:.1f}"]
        for kind, one in results.items()
    ]
    show_table("Memory of a stored result with a prompt of 512 tokens", columns, rows)
    beside = zip(samples["placement_beside_waiting_us"], placements[INDEX][str(many)], strict=True)
    targets = [
        Target(f"placement with {many} replicas over {few}", _over(placements[INDEX], many, few).median, 2.0, False),
        Target(
            f"placement beside {settings['in_flight']} requests that wait for a weight version, over none",
            summarize([waiting / alone for waiting, alone in beside]).median, 1.5, False,
        ),
        Target(f"burst with {many} replicas", summarize(bursts["sent_s"][str(many)]).median, 1.0, False, " s"),
        Target(f"queue opened with {many} replicas", summarize(bursts["opened_s"][str(many)]).median, 1.0, False, " s"),
        Target(
            "allocated over estimated bytes of a stored result, the largest",
            max(one["allocated_bytes"] / one["estimated_bytes"] for one in results.values()), 1.25, False,
        ),
    ]  # fmt: skip
    show_targets(targets)
    figures = {
        "placement_us": {rule: {n: asdict(summarize(us)) for n, us in by.items()} for rule, by in placements.items()},
        "bursts": {kind: {n: asdict(summarize(s)) for n, s in by.items()} for kind, by in bursts.items()},
        "results": results,
    }
    write_result(options, NAME, machine, settings=settings, figures=figures, targets=targets, samples=samples)
    plot(options, machine, samples)


def plot(options: Options, machine: Json, samples: Json) -> None:
    """Placements and bursts by number of replicas, from the samples of a result file."""
    figure, (placement, burst) = new_figure(2, f"The router without servers, {machine['cores']} cores")
    groups = [f"{replicas} replicas" for replicas in REPLICAS]
    bursts = {"burst sent": samples["bursts"]["sent_s"], "waiting burst opened": samples["bursts"]["opened_s"]}
    colours = dict(zip((INDEX, ALL, *bursts), ("#0072b2", "#b8b8b8", "#009e73", "#e69f00"), strict=True))
    for axis, series, title, ylabel in (
        (placement, samples["placement_us"], "Microseconds per placement (median; whiskers: quartiles)", "us"),
        (burst, bursts, "Seconds until all requests of a burst have reached a replica", "s"),
    ):
        bars = {name: [summarize(by[str(n)]) for n in REPLICAS] for name, by in series.items()}
        grouped_bars(axis, groups, bars, title=title, ylabel=ylabel, colours=colours)
    placement.set_yscale("log")
    legend_below(figure, placement, burst)
    save_figure(figure, options.png)


def measure(rounds: int, placements: int, in_flight: int, burst: int) -> Json:
    """Run all measurements."""
    collect_garbage_rarely()
    samples = uvloop.run(measure_placements(rounds, placements, in_flight))
    CONSOLE.print("placements: done", style="dim")
    samples["bursts"] = uvloop.run(measure_bursts(rounds, burst))
    CONSOLE.print("bursts: done", style="dim")
    samples["results"] = measure_results(burst * 50)
    return dict(samples)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds; default 9, quick 2")


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_options(NAME, "Placements, bursts and remembered results of the router.", _add_options)
    settings = {
        "rounds": options.extra.rounds or (2 if options.quick else 9),
        "placements": 1000 if options.quick else 10_000,
        "in_flight": 10_000,
        "burst": 10_000,
    }
    machine = environment()
    samples = measure(settings["rounds"], settings["placements"], settings["in_flight"], settings["burst"])
    report(options, machine, samples, settings)


if __name__ == "__main__":
    main()
