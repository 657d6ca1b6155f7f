"""`verl-server conformance`: its engines and cases, a running server, and the page with the committed results."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

from verl_server import HttpServerEngineAdapter
from verl_server.cli.app import app
from verl_server.conformance.cases import Case, CaseResult, ModelKind, Outcome
from verl_server.conformance.reference import Reference
from verl_server.conformance.suite import (
    CASES,
    ENGINE_NAMES,
    SystemReport,
    as_markdown,
    as_table,
    named_engine,
    number_engines,
    run,
    running_server,
    small_models,
)
from verl_server.conformance.systems.sglang import VerlEngineSystem
from verl_server.errors import BadInputError, ServerError

ROOT = Path(__file__).parents[3]
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


@contextlib.contextmanager
def http_server(status: int, reply: object) -> Iterator[str]:
    """The URL of a program that answers all requests with the same reply."""
    body = json.dumps(reply).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_refused_key_is_set_in_the_environment(tmp_path: Path) -> None:
    """The command has no argument `api_key`, which the adapter's own error names."""
    with http_server(401, {"error": "Unauthorized"}) as url:
        done = CliRunner().invoke(app, ["conformance", "--output", str(tmp_path), "--engine", url])
    assert isinstance(done.exception, ServerError)
    assert re.search(
        r"the api_key is missing or wrong \(401\); set VERL_SERVER_API_KEY and VERL_SERVER_ADMIN_API_KEY to the keys",
        str(done.exception),
    )


def test_a_model_that_is_no_folder_of_this_machine_is_named() -> None:
    for model in ("./model", "/no/such/model"):
        reply = {"model_path": model, "dtype": "float32"}
        expected = f"serves {Path(model)}, which is no folder of this machine; start the server with the absolute path"
        with http_server(200, reply) as url, pytest.raises(BadInputError, match=expected):
            running_server(url, None, None)


def test_the_model_of_the_suite_is_written_without_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with small_models() as models:
        assert all((folder / "config.json").is_file() for folder in models.values())
    assert capfd.readouterr() == ("", "")


def test_help_of_the_program_that_writes_the_page() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "conformance_page.py")]
    before = PAGE.read_bytes()
    done = subprocess.run([*program, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "conformance.json" in done.stdout
    done = subprocess.run([*program, "/no/such/file"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert PAGE.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--engine", "http://u:p@h:1"], "without them, and set VERL_SERVER_API_KEY and VERL_SERVER_ADMIN_API_KEY to"),
        (["--engine", "verl_sever"], "unknown engine 'verl_sever'.*did you mean 'verl_server'"),
        (["--case", "readback"], "unknown case 'readback'; the cases are read-back, .*did you mean 'read-back'"),
        (["--engine", "http://[::1"], "is not an HTTP URL"),
        (["--output", __file__], "output: no file can be created"),
        (["--engine", "vllm", "--vllm-python", "/no/python"], "server_python /no/python is no executable file"),
        (["--engine", "sglang", "--engine", "sglang"], "--engine sglang is given more than once"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], expected: str, tmp_path: Path) -> None:
    """Nothing is printed: no model is written."""
    done = CliRunner().invoke(app, ["conformance", "--output", str(tmp_path), *arguments])
    assert isinstance(done.exception, BadInputError)
    assert re.search(expected, str(done.exception))
    assert done.output == ""


def test_the_results_of_two_running_servers_have_different_names(tmp_path: Path) -> None:
    one = replace(named_engine("verl_server", {ModelKind.DENSE: tmp_path}), name="running server")
    other = replace(one, description="another")
    engines = number_engines([one, named_engine("sglang", {ModelKind.DENSE: tmp_path}), other])
    assert [engine.name for engine in engines] == ["running server 1", "sglang", "running server 2"]
    assert number_engines(engines) == engines


def test_details_with_brackets_are_shown(tmp_path: Path) -> None:
    detail = "RuntimeError: [/a/b.cc:534] closed, [/generate] [red]"
    output = io.StringIO()
    result = CaseResult("read-back", Outcome.FAILED, detail, 1.0)
    Console(file=output, width=200).print(as_table([SystemReport("sglang", "", (result,))]))
    assert detail in output.getvalue()


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
    assert [system["name"] for system in content["systems"]] == list(ENGINE_NAMES)
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
