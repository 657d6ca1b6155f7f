"""Transport for a trainer and servers on the GPUs of one machine: each trainer rank has a double buffer on its GPU.

The server's TP rank i reads the double buffer of trainer rank i (modulo the number of trainer ranks). With equal
placements no byte leaves its GPU. IPC handles are opened once. Everything except the memory is the same as in the
transport `buckets`. This transport has not been run on a GPU yet.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.weights.double_buffer.buffer import DoubleBuffer, DoubleBufferLayout
from verl_server.weights.double_buffer.device_memory import DeviceBucketMemory, visible_uuids
from verl_server.weights.transports import buckets


class Stream(buckets.Stream):
    """Creates and opens double buffers whose buckets are in GPU memory."""

    in_host_memory = False

    @staticmethod
    def create(layout: DoubleBufferLayout) -> DoubleBuffer:
        double_buffer = DoubleBuffer.create(layout)
        try:
            double_buffer.buckets = DeviceBucketMemory.create(layout.bucket_bytes)
        except BaseException:
            double_buffer.close()
            raise
        return double_buffer

    @staticmethod
    def describe(double_buffer: DoubleBuffer) -> Json:
        memory = double_buffer.buckets
        assert isinstance(memory, DeviceBucketMemory)
        return {
            **buckets.Stream.describe(double_buffer),
            "ipc_handle": base64.b64encode(memory.handle()).decode(),
            "device_uuid": memory.device_uuid,
            "num_visible": len(visible_uuids()),
        }

    @staticmethod
    def require_usable(descriptions: Sequence[Json]) -> None:
        """Raise BadInputError if two ranks that see several GPUs have their buckets on the same GPU."""
        ranks: dict[str, int] = {}
        for rank, description in enumerate(descriptions):
            first = ranks.setdefault(description["device_uuid"], rank)
            if first != rank and description["num_visible"] > 1:
                raise BadInputError(
                    f"trainer ranks {first} and {rank} have the same current GPU ({description['device_uuid']}), "
                    f"although rank {rank} sees {description['num_visible']} GPUs. The transport 'cuda_ipc' stages the "
                    "weights on the current GPU of each rank: call torch.cuda.set_device(local_rank) before VerlEngine"
                )

    @staticmethod
    def open_buckets(double_buffer: DoubleBuffer, description: Json) -> None:
        handle = base64.b64decode(description["ipc_handle"])
        double_buffer.buckets = DeviceBucketMemory.open(
            handle, description["device_uuid"], double_buffer.layout.bucket_bytes
        )


class Receiver(buckets.Receiver):
    """Reads the tensors from a double buffer in GPU memory."""

    stream = Stream
