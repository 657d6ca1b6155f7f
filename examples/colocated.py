"""COLOCATED: a policy and a judge take turns in the same memory. One sleeps while the other works.

The judge keeps the weights of its own checkpoint; the score of a response is its mean log prob under the judge.
"""

from __future__ import annotations

import asyncio
from typing import Any

from training import Trainer, memory_mb, trainer

from verl_server import VerlEngine
from verl_server.rollout import RolloutManager
from verl_server.tiny import make_model

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
ARGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 65536}


async def judged(judge: RolloutManager, prompt: list[int], response: list[int]) -> float:
    """Log probs of `response` after `prompt`, in the mean, in nats."""
    reply = await judge.router.generate(
        input_ids=prompt + response,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    scores = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][-len(response) :]
    return float(sum(scores) / len(scores))


async def all_judged(judge: RolloutManager, responses: list[list[int]]) -> list[float]:
    return list(await asyncio.gather(*(judged(judge, *pair) for pair in zip(PROMPTS, responses, strict=True))))


def run(training: Trainer, engine: VerlEngine, policy: RolloutManager, judge: RolloutManager) -> None:
    for step in range(3):
        replies = engine.generate(input_ids=PROMPTS, sampling_params={"max_new_tokens": 16, "ignore_eos": True})
        engine.release_memory_occupation()
        judge.resume_memory_occupation()  # its checkpoint is loaded again
        working = memory_mb(policy), memory_mb(judge)
        scores = asyncio.run(all_judged(judge, [reply["output_ids"] for reply in replies]))
        judge.release_memory_occupation()
        training.step()
        engine.resume_memory_occupation()
        engine.update_weights_from_tensor(training.policy.state_dict().items())
        resting = memory_mb(policy), memory_mb(judge)
        print(
            f"step {step}: scores {[round(score, 2) for score in scores]}; MB of policy and judge: "
            f"{working[0]:.0f} + {working[1]:.0f} while it judges, {resting[0]:.0f} + {resting[1]:.0f} after"
        )


def main() -> None:
    with trainer() as training:
        judge_path = str(
            make_model(training.folder / "judge", seed=7, hidden_size=256, layers=4, intermediate_size=1024)
        )
        with RolloutManager(1, mode="colocated", model_path=judge_path, **ARGS) as judge:
            judge.release_memory_occupation()
            policy = RolloutManager(1, mode="hybrid", model_path=training.model_path, **ARGS)
            with VerlEngine(training.mesh, fleet=policy, model_path=training.model_path, dtype="float32") as engine:
                engine.update_weights_from_tensor(training.policy.state_dict().items())
                run(training, engine, policy, judge)


if __name__ == "__main__":
    main()
