"""Layout of the memory of a double buffer. Pure: equal arguments give equal layouts in all processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from verl_server.errors import BadInputError
from verl_server.types import TensorSpec
from verl_server.weights.layout import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    LARGEST_OFFSET,
    MAX_TP_RANKS,
    PAGE_BYTES,
    REPORT_BYTES,
    round_up,
    tensor_bytes,
)

NUM_BUCKETS = 2
"""Number of buckets in a double buffer."""
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class DoubleBufferLayout:
    """Byte offsets of everything in the memory of a double buffer."""

    num_tensors: int
    """Number of tensors of the model."""
    table_bytes: int
    """Size of the table of one bucket."""
    bucket_bytes: int
    """Size of one bucket."""
    in_host_memory: bool
    """Whether the buckets are in the same memory. Otherwise they are on a GPU."""

    progress_offset = REPORT_BYTES * MAX_TP_RANKS
    failure_offset = progress_offset + PAGE_BYTES
    checksums_offset = failure_offset + PAGE_BYTES

    @property
    def tables_offset(self) -> int:
        return round_up(self.checksums_offset + MAX_TP_RANKS * self.num_tensors * CHECKSUM_BYTES, PAGE_BYTES)

    @property
    def buckets_offset(self) -> int:
        return round_up(self.tables_offset + NUM_BUCKETS * self.table_bytes, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """Size of the host memory."""
        return self.buckets_offset + (NUM_BUCKETS * self.bucket_bytes if self.in_host_memory else 0)


def plan_double_buffer(
    tensors: Mapping[str, TensorSpec], max_bytes: int | None, in_host_memory: bool
) -> DoubleBufferLayout:
    """The layout for the tensors of a model.

    `max_bytes`: maximum size of both buckets together. None: `DEFAULT_BUCKET_BYTES` each. A bucket is never larger than
    half of the model, and never smaller than the largest tensor. Raises BadInputError if the largest tensor does not
    fit.
    """
    largest = round_up(max(1, *(tensor_bytes(spec) for spec in tensors.values())), PAGE_BYTES)
    if max_bytes is None:
        bucket_bytes = max(DEFAULT_BUCKET_BYTES, largest)
    else:
        bucket_bytes = max_bytes // NUM_BUCKETS // PAGE_BYTES * PAGE_BYTES
    if bucket_bytes < largest:
        raise BadInputError(
            f"max_staging_bytes={max_bytes} is too little: the model's largest tensor has {largest} bytes, and "
            f"{NUM_BUCKETS} buckets of that size must fit; set it to {NUM_BUCKETS * largest} or more"
        )
    largest_table = [[name, LARGEST_OFFSET, spec.shape, spec.dtype] for name, spec in tensors.items()]
    table_bytes = round_up(len(json.dumps(largest_table)), PAGE_BYTES)
    model_bytes = sum(round_up(tensor_bytes(spec), ALIGNMENT) for spec in tensors.values())
    sufficient_bytes = max(largest, round_up(model_bytes // NUM_BUCKETS, PAGE_BYTES))
    return DoubleBufferLayout(len(tensors), table_bytes, min(bucket_bytes, sufficient_bytes), in_host_memory)
