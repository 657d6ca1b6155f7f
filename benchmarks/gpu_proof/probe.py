"""Prints the hardware and the package versions as JSON.

The runner calls this in a process of its own: it needs no CUDA context then, and a driver that hangs is found.
"""

from __future__ import annotations

import importlib.metadata
import json

from common import environment, gpu_names


def main() -> None:
    import torch

    found = environment()
    names = gpu_names()
    found["device"] = names[0] if names else None
    found["versions"]["cuda"] = torch.version.cuda
    for package in ("sglang-kernel", "torch-memory-saver", "cuda-bindings", "triton"):
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][package] = None
    if names:
        free, total = torch.cuda.mem_get_info()
        found["gpu_memory_bytes"] = {"free": free, "total": total}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
