"""The server arguments of `verl-server launch`, for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_server.adapter.sglang.argument_values import guess_value
from verl_server.cli import arguments
from verl_server.cli.arguments import KEY_ARGUMENTS, RENAMED_ARGUMENTS
from verl_server.config import EngineKind
from verl_server.errors import BadInputError


def read_server_args(
    engine: EngineKind, server_python: Path | None, args: Sequence[str], own_options: Mapping[str, str]
) -> dict[str, Any]:
    """Read MODEL and the engine's arguments from a command line.

    `own_options`: names of the command's own options, and how each is written. Raises BadInputError for an argument
    that cannot be read and for a name that the engine does not have.
    """
    if engine is EngineKind.VLLM:
        return _read_vllm_args(args)
    sglang = arguments.find_sglang_of(server_python)
    server_args = arguments.parse_server_args(list(args), sglang)
    arguments.require_known_arguments(server_args, own_options, sglang)
    return server_args


def _read_vllm_args(args: Sequence[str]) -> dict[str, Any]:
    """The arguments of a vLLM server: the values are parsed as JSON if they are JSON, otherwise taken as text."""
    from verl_server.adapter.vllm.server_arguments import validate_server_args

    model, values = arguments.split_options(args, lambda argument: "")
    server_args: dict[str, Any] = {"model_path": model}
    for written, texts in values.items():
        name = written.removeprefix("--").replace("-", "_")
        if name in KEY_ARGUMENTS:
            raise arguments.key_on_command_line(written, name)
        if name in RENAMED_ARGUMENTS:
            raise BadInputError(f"{written} is not an option of this command; use {RENAMED_ARGUMENTS[name]}")
        guesses = [guess_value(text) for text in texts]
        if not guesses and name.startswith("no_"):
            server_args[name.removeprefix("no_")] = False
        else:
            server_args[name] = guesses if len(guesses) > 1 else (guesses[0] if guesses else True)
    validated = validate_server_args(server_args)
    if "tp_size" in validated:
        raise BadInputError(f"the number of workers is an option of this command: use {RENAMED_ARGUMENTS['tp_size']}")
    return validated
