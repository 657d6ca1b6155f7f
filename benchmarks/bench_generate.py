"""Measures the overhead of the adapters and of `VerlEngine` for `/generate`, against raw HTTP clients.

Prompts: every client sends the same 64 prompts, which were sent once before the measurement. The prefix cache of the
server then serves all clients equally, and the server does the least possible work, so the overhead of the client is
most visible. (With new prompts the cache would fill up, and the rounds would differ.)

Fairness: client and server share the machine, as in a trainer on one node. The clients run in short bursts, in another
order in each round, so that drift of the machine affects all clients equally. A client is compared with the raw client
of the same round, and the result is the median over the rounds.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass

from common import CONSOLE, Options, environment, parse_options, show_targets, write_result
from generate_clients import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, GenerateClient, GenerateClients
from generate_report import Samples, figures_of, plot, show, targets_of
from servers import one_rank_engine, tiny_model

from verl_server.types import Json

NAME = "bench_generate"
KV_TOKENS = 32768


@dataclass(frozen=True)
class Plan:
    """Size of the measurement. `requests` is requests per client and round, by number of requests in flight."""

    rounds: int
    requests: dict[int, int]


FULL = Plan(rounds=25, requests={1: 10, 16: 64, 64: 128})
QUICK = Plan(rounds=1, requests={1: 5, 16: 32, 64: 64})


def measure(clients: GenerateClients, plan: Plan) -> Samples:
    """Run all rounds of all clients. The order rotates, and every second round runs in reverse order."""
    samples: Samples = {(client.name, level): [] for client in clients.all for level in plan.requests}
    clients.all[0].run(8, PROMPTS)  # every prompt once, to fill the prefix cache of the server
    for number in range(plan.rounds):
        first = number % len(clients.all)
        order = [*clients.all[first:], *clients.all[:first]][:: -1 if number % 2 else 1]
        for level, requests in plan.requests.items():
            for client in order:
                gc.collect()
                samples[client.name, level].append(client.run(level, requests))
            CONSOLE.print(f"round {number + 1} of {plan.rounds}, {level} in flight: done", style="dim")
    return samples


def report(options: Options, machine: Json, plan: Plan, clients: tuple[GenerateClient, ...], samples: Samples) -> Json:
    """Print tables and targets, and write the result files. Returns the `figures` of the JSON file."""
    figures = {level: figures_of(clients, samples, level) for level in plan.requests}
    show(figures)
    targets = targets_of(figures)
    show_targets(targets)
    figures_json = {
        str(level): {name: asdict(f) for name, f in by_client.items()} for level, by_client in figures.items()
    }
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
        figures=figures_json,
        targets=targets,
        samples=[
            {
                "client": name,
                "in_flight": level,
                "round": number,
                "seconds": round(measured.seconds, 6),
                "cpu_s": round(measured.cpu_s, 6),
                "latencies_ms": [round(ms, 3) for ms in measured.latencies_ms],
                "client_ms": [round(ms, 3) for ms in measured.client_ms],
            }
            for (name, level), rounds in samples.items()
            for number, measured in enumerate(rounds)
        ],
    )
    plot(options, machine, figures)
    return figures_json


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds (default 25, with --quick 1)")


def main() -> None:
    options = parse_options(
        NAME, "Measure the overhead of the adapters and of VerlEngine, against raw HTTP clients.", _more_options
    )
    plan = QUICK if options.quick else FULL
    if options.extra.rounds:
        plan = Plan(options.extra.rounds, plan.requests)
    machine = environment()
    with (
        tiny_model() as model,
        one_rank_engine(model_path=str(model), dtype="float32", max_total_tokens=KV_TOKENS) as engine,
    ):
        clients = GenerateClients(engine)
        try:
            samples = measure(clients, plan)
        finally:
            clients.close()
    report(options, machine, plan, clients.all, samples)


if __name__ == "__main__":
    main()
