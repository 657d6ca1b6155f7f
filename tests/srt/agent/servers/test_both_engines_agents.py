"""An agent loop and a gateway over real servers of both engines: trainers get exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import ForcedToolCallsLoop, add, assert_exact, assert_logprobs_match, make_episode
from both_engines import KINDS, SharedEngines
from helpers import adapter_of, reference_model
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits, as_generate_fn
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, Recorder, load_session, session_file, to_batch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, shared_engines: SharedEngines) -> VerlEngine:
    return shared_engines.of(request.param)


@pytest.fixture
def renderer(shared_engines: SharedEngines, engine: VerlEngine) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(shared_engines.model))


def test_episodes_with_tools_record_exact_tokens(
    engine: VerlEngine, renderer: ChatRenderer, shared_engines: SharedEngines, tmp_path: Path
) -> None:
    """Eight concurrent episodes of three turns. Prompts are the recorded paths, log probabilities Hugging Face's."""
    loop, model = ForcedToolCallsLoop([add]), reference_model(shared_engines.model)
    served = adapter_of(engine).get_model_info()["weight_version"]  # other tests push to the same servers

    async def run_one(index: int) -> Any:
        params = {"temperature": 1.0, "max_new_tokens": 12 + index, "ignore_eos": index % 2 == 0}
        recorder = Recorder(tmp_path, f"s{index}", sync=False)
        episode, generate = make_episode(engine, renderer, recorder, sampling_params=params)
        with recorder:
            return await loop.run_episode(episode), episode, generate

    async def run_all() -> list[Any]:
        return list(await asyncio.gather(*(run_one(index) for index in range(8))))

    for index, (stop_reason, episode, generate) in enumerate(asyncio.run(run_all())):
        assert stop_reason == "max_turns", episode.error
        graph = episode.graph
        assert graph.num_turns(episode.leaf) == 3
        assert load_session(session_file(tmp_path, f"s{index}")) == graph
        assert_exact(graph, generate, model)
        versions = {span.version for node in graph.nodes for span in node.spans or ()}
        assert versions == {served}
        batch = to_batch([(graph, episode.leaf)], pad_token_id=0)
        assert int(batch["response_mask"].sum()) == graph.num_sampled_tokens(episode.leaf)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_gateway_records_exact_tokens(
    engine: VerlEngine, renderer: ChatRenderer, shared_engines: SharedEngines, tmp_path: Path, is_streamed: bool
) -> None:
    """Two turns of a conversation are one path of the recorded session."""
    limits = RolloutLimits(max_context_tokens=4000, max_turns=10)
    generate = as_generate_fn(adapter_of(engine).asynchronous)
    with Gateway(generate, tmp_path, renderer=renderer, limits=limits) as gateway:
        info, key = gateway.create_session(sampling_params={"temperature": 1.0, "max_new_tokens": 24})
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(2):
            body = {"model": "m", "messages": messages, "stream": is_streamed}
            reply = httpx.post(
                f"{gateway.openai_url}/chat/completions", json=body, headers={"x-api-key": key}, timeout=120.0
            )
            assert reply.status_code == 200, reply.text
            if is_streamed:
                assert reply.text.rstrip().endswith("data: [DONE]")
                break
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "b"}]
        graph = load_session(session_file(tmp_path, info.id))
    (leaf,) = graph.leaves
    assert graph.num_turns(leaf) == (1 if is_streamed else 2)
    assert_logprobs_match(graph, leaf, reference_model(shared_engines.model))
