"""What a trainer pushes is what SGLang's model computes with, byte for byte, for many families of models.

The reference is an independent load of the same tensors by SGLang from a checkpoint on disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import run_in_fork
from model_families import FAMILIES, IGNORING_FAMILY

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The outcome of each TP rank for each family, by number of TP ranks."""
    folder = tmp_path_factory.mktemp("loaded")
    script = Path(__file__).parents[1] / "loader_ranks.py"
    output = run_in_fork(script, [str(folder), *FAMILIES], tmp_path_factory.mktemp("output"), timeout_s=500.0)
    found: dict[str, list[dict[str, Any]]] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_pushed_weights_equal_loaded_weights(
    family: str, tp_size: int, outcomes: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = outcomes[f"tp{tp_size}"]
    assert len(ranks) == tp_size
    for rank, by_family in enumerate(ranks):
        outcome = by_family[family]
        assert "error" not in outcome, outcome["error"]
        assert outcome["before"] > 5, "the checkpoints differ"
        assert min(outcome["parts"]) > 0
        assert (outcome["b"], outcome["part"], outcome["layer"]) == ([], [], [])
        if rank == 0:
            assert outcome["missing"]["b"] == [0]
            assert min(outcome["missing"]["part"] + outcome["missing"]["layer"]) > 0


def test_tensors_that_the_model_class_ignores_are_not_pushed(outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """An update that SGLang ignores in part fails, by name. Then the trainer knows these tensors and sends none."""
    alone, without, whole, again, left_out = outcomes["tp1"][0][IGNORING_FAMILY]["pushes"]
    for failed in (alone, whole):
        assert failed.startswith("TornWeightsError")
        assert "did not read 6 of the pushed tensors, for example 'model.layers.0.mlp.down_proj.bias'" in failed
    assert without == 6
    assert again.startswith("WeightManifestError")
    assert "ignores 6 of the tensors" in again
    assert left_out == 0
