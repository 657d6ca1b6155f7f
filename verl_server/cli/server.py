"""The server of `verl-server launch`: it runs until the command receives a signal, or until it ends by itself."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.cli.output import print_line, print_server, show_progress
from verl_server.cli.signals import StopRequested, StopSignals

if TYPE_CHECKING:
    from verl_server.adapter import HttpServerEngineAdapter


def run_server(
    server_args: Mapping[str, Any], log_dir: Path | None, server_python: Path | None, generated_keys: list[str]
) -> int:
    """Start a server, print its URL and the generated keys, and wait for SIGINT, SIGTERM or SIGHUP.

    Returns the exit code: 0 if the server was ready when the signal came, otherwise 128 plus the signal's number.
    Raises the errors of the start, and ServerDiedError when the server ends by itself.
    """
    signals = StopSignals()
    try:
        with signals, _start(server_args, log_dir, server_python) as adapter:
            signals.is_server_ready = True
            print_server(adapter, server_args, generated_keys)
            process = adapter.process
            assert process is not None
            process.wait_exit(threading.TIMEOUT_MAX)
            raise process.died(adapter.base_url)
    except StopRequested as stop:
        print_line("The server and all of its processes have ended.")
        return 0 if signals.is_server_ready else 128 + stop.number


def _start(server_args: Mapping[str, Any], log_dir: Path | None, server_python: Path | None) -> HttpServerEngineAdapter:
    from verl_server.adapter import HttpServerEngineAdapter
    from verl_server.config import AdapterConfig
    from verl_server.server.forkserver.socket_folder import shares_forkservers

    # A forkserver of its own would serve only one server.
    config = AdapterConfig(log_dir=log_dir, use_forkserver=shares_forkservers(), server_python=server_python)
    with show_progress(f"Starting a server for {server_args['model_path']}"):
        return HttpServerEngineAdapter(config=config, **server_args)
