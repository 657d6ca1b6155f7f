"""The whole suite with our engine: every case passes. What the suite writes."""

from __future__ import annotations

import io
import json
import re
import socket
from pathlib import Path

from helpers import no_new_shared_memory
from rich.console import Console

from verl_server.conformance.cases import CaseResult, Outcome
from verl_server.conformance.suite import CASES, as_markdown, as_table, named_engine, run_suite, small_models

UPDATES = 6


def test_our_engine_passes_every_case(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    seen: list[CaseResult] = []
    with small_models() as models, no_new_shared_memory():
        (report,) = run_suite(
            [named_engine("verl_server", models)],
            CASES,
            updates=UPDATES,
            output=tmp_path,
            on_result=lambda _, result: seen.append(result),
        )
    problems = {result.name: result.detail for result in report.results if result.outcome is not Outcome.PASSED}
    assert not problems
    assert tuple(seen) == report.results
    assert [result.name for result in report.results] == [case.name for case in CASES]
    assert not report.has_problems

    text = (tmp_path / "conformance.json").read_text()
    content = json.loads(text)
    (repeated,) = (result for result in content["systems"][0]["results"] if result["name"] == "repeated")
    assert [number for number, _ in repeated["figures"]["gaps"]] == list(range(1, UPDATES + 1))
    assert all(gap <= 1e-5 for _, gap in repeated["figures"]["gaps"])
    assert len(repeated["figures"]["update_s"]) == UPDATES
    assert [one["update"] for one in repeated["figures"]["footprints"]] == [3, 4, 5, 6]
    assert all(one["open_files"] > 0 and one["resident_bytes"] > 0 for one in repeated["figures"]["footprints"])
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(Path.home()) not in text
    assert "/tmp/" not in text
    assert (tmp_path / "conformance.md").read_text() == as_markdown(content) + "\n"

    output = io.StringIO()
    Console(file=output, width=200).print(as_table([report]))
    assert output.getvalue().count("passed") == len(CASES)
