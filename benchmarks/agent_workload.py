"""The workload of `bench_agent_loop.py`: sessions of agents with slow tools, and the variants that run them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server import HttpServerEngineAdapter
    from verl_server.agent import Episode, GenerateFn

INDEPENDENT, BATCHED = "independent sessions", "one batch per turn"
RERENDERED = "prompts rendered again"
INDEPENDENT_NO_TOOL_TIME, BATCHED_NO_TOOL_TIME = f"{INDEPENDENT}, no tool time", f"{BATCHED}, no tool time"
VARIANTS = (INDEPENDENT, BATCHED, RERENDERED, INDEPENDENT_NO_TOOL_TIME, BATCHED_NO_TOOL_TIME)
SERVER_ARGUMENTS: Json = {"dtype": "float32", "max_total_tokens": 131072, "max_running_requests": 32}
CONTEXT_LENGTH = 8192
TOOL_MEDIAN_S, TOOL_SIGMA, TOOL_MAX_S = 0.05, 1.6, 3.0
"""Log-normal distribution of tool latencies, and the maximum latency."""
TOOL_MESSAGE = {"role": "tool", "content": "the tool says 42"}


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement."""

    rounds: int = 3
    num_sessions: int = 192
    turns_per_session: int = 20
    tokens_per_turn: int = 12
    """Number of sampled tokens per turn."""
    long_conversation_turns: int = 100
    long_conversation_repeats: int = 7


def draw_tool_latencies(plan: Plan) -> list[list[float]]:
    """Latencies in seconds by session and turn. They are the same for all variants and rounds."""
    rng = random.Random(0)

    def draw() -> float:
        return min(TOOL_MAX_S, rng.lognormvariate(math.log(TOOL_MEDIAN_S), TOOL_SIGMA))

    return [[draw() for _ in range(plan.turns_per_session - 1)] for _ in range(plan.num_sessions)]


class Workload:
    """The sessions of a plan, which each variant runs on the same server."""

    def __init__(self, server: HttpServerEngineAdapter, tokenizer: Any, plan: Plan) -> None:
        from verl_server.agent.engines import access_engine
        from verl_server.trajectory import ChatRenderer

        self._adapter, self._tokenizer, self._plan = server.asynchronous, tokenizer, plan
        self._renderer = ChatRenderer(tokenizer)
        generate = access_engine(server).generate

        async def generate_counted(*, rid: str, session_id: str, **request: Any) -> Mapping[str, Any]:
            reply = await generate(rid=rid, session_id=session_id, **request)
            self._count([request["input_ids"]], [reply])
            return reply

        self._generate: GenerateFn = generate_counted
        self._latencies = draw_tool_latencies(plan)
        no_latencies = [[0.0] * (plan.turns_per_session - 1)] * plan.num_sessions
        self._sampling_params = {"temperature": 1.0, "max_new_tokens": plan.tokens_per_turn, "ignore_eos": True}
        self.variants: dict[str, Callable[[], Awaitable[None]]] = {
            INDEPENDENT: lambda: self._run_independent(self._latencies),
            BATCHED: lambda: self._run_batched(self._latencies),
            RERENDERED: self._run_rerendered,
            INDEPENDENT_NO_TOOL_TIME: lambda: self._run_independent(no_latencies),
            BATCHED_NO_TOOL_TIME: lambda: self._run_batched(no_latencies),
        }
        self.num_sampled_tokens = self.num_prompt_tokens = 0

    def reset_counters(self) -> None:
        self.num_sampled_tokens = self.num_prompt_tokens = 0

    def _count(self, prompts: Sequence[Sequence[int]], replies: Sequence[Mapping[str, Any]]) -> None:
        self.num_prompt_tokens += sum(map(len, prompts))
        self.num_sampled_tokens += sum(len(reply["output_ids"]) for reply in replies)

    def _first_messages(self, index: int) -> list[Json]:
        return [{"role": "user", "content": f"question {index} of {self._plan.num_sessions}"}]

    def _make_episode(self, session_id: str, index: int, max_turns: int) -> Episode:
        from verl_server.agent import Episode, RolloutLimits, Task
        from verl_server.trajectory import TrajectoryGraph

        limits = RolloutLimits(max_response_tokens=CONTEXT_LENGTH, max_turns=max_turns)
        task, graph = Task(session_id, self._first_messages(index)), TrajectoryGraph(session_id)
        return Episode(task, graph, self._generate, self._renderer, limits, self._sampling_params)

    async def _run_independent(self, latencies: Sequence[Sequence[float]]) -> None:
        async def run_session(index: int) -> None:
            episode = self._make_episode(f"s{index}", index, self._plan.turns_per_session)
            await episode.generate(episode.task.messages)
            for latency_s in latencies[index]:
                await asyncio.sleep(latency_s)
                await episode.generate([TOOL_MESSAGE])

        await asyncio.gather(*(run_session(index) for index in range(self._plan.num_sessions)))

    async def _run_batched(self, latencies: Sequence[Sequence[float]]) -> None:
        prompts = [self._renderer.render_prompt(self._first_messages(i)) for i in range(self._plan.num_sessions)]
        params = self._sampling_params
        for turn in range(self._plan.turns_per_session):
            replies: Any = await self._adapter.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
            self._count(prompts, replies)
            if turn == self._plan.turns_per_session - 1:
                return
            await asyncio.sleep(max(session[turn] for session in latencies))
            for prompt, reply in zip(prompts, replies, strict=True):
                prompt += reply["output_ids"]
                prompt += self._renderer.render_next_turn([TOOL_MESSAGE], prompt)

    async def _run_rerendered(self) -> None:
        async def run_session(index: int) -> None:
            messages = self._first_messages(index)
            for latency_s in [*self._latencies[index], None]:
                await self._generate_rerendered(f"s{index}", messages)
                if latency_s is not None:
                    await asyncio.sleep(latency_s)

        await asyncio.gather(*(run_session(index) for index in range(self._plan.num_sessions)))

    async def _generate_rerendered(self, session_id: str, messages: list[Json]) -> None:
        """One turn of a client that stores messages and renders the whole history in each turn."""
        input_ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        reply = await self._generate(
            rid=f"{session_id}-{len(messages)}",
            session_id=session_id,
            input_ids=input_ids,
            sampling_params=self._sampling_params,
            return_logprob=True,
        )
        messages += [{"role": "assistant", "content": self._tokenizer.decode(reply["output_ids"])}, TOOL_MESSAGE]

    async def run_long_conversation(self) -> dict[str, list[float]]:
        """CPU time of each turn of a long conversation in milliseconds, by variant."""
        cpu_ms: dict[str, list[float]] = {INDEPENDENT: [], RERENDERED: []}
        num_turns = self._plan.long_conversation_turns
        episode, messages = self._make_episode("long", 0, num_turns), self._first_messages(0)
        for turn in range(num_turns):
            start = time.thread_time()
            await episode.generate([TOOL_MESSAGE] if turn else episode.task.messages)
            middle = time.thread_time()
            await self._generate_rerendered("long", messages)
            cpu_ms[INDEPENDENT].append((middle - start) * 1e3)
            cpu_ms[RERENDERED].append((time.thread_time() - middle) * 1e3)
        return cpu_ms
