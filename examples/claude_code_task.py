"""The task of `train_claude_code.py`: Claude Code writes the word that the user names into a file.

The policy has to call the tool `Bash` of Claude Code once, with the right word in the command, and then ends its turn.
A tiny model cannot find the format of tool calls by chance. So it first learns the format from demonstrations, in which
a script plays the policy. Of six demonstrations of a task, two write the right word, and each of the other words is
written once: after them the policy calls the tool, and is right in a third of the samples. The rest is left to
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_server.agent import RolloutLimits, RolloutRunner, Sample, Task, reward
from verl_server.gateway import ProgramAgentLoop
from verl_server.tiny import make_model, make_tokenizer
from verl_server.trajectory import ChatRenderer, to_batch

WORDS = ("apple", "river", "candle", "garden", "window")
LIMITS = RolloutLimits(max_turns=2, timeout_s=60.0)
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": 64}
CONTEXT_LENGTH = 4096
SERVER_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": CONTEXT_LENGTH,
    "max_total_tokens": 65536,
    "log_level": "warning",
}
LAST_TURN = "Done."
MAX_CONCURRENCY = 4
WARM_UP_STEPS, WARM_UP_RATE = 150, 1e-2


class WriteWord(ProgramAgentLoop):
    """Claude Code with one tool and a short system prompt."""

    command = (
        'claude -p "$PROMPT" --bare --tools Bash --system-prompt "Use the tool Bash." --dangerously-skip-permissions'
    )

    @reward
    async def is_right(self, sample: Sample) -> float:
        return float((await self.read_file("answer.txt") or "").strip() == sample.task.data["word"])


def require_claude() -> None:
    """Exit with a message unless Claude Code is installed."""
    if shutil.which("claude") is None:
        raise SystemExit("claude is not on the PATH: npm install --global @anthropic-ai/claude-code@2.1.197")


def make_task(number: int, word: str) -> Task:
    return Task(f"{number}-{word}", [{"role": "user", "content": f"Write {word} into answer.txt"}], {"word": word})


def endless_tasks() -> Iterator[Task]:
    """The words in turn."""
    return (make_task(number, word) for number, word in enumerate(itertools.cycle(WORDS)))


def demonstrated_words(word: str) -> list[str]:
    """The words that the demonstrations of a task write."""
    return [*WORDS, word]


def call_text(word: str) -> str:
    """A turn that writes a word into the file."""
    arguments = {"command": f"echo {word} > answer.txt"}
    return f"<tool_call>{json.dumps({'name': 'Bash', 'arguments': arguments})}</tool_call>"


class Demonstrator:
    """Plays the policy: a generate function that calls the tool with one of `demonstrated_words`, and then ends."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._words = {word: itertools.cycle(demonstrated_words(word)) for word in WORDS}

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        prompt = self._tokenizer.decode(request["input_ids"])
        if "<|im_start|>tool" in prompt:
            text = LAST_TURN
        else:
            text = call_text(next(next(words) for word, words in self._words.items() if f"Write {word} " in prompt))
        token_ids = self._tokenizer.encode(text + self._tokenizer.eos_token, add_special_tokens=False)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        return {
            "output_ids": token_ids,
            "meta_info": {**meta, "output_token_logprobs": [[0.0, token, None] for token in token_ids]},
        }


def demonstrate(tokenizer: Any, words: Sequence[str]) -> list[Sample]:
    """Samples of Claude Code with the demonstrator: one for each demonstrated word of the tasks with these words."""

    async def run() -> list[Sample]:
        runner = RolloutRunner(
            WriteWord,
            Demonstrator(tokenizer),
            renderer=ChatRenderer(tokenizer),
            limits=RolloutLimits(max_context_tokens=CONTEXT_LENGTH, timeout_s=60.0),
            n=len(WORDS) + 1,
            max_concurrency=MAX_CONCURRENCY,
        )
        tasks = [make_task(number, word) for number, word in enumerate(words)]
        return [sample async for group in runner.run(tasks) for sample in group.samples]

    return asyncio.run(run())


def write_policy(folder: Path, seed: int) -> None:
    """Write a tiny Qwen3 that has learned from the demonstrations, and a tokenizer that has learned their texts."""
    byte_tokenizer = make_tokenizer(folder / "bytes")
    graphs = [sample.graph for sample in demonstrate(byte_tokenizer, WORDS[:1])]
    texts = [byte_tokenizer.decode(node.token_ids, skip_special_tokens=True) for g in graphs for node in g.nodes]
    texts += [f"{call_text(word)} Write {word}" for word in WORDS]
    make_model(folder, seed=seed, weight_std=0.1, texts=texts, vocab_size=1024, context_length=CONTEXT_LENGTH)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    warm_up(model, [path for sample in demonstrate(tokenizer, WORDS) for path in sample.paths], tokenizer.pad_token_id)
    model.save_pretrained(folder)


def warm_up(model: Any, paths: Sequence[Any], pad_token_id: int) -> None:
    """Supervised learning of the sampled tokens of the paths."""
    batch = to_batch(paths, pad_token_id=pad_token_id)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    start, mask = batch["prompts"].shape[1], batch["response_mask"].bool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(WARM_UP_STEPS):
        optimizer.param_groups[0]["lr"] = WARM_UP_RATE * (1.0 - step / WARM_UP_STEPS)
        logits = model(**inputs, use_cache=False).logits[:, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits[mask], batch["responses"][mask])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"warm-up: {len(paths)} demonstrations, loss {float(loss.detach()):.3f}", flush=True)


def transcript(sample: Sample) -> str:
    """The turns of a sample and its reward."""
    turns = [str((node.message or {}).get("content", "")) for node in sample.graph.nodes if node.sampled]
    return f"{sample.task.data['word']}: {' | '.join(turns)} -> reward {sample.reward}"
