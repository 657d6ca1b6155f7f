"""The tests of `test_agent_branches.py` that need servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from agent_helpers import add, assert_logprobs_match, assert_prompts_are_paths, make_episode
from helpers import reference_model
from test_agent_branches import renderer
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import (
    RolloutLimits,
    ToolAgentLoop,
)
from verl_server.trajectory import (
    ChatRenderer,
    ForkReason,
    TrajectoryGraph,
    to_batch,
)

__all__ = ["renderer"]


def test_concurrent_branches_of_a_real_engine_are_exact(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    """Forks, a sub-agent with a tool of its own, and a compaction: every prompt is the path of its own branch."""
    graph, model = TrajectoryGraph("s"), reference_model(tiny("qwen3"))
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    limits = RolloutLimits(max_response_tokens=600)
    params = {"temperature": 1.0, "max_new_tokens": 10}
    episode, generate = make_episode(shared_engine, renderer, graph, sampling_params=params, limits=limits)

    async def run() -> None:
        await episode.generate()
        helper = episode.new_root([{"role": "user", "content": "help"}], [add])
        branches = [episode.fork() for _ in range(4)]
        question = [{"role": "user", "content": "again"}]
        await asyncio.gather(*(branch.generate(question) for branch in branches), ToolAgentLoop().run(helper))
        await asyncio.gather(*(branch.generate(question) for branch in branches), episode.generate(question))
        summary = [{"role": "user", "content": "You have said hello."}]
        episode.adopt(episode.new_root(summary, reason=ForkReason.COMPACTED))
        await episode.generate()

    asyncio.run(run())
    assert_prompts_are_paths(graph, generate)
    assert sum(node.sampled for node in graph.nodes) == len(generate.prompts) == 12
    assert len(episode.segments) == 4 + 1 + 2, "forks, the sub-agent, and the paths before and after the compaction"
    for segment in episode.segments:
        assert_logprobs_match(graph, segment.leaf, model)
    paths = [(graph, segment.leaf) for segment in episode.segments]
    mask = to_batch(paths, pad_token_id=0)["response_mask"]
    assert int(mask.sum()) == sum(len(node.token_ids) for node in graph.nodes if node.sampled)
