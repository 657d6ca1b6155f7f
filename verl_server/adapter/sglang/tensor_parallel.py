"""Which numbers of tensor parallel ranks divide a model in SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verl_server.adapter.model_files import ModelFacts, read_facts, read_model_config
from verl_server.errors import BadInputError

#: Server arguments with which attention is divided by another number than `tp_size`, or by sizes that are not those of
#: the model's own `config.json`.
UNCHECKED_WITH = (
    "enable_dp_attention", "attn_dp_size", "attn_cp_size", "dcp_size", "json_model_override_args", "revision",
)  # fmt: skip


def require_divisible_model(server_args: Mapping[str, Any]) -> None:
    """Raise BadInputError when `tp_size` ranks can divide the attention heads neither on a CPU nor on an accelerator.

    Reads the model's `config.json` only. A model whose configuration is not on this machine is not checked.
    """
    tp = server_args.get("tp_size") or 1
    is_cpu_engine = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"  # SGLang's own, which has other rules
    if tp == 1 or is_cpu_engine or any(server_args.get(name) for name in UNCHECKED_WITH):
        return
    try:
        facts = read_facts(read_model_config(str(server_args["model_path"])))
    except (OSError, ValueError, TypeError, AttributeError):
        return  # the server reports what is wrong with the file
    if indivisible := _indivisible_heads(facts, tp, on_cpu=False):
        choices = " or ".join(map(str, tp_choices(facts, tp, on_cpu=True)))
        raise BadInputError(
            f"tp_size={tp} cannot divide {', '.join(indivisible)} of the model {server_args['model_path']}; "
            f"use tp_size={choices}. VerlEngine sets tp_size to the number of its trainer ranks unless tp_size is given"
        )


def tp_choices(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[int]:
    """The nearest lower and the nearest higher number of ranks that divide the model. One rank always does."""
    fitting = [n for n in range(1, max(facts.heads, 1) + 1) if not indivisible_sizes(facts, n, on_cpu=on_cpu)]
    lower, higher = [n for n in fitting if n < tp], [n for n in fitting if n > tp]
    return lower[-1:] + higher[:1]


def indivisible_sizes(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    """The sizes of the model that `tp` ranks cannot divide.

    On our platform for CPUs, SGLang pads a model (`configs/update_config.py`). This works for the intermediate size.
    For attention heads it fails when the weights are loaded, also for KV heads, which a GPU would replicate.
    """
    indivisible = _indivisible_heads(facts, tp, on_cpu=on_cpu)
    if not on_cpu:
        sizes = {
            "intermediate elements": facts.intermediate,
            "intermediate elements of an expert": facts.moe_intermediate,
        }
        indivisible += [f"{count} {name}" for name, count in sizes.items() if count % tp]
    return indivisible


def _indivisible_heads(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    indivisible = [f"{facts.heads} attention heads"] if facts.heads % tp else []
    if facts.kv_heads and not facts.latent and facts.kv_heads % tp and (on_cpu or tp % facts.kv_heads):
        reason = "a CPU does not replicate them" if on_cpu else "and cannot replicate them evenly"
        indivisible.append(f"{facts.kv_heads} KV heads ({reason})")
    return indivisible
