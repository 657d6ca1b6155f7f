"""Messages between the trainer and the command server of a sandbox: JSON objects with bytes. Standard library only.

A frame is the length of the JSON and the length of the bytes, each as 4 bytes in network order, then the JSON and the
bytes. No file descriptors are sent: Linux counts those that are on their way for each user, and refuses too many.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

HEADER = struct.Struct("!II")


def encode_frame(message: Mapping[str, Any], content: bytes = b"") -> bytes:
    """The frame of a message."""
    encoded = json.dumps(message).encode()
    return HEADER.pack(len(encoded), len(content)) + encoded + content


class FrameBuffer:
    """Bytes that have arrived, until they are whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes. Yields each message that is complete now."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            message_size, content_size = HEADER.unpack_from(self._bytes)
            begin = HEADER.size + message_size
            if len(self._bytes) < begin + content_size:
                return
            message = json.loads(self._bytes[HEADER.size : begin])
            content = bytes(self._bytes[begin : begin + content_size])
            del self._bytes[: begin + content_size]
            yield message, content


# -- Bounded output ---------------------------------------------------------------------------------
# Buffers that keep the beginning and the end of a command's output. Imports the standard library only.

CHUNK_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20


class BoundedOutput:
    """Keeps at most `max_bytes` of an output: of a longer output the middle is replaced by a note."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes, self._tail_bytes = max_bytes - max_bytes // 2, max_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self._num_omitted = 0

    def add(self, chunk: bytes) -> None:
        """Append a part of the output."""
        room = self._head_bytes - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            self._num_omitted += excess
            del self._tail[:excess]

    @property
    def content(self) -> bytes:
        """The beginning, the note if there is one, and the end."""
        note = f"\n[... {self._num_omitted} bytes omitted ...]\n".encode() if self._num_omitted else b""
        return bytes(self._head) + note + bytes(self._tail)


class OutputPipe:
    """The read end of a pipe, which does not block, and what was read from it."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._output = BoundedOutput(max_bytes)
        self._is_taken = self._is_finished = self.is_closed = False

    def read(self) -> bool:
        """Read what is there. Returns False at the end of the output."""
        self._read_chunk()
        return not self._is_finished

    def _read_chunk(self) -> bool:
        """Read once. Returns False if there is nothing to read now."""
        try:
            chunk = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._is_finished = not chunk
        if not self._is_taken:
            self._output.add(chunk)
        return True

    def take(self) -> bytes:
        """The output so far, with what the pipe holds. What a process prints after that is dropped."""
        for _ in range(MAX_PIPE_BYTES // CHUNK_BYTES):
            if self._is_finished or not self._read_chunk():
                break
        self._is_taken = True
        content, self._output = self._output.content, BoundedOutput(0)
        return content

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)
        self.is_closed = True
