"""Claude Code and Codex, the real programs, act through the gateway with a policy on a real SGLang server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from program_helpers import (
    Exchange,
    LoggingGenerateFn,
    install_programs,
    make_trained_policy,
    recorded_turns,
    run_samples,
    word_task,
    write_word_agent,
)
from transformers import AutoTokenizer

from verl_server import HttpServerEngineAdapter
from verl_server.agent import as_generate_fn
from verl_server.trajectory import ChatRenderer, load_session

pytestmark = pytest.mark.timeout(900)  # the policy learns prompts of thousands of tokens

CODEX_SETTINGS = {
    "model": "policy",
    "model_provider": "verl",
    "model_providers.verl.name": "verl",
    "model_providers.verl.base_url": "$OPENAI_BASE_URL",
    "model_providers.verl.wire_api": "responses",
    "model_providers.verl.env_key": "OPENAI_API_KEY",
}
COMMAND = "echo hello > answer.txt"


def make_exchanges() -> dict[str, Exchange]:
    """The programs with their whole default prompts and all their tools."""
    folder = install_programs()
    claude = f'{folder}/claude -p "$PROMPT" --dangerously-skip-permissions'
    settings = " ".join(f'-c {name}="{value}"' for name, value in CODEX_SETTINGS.items())
    codex = f'{folder}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {settings} "$PROMPT"'
    return {
        "claude": Exchange(write_word_agent(claude), "Bash", {"command": COMMAND}),
        "codex": Exchange(write_word_agent(codex), "exec_command", {"cmd": COMMAND}),
    }


@pytest.fixture(scope="module")
def exchanges() -> dict[str, Exchange]:
    return make_exchanges()


@pytest.fixture(scope="module")
def server(
    exchanges: dict[str, Exchange], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServerEngineAdapter]:
    """A server whose policy calls the tool of each program, and ends after the result."""
    policy = make_trained_policy(tmp_path_factory.mktemp("policy"), list(exchanges.values()))
    with HttpServerEngineAdapter(str(policy), dtype="float32", context_length=65_536, log_level="warning") as adapter:
        yield adapter


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_program_runs_a_tool_and_every_token_is_that_of_the_engine(
    name: str, exchanges: dict[str, Exchange], server: HttpServerEngineAdapter, tmp_path: Path
) -> None:
    generate = LoggingGenerateFn(as_generate_fn(server.asynchronous))
    tokenizer = AutoTokenizer.from_pretrained(server.get_server_info()["model_path"])
    (sample,) = run_samples(
        exchanges[name].agent,
        generate,
        [word_task()],
        renderer=ChatRenderer(tokenizer),
        sampling_params={"temperature": 0.0},
        run_dir=tmp_path,
    )
    assert (sample.stop_reason, sample.error, sample.reward) == ("done", None, 1.0)
    assert len(generate.turns) == 2
    assert recorded_turns(sample.graph) == generate.turns
    assert recorded_turns(load_session(tmp_path / "hello-0.jsonl")) == generate.turns
    assert sample.path[0].token_ids(sample.path[1]) == [*generate.turns[1][0], *generate.turns[1][1]]
    assert sample.times["generate"] > 0.0
