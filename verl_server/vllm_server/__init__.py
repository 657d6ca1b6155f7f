"""What runs inside a vLLM server: its main module, the keys of its routes, and the loading of weights.

The modules import vllm, torch, `verl_server/server/` and the parts of `verl_server/weights/` that need no engine.

server_main.py        main module of the server process: arguments from a pipe, then vLLM's own API server
start_checks.py       what is refused before the engine loads: versions of vLLM, head sizes on a CPU
start_environment.py  environment variables of vLLM that the server needs
command_line.py       server arguments as options of vLLM's command line
keys.py               ASGI class that closes all routes of the server to requests without a key
worker_extension.py   methods that vLLM adds to its workers: release and resume of memory on a CPU
start_method.py       vLLM's processes are forked in a server that a forkserver has forked
forked_server.py      what a forkserver imports and runs for a vLLM server
forked_worker.py      the worker of such a server
openmp_threads.py     OpenMP threads of a forked worker, like those of a spawned worker
weight_engine.py      the weight transfer engine of each worker
weight_session.py     what happened in one update on one worker
loading/              how an update gets into the model of one worker
"""

from __future__ import annotations

import contextlib

BACKEND = "verl_server"
"""Name of the weight transfer engine in `--weight-transfer-config`."""


def register() -> None:
    """Register the weight transfer engine with vLLM. May be called again.

    vLLM calls it by the entry point group `vllm.general_plugins` where this package is installed. In servers that this
    library starts, `worker_extension.py` calls it, because there the package may only be on `PYTHONPATH`.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is already registered
        WeightTransferEngineFactory.register_engine(BACKEND, "verl_server.vllm_server.weight_engine", "WeightEngine")
