"""Programs of the environment of clients, which `make clients` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[3] / ".venv-clients"
TIMEOUT_S = 150.0


def run_program(*command: str, given: str = "", env: dict[str, str] | None = None, folder: Path) -> str:
    """What a program of the environment of clients prints. Keys are never in its arguments.

    The program sees no variables of this process: neither keys of real services nor proxies.
    """
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.fail("the environment of the client programs is missing; run `make clients`")
    variables = {
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of the prices of models
        "LITELLM_TELEMETRY": "False",
        **(env or {}),
    }
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / command[0]), *command[1:]],
        input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=variables, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout


def run_mini_swe_agent(task: str, *options: str, url: str, key: str, folder: Path) -> None:
    """Run mini-swe-agent until it ends by itself. It is told of the gateway by URL and key only."""
    run_program(
        "mini", "--model", "openai/policy", "--task", task, "--yolo", "--exit-immediately", *options,
        "-c", "model.cost_tracking=ignore_errors",
        env={
            "OPENAI_API_KEY": key,
            "OPENAI_BASE_URL": url,
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "config"),
            "MSWEA_CONFIGURED": "true",
        },
        folder=folder,
    )  # fmt: skip
