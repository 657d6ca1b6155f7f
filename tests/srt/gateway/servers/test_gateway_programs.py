"""Real agent programs act through the gateway: with a policy on a real SGLang server, and with one that is a script."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from agent_helpers import ScriptedGenerateFn, call_text
from PIL import Image
from program_helpers import (
    END,
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
from verl_server.agent import RolloutLimits, as_generate_fn
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


def command_lines() -> dict[str, str]:
    """The programs with their whole default prompts and all their tools."""
    folder = install_programs()
    settings = " ".join(f'-c {name}="{value}"' for name, value in CODEX_SETTINGS.items())
    codex = f"{folder}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {settings}"
    return {
        "claude": f'{folder}/claude -p "$PROMPT" --dangerously-skip-permissions',
        "codex": f'{codex} "$PROMPT"',
        "qwen": f'{folder}/qwen --auth-type openai --model policy --yolo -p "$PROMPT"',
        "opencode": f'{folder}/opencode run --model verl/policy "$PROMPT"',
        "ai-sdk": f"node {folder.parents[1]}/ai_sdk.mjs",
    }


def make_exchanges() -> dict[str, Exchange]:
    commands = command_lines()
    return {
        "claude": Exchange(write_word_agent(commands["claude"]), "Bash", {"command": COMMAND}),
        "codex": Exchange(write_word_agent(commands["codex"]), "exec_command", {"cmd": COMMAND}),
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


# -- what the policy cannot see ---------------------------------------------------------------------

OPENCODE_MODEL = {"attachment": True, "modalities": {"input": ["text", "image", "pdf"], "output": ["text"]}}
OPENCODE_SETTINGS = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": OPENCODE_MODEL},
}
NO_IMAGE = "[image omitted: the model reads no images]"
LOOKS: dict[str, tuple[list[tuple[str, dict[str, Any]]], list[str]]] = {
    "claude": (
        [("Read", {"file_path": "picture.png"}), ("Read", {"file_path": "notes.pdf"}), ("Bash", {"command": COMMAND})],
        [NO_IMAGE, "[document omitted: the model cannot read it]"],
    ),
    "codex": ([("view_image", {"path": "picture.png"}), ("exec_command", {"cmd": COMMAND})], [NO_IMAGE]),
    "qwen": (
        [
            ("read_file", {"file_path": "picture.png"}),
            ("read_file", {"file_path": "notes.pdf"}),
            ("run_shell_command", {"command": COMMAND, "description": "x", "is_background": False}),
        ],
        [],  # this version does not send images to a model whose name it does not know
    ),
    "opencode": (
        [
            ("read", {"filePath": "picture.png"}),
            ("read", {"filePath": "notes.pdf"}),
            ("bash", {"command": COMMAND, "description": "x"}),
        ],
        [NO_IMAGE, "[file omitted: the model cannot read it]"],
    ),
    "ai-sdk": ([("readNote", {"note": "a"}), ("writeAnswer", {"word": "hello"})], []),
}
"""The calls of the policy of each program, and what it reads in place of what it cannot see."""


def as_file(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("name", LOOKS)
def test_a_program_goes_on_after_a_look_at_files_that_the_policy_cannot_see(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Each program reads an image and a PDF, and sends its history in its own way: it stays one path."""
    calls, shown = LOOKS[name]
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    folders = list[str]()

    class Look(write_word_agent(command_lines()[name])):  # type: ignore[misc]
        env: ClassVar = {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"verl": OPENCODE_SETTINGS}})}

        async def prepare(self) -> None:
            folders.append(self.workspace)
            await self.write_file("picture.png", as_file("PNG"))
            await self.write_file("notes.pdf", as_file("PDF"))

    def reply(prompt: str) -> str:
        number = prompt.count("<|im_start|>tool\n")
        if "Generate a title" in prompt or number == len(calls):
            return "Done." + END
        tool, arguments = calls[number]
        paths = {key: f"{folders[0]}/{value}" for key, value in arguments.items() if "path" in key.lower()}
        return "I look.\n" + call_text(tool, **{**arguments, **paths}) + END

    generate = ScriptedGenerateFn(tokenizer, reply)
    limits = RolloutLimits(max_context_tokens=400_000, timeout_s=120.0)
    (sample,) = run_samples(
        Look, generate, [word_task()], renderer=ChatRenderer(tokenizer), limits=limits, run_dir=tmp_path
    )
    assert (sample.stop_reason, sample.error, sample.reward) == ("done", None, 1.0)
    graph = load_session(tmp_path / "hello-0.jsonl")
    (leaf,) = [leaf for leaf in graph.leaves if graph.num_turns(leaf) > 1]
    assert graph.num_turns(leaf) == len(calls) + 1
    text = tokenizer.decode(graph.token_ids(leaf))
    assert all(part in text for part in shown)
    assert sum(note.name == "omitted" and note.node != 0 for note in graph.notes) == len(shown)
