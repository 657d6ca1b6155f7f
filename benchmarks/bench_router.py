"""What the router costs: two real servers asked directly, through our router, and through SGLang's own.

The same closed load for each way, in turns within a round: N callers, each with one request at a time. Directly
means that half of the callers know one server and half the other. Then conversations: eight turns each, of very
different lengths, whose hits in the prefix cache are compared with those of one server that has them all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import orjson
from common import (
    CONSOLE,
    Json,
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
from servers import free_port

NAME = "bench_router"
DIRECT, OURS, SGLANGS = "direct", "our router", "sglang-router"
KEY = "benchmark"
SAMPLING = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
SERVER: Json = {"dtype": "float32", "max_total_tokens": 65536, "api_key": KEY}
TURNS = 8


@dataclass
class ReplicaLoad:
    """One burst: requests a second, and the milliseconds of each request."""

    rate: float
    latencies_ms: list[float] = field(default_factory=list)


async def burst(urls: Sequence[str], in_flight: int, requests: int) -> ReplicaLoad:
    """`requests` requests by `in_flight` callers."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    left = iter(range(requests))
    found = ReplicaLoad(0.0)

    async def caller(session: aiohttp.ClientSession, url: str, number: int) -> None:
        for index in left:
            body = orjson.dumps({"input_ids": [1, 2, 3 + number % 50, 4 + index % 97], "sampling_params": SAMPLING})
            begun = time.perf_counter()
            async with session.post(f"{url}/generate", data=body, headers=headers) as reply:
                raw = await reply.read()
                assert reply.status == 200, raw[:300]
            found.latencies_ms.append((time.perf_counter() - begun) * 1e3)

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        started = time.perf_counter()
        await asyncio.gather(*(caller(session, urls[i % len(urls)], i) for i in range(in_flight)))
        found.rate = requests / (time.perf_counter() - started)
    return found


async def conversations(url: str, count: int, seed: int) -> float:
    """`count` conversations at once, of skewed lengths; the share of prompt tokens that the caches had."""
    rng = random.Random(seed)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    cached = total = 0

    async def one(session: aiohttp.ClientSession, name: int) -> None:
        nonlocal cached, total
        size = min(int(16 * rng.paretovariate(1.2)), 500)
        history = [rng.randrange(1, 200) for _ in range(size)]
        for _ in range(TURNS):
            body = {"input_ids": history, "sampling_params": SAMPLING, "session_id": f"{seed}-{name}"}
            own = {**headers, "x-session-id": f"{seed}-{name}"}
            async with session.post(f"{url}/generate", data=orjson.dumps(body), headers=own) as reply:
                answer = orjson.loads(await reply.read())
                assert reply.status == 200, answer
            total += len(history)
            cached += answer["meta_info"]["cached_tokens"]
            history = [*history, *answer["output_ids"], *(rng.randrange(1, 200) for _ in range(size // 4 + 4))]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        await asyncio.gather(*(one(session, name) for name in range(count)))
    return cached / total


async def watched_conversations(url: str, count: int, seed: int) -> tuple[float, float]:
    """The same through our router, and the tokens in flight on its busier replica over their mean, over time."""
    headers = {"Authorization": f"Bearer {KEY}"}
    held: dict[str, int] = {}
    talking = asyncio.ensure_future(conversations(url, count, seed))
    async with aiohttp.ClientSession(trust_env=False, headers=headers) as session:
        while not talking.done():
            async with session.get(f"{url}/replicas") as reply:
                for one in await reply.json():
                    held[one["name"]] = held.get(one["name"], 0) + one["tokens"]
            await asyncio.sleep(0.02)
    return await talking, max(held.values()) * len(held) / sum(held.values())


@contextmanager
def our_router(urls: Sequence[str]) -> Iterator[str]:
    """The process of `verl-server router`."""
    command = [sys.executable, "-m", "verl_server.cli", "router", *(f"--replica={url}" for url in urls)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "VERL_SERVER_API_KEY": KEY}
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@contextmanager
def sglangs_router(urls: Sequence[str], log: Path) -> Iterator[str]:
    """`sglang-router`, without retries (they sample twice) and without health checks that generate."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--policy", "power_of_two", "--disable-retries", "--prometheus-port", str(free_port()),
        "--worker-urls", *urls, "--api-key", KEY, "--log-level", "warn",
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        asyncio.run(_until_it_answers(f"http://127.0.0.1:{port}", log))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


async def _until_it_answers(url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            await burst([url], 1, 1)
        except (aiohttp.ClientError, AssertionError, ConnectionError):
            await asyncio.sleep(0.2)
        else:
            return
    raise RuntimeError(f"sglang-router did not answer: {log.read_text()[-2000:]}")


def measure(rounds: int, requests: dict[int, int], count: int, scratch: Path) -> Json:
    """All ways in turns; then the conversations."""
    from verl_server import HttpServerEngineAdapter
    from verl_server.tiny import make_model

    folder = str(make_model(scratch / "model", "qwen3"))
    bursts: dict[str, dict[str, list[ReplicaLoad]]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(HttpServerEngineAdapter(model_path=folder, **SERVER)) for _ in range(2)]
        urls = [one.base_url for one in servers]
        ours = stack.enter_context(our_router(urls))
        ways = {DIRECT: urls, OURS: [ours], SGLANGS: [stack.enter_context(sglangs_router(urls, scratch / "log"))]}
        for in_flight, number in requests.items():
            for targets in ways.values():
                asyncio.run(burst(targets, in_flight, number // 4 + 1))
            found: dict[str, list[ReplicaLoad]] = {way: [] for way in ways}
            for turn in range(rounds):
                order = list(ways)
                for way in [*order[turn % 3 :], *order[: turn % 3]]:
                    found[way].append(asyncio.run(burst(ways[way], in_flight, number)))
            bursts[str(in_flight)] = found
            CONSOLE.print(f"{in_flight} in flight: done", style="dim")
        hits, fullest = {}, 0.0
        for way, url in {"one server": urls[0], OURS: ours, SGLANGS: ways[SGLANGS][0]}.items():
            for one in servers:
                one.flush_cache()
            if way == OURS:
                hits[way], fullest = asyncio.run(watched_conversations(url, count, seed=7))
            else:
                hits[way] = asyncio.run(conversations(url, count, seed=7))
    return {"bursts": {key: {way: [asdict(one) for one in loads] for way, loads in found.items()}
                       for key, found in bursts.items()}, "hits": hits, "fullest": fullest}  # fmt: skip


def _median_ms(loads: Sequence[Json]) -> float:
    return summarize([summarize(one["latencies_ms"]).median for one in loads]).median


def report(options: Options, machine: Json, found: Json, settings: Json) -> None:
    rows, targets = [], []
    for in_flight, ways in found["bursts"].items():
        direct = [one["rate"] for one in ways[DIRECT]]
        for way, loads in ways.items():
            rates = [one["rate"] for one in loads]
            ratio = summarize([a / b for a, b in zip(rates, direct, strict=True)])
            rows.append([
                in_flight, way, f"{summarize(rates).median:.0f}",
                f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})",
                f"{_median_ms(loads):.2f}", f"{_median_ms(loads) - _median_ms(ways[DIRECT]):+.2f}",
            ])  # fmt: skip
    show_table("Requests of 16 tokens", ["in flight", "way", "a second", "of direct", "median ms", "added ms"], rows)
    CONSOLE.print(f"prefix cache hits of {TURNS}-turn conversations: {found['hits']}")
    one, many = found["bursts"]["1"], found["bursts"]["64"]
    added_ms = _median_ms(one[OURS]) - _median_ms(one[DIRECT])
    targets = [
        Target("median added by our router, 1 in flight, ms", added_ms, 1.0, False),
        Target("throughput of direct, 64 in flight", _ratio(many, OURS, DIRECT), 0.95, True),
        Target("throughput of sglang-router's, 64 in flight", _ratio(many, OURS, SGLANGS), 0.9, True),
        Target("cache hits of one server's", found["hits"][OURS] / found["hits"]["one server"], 0.9, True),
        Target("tokens on the fuller replica over the mean", found["fullest"], 1.5, False),
    ]  # fmt: skip
    show_targets(targets)
    figures = {key: {way: asdict(summarize([o["rate"] for o in loads])) for way, loads in ways.items()}
               for key, ways in found["bursts"].items()}  # fmt: skip
    write_result(options, NAME, machine, settings=settings, figures=figures, targets=targets, samples=_short(found))
    figure, (rates, added) = new_figure(2, f"Two servers behind a router, {machine['cores']} cores", width=11)
    groups = list(found["bursts"])
    ways = [DIRECT, OURS, SGLANGS]
    grouped_bars(
        rates, [f"{g} in flight" for g in groups],
        {way: [summarize([one["rate"] for one in found["bursts"][g][way]]) for g in groups] for way in ways},
        title="Requests a second (median; whiskers: quartiles)", ylabel="requests/s",
    )  # fmt: skip
    grouped_bars(
        added, [f"{g} in flight" for g in groups],
        {way: [summarize([summarize(one["latencies_ms"]).median for one in found["bursts"][g][way]]) for g in groups]
         for way in ways},
        title="Median latency", ylabel="ms",
    )  # fmt: skip
    legend_below(figure, rates)
    save_figure(figure, options.png)


def _ratio(ways: Json, way: str, other: str) -> float:
    pairs = zip(ways[way], ways[other], strict=True)
    return summarize([a["rate"] / b["rate"] for a, b in pairs]).median


def _short(found: Json) -> Json:
    """Latencies to a hundredth of a millisecond."""
    return {
        "hits": found["hits"],
        "fullest": found["fullest"],
        "bursts": {
            key: {
                way: [{**one, "latencies_ms": [round(ms, 2) for ms in one["latencies_ms"]]} for one in loads]
                for way, loads in ways.items()
            }
            for key, ways in found["bursts"].items()
        },
    }


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all ways (default 9, quick 2)")


def main() -> None:
    import tempfile

    options = parse_options(NAME, "What the router costs.", _more_options)
    rounds = options.extra.rounds or (2 if options.quick else 9)
    requests = {1: 30, 64: 200} if options.quick else {1: 150, 16: 400, 64: 800}
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as scratch:
        found = measure(rounds, requests, 8 if options.quick else 32, Path(scratch))
    report(options, environment(), found, {"rounds": rounds, "requests": requests, "sampling": SAMPLING})


if __name__ == "__main__":
    main()
