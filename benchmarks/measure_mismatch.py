"""Measures how far the log probabilities of servers are from those of a trainer with the same weights.

A pretrained model (`verl-server model smollm2 DIR`) answers prompts on servers of each engine, dtype and setting, at
several temperatures. Hugging Face computes the log probabilities of the same tokens, in float32 and as a trainer with
bfloat16 autocast. Log probabilities are those of the tempered distribution, of which the tokens are sampled. It
prints a table; the raw log probabilities are in the JSON file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import CONSOLE, RESULTS, environment, hardware_slug
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server import VerlEngine, training
from verl_server.conformance.other_processes import find_vllm_python
from verl_server.errors import VerlServerError
from verl_server.types import Json

NAME = "mismatch"
TEMPERATURES = (0.6, 1.0, 1.4)
NUM_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a sentence about the sea.",
    "What is 17 + 25?",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into French.",
    "Write a Python function that reverses a string.",
    "Who wrote Hamlet?",
)


@dataclass(frozen=True)
class Setting:
    """A server to measure."""

    engine: str
    dtype: str
    remark: str = ""
    arguments: Json | None = None


SETTINGS = (
    Setting("sglang", "float32"),
    Setting("sglang", "float16"),
    Setting("sglang", "bfloat16"),
    Setting("sglang", "bfloat16", "float32 head", {"enable_fp32_lm_head": True}),
    Setting("sglang", "bfloat16", "deterministic", {"enable_deterministic_inference": True}),
    Setting("vllm", "float32"),
    Setting("vllm", "float16"),
    Setting("vllm", "bfloat16"),
)


@dataclass(frozen=True)
class Sampled:
    """One answer, and what the server says of it."""

    temperature: float
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def sample(setting: Setting, model: Path, prompts: list[list[int]], vllm_python: Path | str) -> Iterator[Sampled]:
    """Start the server and let it answer all prompts at all temperatures."""
    server: dict[str, Any] = {
        "model_path": str(model), "dtype": setting.dtype, "random_seed": 0, **(setting.arguments or {}),
        "engine_kind": setting.engine,
        "server_python": vllm_python if setting.engine == "vllm" else None,
        "context_length": 2048,
        "max_running_requests": 16,
    }  # fmt: skip
    with VerlEngine(**server) as engine:
        for temperature in TEMPERATURES:
            sampling = {"temperature": temperature, "max_new_tokens": NUM_TOKENS, "sampling_seed": 1}
            replies = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
            for prompt, reply in zip(prompts, replies, strict=True):
                found = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
                yield Sampled(temperature, prompt, reply["output_ids"], found)


@torch.no_grad()
def trainer_logprobs(policy: torch.nn.Module, sampled: Sampled, *, bfloat16: bool) -> torch.Tensor:
    tokens = torch.tensor([sampled.prompt + sampled.tokens])
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = policy(input_ids=tokens).logits[0].float() / sampled.temperature
    rows = range(len(sampled.prompt) - 1, tokens.shape[1] - 1)
    logprobs: torch.Tensor = logits.log_softmax(-1)[rows, sampled.tokens]
    return logprobs


def figures(server: torch.Tensor, trainer: torch.Tensor) -> dict[str, float]:
    """The gap in nats, and what it does to importance weights of tokens."""
    gap = trainer - server
    weights = training.importance_weights(trainer, server, torch.ones_like(server))
    return {
        "largest": float(gap.abs().max()),
        "mean": float(gap.abs().mean()),
        "kl": float((gap.exp() - 1 - gap).mean()),
        "effective": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model, from `verl-server model smollm2 DIR`")
    model: Path = parser.parse_args().model
    vllm = find_vllm_python(None)
    machine = environment()
    machine["versions"]["vllm"] = vllm.version
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    policy: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    results: list[Json] = []
    print("| Server | dtype | temperature | largest | mean | KL | effective samples | mean, bfloat16 trainer |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        title = " ".join(filter(None, [setting.dtype, setting.remark]))
        try:
            answers = list(sample(setting, model, prompts, vllm.path))
        except VerlServerError as error:
            print(f"| {setting.engine} | {title} | does not start: {error!s:.160} |")
            results.append({"engine": setting.engine, "setting": title, "error": str(error)})
            continue
        for temperature in TEMPERATURES:
            chosen = [answer for answer in answers if answer.temperature == temperature]
            server = torch.tensor([value for answer in chosen for value in answer.logprobs])
            exact, rounded = (
                torch.cat([trainer_logprobs(policy, answer, bfloat16=bfloat16) for answer in chosen])
                for bfloat16 in (False, True)
            )
            found, found_bfloat16 = figures(server, exact), figures(server, rounded)
            print(
                f"| {setting.engine} | {title} | {temperature} | {found['largest']:.2g} | {found['mean']:.2g} "
                f"| {found['kl']:.2g} | {found['effective']:.4f} | {found_bfloat16['mean']:.2g} |",
                flush=True,
            )
            results.append(
                {
                    "engine": setting.engine, "setting": title, "temperature": temperature,
                    "to_float32": found, "to_bfloat16": found_bfloat16,
                    "server": server.tolist(), "float32": exact.tolist(), "bfloat16": rounded.tolist(),
                }
            )  # fmt: skip
    path = RESULTS / f"{NAME}-{hardware_slug()}.json"
    path.write_text(json.dumps({"environment": machine, "tokens": NUM_TOKENS, "results": results}, indent=1) + "\n")
    CONSOLE.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
