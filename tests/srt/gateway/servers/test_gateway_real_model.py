"""An agent program and a pretrained model: mini-swe-agent without tools, as it is for models that cannot call any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from agent_clients.programs import run_mini_swe_agent
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server import HttpServerEngineAdapter
from verl_server.agent import RolloutLimits, as_generate_fn
from verl_server.gateway import Gateway
from verl_server.trajectory import get_renderer, load_session

CONTEXT_LENGTH = 8192
NUM_TURNS = 3
"""The program gives up after so many answers without a command in a row."""


@torch.no_grad()
def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Hugging Face's log probability of each token but the first, of which it says 0."""
    logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    chosen: torch.Tensor = logprobs[range(len(tokens) - 1), tokens[1:]]
    return torch.cat([torch.zeros(1), chosen])


def test_all_turns_have_the_tokens_and_log_probabilities_of_the_model(real_model: Path, tmp_path: Path) -> None:
    """The model of 135 million parameters does not keep to the format of commands. The program says so and goes on."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    limits = RolloutLimits(max_context_tokens=CONTEXT_LENGTH - 16, max_response_tokens=200)
    with (
        HttpServerEngineAdapter(
            model_path=str(real_model), dtype="float32", max_total_tokens=2 * CONTEXT_LENGTH, random_seed=0
        ) as server,
        Gateway(
            as_generate_fn(server.asynchronous), tmp_path / "run", renderer=get_renderer(tokenizer), limits=limits
        ) as gateway,
    ):
        session, key = gateway.create_session()
        run_mini_swe_agent(
            "Say hello.", "-c", "mini_textbased.yaml", "-c", f"agent.step_limit={NUM_TURNS}",
            "-c", "environment.env.PATH=/none", url=gateway.openai_url, key=key, folder=tmp_path,
        )  # fmt: skip
    graph = load_session(tmp_path / "run" / f"{session.id}.jsonl")
    assert len(graph.leaves) == NUM_TURNS, "the program sends its complaint instead of the answer: a path for each"
    for leaf in graph.leaves:
        path = graph.token_sequence(leaf)
        assert "exactly one bash code block" in tokenizer.decode(path.token_ids).lower()
        mask = torch.tensor(path.loss_mask, dtype=torch.bool)
        gaps = (torch.tensor(path.logprobs) - logprobs_of(model, path.token_ids))[mask].abs()
        assert len(gaps) > 10
        assert float(gaps.max()) < 1e-3
