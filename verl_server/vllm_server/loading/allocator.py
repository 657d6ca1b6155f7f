"""The C library's allocator during an update.

glibc returns large blocks to the system when they are freed. oneDNN allocates the packed weights of every module anew,
so that an update would take all their pages from the system again, which costs more time than packing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in `malloc.h`."""
LARGEST = 2**31 - 1
MMAP_BYTES, TRIM_BYTES = 2**25, 2**26
"""The thresholds to which glibc's own adaptation grows. It ends at the first call of `mallopt`."""


@contextlib.contextmanager
def freed_memory_is_kept() -> Iterator[None]:
    """In the body, freed memory stays in the process and serves the next allocation of its size."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST)
    mallopt(M_TRIM_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
