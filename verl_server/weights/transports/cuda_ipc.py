"""Transport for a trainer and servers on the GPUs of one machine: each trainer rank has a pair of buckets on its GPU.

The server's TP rank i reads the buckets of trainer rank i (modulo the number of trainer ranks). With equal
placements no byte leaves its GPU. IPC handles are opened once. Everything except the memory of the buckets is the same
as in the transport `buckets`. This transport has not been run on a GPU yet.
"""

from verl_server.weights.transports.buckets import Receiver

__all__ = ["Receiver"]
