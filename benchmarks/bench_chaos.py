"""A fleet under fire: random `kill -9` of servers, schedulers and its router under load, with new weights all the time.

Every sample is greedy, and is checked afterwards token by token against Hugging Face with the weights that the
sample says it was made with. Lost, doubled or misattributed samples, orphans and left-over shared memory are
counted; all must be 0. Not a race: the figures are counts, and the seconds back to full strength, over the start of
one server alone and over its start under the same load (the servers share the machine's cores with their callers).
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
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
from plots import new_figure, save_figure
from servers import one_rank_mesh

NAME = "bench_chaos"
SERVER: Json = {"dtype": "float32", "max_total_tokens": 16384}
SETS = 3
"""Different weights, pushed in turn: version v is set v modulo this."""
TOKENS = (20, 120)
BACK_TARGET = 1.5
PAUSE_S = (2.0, 12.0)
"""Between two kills."""
MARK = "VERL_SERVER_CHAOS"


@dataclass
class Found:
    """What happened."""

    start_s: float = 0.0
    """Of one server, alone."""
    loaded_start_s: float = 0.0
    """Of one more, under the load."""
    seconds: float = 0.0
    kills: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    updates: int = 0
    answers: list[Json] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    misfits: list[Json] = field(default_factory=list)
    """Tokens that are not the likeliest under the weights of their span."""
    doubled: int = 0
    orphans: int = 0
    files: list[str] = field(default_factory=list)
    routers: int = 0
    """Router processes that were started again."""


def weight_sets(folder: Path) -> list[dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    original = load_file(next(folder.glob("*.safetensors")))
    sets = []
    for seed in range(SETS):
        generator = torch.Generator().manual_seed(seed)
        sets.append({name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in original.items()})
    return sets


def run(folder: Path, replicas: int, requests: int, kills: int, callers: int, seed: int) -> Found:
    """The fleet, its load, its weights and its enemy."""
    from verl_server import VerlEngine
    from verl_server.config import RecoveryConfig
    from verl_server.rollout.manager import RolloutManager

    found, rng = Found(), random.Random(seed)
    os.environ[MARK] = "1"
    before = set(os.listdir("/dev/shm"))
    sets = weight_sets(folder)
    stop = threading.Event()
    with one_rank_mesh() as mesh:
        torch.set_num_threads(1)
        started = time.monotonic()
        recovery = RecoveryConfig(stall_timeout_s=20.0, max_restarts=kills + 1)
        fleet = RolloutManager(
            1, model_path=str(folder), recovery=recovery, router_process=True, on_event=found.events.append, **SERVER
        )  # fmt: skip
        found.start_s = time.monotonic() - started
        for _ in range(replicas - 2):
            fleet.add_replica()
        with VerlEngine(mesh, fleet=fleet, model_path=str(folder), dtype=SERVER["dtype"]) as engine:
            engine.update_weights_from_tensor(sets[1].items(), weight_version=1)
            enemy = threading.Thread(target=_attack, args=(fleet, found, kills, rng, stop))
            pusher = threading.Thread(target=_push, args=(engine, sets, found, stop))
            started = time.monotonic()
            enemy.start()
            pusher.start()
            asyncio.run(_ask(fleet, found, requests, callers, seed, enemy))
            found.seconds = time.monotonic() - started
            stop.set()
            enemy.join()
            pusher.join()
            found.routers = fleet.router_restarts
    time.sleep(1.0)
    found.files = sorted(set(os.listdir("/dev/shm")) - before)
    found.orphans = sum(_is_marked(process) for process in psutil.process_iter())
    _check(found, folder, sets)
    return found


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and MARK in process.environ()
    except psutil.Error:
        return False


def _attack(fleet: Any, found: Found, kills: int, rng: random.Random, stop: threading.Event) -> None:
    """Complete the fleet under load, then kill one victim after the other, whenever it has one to lose."""
    time.sleep(3.0)
    started = time.monotonic()
    fleet.add_replica()
    found.loaded_start_s = time.monotonic() - started
    while len(found.kills) < kills and not stop.wait(rng.uniform(*PAUSE_S)):
        healthy = [one for one in fleet.replicas if one.state.value == "healthy" and one.adapter is not None]
        if len(healthy) < 2:
            continue
        victim = rng.choice(healthy)
        what = rng.choice(["server", "scheduler", "router"])
        if what == "router":
            os.kill(fleet._router_process.pid, signal.SIGKILL)
            found.kills.append({"time": time.time(), "replica": None, "what": what})
            continue
        try:
            main = psutil.Process(victim.adapter.asynchronous.process.pid)
            pid = main.pid
            if what == "scheduler":
                pid = next(c.pid for c in main.children(recursive=True) if any("scheduler" in w for w in c.cmdline()))
            os.kill(pid, signal.SIGKILL)
        except (psutil.Error, StopIteration, ProcessLookupError, AttributeError):
            continue
        found.kills.append({"time": time.time(), "replica": victim.name, "what": what})


def _push(engine: Any, sets: list[dict[str, torch.Tensor]], found: Found, stop: threading.Event) -> None:
    version = 1
    while not stop.wait(3.0):
        version += 1
        try:
            engine.update_weights_from_tensor(sets[version % SETS].items(), weight_version=version)
            found.updates += 1
        except Exception as error:  # noqa: BLE001 - counted, not hidden
            found.errors.append(f"update {version}: {type(error).__name__}: {error}")
            return


async def _ask(fleet: Any, found: Found, requests: int, callers: int, seed: int, enemy: threading.Thread) -> None:
    """`requests` samples, and more as long as the enemy has not finished."""
    from verl_server.router.client import RouterClient

    numbers = iter(range(10**9))

    async def caller(client: RouterClient) -> None:
        for number in numbers:
            if number >= requests and not enemy.is_alive():
                return
            rng = random.Random(seed * 10**6 + number)
            prompt = [rng.randrange(1, 200) for _ in range(rng.randrange(3, 40))]
            sampling = {"temperature": 0.0, "max_new_tokens": rng.randrange(*TOKENS), "ignore_eos": True}
            try:
                reply = await client.generate(
                    request_id=f"sample-{number}",
                    session_id=f"s{number % 40}",
                    input_ids=prompt,
                    sampling_params=sampling,
                )
            except Exception as error:  # noqa: BLE001 - counted, not hidden
                found.errors.append(f"sample {number}: {type(error).__name__}: {error}")
                continue
            meta = reply["meta_info"]
            found.answers.append({
                "number": number, "prompt": prompt, "wanted": sampling["max_new_tokens"], "output": reply["output_ids"],
                "spans": meta["weight_versions"], "attempts": meta["attempts"],
            })  # fmt: skip

    async with RouterClient(fleet.router_url, fleet.router_key) as client:
        await asyncio.gather(*(caller(client) for _ in range(callers)))


def _check(found: Found, folder: Path, sets: list[dict[str, torch.Tensor]]) -> None:
    """Every token must be the likeliest under the weights of its span; every sample must be there once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    numbers = [one["number"] for one in found.answers]
    found.doubled = len(numbers) - len(set(numbers))
    wrong: set[int] = set()
    for which in range(SETS):
        model.load_state_dict(sets[which], strict=False)
        for one in found.answers:
            spans = [span for span in one["spans"] if int(span["version"]) % SETS == which]
            if len(one["output"]) != one["wanted"] or one["spans"][-1]["end"] != one["wanted"]:
                wrong.add(one["number"])
            if not spans:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([[*one["prompt"], *one["output"]]])).logits[0]
            for span in spans:
                for at in range(span["start"], span["end"]):
                    row = logits[len(one["prompt"]) + at - 1]
                    if float(row.max() - row[one["output"][at]]) > 1e-4:  # equal up to rounding
                        wrong.add(one["number"])
                        found.misfits.append({
                            "sample": one["number"], "at": at, "spans": one["spans"], "attempts": one["attempts"],
                            "gap": float(row.max() - row[one["output"][at]]),
                        })  # fmt: skip
    found.wrong = len(wrong)


def back_s(found: Found) -> list[float]:
    """Seconds from each death to the same replica's health."""
    seconds, died = [], {}
    for event in found.events:
        if event["after"] == "dead":
            died[event["replica"]] = event["time"]
        elif event["after"] == "healthy" and event["replica"] in died:
            seconds.append(event["time"] - died.pop(event["replica"]))
    return seconds


def report(options: Options, machine: Json, found: Found, settings: Json) -> None:
    back = summarize(back_s(found))
    lost = max(0, settings["requests"] - len(found.answers))
    rows = [
        ["samples", len(found.answers)],
        ["of them over several replicas", sum(a["attempts"] > 1 for a in found.answers)],
        ["of them over several versions", sum(len(a["spans"]) > 1 for a in found.answers)],
        ["kills", len(found.kills)], ["weight updates", found.updates], ["seconds", f"{found.seconds:.0f}"],
        ["of them of the router", sum(kill["what"] == "router" for kill in found.kills)],
        ["start of one server alone, s", f"{found.start_s:.1f}"],
        ["start of one more under load, s", f"{found.loaded_start_s:.1f}"],
        ["back at work, s (median, most)", f"{back.median:.1f}, {max(back_s(found)):.1f}"],
        ["routers started again", found.routers],
    ]  # fmt: skip
    show_table("Chaos", ["what", "count"], [[words, str(value)] for words, value in rows])
    for words in [*found.errors[:10], *map(str, found.misfits[:10])]:
        CONSOLE.print(words, style="red")
    targets = [
        Target("kills", len(found.kills), settings["kills"], True),
        Target("samples lost", lost + len(found.errors), 0, False),
        Target("samples doubled", found.doubled, 0, False),
        Target("samples with tokens that are not of the stated weights", found.wrong, 0, False),
        Target("orphaned processes", found.orphans, 0, False),
        Target("files left in shared memory", len(found.files), 0, False),
        Target("back at full strength over one start alone", back.median / found.start_s, BACK_TARGET, False),
        Target("the same over one start under load", back.median / found.loaded_start_s, BACK_TARGET, False),
    ]
    show_targets(targets)
    samples = {**asdict(found), "answers": len(found.answers), "back_s": back_s(found)}
    figures = {"back_s": asdict(back), "start_s": found.start_s, "loaded_start_s": found.loaded_start_s}
    write_result(options, NAME, machine, settings=settings, figures=figures, targets=targets, samples=samples)
    figure, (axes,) = new_figure(
        1, f"{len(found.kills)} kills in {found.seconds:.0f} s, {settings['replicas']} replicas"
    )
    names = sorted({event["replica"] for event in found.events})
    origin = min(event["time"] for event in found.events)
    colours = {"healthy": "tab:green", "dead": "tab:red", "restarting": "tab:orange", "stale": "tab:blue"}
    for row, name in enumerate(names):
        own = [event for event in found.events if event["replica"] == name]
        ends = [event["time"] for event in own[1:]] + [origin + found.seconds + found.start_s]
        for event, end in zip(own, ends, strict=True):
            left, width = event["time"] - origin, end - event["time"]
            axes.barh(row, width, left=left, color=colours.get(event["after"], "tab:gray"), height=0.6)
    axes.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel="seconds",
        title="green: serves; orange: starts; blue: stale",
    )
    save_figure(figure, options.png)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="default 20, quick 2")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Random kills under load.", _more_options)
    kills = options.extra.kills or (2 if options.quick else 20)
    settings = {"replicas": 2 if options.quick else 3, "requests": 60 if options.quick else 2000, "kills": kills,
                "callers": 8, "seed": options.extra.seed}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        model = make_model(Path(folder) / "model", "qwen3")
        found = run(model, **settings)
    report(options, environment(), found, settings)


if __name__ == "__main__":
    main()
