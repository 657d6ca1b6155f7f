"""`verl-server doctor`: check a machine, an environment, a model or a gateway."""

from __future__ import annotations

import os

import typer
from rich.console import Console

from verl_server.cli import arguments as options
from verl_server.cli.common_options import EXIT_FAILED, Json, Verbose
from verl_server.cli.output import show_progress
from verl_server.validation import require_http_url


def doctor(
    model: options.OptionalModel = None,
    tp: options.TensorParallel = 1,
    dtype: options.Dtype = "auto",
    as_json: Json = False,
    gateway_url: options.GatewayUrl = None,
    server_python: options.ServerPython = None,
    engine: options.OptionalEngine = None,
    verbose: Verbose = False,
) -> None:
    """Check this machine, and whether a model can be served on it; or the chain behind a gateway.

    Every problem is printed with its symptom and its fix. Exit code 1 when a check failed.

    With --gateway, the chain agent -> gateway -> router -> engine is checked. Run it where the agent runs: keys, base
    URLs and the name of the model are those of the agent's environment (ANTHROPIC_AUTH_TOKEN, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and so on). With VERL_SERVER_GATEWAY_ADMIN_KEY, one token is generated, which is not recorded.

    With --server-python, the environment of this interpreter is checked, in which servers would run. It has SGLang or
    vLLM; --engine says which engine is wanted.

    Examples:
      verl-server doctor
      verl-server doctor --server-python /opt/sglang/bin/python
      verl-server doctor --server-python .venv-vllm/bin/python --engine vllm
      verl-server doctor --gateway http://127.0.0.1:9000
      verl-server doctor ./model --tp 2 --dtype bfloat16
    """
    from verl_server.doctor import examine, examine_gateway, report

    if gateway_url is not None:
        gateway_url = require_http_url("--gateway", gateway_url, "--gateway http://127.0.0.1:9000")
        with show_progress("Checking the gateway"):
            sections = {f"Gateway {gateway_url}": examine_gateway(gateway_url, os.environ)}
    else:
        with show_progress("Checking this machine"):
            sections = examine(model, tp=tp, dtype=dtype, server_python=server_python, engine_kind=engine)
    if as_json:
        print(report.as_json(sections))
    else:
        report.show(sections, Console(highlight=False))
    if report.failed(sections):
        raise typer.Exit(EXIT_FAILED)
