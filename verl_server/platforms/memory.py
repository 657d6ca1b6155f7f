"""Return of a tensor's memory to the operating system while its address stays valid.

On Linux `madvise(MADV_DONTNEED)` drops the pages of private memory at once. The address range stays valid and reads as
zeros until it is written again (madvise(2)). So no pointer becomes invalid: tied weights, views and captured buffers
keep working, and an unexpected access costs a page instead of a segmentation fault. `MADV_POPULATE_WRITE` (Linux 5.14)
allocates the pages again in one call.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MADV_DONTNEED = 4
MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, order=True)
class Region:
    """A range of this process's memory."""

    address: int
    size: int
    """Number of bytes."""


def is_supported() -> bool:
    """Whether this operating system drops pages on MADV_DONTNEED. On other systems it is only a hint."""
    return sys.platform == "linux"


def weight_regions(models: Iterable[Any]) -> list[Region]:
    """The storages of all parameters. Buffers, such as rope tables, are kept: weight updates do not contain them."""
    found: dict[int, int] = {}
    for model in models:
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
    return [Region(address, size) for address, size in sorted(found.items())]


def kv_regions(pool: Any) -> list[Region]:
    """The buffers of a KV pool, as the pool lists them for transfers to other machines.

    `get_contiguous_buf_infos` lists the buffers of full attention, `get_state_buf_infos` those of sliding windows and
    linear attention. Neither lists index tables, which must keep their contents.
    """
    found: dict[int, int] = {}
    for name in ("get_contiguous_buf_infos", "get_state_buf_infos"):
        if hasattr(pool, name):
            addresses, sizes, *_ = getattr(pool, name)()
            found.update(zip(addresses, sizes, strict=True))
    return [Region(address, size) for address, size in sorted(found.items())]


def whole_pages(regions: Iterable[Region]) -> Iterator[Region]:
    """The pages that lie completely inside a region. Other pages may also hold other objects."""
    page = mmap.PAGESIZE
    for region in regions:
        start = -(-region.address // page) * page
        end = (region.address + region.size) // page * page
        if end > start:
            yield Region(start, end - start)


def drop(regions: Iterable[Region]) -> int:
    """Return the pages to the operating system. The contents become zeros. Returns the number of bytes."""
    dropped = 0
    for region in whole_pages(regions):
        _madvise(region, MADV_DONTNEED)
        dropped += region.size
    return dropped


def allocate_again(regions: Iterable[Region]) -> int:
    """Allocate the pages again, so that missing memory is noticed now and not during a request. Returns bytes."""
    taken = 0
    for region in whole_pages(regions):
        try:
            _madvise(region, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: Linux before 5.14
                raise
            ctypes.memset(region.address, 0, region.size)
        taken += region.size
    return taken


def _madvise(region: Region, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.madvise(ctypes.c_void_p(region.address), ctypes.c_size_t(region.size), ctypes.c_int(advice))
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"madvise({advice}) of {region.size} bytes failed")
