"""Transport for a trainer and servers on the GPUs of one machine: each trainer rank has a double buffer on its GPU.

The server's TP rank i reads the double buffer of trainer rank i (modulo the number of trainer ranks). With equal
placements no byte leaves its GPU. IPC handles are opened once. Everything except the memory is the same as in the
transport `buckets`. This transport has not been run on a GPU yet.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from verl_server.types import Json
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.device_memory import DeviceBucketMemory
from verl_server.weights.double_buffer.layout import DoubleBufferLayout
from verl_server.weights.transports import buckets


class Stream(buckets.Stream):
    """Creates and opens double buffers whose buckets are in GPU memory."""

    in_host_memory = False

    @staticmethod
    def create(layout: DoubleBufferLayout) -> DoubleBuffer:
        return _with_device_buckets(DoubleBuffer.create(layout), lambda: DeviceBucketMemory.create(layout.bucket_bytes))

    @staticmethod
    def describe(double_buffer: DoubleBuffer) -> Json:
        memory = double_buffer.buckets
        assert isinstance(memory, DeviceBucketMemory)
        return {**buckets.Stream.describe(double_buffer), "ipc_handle": base64.b64encode(memory.handle()).decode()}

    @staticmethod
    def open(description: Json, layout: DoubleBufferLayout) -> DoubleBuffer:
        handle = base64.b64decode(description["ipc_handle"])
        return _with_device_buckets(
            DoubleBuffer.open(description["location"], layout),
            lambda: DeviceBucketMemory.open(handle, layout.bucket_bytes),
        )


class Receiver(buckets.Receiver):
    """Reads the tensors from a double buffer in GPU memory."""

    stream = Stream


def _with_device_buckets(double_buffer: DoubleBuffer, make_buckets: Callable[[], DeviceBucketMemory]) -> DoubleBuffer:
    """The double buffer with buckets on a GPU. It is closed if they cannot be made."""
    try:
        double_buffer.buckets = make_buckets()
    except BaseException:
        double_buffer.close()
        raise
    return double_buffer
