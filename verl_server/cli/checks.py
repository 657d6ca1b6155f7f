"""The commands `verl-server doctor` and `verl-server check-template`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from verl_server.cli import arguments as options
from verl_server.cli.common import EXIT_FAILED, PIPE_WIDTH, Json, Verbose, load_tokenizer, show_progress
from verl_server.validation import require_http_url

if TYPE_CHECKING:
    from verl_server.trajectory.rendering.chat_renderer import ChatRenderer


# -- Doctor -----------------------------------------------------------------------------------------
# `verl-server doctor`: check a machine, an environment, a model or a gateway.


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


# -- Template ---------------------------------------------------------------------------------------

EXIT_NOT_USABLE = 1


def check_template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the Hub.")],
    family: Annotated[
        str | None,
        typer.Option(help="Family of the package `renderers`. Default: by the model's name.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check whether prompts that grow by turns equal what the model's chat template renders.

    Only the tokenizer is loaded. Verdicts: equal; kept (earlier tokens stay where the template changes them);
    refused; unverified (the template refuses what the renderer accepts); different (from what the template
    renders: a defect, or a family for another revision of the template).

    The last line says whether agent loops find the tool calls that the template writes.

    Exit code 0 when the template is usable, 1 when it is refused or a prompt is different.

    Examples:
      verl-server check-template ./model
      verl-server check-template Qwen/Qwen3-8B --json
    """
    import json

    with show_progress("Checking the chat template"):
        from verl_server.trajectory.rendering.families import get_renderer
        from verl_server.trajectory.template_check import check

        tokenizer = load_tokenizer(model, "pass a folder with a tokenizer, or a name on the Hub")
        report = check.check_template(tokenizer, family)
        calls = "not checked" if report.refusal else _describe_calls(get_renderer(tokenizer, family))
    if as_json:
        print(json.dumps({**check.as_json(report), "tool_calls": calls}))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PIPE_WIDTH  # reasons are not wrapped in a file
        check.show(report, console)
        if not report.refusal:
            console.print(f"tool calls: {calls}", markup=False, soft_wrap=True)
    if not report.is_usable:
        raise typer.Exit(EXIT_NOT_USABLE)


def _describe_calls(renderer: ChatRenderer) -> str:
    """Whether `ToolAgentLoop` finds the calls that the template writes, and what to do if it does not."""
    from verl_server.agent.environments import CURE, find_unread_call

    problem = find_unread_call(renderer)
    if problem is None:
        return "not checked: the template does not show how a call is written"
    return f"not found: {problem}. {CURE}" if problem else "found"
