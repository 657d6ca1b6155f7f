"""An SGLang server that is forked by a forkserver (`forkserver_main.py`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from verl_server.server import server_main

PROGRAM = server_main.__file__
#: Modules that a server imports after it has forked its workers. A version of SGLang may not have all of them.
LATE_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
)


def load() -> None:
    """Import what a server imports, and check that this process can fork. Exits with the reason when it cannot."""
    server_main.load()
    gc.disable()  # as in `server_main.load`
    for name in LATE_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()

    from sglang.srt.platforms import current_platform

    from verl_server.cpu import hooks
    from verl_server.cpu.platform import TorchNativeCpuPlatform

    if not isinstance(current_platform, TorchNativeCpuPlatform):
        sys.exit("another SGLang platform than the one for machines without an accelerator is active")
    if not hooks.can_fork():
        sys.exit(f"this process has {len(os.listdir('/proc/self/task'))} threads: it cannot fork servers")
    hooks.allow_forks_to_fork()


def serve() -> None:
    """Run the server whose arguments are on standard input."""
    server_main.serve(server_main.read_arguments())
