"""Trainer and server on the GPUs of one machine: two buckets on each trainer rank's GPU, filled and emptied in turn.

The server's TP rank i reads those of trainer rank i (modulo their number), so with equal placements nothing
leaves a GPU. Handles are opened once. Everything but the memory is the same as in `buckets`. Not run on a GPU yet.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from verl_server.weights.device import DeviceBuckets
from verl_server.weights.double_buffer import DoubleBuffer, DoubleBufferLayout
from verl_server.weights.transports import buckets
from verl_server.weights.transports.base import Json


class Stream(buckets.Stream):
    on_host = False

    @staticmethod
    def create(layout: DoubleBufferLayout) -> DoubleBuffer:
        return _behind(DoubleBuffer.create(layout), lambda: DeviceBuckets.create(layout.bucket_bytes))

    @staticmethod
    def describe(lane: DoubleBuffer) -> Json:
        assert isinstance(lane.buckets, DeviceBuckets)
        return {**buckets.Stream.describe(lane), "handle": base64.b64encode(lane.buckets.handle()).decode()}

    @staticmethod
    def open(described: Json, layout: DoubleBufferLayout) -> DoubleBuffer:
        handle = base64.b64decode(described["handle"])
        return _behind(
            DoubleBuffer.open(described["path"], layout), lambda: DeviceBuckets.open(handle, layout.bucket_bytes)
        )


class Receiver(buckets.Receiver):
    stream = Stream


def _behind(lane: DoubleBuffer, buckets_of: Callable[[], DeviceBuckets]) -> DoubleBuffer:
    """The lane with its buckets, or neither."""
    try:
        lane.buckets = buckets_of()
    except BaseException:
        lane.close()
        raise
    return lane
