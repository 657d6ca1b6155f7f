"""What the adapter and `VerlEngine` cost on top of raw HTTP, in one run against one server.

Prompts: one fixed set of 64 prompts, the same for every way, all sent once before the clock starts. The
server's prefix cache then answers every way alike, and it does the least work that it can, so the client's
cost weighs the most. (With a new prompt for each request the cache would fill up and the rounds differ.)

Fairness: client and server share the machine, as they do in a trainer on one node. The ways take turns in
short bursts, in another order each round, so that drift of the machine hits all alike; a way is compared
with the raw way of the same round, and the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass

from common import CONSOLE, Json, Options, environment, parse_options, show_targets, write_result
from generate_figures import Samples, figures_of, plot, show, targets_of
from servers import one_rank_engine, tiny_model
from ways import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, Way, Ways

NAME = "bench_generate"
KV_TOKENS = 32768


@dataclass(frozen=True)
class Plan:
    """How much is measured. `requests`: by number of requests in flight, for one way in one round."""

    rounds: int
    requests: dict[int, int]


FULL = Plan(rounds=25, requests={1: 10, 16: 64, 64: 128})
QUICK = Plan(rounds=1, requests={1: 5, 16: 32, 64: 64})


def measure(ways: Ways, plan: Plan) -> Samples:
    """All rounds of all ways. The order turns each round, and every other round runs backwards."""
    samples: Samples = {(way.name, level): [] for way in ways.all for level in plan.requests}
    ways.all[0].run(8, PROMPTS)  # every prompt once: the server's prefix cache is warm for all
    for number in range(plan.rounds):
        turn = number % len(ways.all)
        order = [*ways.all[turn:], *ways.all[:turn]][:: -1 if number % 2 else 1]
        for level, requests in plan.requests.items():
            for way in order:
                gc.collect()
                samples[way.name, level].append(way.run(level, requests))
            CONSOLE.print(f"round {number + 1} of {plan.rounds}, {level} in flight: done", style="dim")
    return samples


def report(options: Options, machine: Json, plan: Plan, ways: tuple[Way, ...], samples: Samples) -> Json:
    """Print tables and targets, write the files; returns what stands in the file under `figures`."""
    figures = {level: figures_of(ways, samples, level) for level in plan.requests}
    show(figures)
    targets = targets_of(figures)
    show_targets(targets)
    plain = {str(level): {name: asdict(f) for name, f in found.items()} for level, found in figures.items()}
    write_result(
        options,
        NAME,
        machine,
        settings={
            "rounds": plan.rounds,
            "requests": {str(level): count for level, count in plan.requests.items()},
            "prompts": PROMPTS,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
        },
        figures=plain,
        targets=targets,
        samples=[
            {
                "way": name,
                "in_flight": level,
                "round": number,
                "seconds": round(one.seconds, 6),
                "cpu_s": round(one.cpu_s, 6),
                "latencies_ms": [round(ms, 3) for ms in one.latencies_ms],
                "client_ms": [round(ms, 3) for ms in one.client_ms],
            }
            for (name, level), rounds in samples.items()
            for number, one in enumerate(rounds)
        ],
    )
    plot(options, machine, figures)
    return plain


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all ways (default 25, quick 1)")


def main() -> None:
    options = parse_options(NAME, "The adapter's cost on top of raw HTTP.", _more_options)
    plan = QUICK if options.quick else FULL
    if options.extra.rounds:
        plan = Plan(options.extra.rounds, plan.requests)
    machine = environment()
    with (
        tiny_model() as model,
        one_rank_engine(model_path=str(model), dtype="float32", max_total_tokens=KV_TOKENS) as engine,
    ):
        ways = Ways(engine)
        try:
            samples = measure(ways, plan)
        finally:
            ways.close()
    report(options, machine, plan, ways.all, samples)


if __name__ == "__main__":
    main()
