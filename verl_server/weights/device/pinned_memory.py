"""Host memory that is registered with the CUDA driver, so that copies need no buffer of the driver's own."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from typing import Any

logger = logging.getLogger(__name__)


class PinnedMemory:
    """The registration of a mapping. Registering makes the machine provide all of its pages."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._address = 0
        """Address of the registered mapping. 0: not registered."""
        self._was_tried = False

    def pin(self) -> bool:
        """Register the mapping, once. Returns whether it is registered: not without a GPU, or if CUDA refuses it.

        Copies work in any case. Without registration they are slower.
        """
        import torch

        if self._was_tried or not torch.cuda.is_available():
            return self._address != 0
        self._was_tried = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        status = int(_cuda_runtime().cudaHostRegister(address, len(self._memory), 0))
        if status == 0:
            self._address = address
        else:
            logger.warning("CUDA does not pin the staging memory (error %d): copies are slower", status)
            with contextlib.suppress(RuntimeError):  # torch would raise CUDA's last error in a later operation
                torch.ones(1, device="cuda")
        return self._address != 0

    def unpin(self) -> None:
        """End the registration. To be called before the mapping is closed."""
        address, self._address = self._address, 0
        if address:
            _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    """torch's own binding of the CUDA runtime."""
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
