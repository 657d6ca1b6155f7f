"""HYBRID: two replicas on the trainer's devices. They release their memory while the trainer takes a step."""

from __future__ import annotations

import asyncio

from training import memory_mb, trainer

from verl_server import RolloutManager, VerlEngine

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


def main() -> None:
    with (
        trainer() as training,
        RolloutManager(
            2, mode="hybrid", model_path=training.model_path, dtype="float32", max_total_tokens=65536
        ) as fleet,
        VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine,
    ):
        engine.update_weights_from_tensor(training.policy.state_dict().items())
        for step in range(3):
            replies = engine.generate(input_ids=PROMPTS, sampling_params={"max_new_tokens": 16})
            serving_mb = memory_mb(fleet)
            engine.release_memory_occupation()  # now the trainer can use the devices
            released_mb = memory_mb(fleet)
            training.step()
            engine.resume_memory_occupation()
            engine.update_weights_from_tensor(training.policy.state_dict().items())
            versions = sorted({reply["meta_info"]["weight_version"] for reply in replies})
            print(
                f"step {step}: {len(replies)} samples of weight versions {versions}; "
                f"{serving_mb:.0f} MB while serving, {released_mb:.0f} MB while released"
            )
        last = asyncio.run(fleet.router.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4}))
        print("weight version served now:", last["meta_info"]["weight_version"])


if __name__ == "__main__":
    main()
