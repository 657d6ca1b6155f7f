"""Measures the gateway: what it adds to requests of agents, compared with the engine, the router and LiteLLM's proxy.

Three parts, which `--part` selects:

- `engine`: the same chat requests to SGLang's own endpoint, through `verl-server router`, the gateway, and LiteLLM's
  proxy. One server with a tiny model. Only the gateway asks the engine for log probabilities, and records them.
  "direct engine, log probs" is SGLang's `/generate` with the token ids and the log probabilities of the gateway.
- `upstream`: the gateway and LiteLLM's proxy in front of an upstream that answers at once.
- `turns`: CPU time of the gateway for each turn of a growing conversation, through each dialect.

All systems run once in each round, in rotating order.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
import uvloop
from bench_router import KEY
from common import CONSOLE, Options, environment, parse_options
from gateway_conversation import DIALECTS, measure_conversation
from gateway_report import report
from gateway_systems import System, engine_systems, gateway, upstream_systems
from http_load import body_of, connect, encode_head, run_burst

from verl_server.cli.common import exit_after_cleanup
from verl_server.types import Json

NAME = "bench_gateway"
PARTS = ("engine", "upstream", "turns")
SERVER: Json = {
    "dtype": "float32",
    "max_total_tokens": 131072,
    "api_key": KEY,
    "served_model_name": "policy",
}
CONTEXT_LENGTH = 4096
NUM_BODIES = {"short": 4000, "60 kB": 100}
"""Number of different requests of each size."""
NUM_SESSIONS = 64
"""Minimum number of new sessions of a burst."""
NUM_TOOLS, DESCRIPTION_CHARS = 24, 2000
"""Tools of a request of 60 kB: as Claude Code sends them with each request."""


@dataclass(frozen=True)
class Case:
    """A kind of load."""

    in_flight: int
    size: str = "short"
    stream: bool = False

    @property
    def name(self) -> str:
        return f"{self.in_flight} in flight, {self.size}{', stream' if self.stream else ''}"


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement."""

    engine_rounds: int = 5
    upstream_rounds: int = 5
    alone_rounds: int = 30
    """Number of rounds with one request in flight in front of the engine: few milliseconds of 300 are measured, and the
    speed of the machine changes by more within a minute."""
    engine_s: float = 2.0
    """Seconds of a burst in front of the engine, in which the requests in flight are answered at least once."""
    alone_s: float = 0.5
    upstream_s: float = 0.8
    engine_tokens: int = 128
    """Number of tokens of a reply of the engine."""
    in_flight: tuple[int, ...] = (1, 16, 64, 128)
    turns: int = 50
    conversations: int = 9
    """Number of conversations through each dialect."""

    @property
    def cases(self) -> list[Case]:
        short = [Case(in_flight) for in_flight in self.in_flight]
        others = [("short", True), ("60 kB", False)]
        return short + [Case(max(1, self.in_flight[-2]), size, stream) for size, stream in others]

    def engine_bursts(self, case: Case) -> tuple[int, float]:
        """Number of rounds of a case in front of the engine, and seconds of each burst."""
        return (self.alone_rounds, self.alone_s) if case.in_flight == 1 else (self.engine_rounds, self.engine_s)


QUICK = Plan(
    engine_rounds=1,
    upstream_rounds=1,
    alone_rounds=1,
    engine_s=0.3,
    alone_s=0.3,
    upstream_s=0.2,
    engine_tokens=8,
    in_flight=(1, 4, 8),
    turns=12,
    conversations=2,
)


def make_bodies(case: Case, max_tokens: int) -> list[Json]:
    """The bodies of a load in OpenAI's chat dialect. Each has another question."""
    fields: Json = {"model": "policy", "max_tokens": max_tokens, "stream": case.stream, "ignore_eos": True}
    if case.size == "60 kB":
        parameters = {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(8)}}
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{number}",
                    "description": "What it does. " * (DESCRIPTION_CHARS // 14),
                    "parameters": parameters,
                },
            }
            for number in range(NUM_TOOLS)
        ]
    questions = (f"Question {number}: what is the answer?" for number in range(NUM_BODIES[case.size]))
    return [{**fields, "messages": [{"role": "user", "content": text}]} for text in questions]


async def check_length(system: System, chat_body: Json, num_tokens: int) -> None:
    """Raise RuntimeError unless a reply has this number of tokens: all systems have to do the same work."""
    (key,), body = system.make_keys(1), system.encode(chat_body)
    connection = await connect(system.url)
    try:
        reply = orjson.loads(body_of(await connection.send(encode_head(system.url, system.path, key, body) + body)))
    finally:
        connection.close()
    found = (reply.get("usage") or reply.get("meta_info"))["completion_tokens"]
    if found != num_tokens:
        raise RuntimeError(f"{system.url} has generated {found} tokens, not {num_tokens}")


async def measure_systems(
    systems: dict[str, System], plan: Plan, rounds_of: Callable[[Case], tuple[int, float]], num_tokens: int
) -> Json:
    """Each case with each system in each round. Returns bursts by case and system.

    `rounds_of`: number of rounds of a case, and seconds of each burst.
    """
    samples: Json = {}
    for system in systems.values():
        await check_length(system, make_bodies(Case(1), num_tokens)[0], num_tokens)
    for case in plan.cases:
        chat_bodies, found = make_bodies(case, num_tokens), dict[str, list[Json]]()
        rounds, seconds = rounds_of(case)
        bodies = {name: [system.encode(body) for body in chat_bodies] for name, system in systems.items()}
        for number in range(rounds + 1):  # the first round opens what later rounds use, and is not counted
            order = list(systems)
            first = number % len(order)
            for name in [*order[first:], *order[:first]]:
                system, duration = systems[name], seconds if number else min(0.5, seconds)
                keys = system.make_keys(max(case.in_flight, NUM_SESSIONS))
                burst = await run_burst(
                    system.url, system.path, keys, bodies[name], case.in_flight, duration, system.pid
                )
                if number:
                    found.setdefault(name, []).append(asdict(burst))
        samples[case.name] = {name: found[name] for name in systems}
        CONSOLE.print(f"{case.name}: done", style="dim")
    return samples


async def measure_turns(system: System, plan: Plan) -> Json:
    """CPU time of each turn of each conversation, by dialect."""
    cpu_ms: dict[str, list[list[float]]] = {dialect: [] for dialect in DIALECTS}
    num_bytes = 0
    await measure_conversation(system, "chat", plan.turns)  # not counted
    for _ in range(plan.conversations):
        for dialect in DIALECTS:
            found, size = await measure_conversation(system, dialect, plan.turns)
            cpu_ms[dialect].append([round(ms, 3) for ms in found])
            num_bytes = max(num_bytes, size)
    return {"cpu_ms": cpu_ms, "last_body_bytes": num_bytes}


def measure_engine(plan: Plan, scratch: Path) -> Json:
    """The part `engine`."""
    from verl_server import HttpServerEngineAdapter
    from verl_server.tiny import make_model

    model = make_model(scratch / "model", "qwen3", context_length=CONTEXT_LENGTH)
    with (
        HttpServerEngineAdapter(model_path=str(model), **SERVER) as server,
        engine_systems(server.base_url, model, scratch) as systems,
    ):
        return uvloop.run(measure_systems(systems, plan, plan.engine_bursts, plan.engine_tokens))


def measure_upstream(plan: Plan, scratch: Path) -> Json:
    """The part `upstream`."""
    from fake_upstream import NUM_TEXT_TOKENS

    with upstream_systems(make_tokenizer_folder(scratch), scratch) as systems:
        bursts = (plan.upstream_rounds, plan.upstream_s)
        return uvloop.run(measure_systems(systems, plan, lambda _: bursts, NUM_TEXT_TOKENS))


def measure_growth(plan: Plan, scratch: Path) -> Json:
    """The part `turns`."""
    with gateway(scratch, tokenizer=make_tokenizer_folder(scratch)) as system:
        return uvloop.run(measure_turns(system, plan))


def make_tokenizer_folder(scratch: Path) -> Path:
    """A folder with a tokenizer."""
    from verl_server.tiny import make_tokenizer

    folder = scratch / "tokenizer"
    folder.mkdir(exist_ok=True)
    make_tokenizer(folder)
    return folder


MEASURES: dict[str, Callable[[Plan, Path], Json]] = {
    "engine": measure_engine,
    "upstream": measure_upstream,
    "turns": measure_growth,
}


def measure(plan: Plan, parts: Sequence[str]) -> Json:
    """The samples of some parts."""
    samples: Json = {}
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="verl-bench-") as scratch:
            samples[part] = MEASURES[part](plan, Path(scratch))
    return samples


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="number of rounds; default 5, and 30 with one request in flight in front of the engine",
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part only; may be repeated")


def main() -> None:
    """Run the benchmark from the command line."""
    options: Options = parse_options(NAME, "What the gateway adds to requests of agents.", _add_options)
    plan = QUICK if options.quick else Plan()
    if options.extra.rounds:
        rounds = options.extra.rounds
        plan = replace(plan, engine_rounds=rounds, upstream_rounds=rounds, alone_rounds=rounds)
    machine = environment()
    with exit_after_cleanup():
        samples = measure(plan, options.extra.part or PARTS)
    report(options, machine, plan, samples)


if __name__ == "__main__":
    main()
