"""A prefill that takes many times longer than the stall timeout is not a stall."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from helpers import no_new_shared_memory

from verl_server import RecoveryConfig, RolloutManager
from verl_server.tiny import make_model

pytestmark = pytest.mark.timeout(900)

STALL_TIMEOUT_S = 2.0
PROMPT = 14336
"""Tokens of the prompt. The prefill takes about a quarter of a minute on one core."""


def test_a_long_prefill_is_healthy(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 1024}
    model = str(make_model(tmp_path / "model", context_length=32768, **sizes))
    events: list[Any] = []
    with (
        no_new_shared_memory(),
        RolloutManager(
            1,
            mode="colocated",
            model_path=model,
            dtype="float32",
            max_total_tokens=40000,
            recovery=RecoveryConfig(stall_timeout_s=STALL_TIMEOUT_S),
            on_event=events.append,
        ) as fleet,
    ):
        started = time.monotonic()
        reply = fleet.generate(input_ids=[7 * at % 300 for at in range(PROMPT)], sampling_params={"max_new_tokens": 1})
        assert time.monotonic() - started > 3 * STALL_TIMEOUT_S, "the prefill is too short on this machine"
        assert (reply["meta_info"]["prompt_tokens"], reply["meta_info"]["attempts"]) == (PROMPT, 1)
        assert [event["after"] for event in events] == ["healthy"]
