"""Measures what waiting for tools costs: many agents with many turns, whose tools have long-tailed latencies.

One real server runs the same sessions in five variants, which alternate within a round:

- independent sessions: each session sends its next turn when its own tool has returned (this library's way);
- one batch per turn: all sessions wait for the slowest tool, and their turns are sent as one batch;
- prompts rendered again: as independent sessions, but each prompt is the whole history rendered again;
- two upper bounds in which tools take no time, so that the engine is never idle: independent sessions, and batches,
  which save the engine's front end and the client one request per turn.

Then one conversation of a hundred turns measures the CPU time of each turn on the trainer's side.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_workload import (
    BATCHED,
    BATCHED_NO_TOOL_TIME,
    CONTEXT_LENGTH,
    INDEPENDENT,
    INDEPENDENT_NO_TOOL_TIME,
    RERENDERED,
    SERVER_ARGUMENTS,
    VARIANTS,
    Plan,
    Workload,
)
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
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server import HttpServerEngineAdapter

NAME = "bench_agent_loop"


async def measure(server: HttpServerEngineAdapter, tokenizer: Any, plan: Plan) -> Json:
    """Run all variants in each round, then the long conversations.

    Returns `seconds` by variant and round, `prompt_tokens` by variant, and `conversation_cpu_ms` by repeat, variant
    and turn. Raises RuntimeError if a variant did not sample the planned number of tokens.
    """
    workload = Workload(server, tokenizer, plan)
    prompt_tokens: dict[str, int] = {}
    await workload.variants[INDEPENDENT_NO_TOOL_TIME]()  # the engine's first batches of each size take longer
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for round_index in range(plan.rounds):
        first = round_index % len(VARIANTS)
        for variant in [*VARIANTS[first:], *VARIANTS[:first]]:
            await server.asynchronous.flush_cache()
            workload.reset_counters()
            start = time.perf_counter()
            await workload.variants[variant]()
            seconds[variant].append(time.perf_counter() - start)
            prompt_tokens[variant] = workload.num_prompt_tokens
            if workload.num_sampled_tokens != plan.num_sessions * plan.turns_per_session * plan.tokens_per_turn:
                raise RuntimeError(f"{variant}: unexpected number of sampled tokens: {workload.num_sampled_tokens}")
        durations = ", ".join(f"{variant} {values[-1]:.1f} s" for variant, values in seconds.items())
        CONSOLE.print(f"round {round_index + 1}: {durations}", style="dim")
    conversations = [await workload.run_long_conversation() for _ in range(plan.long_conversation_repeats)]
    return {"seconds": seconds, "prompt_tokens": prompt_tokens, "conversation_cpu_ms": conversations}


def median_by_turn(measured: Json, variant: str) -> list[float]:
    """CPU milliseconds of each turn of the long conversation: the median of the repeats."""
    repeats = [conversation[variant] for conversation in measured["conversation_cpu_ms"]]
    return [summarize(list(values)).median for values in zip(*repeats, strict=True)]


def growth(cpu_ms: Sequence[float]) -> float:
    """Median of the last tenth of the turns divided by the median of the first tenth.

    The first turn is left out, because it opens the connection.
    """
    tenth = max(1, len(cpu_ms) // 10)
    return summarize(cpu_ms[-tenth:]).median / summarize(cpu_ms[1 : tenth + 1]).median


def report(options: Options, machine: Json, plan: Plan, measured: Json) -> None:
    """Print the tables and the targets, and write the result file and the plot."""
    num_tokens, seconds = plan.num_sessions * plan.turns_per_session * plan.tokens_per_turn, measured["seconds"]
    tokens_per_s = {variant: [num_tokens / s for s in seconds[variant]] for variant in VARIANTS}

    def ratio(variant: str, baseline: str) -> float:
        return summarize([a / b for a, b in zip(tokens_per_s[variant], tokens_per_s[baseline], strict=True)]).median

    rows = [
        [
            variant,
            f"{summarize(seconds[variant]).median:.1f}",
            f"{summarize(tokens_per_s[variant]).median:.0f}",
            f"{ratio(variant, INDEPENDENT_NO_TOOL_TIME):.2f}",
            str(measured["prompt_tokens"][variant]),
        ]
        for variant in VARIANTS
    ]
    title = f"{plan.num_sessions} sessions, {plan.turns_per_session} turns each, {plan.tokens_per_turn} tokens per turn"
    show_table(title, ["variant", "seconds", "tokens/s", "of no tool time", "prompt tokens"], rows)
    cpu_ms = {variant: median_by_turn(measured, variant) for variant in (INDEPENDENT, RERENDERED)}
    for variant, values in cpu_ms.items():
        CONSOLE.print(
            f"{variant}: CPU time of turn 2 {values[1]:.2f} ms, of turn {plan.long_conversation_turns} "
            f"{values[-1]:.2f} ms, growth {growth(values):.2f}"
        )
    targets = [
        Target("throughput over one batch per turn", ratio(INDEPENDENT, BATCHED), 2.0, True),
        Target("throughput over no tool time", ratio(INDEPENDENT, INDEPENDENT_NO_TOOL_TIME), 0.85, True),
        Target("throughput over batches with no tool time", ratio(INDEPENDENT, BATCHED_NO_TOOL_TIME), 0.85, True),
        Target("CPU time of the last ten turns over turns 2 to 11", growth(cpu_ms[INDEPENDENT]), 1.2, False),
    ]
    show_targets(targets)
    figures = {
        "tokens_per_s": {variant: asdict(summarize(tokens_per_s[variant])) for variant in VARIANTS},
        "throughput_over_rendering_again": ratio(INDEPENDENT, RERENDERED),
        "cpu_time_growth": {variant: growth(values) for variant, values in cpu_ms.items()},
        "cpu_ms_by_turn": {variant: [round(value, 3) for value in values] for variant, values in cpu_ms.items()},
    }
    samples = _with_rounded_times(measured)
    write_result(options, NAME, machine, settings=asdict(plan), figures=figures, targets=targets, samples=samples)
    plot(options.png, f"{title}, {machine['cores']} cores", tokens_per_s, cpu_ms)


def plot(
    png: Path, title: str, tokens_per_s: Mapping[str, Sequence[float]], cpu_ms: Mapping[str, Sequence[float]]
) -> None:
    """Plot the throughput of the variants, and the CPU time of each turn of the long conversation."""
    figure, (bars, lines) = new_figure(2, title, width=10)
    grouped_bars(
        bars,
        [""],
        {variant: [summarize(list(values))] for variant, values in tokens_per_s.items()},
        title="Sampled tokens per second (median; whiskers: quartiles)",
        ylabel="tokens/s",
        digits=0,
    )
    for variant, values in cpu_ms.items():
        lines.plot(range(1, len(values) + 1), values, label=variant, color=COLOURS[VARIANTS.index(variant)])
    lines.set_title("CPU time of a turn on the trainer's side", fontsize=10, loc="left")
    lines.set(xlabel="turn of one conversation", ylabel="ms", ylim=(0, None))
    legend_below(figure, bars)
    save_figure(figure, png)


def _with_rounded_times(measured: Json) -> Json:
    """The measured values with CPU times rounded to microseconds, which keeps the result file small."""
    conversations = [
        {variant: [round(ms, 3) for ms in values] for variant, values in conversation.items()}
        for conversation in measured["conversation_cpu_ms"]
    ]
    return {**measured, "conversation_cpu_ms": conversations}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 3, quick: 1)")


def main() -> None:
    from transformers import AutoTokenizer

    from verl_server import HttpServerEngineAdapter
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Measures agents that wait for tools.", _add_options)
    quick_plan = Plan(rounds=1, num_sessions=16, turns_per_session=4, long_conversation_repeats=2)
    plan = quick_plan if options.quick else Plan()
    if options.extra.rounds:
        plan = replace(plan, rounds=options.extra.rounds)
    machine = environment()
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as scratch:
        model = make_model(Path(scratch) / "model", "qwen3", context_length=CONTEXT_LENGTH)

        with HttpServerEngineAdapter(str(model), **SERVER_ARGUMENTS) as server:
            measured = asyncio.run(measure(server, AutoTokenizer.from_pretrained(model), plan))
    report(options, machine, plan, measured)


if __name__ == "__main__":
    main()
