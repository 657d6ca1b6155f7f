"""`verl-server check-template`: check the chat template of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from verl_server.cli.output import PIPE_WIDTH, show_progress
from verl_server.cli.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from verl_server.trajectory.rendering.chat_renderer import ChatRenderer

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
        from verl_server.trajectory.template_check import check, table

        tokenizer = load_tokenizer(model, "pass a folder with a tokenizer, or a name on the Hub")
        report = check.check_template(tokenizer, family)
        calls = "not checked" if report.refusal else _describe_calls(get_renderer(tokenizer, family))
    if as_json:
        print(json.dumps({**table.as_json(report), "tool_calls": calls}))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PIPE_WIDTH  # reasons are not wrapped in a file
        table.show(report, console)
        if not report.refusal:
            console.print(f"tool calls: {calls}", markup=False, soft_wrap=True)
    if not report.is_usable:
        raise typer.Exit(EXIT_NOT_USABLE)


def _describe_calls(renderer: ChatRenderer) -> str:
    """Whether `ToolAgentLoop` finds the calls that the template writes, and what to do if it does not."""
    from verl_server.agent.environments.template_calls import CURE, find_unread_call

    problem = find_unread_call(renderer)
    if problem is None:
        return "not checked: the template does not show how a call is written"
    return f"not found: {problem}. {CURE}" if problem else "found"
