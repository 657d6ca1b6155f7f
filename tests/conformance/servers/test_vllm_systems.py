"""The systems with vLLM: our server passes where vLLM's own reload does not, and both fail in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import no_new_shared_memory
from vllm_helpers import VLLM_PYTHON, needs_vllm

from verl_server.conformance.cases import CaseResult, ModelKind, Outcome
from verl_server.conformance.other_processes import find_vllm_python
from verl_server.conformance.suite import CASES, named_engine, run_suite, small_models
from verl_server.conformance.systems import NotOfferedError
from verl_server.conformance.systems.vllm import as_options
from verl_server.errors import BadInputError


def run(name: str, case_names: tuple[str, ...], output: Path) -> dict[str, CaseResult]:
    """The results of an engine by the name of the case."""
    (output / "logs").mkdir()
    cases = [case for case in CASES if case.name in case_names]
    with small_models({case.model for case in cases}) as models, no_new_shared_memory():
        engine = named_engine(name, models, find_vllm_python(VLLM_PYTHON))
        (report,) = run_suite([engine], cases, updates=2, output=output, on_result=lambda *_: None)
    return {result.name: result for result in report.results}


@needs_vllm
def test_our_vllm_server_updates_tied_embeddings_and_lora_adapters(tmp_path: Path) -> None:
    results = run("verl_server_vllm", ("tied-embeddings", "lora"), tmp_path)
    assert results["tied-embeddings"].outcome is Outcome.PASSED, results
    assert results["lora"].outcome is Outcome.PASSED, results
    assert '"vllm": "0.' in (tmp_path / "conformance.json").read_text()


@needs_vllm
def test_the_reload_of_vllm_leaves_a_tied_head_behind(tmp_path: Path) -> None:
    """If this test fails, vLLM has repaired its reload: run the suite again, and look at `reload.py`."""
    result = run("vllm", ("tied-embeddings",), tmp_path)["tied-embeddings"]
    assert result.outcome is Outcome.FAILED, result
    assert result.detail.startswith("after update 1, log probabilities differ from Hugging Face by"), result


def test_an_environment_without_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"no \.venv-vllm/bin/python here: run `make setup-vllm`.*--vllm-python"):
        find_vllm_python(None)
    with pytest.raises(BadInputError, match="the engine vllm needs an interpreter with vLLM"):
        named_engine("vllm", {ModelKind.DENSE: tmp_path})


def test_server_arguments_of_cases_become_options_of_vllm() -> None:
    assert as_options({"enable_lora": True, "lora_target_modules": ["q_proj"]}) == {"enable_lora": True}
    assert as_options({"enable_memory_saver": True}) == {"enable_sleep_mode": True}
    with pytest.raises(NotOfferedError, match="vLLM has no server argument other"):
        as_options({"other": 1})
