"""Trains with TRL on real servers and writes what happened as JSON. `test_trl.py` runs it with the interpreter of TRL.

python trl_trainer.py FOLDER SERVER_PYTHON SCENARIO...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_adapters import adapters
from trl_common import (
    COMMON,
    TASKS,
    KillAfterStep,
    Recorded,
    error_of,
    quiet,
    replica_gap,
    reward,
    sample_logs,
    wait_until_healthy,
)

from verl_server import AdapterConfig, Timeouts
from verl_server.integrations.trl import (
    FleetRolloutFunc,
    FleetRolloutWorker,
    FleetWeightTransfer,
    RolloutServers,
    enable_async_grpo_on_cpu,
    start_servers,
)
from verl_server.tiny import make_model

STEPS = 4
CALLS_A_TOOL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 1, "b": 2\}\}\n</tool_call>'
SERVER: dict[str, Any] = {"dtype": "float32", "context_length": 2048, "max_total_tokens": 16384, "log_level": "warning"}


def grpo(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """`GRPOTrainer` with a generation in each step. A server is killed while it generates for the third step."""
    assert servers.fleet is not None
    rollout_func, kill = Recorded(FleetRolloutFunc(servers, seed=0)), KillAfterStep(servers.fleet, 2)
    args = GRPOConfig(str(folder), max_steps=STEPS, **COMMON)
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=TASKS, rollout_func=rollout_func)
    quiet(trainer, kill).train()
    wait_until_healthy(servers.fleet)
    servers.engine.update_weights_from_tensor(trainer.model.named_parameters())
    return {
        "steps": rollout_func.steps,
        "trl_gaps": [logs["sampling/sampling_logp_difference/max"] for logs in sample_logs(trainer)],
        "killed": kill.killed,
        "restarts": [replica.restarts for replica in servers.fleet.replicas],
        "versions": [replica.weight_version for replica in servers.fleet.replicas],
        "replica_gaps": [replica_gap(replica.adapter, trainer.model) for replica in servers.fleet.replicas],
    }


def lora(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """`GRPOTrainer` with an adapter of PEFT, which is merged for each push."""
    args = GRPOConfig(str(folder), max_steps=2, **{**COMMON, "learning_rate": 0.05})
    rollout_func = Recorded(FleetRolloutFunc(servers))
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=args, train_dataset=TASKS, rollout_func=rollout_func,
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )  # fmt: skip
    quiet(trainer).train()
    return {"steps": rollout_func.steps}


def long_prompts(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """Prompts that nearly fill the context of the servers. The trainer trains twice, with one step each."""
    args = GRPOConfig(str(folder), max_steps=1, **{**COMMON, "per_device_train_batch_size": 4})

    def make_trainer(rollout_func: Any, prompt: str) -> Any:
        rows = Dataset.from_list([{"prompt": prompt, "n": 0}] * 4)
        return quiet(GRPOTrainer(model, reward, args, rows, rollout_func=rollout_func))

    rollout_func = Recorded(FleetRolloutFunc(servers))
    trainer = make_trainer(rollout_func, "a" * 2032)
    trainer.train()
    trainer.train()
    no_room = make_trainer(FleetRolloutFunc(servers), "a" * 2042)
    return {"steps": rollout_func.steps, "no_room": error_of(no_room.train)}


def two_ranks(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """`GRPOTrainer` on two ranks. Each rank gets the completions of its own prompts."""
    rollout_func = Recorded(FleetRolloutFunc(servers))
    args = GRPOConfig(str(folder), max_steps=2, **COMMON)
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=TASKS, rollout_func=rollout_func)
    quiet(trainer).train()
    mode = None if servers.fleet is None else servers.fleet.mode
    return {"steps": rollout_func.steps, "mode": mode, "error": error_of(lambda: FleetWeightTransfer(servers))}


def tools(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """`GRPOTrainer(tools=...)`: TRL runs the tool, and its second turn comes from the servers, too.

    A grammar makes the random model call the tool in each turn. No turn has room for `max_completion_length` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    calls: list[tuple[int, int]] = []
    roles: list[list[str]] = []

    def add(a: int, b: int) -> int:
        """The sum of two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        calls.append((a, b))
        return a + b

    def record(completions: list[Any], **_: Any) -> list[float]:
        roles.extend([message["role"] for message in messages] for messages in completions)
        return [0.0] * len(completions)

    settings = {**COMMON, "per_device_train_batch_size": 4, "max_completion_length": 2000}
    args = GRPOConfig(str(folder), max_steps=1, max_tool_calling_iterations=1, **settings)
    func = FleetRolloutFunc(servers, sampling_params={"regex": CALLS_A_TOOL})
    trainer = GRPOTrainer(
        model=model, reward_funcs=record, args=args, train_dataset=TASKS, rollout_func=func, tools=[add],
        processing_class=tokenizer,
    )  # fmt: skip
    quiet(trainer).train()
    return {"calls": calls, "roles": roles, "call_frequency": sample_logs(trainer)[0]["tools/call_frequency"]}


def asynchronous(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """`AsyncGRPOTrainer`. A server is killed after the second step."""
    assert servers.fleet is not None
    args = async_config(folder)
    worker = FleetRolloutWorker(servers, args, TASKS, reward, AutoTokenizer.from_pretrained(model), seed=0)
    transfer, kill = FleetWeightTransfer(servers), KillAfterStep(servers.fleet, 2)
    trainer = AsyncGRPOTrainer(
        model=model, args=args, train_dataset=TASKS, rollout_worker=worker, weight_transfer=transfer
    )
    quiet(trainer, kill).train()
    wait_until_healthy(servers.fleet)
    logs, trained = sample_logs(trainer), plain_copy(trainer, model)
    return {
        "kl": [entry["kl"] for entry in logs],
        "oldest": [entry["policy_version/oldest_token"] for entry in logs],
        "staleness": [entry["sample/staleness_max"] for entry in logs],
        "model_version": trainer.model_version,
        "killed": kill.killed,
        "threads": [thread.name for thread in threading.enumerate() if thread.name == "trl rollouts"],
        "replica_gaps": [replica_gap(replica.adapter, trained) for replica in servers.fleet.replicas],
    }


def plain_copy(trainer: Any, model: str) -> Any:
    """The trained weights in a model with ordinary attention."""
    from transformers import AutoModelForCausalLM

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    copy.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    return copy


def async_config(folder: Path, **more: Any) -> AsyncGRPOConfig:
    settings = {"max_steps": STEPS, "token_budget": 0, "max_inflight_tasks": 16, "queue_maxsize": 16, **more}
    return AsyncGRPOConfig(str(folder), **{**COMMON, **settings})


def refusals(servers: RolloutServers, model: str, folder: Path) -> dict[str, str]:
    """The errors of what cannot work: type and message."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def train_with(**settings: Any) -> None:
        args = GRPOConfig(str(folder), max_steps=1, **{**COMMON, **settings})
        func = FleetRolloutFunc(servers)
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=TASKS, rollout_func=func)
        quiet(trainer).train()

    def reuse() -> None:
        func = FleetRolloutFunc(servers)
        for _ in range(2):
            args = GRPOConfig(str(folder), max_steps=1, **COMMON)
            quiet(GRPOTrainer(model, reward, args, TASKS, rollout_func=func)).train()

    def fail_in_reward() -> None:
        args = async_config(folder)
        worker = FleetRolloutWorker(servers, args, TASKS, broken_reward, tokenizer)
        worker.start()
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            worker.check_health(30.0)
            time.sleep(0.05)

    cases: dict[str, Callable[[], Any]] = {
        "generation_kwargs": lambda: train_with(generation_kwargs={"top_k": 5}),
        "reuse": reuse,
        "broken_reward": fail_in_reward,
    }
    return {name: error_of(case) for name, case in cases.items()}


def broken_reward(**_: Any) -> list[float]:
    raise RuntimeError("no judge")


SCENARIOS = {
    each.__name__: each for each in (grpo, lora, adapters, long_prompts, tools, asynchronous, refusals, two_ranks)
}


def main(folder: Path, server_python: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    enable_async_grpo_on_cpu()
    rank = os.environ.get("RANK", "0")
    model = str(make_model(folder / f"model-{rank}", weight_std=0.1))  # equal on all ranks
    config = AdapterConfig(Timeouts(generation_s=60.0), server_python=server_python)
    result: dict[str, Any] = {"modules": sorted({"sglang", "vllm"} & set(sys.modules))}
    mode = "standalone" if names == ["two_ranks"] else "hybrid"
    with start_servers(model, 2, mode=mode, config=config, **SERVER) as servers:
        for name in names:
            started = time.monotonic()
            result[name] = SCENARIOS[name](servers, model, folder / "output")
            print(name, f"{time.monotonic() - started:.1f} s", flush=True)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
