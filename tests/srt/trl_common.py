"""What the scenarios of `trl_trainer.py` share: settings of TRL, a reward, records of log probabilities, a kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from verl_server import RolloutManager
from verl_server.errors import VerlServerError
from verl_server.integrations.trl import FleetRolloutFunc

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 32,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
TASKS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Write {n}."}], "n": n} for n in range(64)])


def reward(completion_ids: list[list[int]], n: list[int], **_: Any) -> list[float]:
    """Some reward that differs between the completions."""
    rows = zip(completion_ids, n, strict=True)
    return [sum(token > 64 + number % 8 for token in ids) / len(ids) for ids, number in rows]


class Recorded:
    """A rollout function that also compares its log probs with those of the trainer's model, by its own forward."""

    def __init__(self, rollout_func: FleetRolloutFunc) -> None:
        self._rollout_func = rollout_func
        self.steps: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = self._rollout_func(prompts, trainer)
        rows = zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], strict=True)
        gap = max(log_prob_gap(trainer.model, *row) for row in rows)
        versions = {span["version"] for spans in output["weight_versions"] for span in spans}
        longest = max(len(completion) for completion in output["completion_ids"])
        self.steps.append({"gap": gap, "versions": sorted(versions), "longest": longest})
        return output


@torch.no_grad()
def log_prob_gap(model: Any, prompt: list[int], completion: list[int], log_probs: list[float]) -> float:
    """Largest difference between the log probs of the server and those of the model."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
    return float((own - torch.tensor(log_probs)).abs().max())


class KillAfterStep(TrainerCallback):  # type: ignore[misc]
    """Kills a server with SIGKILL as soon as it runs requests after a step."""

    def __init__(self, fleet: RolloutManager, step: int) -> None:
        self._fleet, self._step = fleet, step
        self.killed: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for replica in self._fleet.status().replicas:
                if replica.running_requests and replica.pids is not None:
                    os.kill(replica.pids.main, signal.SIGKILL)
                    self.killed.append(replica.name)
                    return
            time.sleep(0.002)


def quiet(trainer: Any, *callbacks: Any) -> Any:
    trainer.remove_callback(PrinterCallback)
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def replica_gap(adapter: Any, model: Any) -> float:
    prompt = [10, 20, 30]
    reply = adapter.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 8, "temperature": 0.0}, return_logprob=True
    )
    log_probs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    return log_prob_gap(model, prompt, reply["output_ids"], log_probs)


def error_of(case: Callable[[], Any]) -> str:
    try:
        case()
    except VerlServerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sample_logs(trainer: Any) -> list[dict[str, float]]:
    """Logs of the steps with metrics of samples."""
    return [logs for logs in trainer.state.log_history if "reward" in logs]


def wait_until_healthy(fleet: RolloutManager) -> None:
    deadline = time.monotonic() + 60.0
    while any(replica.state != "healthy" for replica in fleet.replicas):
        assert time.monotonic() < deadline, fleet.replicas
        time.sleep(0.02)
