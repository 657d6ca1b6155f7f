"""COLOCATED: a policy and a judge model use the same memory in turn. One releases its memory while the other works.

The judge keeps the weights of its checkpoint. The score of a response is its mean log probability under the judge.
"""

from __future__ import annotations

import asyncio
from typing import Any

from training import Trainer, memory_mb, trainer

from verl_server import RolloutManager, VerlEngine
from verl_server.tiny import make_model

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
SERVER_ARGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 65536}


async def score(judge: RolloutManager, prompt: list[int], response: list[int]) -> float:
    """Mean log probability, in nats, of the tokens of `response` after `prompt`."""
    reply = await judge.router.generate(
        input_ids=prompt + response,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    logprobs = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][-len(response) :]
    return float(sum(logprobs) / len(logprobs))


async def score_all(judge: RolloutManager, responses: list[list[int]]) -> list[float]:
    pairs = zip(PROMPTS, responses, strict=True)
    return list(await asyncio.gather(*(score(judge, prompt, response) for prompt, response in pairs)))


def run(training: Trainer, engine: VerlEngine, policy: RolloutManager, judge: RolloutManager) -> None:
    for step in range(3):
        replies = engine.generate(input_ids=PROMPTS, sampling_params={"max_new_tokens": 16, "ignore_eos": True})
        engine.release_memory_occupation()
        judge.resume_memory_occupation()  # the judge loads its checkpoint again
        judging_mb = memory_mb(policy), memory_mb(judge)
        scores = asyncio.run(score_all(judge, [reply["output_ids"] for reply in replies]))
        judge.release_memory_occupation()
        training.step()
        engine.resume_memory_occupation()
        engine.update_weights_from_tensor(training.policy.state_dict().items())
        after_mb = memory_mb(policy), memory_mb(judge)
        print(
            f"step {step}: scores {[round(one, 2) for one in scores]}; MB of policy and judge: "
            f"{judging_mb[0]:.0f} + {judging_mb[1]:.0f} while it judges, {after_mb[0]:.0f} + {after_mb[1]:.0f} after"
        )


def main() -> None:
    with trainer() as training:
        judge_path = str(
            make_model(training.folder / "judge", seed=7, hidden_size=256, layers=4, intermediate_size=1024)
        )
        with RolloutManager(1, mode="colocated", model_path=judge_path, **SERVER_ARGS) as judge:
            judge.release_memory_occupation()
            with (
                RolloutManager(1, mode="hybrid", model_path=training.model_path, **SERVER_ARGS) as policy,
                VerlEngine(training.mesh, fleet=policy, model_path=training.model_path, dtype="float32") as engine,
            ):
                engine.update_weights_from_tensor(training.policy.state_dict().items())
                run(training, engine, policy, judge)


if __name__ == "__main__":
    main()
