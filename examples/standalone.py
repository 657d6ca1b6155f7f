"""STANDALONE: two replicas on their own devices generate all the time, while new weights arrive by broadcast."""

from __future__ import annotations

import asyncio
from collections import Counter

from training import Trainer, trainer

from verl_server import RolloutManager, VerlEngine

SAMPLING_PARAMS = {"max_new_tokens": 128, "ignore_eos": True}
UPDATES, CALLERS = 4, 8


async def generate_until(stop: asyncio.Event, fleet: RolloutManager, samples: Counter[int]) -> None:
    """One caller: generates sample after sample and never waits for an update.

    `samples` counts the samples by the number of weight versions that generated their tokens.
    """
    while not stop.is_set():
        reply = await fleet.router.generate(input_ids=[1, 2, 3], sampling_params=SAMPLING_PARAMS)
        samples[len(reply["meta_info"]["weight_versions"])] += 1


async def train(training: Trainer, engine: VerlEngine, fleet: RolloutManager) -> Counter[int]:
    stop, samples = asyncio.Event(), Counter[int]()
    callers = [asyncio.create_task(generate_until(stop, fleet, samples)) for _ in range(CALLERS)]
    for _ in range(UPDATES):
        await asyncio.sleep(1.0)
        training.step()
        update = await asyncio.to_thread(
            engine.update_weights_from_tensor,
            training.policy.state_dict().items(),
            pause_mode="in_place",
            flush_cache=False,
        )
        print(f"version {update.weight_version} by {update.transport}: {update.load_s * 1e3:.0f} ms")
    stop.set()
    await asyncio.gather(*callers)
    return samples


def main() -> None:
    with (
        trainer() as training,
        RolloutManager(
            2, mode="standalone", model_path=training.model_path, dtype="float32", max_total_tokens=65536
        ) as fleet,
        VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine,
    ):
        samples = asyncio.run(train(training, engine, fleet))
        for versions, count in sorted(samples.items()):
            print(f"{count} samples were generated with {versions} version(s) of the weights")


if __name__ == "__main__":
    main()
