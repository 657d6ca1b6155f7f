"""Real agent programs for tests: their installation, and tiny policies that have learned to use them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import ScriptedGenerateFn, call_text

from verl_server.agent import RolloutLimits, RolloutRunner, Sample, Task, reward
from verl_server.gateway import ProgramAgentLoop
from verl_server.tiny import make_model, make_tokenizer
from verl_server.trajectory import ChatRenderer, TrajectoryGraph

PACKAGES = Path(__file__).with_name("programs")
LIMITS = RolloutLimits(max_context_tokens=60_000, timeout_s=120.0)
END = "<|im_end|>"


def install_programs() -> Path:
    """The folder `bin` with the programs of `programs/package.json`, installed once for each state of `programs/`.

    It is in the user's cache folder: local sandboxes have a `/tmp` of their own, and the checkout may be in `/tmp`.
    """
    if shutil.which("npm") is None:
        pytest.fail("the tests of agent programs need npm: install Node.js 20 or newer")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGES.iterdir()))).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_server"
    target = cache / f"programs-{digest}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            folder = Path(shutil.copytree(PACKAGES, Path(name) / "programs"))
            # The scripts of packages do not run, except those that put the program for this machine there. `npm ci`
            # would refuse the lock file: not every registry has the optional packages for other machines.
            for command in (
                ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund"],
                ["node", "node_modules/@anthropic-ai/claude-code/install.cjs"],
                ["node", "node_modules/opencode-ai/postinstall.mjs"],
            ):
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
                if done.returncode:
                    pytest.fail(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
            try:
                folder.rename(target)
            except OSError:
                assert target.exists(), "another process has installed the programs meanwhile"
    return target / "node_modules" / ".bin"


def write_word_agent(command_line: str) -> type[ProgramAgentLoop]:
    """An agent whose program shall write a word into `answer.txt`."""

    class WriteWord(ProgramAgentLoop):
        command = command_line

        @reward
        async def is_right(self, sample: Sample) -> float:
            return float((await self.read_file("answer.txt") or "").strip() == sample.task.data["word"])

    return WriteWord


def word_task(word: str = "hello") -> Task:
    return Task(word, [{"role": "user", "content": f"Write the word {word} into answer.txt"}], {"word": word})


def run_samples(agent: type[ProgramAgentLoop], engine: Any, tasks: Sequence[Task], **options: Any) -> list[Sample]:
    """All samples of the tasks."""

    async def run() -> list[Sample]:
        runner = RolloutRunner(agent, engine, **{"limits": LIMITS, **options})
        return [sample async for group in runner.run(tasks) for sample in group.samples]

    return asyncio.run(run())


@dataclass(frozen=True)
class Exchange:
    """A program, and the tool call with which the policy shall answer its first request."""

    agent: type[ProgramAgentLoop]
    tool: str
    arguments: Mapping[str, Any]

    def reply(self, prompt: str) -> str:
        """What the policy shall say after a prompt."""
        is_last = "<|im_start|>tool" in prompt
        return ("Done." if is_last else call_text(self.tool, **self.arguments)) + END


def demonstrate(exchange: Exchange, tokenizer: Any) -> Sample:
    """A sample in which a script plays the policy: what the tiny policy shall learn by heart."""
    generate = ScriptedGenerateFn(tokenizer, exchange.reply)
    (sample,) = run_samples(exchange.agent, generate, [word_task()], renderer=ChatRenderer(tokenizer))
    assert sample.reward == 1.0, (sample.error, sample.text)
    return sample


def text_of(graph: TrajectoryGraph, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(node.token_ids, skip_special_tokens=True) for node in graph.nodes]


def make_trained_policy(folder: Path, exchanges: Sequence[Exchange]) -> Path:
    """A tiny model that has learned the exchanges by heart, with a tokenizer that has learned their texts."""
    byte_tokenizer = make_tokenizer(folder / "bytes")
    texts = [text for item in exchanges for text in text_of(demonstrate(item, byte_tokenizer).graph, byte_tokenizer)]
    model_folder = make_model(
        folder / "policy", weight_std=0.1, texts=texts, vocab_size=2048, context_length=65_536, layers=2
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    samples = [demonstrate(item, tokenizer) for item in exchanges]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    learn(model, [sample.path for sample in samples])
    model.save_pretrained(model_folder)
    return model_folder


def learn(model: Any, paths: Sequence[tuple[TrajectoryGraph, int]], max_steps: int = 300) -> None:
    """Train until each sampled token of the paths is certain."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    rows = []
    for graph, leaf in paths:
        nodes = graph.path(leaf)
        is_sampled = [node.sampled for node in nodes for _ in node.token_ids]
        rows.append((torch.tensor([graph.token_ids(leaf)]), torch.tensor(is_sampled[1:])))
    for _ in range(max_steps):
        losses = []
        for ids, mask in rows:
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[0][mask]
            losses.append(torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[0, 1:][mask], reduction="none"))
        loss = torch.cat(losses)
        if float(loss.detach().max()) < 0.1:  # greedy decoding repeats it then
            return
        loss.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pytest.fail(f"the policy has not learned the exchanges: loss {float(loss.detach().max())}")


class LoggingGenerateFn:
    """Forwards requests to an engine, and stores the token ids of each request and of its reply."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self._generate = generate
        self.turns: list[tuple[list[int], list[int]]] = []

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        reply = await self._generate(rid=rid, session_id=session_id, **request)
        self.turns.append((list(request["input_ids"]), list(reply["output_ids"])))
        return reply


def recorded_turns(graph: TrajectoryGraph) -> list[tuple[list[int], list[int]]]:
    """The prompt and the tokens of each turn of a graph."""
    return [
        (graph.token_ids(node.parent), list(node.token_ids))
        for node in graph.nodes
        if node.sampled and node.parent is not None
    ]
