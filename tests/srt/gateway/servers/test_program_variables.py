"""What a program gets besides its gateway: variables of its class, its folders, and a limit of its time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_program_loop import engine, program, renderer, run

from verl_server.agent import RolloutLimits, Sample
from verl_server.gateway.programs import MAX_PROGRAM_S

__all__ = ["engine", "renderer", "run"]
PAGE = (Path(__file__).parents[4] / "docs" / "programs-reference.md").read_text()
PRINT_VARIABLES = """
ask(user("a"))
names = ("OWN", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "OPENAI_BASE_URL", "OPENAI_API_KEY", "HOME")
open("variables.json", "w").write(json.dumps([os.getcwd(), *(os.environ[name] for name in names)]))
"""


def test_a_program_has_the_variables_of_the_page_and_of_its_class(run: Callable[..., list[Sample]]) -> None:
    class Program(program(PRINT_VARIABLES, env={"OWN": "a", "HOME": "/nowhere"})):  # type: ignore[misc]
        async def teardown(self) -> None:
            found.append(json.loads(await self.read_file("variables.json")))
            await super().teardown()

    found = list[list[str]]()
    samples = run(Program, n=2)
    assert [sample.error for sample in samples] == [None, None]
    keys = set()
    for folder, own, url, token, openai_url, key, home in found:
        assert (folder, own, home) == ("/tmp/workspace", "a", "/nowhere"), "the class comes last"
        assert (openai_url, key) == (f"{url}/v1", token)
        keys.add(key)
    assert len(keys) == 2, "each sample has a key of its own"


def test_a_program_without_a_limit_of_its_time_has_an_hour(
    run: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (MAX_PROGRAM_S, "`timeout_s` (without it, one hour)" in PAGE) == (3600.0, True)
    monkeypatch.setattr("verl_server.gateway.programs.MAX_PROGRAM_S", 3.0)
    limits = RolloutLimits(max_context_tokens=1500)
    (sample,) = run(program("ask(user('a')); import time; time.sleep(1000)"), limits=limits)
    assert (sample.stop_reason, sample.error) == ("timeout_s", None)
