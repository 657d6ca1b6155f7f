"""Main module of a vLLM server process: read the server arguments from standard input, then run vLLM's API server.

The arguments arrive as those of an SGLang server do (`verl_server/server/server_main.py`), so that keys appear on no
command line. vLLM's subprocesses import this module again, as `__mp_main__`; therefore it imports only the standard
library and light modules at module level.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, cast

from verl_server.server.server_main import EXIT_BAD_ARGUMENT, read_arguments
from verl_server.types import parse_weight_version
from verl_server.vllm_plugin.start import (
    find_argument_refusal,
    find_version_refusal,
    server_variables,
    to_command_line,
    translate,
)

#: Begin of the log line with the reason of `EXIT_BAD_ARGUMENT`.
REFUSAL = "vLLM refuses the server arguments: "


def main(**own_args: Any) -> None:
    """Run the server. `own_args`: further options of vLLM's command line, of a server that was forked."""
    server_args = read_arguments()
    keys = (server_args.pop("api_key"), server_args.pop("admin_api_key"))
    weight_version = parse_weight_version(server_args.pop("weight_version", None))
    os.environ.update(server_variables(server_args, os.environ))
    if (refusal := find_version_refusal()) is not None:
        _refuse(refusal)
    serve({**server_args, **own_args}, *keys, weight_version)


def serve(server_args: dict[str, Any], api_key: str, admin_api_key: str, weight_version: int) -> None:
    """Run vLLM's API server until the process is killed. `server_args`: options of vLLM's command line by name."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from verl_server.vllm_plugin import register
    from verl_server.vllm_plugin.start import set_keys
    from verl_server.vllm_plugin.wire.app import set_facts
    from verl_server.vllm_plugin.wire.state import ServerFacts

    set_keys(api_key, admin_api_key)
    set_facts(ServerFacts(dict(server_args), weight_version))
    register()
    server_args = translate(server_args, is_cpu=current_platform.is_cpu())
    if current_platform.is_cpu() and server_args["enforce_eager"]:
        # vLLM compiles a function for log probabilities even so, which takes up to 30 s at the first request for them.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    command_line = import_command_line()
    parser = command_line.make_arg_parser(FlexibleArgumentParser())
    parser.error = _refuse
    args = parser.parse_args(to_command_line(server_args))
    if (refusal := find_argument_refusal(server_args)) is not None:
        _refuse(refusal)
    command_line.validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


def import_command_line() -> ModuleType:
    """vLLM's module of command line arguments, which version 0.33 has moved."""
    try:
        import vllm.entrypoints.common.cli_args as command_line
    except ModuleNotFoundError:
        import vllm.entrypoints.launchers.cli_args as command_line
    return cast(ModuleType, command_line)


def _refuse(reason: str) -> None:
    """End the process before the engine loads. The trainer raises BadInputError with the reason."""
    print(REFUSAL + " ".join(reason.split()), flush=True)
    sys.exit(EXIT_BAD_ARGUMENT)


if __name__ == "__main__":
    main()
