"""What runs inside a vLLM server: its main module, the keys of its routes, and the loading of weights.

The modules import vllm, torch, `verl_server/server/` and the parts of `verl_server/weights/` that need no engine.

server_main.py    main module of the server process: arguments from a pipe, then vLLM's own API server
start.py          what is refused before the engine loads, environment variables, command line, keys
weights.py        the weight transfer engine of each worker, and methods that vLLM adds to its workers
reload.py         vLLM's own reload of a model, for every model
"""

from __future__ import annotations

import contextlib

BACKEND = "verl_server"
"""Name of the weight transfer engine in `--weight-transfer-config`."""


def register() -> None:
    """Register the weight transfer engine with vLLM. May be called again.

    vLLM calls it by the entry point group `vllm.general_plugins` where this package is installed. In servers that this
    library starts, `weights.py` calls it, because there the package may only be on `PYTHONPATH`.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is already registered
        WeightTransferEngineFactory.register_engine(BACKEND, "verl_server.vllm_plugin.weights", "WeightEngine")
