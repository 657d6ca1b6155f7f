"""Server arguments that a CPU does not support are refused at the start, with a message that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_server.tiny import make_model

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present"),
    pytest.mark.timeout(600),
]

# One process resolves all cases, because importing SGLang takes most of the time of this test.
RESOLVE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
for case in json.loads(sys.argv[1]):
    try:
        ServerArgs(**case).resolve_once()
        print("RESULT accepted")
    except ValueError as error:
        print("RESULT", str(error).replace(chr(10), " "))
"""

CASES: list[tuple[dict[str, object], str]] = [
    ({"quantization": "fp8"}, "quantization"),
    ({"speculative_algorithm": "NGRAM"}, "peculative"),
    ({"enable_hierarchical_cache": True}, "hierarchical"),
    ({"enable_deterministic_inference": True}, "sampling_seed"),
    ({"rl_on_policy_target": "fsdp"}, "sampling_seed"),
    ({}, "accepted"),
    ({"attention_backend": "fa3", "enable_memory_saver": True, "page_size": 16}, "accepted"),
]


def test_each_refusal_names_its_reason(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    cases = [{"model_path": model, **arguments} for arguments, _ in CASES]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(cases)], capture_output=True, text=True, timeout=500, check=True
    )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(CASES), done.stderr[-2000:]
    for (arguments, expected), result in zip(CASES, results, strict=True):
        assert expected in result, (arguments, result)
