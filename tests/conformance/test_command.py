"""`verl-server conformance`: its engines and cases, a running server, and the page with the committed results."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

from verl_server import HttpServerEngineAdapter
from verl_server.cli import app
from verl_server.conformance.case import Case
from verl_server.conformance.cases import CASES
from verl_server.conformance.command import run
from verl_server.conformance.engines import running_server
from verl_server.conformance.reference import Reference
from verl_server.conformance.report import as_markdown
from verl_server.conformance.systems.verl_engine import VerlEngineSystem
from verl_server.errors import BadInputError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
RESULT = ROOT / "benchmarks" / "results" / "conformance-2cpu.json"


def test_a_running_server_gets_its_weights_back(
    one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama", weight_std=0.07)
    with contextlib.closing(VerlEngineSystem(model, max_total_tokens=8192)) as system:
        adapter = system._adapter
        keys = adapter.api_key, adapter.admin_api_key
        assert not run([system.url], ["read-back", "server-killed", "lora"], 2, tmp_path, keys)
        reference = Reference(model)
        reference.require(system, reference.original, "after the suite")
    (report,) = json.loads((tmp_path / "conformance.json").read_text())["systems"]
    outcomes = {result["name"]: (result["outcome"], result["detail"]) for result in report["results"]}
    assert outcomes["read-back"][0] == "passed"
    assert outcomes["server-killed"] == ("not offered", "the suite does not kill a server that it has not started")
    assert outcomes["lora"] == ("not offered", "the server was started without enable_lora")
    shown = capsys.readouterr().out
    assert "read-back passed" in shown
    assert not any(key in shown for key in keys if key)


def test_servers_of_other_dtypes_are_refused(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """Rounding in bfloat16 would hide what the suite looks for."""
    model = tiny("qwen3", dtype="bfloat16")
    with (
        HttpServerEngineAdapter(model_path=str(model), dtype="bfloat16", max_total_tokens=4096) as adapter,
        pytest.raises(BadInputError, match=r"computes in bfloat16.*start it with --dtype float32"),
    ):
        running_server(adapter.base_url, adapter.api_key, adapter.admin_api_key)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--engine", "verl_sever"], "unknown engine 'verl_sever'.*did you mean 'verl_server'"),
        (["--case", "readback"], "unknown case 'readback'; the cases are read-back, .*did you mean 'read-back'"),
        (["--engine", "http://[::1"], "is not an HTTP URL"),
        (["--output", __file__], "output: no file can be created"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["conformance", "--output", str(tmp_path), *arguments])
    assert isinstance(done.exception, BadInputError)
    assert re.search(expected, str(done.exception))


def test_every_case_has_a_claim_issues_and_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.claim.endswith("."), case.name
        assert case.issues, case.name
        for issue in case.issues:
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", issue), issue


def test_the_page_shows_the_committed_results() -> None:
    content = json.loads(RESULT.read_text())
    assert as_markdown(content) in PAGE.read_text(), "run `python benchmarks/conformance_page.py`"
    assert content["updates"] == 1000
    assert [system["name"] for system in content["systems"]] == ["verl_server", "sglang"]
    for system in content["systems"]:
        assert len(system["results"]) == len(content["cases"])
    ours = {result["name"]: result for result in content["systems"][0]["results"]}
    assert {result["outcome"] for result in ours.values()} == {"passed"}
    assert ours["repeated"]["figures"]["updates"] == 1000


def test_the_page_has_the_claims_of_the_cases() -> None:
    content = json.loads(RESULT.read_text())
    measured = [Case(one["name"], one["claim"], tuple(one["issues"]), CASES[0].run) for one in content["cases"]]
    described = [(case.name, case.claim, case.issues) for case in CASES]
    assert [(case.name, case.claim, case.issues) for case in measured] == described
