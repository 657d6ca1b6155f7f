"""STANDALONE: two replicas with devices of their own generate all the time, while new weights come by broadcast."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from training import Trainer, trainer

from verl_server import VerlEngine
from verl_server.rollout import RolloutManager

PARAMS = {"max_new_tokens": 128, "ignore_eos": True}
UPDATES, CALLERS = 4, 8


async def sample_until(fleet: RolloutManager, stop: asyncio.Event, spans: Counter[int]) -> None:
    """One caller: asks again and again, never waits for an update."""
    while not stop.is_set():
        reply = await fleet.router.generate(input_ids=[1, 2, 3], sampling_params=PARAMS)
        spans[len(reply["meta_info"]["weight_versions"])] += 1


async def train(training: Trainer, engine: VerlEngine, fleet: RolloutManager) -> Counter[int]:
    stop, spans = asyncio.Event(), Counter[int]()
    callers = [asyncio.create_task(sample_until(fleet, stop, spans)) for _ in range(CALLERS)]
    for _ in range(UPDATES):
        await asyncio.sleep(1.0)
        training.step()
        update: Any = await asyncio.to_thread(
            engine.update_weights_from_tensor,
            training.policy.state_dict().items(),
            pause_mode="in_place",
            flush_cache=False,
        )
        print(f"version {update.weight_version} by {update.transport}: {update.load_s * 1e3:.0f} ms")
    stop.set()
    await asyncio.gather(*callers)
    return spans


def main() -> None:
    with trainer() as training:
        fleet = RolloutManager(
            2, mode="standalone", model_path=training.model_path, dtype="float32", max_total_tokens=65536
        )
        with VerlEngine(training.mesh, fleet=fleet, model_path=training.model_path, dtype="float32") as engine:
            spans = asyncio.run(train(training, engine, fleet))
            for versions, samples in sorted(spans.items()):
                print(f"{samples} samples were made with {versions} version(s) of the weights")


if __name__ == "__main__":
    main()
