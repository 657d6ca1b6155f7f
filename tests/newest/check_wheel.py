"""Use an installed `verl_server` as a new user does: import all of it, check a chat template, run an agent.

`make newest` runs this with the interpreter of a fresh environment that has the wheel and the newest versions of its
dependencies. Nothing of the repository is on the import path. The policy is a function, so no engine is needed.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

#: Packages of environments that the wheel does not describe: trainers and what comes with an engine.
OTHER_ENVIRONMENTS = {"verl", "trl", "torch_memory_saver", "cuda", "datasets", "accelerate", "tensorboard"}


def optional_packages() -> set[str]:
    """Top-level names of the packages of the extras, and of those that are in other environments."""
    parsed = [Requirement(text) for text in requires("verl-server") or []]
    return OTHER_ENVIRONMENTS | {r.name for r in parsed if r.marker is not None and "extra" in str(r.marker)}


def import_everything() -> None:
    """Import each module. One may lack a package of an extra, no other."""
    import verl_server
    from verl_server.errors import UnsupportedError

    assert "site-packages" in str(verl_server.__file__), f"not the installed package: {verl_server.__file__}"
    optional, count, skipped = optional_packages(), 0, []
    for module in pkgutil.walk_packages(verl_server.__path__, "verl_server."):
        if module.name.endswith("__main__") or module.name.rpartition(".")[2].endswith("_main"):
            continue
        try:
            imported = importlib.import_module(module.name)
            for name in getattr(imported, "__all__", ()):
                getattr(imported, name)
        except (ImportError, UnsupportedError) as error:  # UnsupportedError: a public name of an extra, with the cure
            cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
            missing = (getattr(cause, "name", None) or "").partition(".")[0]
            if missing not in optional:
                raise
            skipped.append(f"{module.name} ({missing})")
            continue
        count += 1
    print(f"{count} modules imported; without their extras: {', '.join(skipped) or 'none'}")


def check_template(model: Path) -> None:
    command = Path(sys.executable).with_name("verl-server")
    done = subprocess.run([command, "check-template", model], capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout + done.stderr


CALL = '<tool_call>{"name": "add", "arguments": {"a": 19, "b": 23}}</tool_call>'


class Policy:
    """Calls the tool once, then answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        asked = self._tokenizer.decode(request["input_ids"])
        text = "The sum is 42." if "42" in asked else CALL
        token_ids = self._tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in token_ids],
        }
        return {"output_ids": token_ids, "meta_info": meta}


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def run_agent(tokenizer: Any) -> None:
    """The agent of the README with a function as its engine."""
    from verl_server.agent import RolloutLimits, RolloutRunner, Task
    from verl_server.trajectory import get_renderer

    runner = RolloutRunner(
        [add],
        Policy(tokenizer),
        renderer=get_renderer(tokenizer),
        limits=RolloutLimits(max_response_tokens=500, max_turns=4),
        n=2,
        reward=lambda sample: float("42" in sample.text),
    )
    async for step in runner.steps([Task("sum", [{"role": "user", "content": "19 + 23?"}])], num_groups=1):
        batch = step.batch()
        rewards = [sample.reward for group in step.groups for sample in group.samples]
        assert rewards == [1.0, 1.0], rewards
        assert batch is not None
        print("an agent run: rewards", rewards)
        return
    raise AssertionError("the runner has made no step")


def main() -> None:
    import_everything()
    from verl_server.tiny import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        check_template(model)
        from transformers import AutoTokenizer

        asyncio.run(run_agent(AutoTokenizer.from_pretrained(model)))
    print("newest: ok")


if __name__ == "__main__":
    main()
