"""What an item learns from the runner: its device, the arguments of its servers, and the file for its records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DEVICE_VARIABLE = "GPU_PROOF_DEVICE"
"""Environment variable: "cuda", or "cpu" for a rehearsal of the items that a machine without a GPU can run."""
RECORDS_VARIABLE = "GPU_PROOF_RECORDS"
"""Environment variable: the file to which an item appends its records. Not set outside of the runner."""
METHOD = "method"
"""Name of the records of `weight_sync.py`: one for each method of an update."""
CUDA_SERVER_ARGS: dict[str, Any] = {
    # Triton and torch need neither FlashInfer's attention nor the large files of SGLang's kernels. RMSNorm needs
    # FlashInfer in any case, see `norm_kernel.py`.
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    # Several tiny servers share one GPU while the tests run.
    "mem_fraction_static": 0.3,
}


def device() -> str:
    """Type of the device on which the trainer has its tensors: that of the servers, too."""
    return os.environ.get(DEVICE_VARIABLE, "cuda")


def server_args(**more: Any) -> dict[str, Any]:
    """SGLang's arguments for a server of an item."""
    return {**(CUDA_SERVER_ARGS if device() == "cuda" else {}), **more}


def record(name: str, **values: Any) -> None:
    """Append a record to the item's records. `values` are JSON values: measured figures, or a reason."""
    path = os.environ.get(RECORDS_VARIABLE)
    line = json.dumps({"name": name, **values})
    print(line, flush=True)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
