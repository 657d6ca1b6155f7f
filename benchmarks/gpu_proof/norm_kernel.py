"""Which kernel SGLang's RMSNorm uses on a GPU, and whether the installed packages have it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

NO_FLOAT32 = (
    "SGLang has no RMSNorm kernel for float32 on CUDA: `sgl_kernel.rmsnorm` has instances for bfloat16 and float16 only"
)
SOURCE = Path("data", "csrc", "norm.cu")
"""Source of FlashInfer's RMSNorm, in the folder of the package."""


def missing_norm_kernel() -> str | None:
    """Why a server cannot compute RMSNorm in bfloat16 with the installed packages. None if it can.

    `sgl_kernel.rmsnorm` calls FlashInfer whenever `flashinfer` is installed, whatever the attention backend is.
    FlashInfer then uses CuTe DSL (the module `cutlass` of nvidia-cutlass-dsl). Without it, FlashInfer compiles its own
    source at the first forward pass.
    """
    flashinfer = find_spec("flashinfer")
    if flashinfer is None or not flashinfer.submodule_search_locations or find_spec("cutlass") is not None:
        return None
    source = Path(flashinfer.submodule_search_locations[0]) / SOURCE
    if source.exists():
        return None
    return (
        f"flashinfer has no {source.name} ({source}), which SGLang's RMSNorm compiles without nvidia-cutlass-dsl: keep "
        "flashinfer/data/csrc, flashinfer/data/include and flashinfer/data/cccl of the wheel (docs/gpu-proof.md)"
    )
