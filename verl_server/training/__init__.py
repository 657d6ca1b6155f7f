"""Functions for a training loop of your own: advantages, log probabilities, losses, evaluation, metrics, checkpoints.

They are no trainer: they take and return tensors, and any of them can be replaced. All names are imported lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.training.checkpoints import load_checkpoint, save_checkpoint, save_pretrained
    from verl_server.training.evaluation import Evaluation, evaluate, pass_at_k
    from verl_server.training.losses import (
        entropy_of,
        group_advantages,
        importance_weights,
        logprobs_of,
        pad_rows,
        policy_loss,
        response_logits,
        response_logprobs,
    )
    from verl_server.training.metrics import MetricsWriter, draw_curves
    from verl_server.training.questions import keep_settings, read_tasks, sum_tasks
    from verl_server.training.ranks import TrainerRanks, trainer_ranks

__all__ = [
    "Evaluation",
    "MetricsWriter",
    "TrainerRanks",
    "draw_curves",
    "entropy_of",
    "evaluate",
    "group_advantages",
    "importance_weights",
    "keep_settings",
    "load_checkpoint",
    "logprobs_of",
    "pad_rows",
    "pass_at_k",
    "policy_loss",
    "read_tasks",
    "response_logits",
    "response_logprobs",
    "save_checkpoint",
    "save_pretrained",
    "sum_tasks",
    "trainer_ranks",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.training.checkpoints": ["load_checkpoint", "save_checkpoint", "save_pretrained"],
        "verl_server.training.evaluation": ["Evaluation", "evaluate", "pass_at_k"],
        "verl_server.training.losses": [
            "entropy_of",
            "group_advantages",
            "importance_weights",
            "logprobs_of",
            "pad_rows",
            "policy_loss",
            "response_logits",
            "response_logprobs",
        ],
        "verl_server.training.metrics": ["MetricsWriter", "draw_curves"],
        "verl_server.training.questions": ["keep_settings", "read_tasks", "sum_tasks"],
        "verl_server.training.ranks": ["TrainerRanks", "trainer_ranks"],
    },
)
