"""Adapters of PEFT in the pushed weights, without a server. A scenario of `trl_trainer.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl_common import error_of

from verl_server.integrations.trl import RolloutServers
from verl_server.integrations.trl.weights import named_weights, require_mergeable

NUM_PUSHES = 3


def adapters(servers: RolloutServers, model: str, folder: Path) -> dict[str, Any]:
    """What is pushed of a model in bfloat16 with an adapter, and what the pushes leave of the model."""
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return {
        "lora": push(model, LoraConfig(modules_to_save=["norm"], **lora)),
        "dora": push(model, LoraConfig(use_dora=True, **lora)),
        "tied": error_of(lambda: require_tied(model, LoraConfig(r=4, target_modules=["lm_head"]))),
        "saved": {name: error_of(partial(require_tied, model, saving(name))) for name in ("embed_tokens", "lm_head")},
        "saved_together": error_of(lambda: require_tied(model, saving("embed_tokens", ensure_weight_tying=True))),
    }


def saving(module: str, **settings: Any) -> LoraConfig:
    """An adapter that trains a copy of a whole module."""
    return LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[module], **settings)


def push(model: str, config: LoraConfig) -> dict[str, list[str]]:
    """Names of the parameters that differ from what is expected."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    names = [name for name, _ in base.named_parameters()]
    policy = get_peft_model(base, config)
    policy.add_adapter("ref", config)  # TRL keeps the reference policy there
    fill(policy, ".modules_to_save.default.", lambda parameter: parameter.mul_(2))
    fill(policy, ".modules_to_save.ref.", lambda parameter: parameter.mul_(3))
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    for _ in range(NUM_PUSHES):
        pushed = list(named_weights(policy))
    for name, _ in named_weights(policy):  # the caller stops in the middle
        if name.endswith("q_proj.weight"):
            break
    merged = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    return {
        "names": sorted({name for name, _ in pushed} ^ set(names)),
        "twice": sorted({name for name, _ in pushed if [each for each, _ in pushed].count(name) > 1}),
        "wrong": [name for name, tensor in pushed if name in merged and not torch.equal(tensor, merged[name])],
        "drifted": [name for name, each in policy.named_parameters() if not torch.equal(each, before[name])],
        "still_merged": [name for name, module in policy.named_modules() if getattr(module, "merged", False)],
    }


@torch.no_grad()
def fill(policy: Any, part: str, change: Callable[[torch.Tensor], object]) -> None:
    """Change the parameters with `part` in their names."""
    for name, parameter in policy.named_parameters():
        if part in name:
            change(parameter)


def require_tied(model: str, config: LoraConfig) -> None:
    """Check an adapter of a model whose head has the weight of the embedding."""
    base = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=True)
    base.tie_weights()
    require_mergeable(get_peft_model(base, config))
