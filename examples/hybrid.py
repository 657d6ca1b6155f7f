"""HYBRID: two replicas on the trainer's devices. They sleep while it trains, and wake up with its new weights."""

from __future__ import annotations

import asyncio

from training import memory_mb, trainer

from verl_server import VerlEngine
from verl_server.rollout import RolloutManager

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


def main() -> None:
    with trainer() as training:
        fleet = RolloutManager(
            2, mode="hybrid", model_path=training.model_path, dtype="float32", max_total_tokens=65536
        )
        with VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine:
            engine.update_weights_from_tensor(training.policy.state_dict().items())
            for step in range(3):
                replies = engine.generate(input_ids=PROMPTS, sampling_params={"max_new_tokens": 16})
                awake = memory_mb(fleet)
                engine.release_memory_occupation()  # the devices are the trainer's now
                asleep = memory_mb(fleet)
                training.step()
                engine.resume_memory_occupation()
                engine.update_weights_from_tensor(training.policy.state_dict().items())
                made_by = sorted({reply["meta_info"]["weight_version"] for reply in replies})
                print(f"step {step}: {len(replies)} samples of {made_by}; {awake:.0f} MB awake, {asleep:.0f} asleep")
            last = asyncio.run(fleet.router.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4}))
            print("served now:", last["meta_info"]["weight_version"])


if __name__ == "__main__":
    main()
