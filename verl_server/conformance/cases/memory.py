"""The case of released memory: sleep, wake, and updates afterwards."""

from __future__ import annotations

import torch

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.reference import describe_gap

#: On a GPU, SGLang releases memory only if the server was started with this argument.
SERVER_ARGS = {"enable_memory_saver": True} if torch.accelerator.is_available() else {}


def updates_after_sleep(trial: Trial) -> str:
    """Release and resume all memory before each of three updates."""
    gaps: list[float] = []
    for seed in (71, 72, 73):
        weights = trial.reference.weights(seed)
        trial.system.release_memory()
        trial.system.resume_memory()
        trial.system.update(weights)
        gaps.append(trial.reference.require(trial.system, weights, f"after sleep and update {len(gaps) + 1}"))
    return describe_gap(max(gaps))


CASES = (
    Case(
        "sleep-and-update",
        "Generation is right after each of three updates that follow a release of all memory.",
        ("https://github.com/verl-project/verl/issues/7904", "https://github.com/sgl-project/sglang/issues/15246"),
        updates_after_sleep,
        server_args=SERVER_ARGS,
    ),
)
