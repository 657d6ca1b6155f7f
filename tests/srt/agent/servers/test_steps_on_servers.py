"""The tests of `test_steps.py` that need servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agent_helpers import RecordingGenerateFn, make_runner
from helpers import adapter_of
from test_steps import TwoTurns, endless_tasks, renderer, spans_of
from transformers import AutoModelForCausalLM

from verl_server import VerlEngine
from verl_server.agent import (
    RolloutLimits,
)
from verl_server.trajectory import ChatRenderer, load_session

__all__ = ["renderer"]


KILLED_TRAINING = """
import asyncio, itertools, sys
from transformers import AutoTokenizer
from verl_server import AsyncHttpServerEngineAdapter
from verl_server.agent import RolloutLimits, RolloutRunner, Task, as_generate_fn
from verl_server.trajectory import ChatRenderer
from test_steps import TwoTurns, endless_tasks

async def main(url, key, model, run_dir, start_step):
    adapter = AsyncHttpServerEngineAdapter.attach(url, api_key=key)
    runner = RolloutRunner(
        TwoTurns(), as_generate_fn(adapter), renderer=ChatRenderer(AutoTokenizer.from_pretrained(model)),
        limits=RolloutLimits(2000),
        sampling_params={"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True},
        n=2, max_staleness=1, run_dir=run_dir,
    )
    async for step in runner.steps(endless_tasks(), 3, start_step=int(start_step)):
        numbers = [group.task.data["number"] for group in step.groups]
        print(step.index, *numbers, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_training_that_is_killed_again_and_again_uses_each_sample_once(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """On a real server. The trainer goes on where it was killed, or one step earlier."""
    adapter = adapter_of(shared_engine)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    steps: dict[int, str] = {}
    for attempt in range(4):
        start = max(len(steps) - attempt % 2, 0)
        command = [sys.executable, "-c", KILLED_TRAINING, adapter.base_url, str(adapter.api_key)]
        command += [str(tiny("qwen3")), str(tmp_path), str(start)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        for _ in range(2):
            index, _, numbers = process.stdout.readline().strip().partition(" ")
            assert steps.setdefault(int(index), numbers) == numbers
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    delivered = [int(number) for numbers in steps.values() for number in numbers.split()]
    assert len(steps) >= 5
    assert len(delivered) == len(set(delivered)) == 3 * len(steps)
    for path in tmp_path.glob("step-*/*.jsonl"):
        assert len(load_session(path).leaves) <= 1, "a turn was sampled twice"


def test_each_step_has_tokens_of_the_weights_of_its_step(
    shared_engine: VerlEngine, renderer: ChatRenderer, tiny: Callable[..., Path]
) -> None:
    """On a real server, whose weights are updated between two steps. The versions are those of the engine."""
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3"))

    async def run(max_staleness: int) -> None:
        generate = RecordingGenerateFn(shared_engine)
        params = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
        runner = make_runner(
            shared_engine, renderer, engine=generate, agent=TwoTurns(), sampling_params=params, n=2,
            max_staleness=max_staleness, limits=RolloutLimits(1000),
        )  # fmt: skip
        version = shared_engine.weight_version
        async with contextlib.aclosing(runner.steps(endless_tasks(), 2)) as steps:
            for _ in range(4):
                step = await anext(steps)
                versions = [span.version for sample in step.samples for span in spans_of(sample)]
                assert version - max_staleness <= min(versions)
                assert max(versions) <= version
                if max_staleness == 0:
                    assert set(step.batch()["weight_versions"].unique().tolist()) == {-1, version}
                await asyncio.to_thread(shared_engine.update_weights_from_tensor, model.state_dict().items())
                version = shared_engine.weight_version

    for max_staleness in (0, 1):
        asyncio.run(run(max_staleness))
