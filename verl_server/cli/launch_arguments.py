"""The server arguments of `verl-server launch`, for each engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from verl_server.adapter.sglang.server_arguments import NUMBER_TYPES
from verl_server.cli import arguments
from verl_server.cli.arguments import KEY_ARGUMENTS, RENAMED_ARGUMENTS
from verl_server.config import EngineKind
from verl_server.errors import BadInputError

#: Other names of the options `--pp-size`, `--dp-size` and `--ep-size` on SGLang's own command line.
PARALLEL_SIZE = re.compile(r"(pipeline|data|expert)_parallel_size|[pde]p")


def read_server_args(engine: EngineKind, args: Sequence[str]) -> dict[str, Any]:
    """Read MODEL and the engine's arguments from a command line: `--name value`, `--name=value`, `--name v1 v2`.

    A bool is True as `--name` or `--name true`, and False as `--no-name` or `--name false`. Numbers that are needed
    before the server starts are parsed as SGLang parses them (`NUMBER_TYPES`), others if they lose no digit. The
    server, which has the engine's own parser, reads all other texts and refuses names that the engine does not have.
    vLLM's arguments are parsed as JSON. Raises BadInputError for an argument that cannot be read, and for keys, because
    other users of the machine can read a command line.
    """
    model, options = arguments.split_options(args)
    server_args: dict[str, Any] = {"model_path": model}
    for written, texts in options.items():
        name = written.removeprefix("--").replace("-", "_")
        if engine is EngineKind.SGLANG and PARALLEL_SIZE.fullmatch(name):
            name = f"{name[0]}p_size"
        if name in KEY_ARGUMENTS:
            raise arguments.key_on_command_line(written, name)
        if name in RENAMED_ARGUMENTS:
            raise BadInputError(f"{written} is not an option of this command; use {RENAMED_ARGUMENTS[name]}")
        values = [_read_value(engine, name, text) for text in texts]
        if not values and name.startswith("no_"):
            server_args[name.removeprefix("no_")] = False
        else:
            server_args[name] = values if len(values) > 1 else (values[0] if values else True)
    if engine is EngineKind.VLLM:
        from verl_server.adapter.vllm.server_arguments import validate_server_args

        server_args = validate_server_args(server_args)
        if "tp_size" in server_args:
            raise BadInputError(
                f"the number of workers is an option of this command: use {RENAMED_ARGUMENTS['tp_size']}"
            )
    return server_args


def _read_value(engine: EngineKind, name: str, text: str) -> Any:
    """`text` as JSON, or `text` itself if it is no JSON. For SGLang only bools and numbers, see `read_server_args`."""
    try:
        if engine is EngineKind.SGLANG and name in NUMBER_TYPES:
            return NUMBER_TYPES[name](text)
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
    is_plain = isinstance(value, bool) or (isinstance(value, (int, float)) and str(value) == text)
    return value if is_plain or engine is EngineKind.VLLM else text
