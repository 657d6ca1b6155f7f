"""What waiting for tools costs: many agents of many turns, whose tools answer after long-tailed times.

One real server, the same sessions for each way, in turns within a round: every session sends its next turn when its
own tool has answered, and who is furthest behind goes first (ours); all wait for the slowest tool, and their turns go
out as one batch; as ours, but each turn's prompt is the whole history, rendered again. Two bounds, in which tools take
no time, so that the engine is never idle for want of work: each session at its own pace, and in batches, which spares
the engine's front and the client a request for each turn. Then one conversation of a hundred turns: the processor time
that each turn costs on the trainer's side.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure

NAME = "bench_agent_loop"
OURS, BATCH, AGAIN = "each at its own pace", "batch per turn", "rendered again"
FREE, FREE_BATCH = "each at its own pace, no waiting", "batch per turn, no waiting"
WAYS = (OURS, BATCH, AGAIN, FREE, FREE_BATCH)
SERVER: Json = {"dtype": "float32", "max_total_tokens": 131072, "max_running_requests": 32}
CONTEXT = 8192
MEDIAN_S, SIGMA, MOST_S = 0.05, 1.6, 3.0
"""Of tools: log-normal, cut off."""
ANSWER = {"role": "tool", "content": "the tool says 42"}


@dataclass(frozen=True)
class Plan:
    rounds: int = 3
    sessions: int = 192
    turns: int = 20
    tokens: int = 12
    """Sampled in each turn."""
    long_turns: int = 100
    repeats: int = 7
    """Of the conversation of `long_turns`."""


def tool_times(plan: Plan) -> list[list[float]]:
    """Seconds, by session and turn; the same for all ways and rounds."""
    rng = random.Random(0)

    def draw() -> float:
        return min(MOST_S, rng.lognormvariate(math.log(MEDIAN_S), SIGMA))

    return [[draw() for _ in range(plan.turns - 1)] for _ in range(plan.sessions)]


class Ways:
    """All ways to the same sessions, on one server."""

    def __init__(self, adapter: Any, tokenizer: Any, plan: Plan) -> None:
        from verl_server.agent.episode import generate_of
        from verl_server.trajectory.rendering import Renderer

        self._adapter, self._tokenizer, self._plan = adapter, tokenizer, plan
        self._renderer = Renderer(tokenizer)
        generate = generate_of(adapter)

        async def counted(**request: Any) -> Json:
            reply = await generate(**request)
            self._count([request["input_ids"]], [reply])
            return reply

        self._generate = counted
        self._times = tool_times(plan)
        nothing = [[0.0] * (plan.turns - 1)] * plan.sessions
        self._sampling = {"temperature": 1.0, "max_new_tokens": plan.tokens, "ignore_eos": True}
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            OURS: lambda: self._paced(self._times, self._in_turn()),
            BATCH: lambda: self._batches(self._times),
            AGAIN: lambda: self._again(self._in_turn()),
            FREE: lambda: self._paced(nothing, self._generate),
            FREE_BATCH: lambda: self._batches(nothing),
        }
        self.sampled = self.prompted = 0
        """Tokens, since somebody set them to 0."""

    def _in_turn(self) -> Any:
        """Who is furthest behind goes first; as many at a time as the engine works on."""
        from verl_server.agent.fair_scheduler import Turnstile

        return Turnstile(self._generate, SERVER["max_running_requests"])

    def _count(self, prompts: Sequence[Sequence[int]], replies: Sequence[Json]) -> None:
        self.prompted += sum(map(len, prompts))
        self.sampled += sum(len(reply["output_ids"]) for reply in replies)

    def first(self, number: int) -> list[Json]:
        return [{"role": "user", "content": f"question {number} of {self._plan.sessions}"}]

    def rollout(self, name: str, number: int, turns: int, generate: Any) -> Any:
        from verl_server.agent.episode import Budget, Rollout, Task
        from verl_server.trajectory.graph import Session

        budget = Budget(response_tokens=CONTEXT, turns=turns)
        task = Task(name, self.first(number))
        return Rollout(task, Session(name), generate, self._renderer, budget, self._sampling)

    async def _paced(self, times: Sequence[Sequence[float]], generate: Any) -> None:
        async def one(number: int) -> None:
            rollout = self.rollout(f"s{number}", number, self._plan.turns, generate)
            await rollout.turn(rollout.task.messages)
            for wait_s in times[number]:
                await asyncio.sleep(wait_s)
                await rollout.turn([ANSWER])

        await asyncio.gather(*(one(number) for number in range(self._plan.sessions)))

    async def _batches(self, times: Sequence[Sequence[float]]) -> None:
        paths = [self._renderer.first(self.first(number)) for number in range(self._plan.sessions)]
        for turn in range(self._plan.turns):
            replies = await self._adapter.generate(input_ids=paths, sampling_params=self._sampling, return_logprob=True)
            self._count(paths, replies)
            if turn == self._plan.turns - 1:
                return
            await asyncio.sleep(max(one[turn] for one in times))
            for path, reply in zip(paths, replies, strict=True):
                path += reply["output_ids"]
                path += self._renderer.suffix([ANSWER], path)

    async def _again(self, generate: Any) -> None:
        async def one(number: int) -> None:
            messages = self.first(number)
            for wait_s in [*self._times[number], None]:
                await self.ask_again(f"s{number}", messages, generate)
                if wait_s is not None:
                    await asyncio.sleep(wait_s)

        await asyncio.gather(*(one(number) for number in range(self._plan.sessions)))

    async def ask_again(self, name: str, messages: list[Json], generate: Any) -> None:
        """One turn of a client that keeps messages and renders them all."""
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        reply = await generate(
            rid=f"{name}-{len(messages)}",
            session_id=name,
            input_ids=ids,
            sampling_params=self._sampling,
            return_logprob=True,
        )
        messages += [{"role": "assistant", "content": self._tokenizer.decode(reply["output_ids"])}, ANSWER]

    async def long_talk(self) -> dict[str, list[float]]:
        """Milliseconds of processor time that each turn of a long conversation costs, by way."""
        found: dict[str, list[float]] = {OURS: [], AGAIN: []}
        rollout, messages = self.rollout("long", 0, self._plan.long_turns, self._generate), self.first(0)
        for turn in range(self._plan.long_turns):
            begun = time.thread_time()
            await rollout.turn([ANSWER] if turn else rollout.task.messages)
            between = time.thread_time()
            await self.ask_again("long", messages, self._generate)
            found[OURS].append((between - begun) * 1e3)
            found[AGAIN].append((time.thread_time() - between) * 1e3)
        return found


async def measure(adapter: Any, tokenizer: Any, plan: Plan) -> Json:
    """Seconds of each way, by round; then the long conversations. Raises RuntimeError for a missing token."""
    ways = Ways(adapter, tokenizer, plan)
    prompted: dict[str, int] = {}
    await ways.all[FREE]()  # the engine's first batches of each size take longer
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(plan.rounds):
        for way in [*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]]:
            await adapter.flush_cache()
            ways.sampled = ways.prompted = 0
            begun = time.perf_counter()
            await ways.all[way]()
            seconds[way].append(time.perf_counter() - begun)
            prompted[way] = ways.prompted
            if ways.sampled != plan.sessions * plan.turns * plan.tokens:
                raise RuntimeError(f"{way}: {ways.sampled} tokens were sampled")
        CONSOLE.print(f"round {turn + 1}: " + ", ".join(f"{w} {s[-1]:.1f} s" for w, s in seconds.items()), style="dim")
    talks = [await ways.long_talk() for _ in range(plan.repeats)]
    return {"seconds": seconds, "talks": talks, "prompted": prompted}


def by_turn(found: Json, way: str) -> list[float]:
    """The median over the repeats, for each turn."""
    return [summarize(list(values)).median for values in zip(*(talk[way] for talk in found["talks"]), strict=True)]


def growth(costs: Sequence[float]) -> float:
    """The last tenth of the turns over the first, by their medians; the very first, which connects, is left out."""
    tenth = max(1, len(costs) // 10)
    return summarize(costs[-tenth:]).median / summarize(costs[1 : tenth + 1]).median


def report(options: Options, machine: Json, plan: Plan, found: Json) -> None:
    tokens, seconds = plan.sessions * plan.turns * plan.tokens, found["seconds"]
    rates = {way: [tokens / s for s in seconds[way]] for way in WAYS}

    def ratio(way: str, other: str) -> float:
        return summarize([a / b for a, b in zip(rates[way], rates[other], strict=True)]).median

    rows = [
        [
            way,
            f"{summarize(seconds[way]).median:.1f}",
            f"{summarize(rates[way]).median:.0f}",
            f"{ratio(way, FREE):.2f}",
            str(found["prompted"][way]),
        ]
        for way in WAYS
    ]
    title = f"{plan.sessions} sessions of {plan.turns} turns of {plan.tokens} tokens"
    show_table(title, ["way", "seconds", "tokens/s", "of no waiting", "prompt tokens"], rows)
    costs = {way: by_turn(found, way) for way in (OURS, AGAIN)}
    for way, values in costs.items():
        CONSOLE.print(
            f"{way}: turn 2 {values[1]:.2f} ms, turn {plan.long_turns} {values[-1]:.2f} ms, grown {growth(values):.2f}"
        )
    targets = [
        Target("throughput over batch per turn", ratio(OURS, BATCH), 2.0, True),
        Target("throughput of the same without waiting", ratio(OURS, FREE), 0.85, True),
        Target("throughput of batches without waiting", ratio(OURS, FREE_BATCH), 0.85, True),
        Target("processor time of the last ten turns over turns 2 to 11", growth(costs[OURS]), 1.2, False),
    ]
    show_targets(targets)
    figures = {
        "tokens_per_s": {way: asdict(summarize(rates[way])) for way in WAYS},
        "over_rendered_again": ratio(OURS, AGAIN),
        "growth": {way: growth(values) for way, values in costs.items()},
        "ms_by_turn": {way: [round(value, 3) for value in values] for way, values in costs.items()},
    }
    write_result(options, NAME, machine, settings=asdict(plan), figures=figures, targets=targets, samples=_short(found))
    figure, (bars, lines) = new_figure(2, f"{title}, {machine['cores']} cores", width=10)
    grouped_bars(
        bars, [""], {way: [summarize(rates[way])] for way in WAYS},
        title="Sampled tokens a second (median; whiskers: quartiles)", ylabel="tokens/s", digits=0,
    )  # fmt: skip
    for way, values in costs.items():
        lines.plot(range(1, len(values) + 1), values, label=way, color=COLOURS[WAYS.index(way)])
    lines.set_title("Processor time of a turn on the trainer's side", fontsize=10, loc="left")
    lines.set(xlabel="turn of one conversation", ylabel="ms", ylim=(0, None))
    legend_below(figure, bars)
    save_figure(figure, options.png)


def _short(found: Json) -> Json:
    talks = [{way: [round(ms, 3) for ms in values] for way, values in talk.items()} for talk in found["talks"]]
    return {"seconds": found["seconds"], "talks": talks, "prompted": found["prompted"]}


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="default 5, quick 1")


def main() -> None:
    from transformers import AutoTokenizer

    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Agents that wait for tools.", _more_options)
    plan = Plan(rounds=1, sessions=16, turns=4, repeats=2) if options.quick else Plan()
    if options.extra.rounds:
        plan = Plan(**{**asdict(plan), "rounds": options.extra.rounds})
    machine = environment()
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as scratch:
        folder = make_model(Path(scratch) / "model", "qwen3", context_length=CONTEXT)

        async def run() -> Json:
            adapter = await AsyncHttpServerEngineAdapter.launch(model_path=str(folder), **SERVER)
            async with adapter:
                return await measure(adapter, AutoTokenizer.from_pretrained(folder), plan)

        found = asyncio.run(run())
    report(options, machine, plan, found)


if __name__ == "__main__":
    main()
