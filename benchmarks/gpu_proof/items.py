"""The items of the proof: what each shows, its command, and its deadline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_proof.norm_kernel import NO_FLOAT32

TRANSPORTS = ("shared_memory", "buckets", "cuda_ipc", "disk", "delta")
"""The weight transports that one GPU can run. NCCL, which `distributed_buckets` uses, needs a GPU for each member."""


@dataclass(frozen=True)
class Item:
    """One item of the proof."""

    name: str
    shows: str
    """What is shown when the item has run."""
    command: tuple[str, ...]
    """The command, without the interpreter, in the repository's root."""
    deadline_s: float
    """Seconds after which the item is ended."""
    exclusive: bool = False
    """Whether no other item may use the GPU at the same time, because the item measures memory or time."""
    runs_on_cpu: bool = True
    """Whether a rehearsal without a GPU can run the item."""
    cpu_options: tuple[str, ...] = ()
    """Further options of the command in a rehearsal."""
    cpu_only: str = ""
    """Why no GPU can run the item, but a rehearsal. Empty: a GPU can run the item."""

    def argv(self, device: str) -> list[str]:
        """The whole command for a device."""
        return [sys.executable, *self.command, *(self.cpu_options if device == "cpu" else ())]


def _test(
    name: str,
    shows: str,
    test: str,
    deadline_s: float = 150.0,
    *,
    exclusive: bool = False,
    runs_on_cpu: bool = True,
    cpu_only: str = "",
) -> Item:
    """An item that is one test of `test_gpu.py`, or all tests whose name begins with `test`."""
    command = ("-m", "pytest", "-q", "-n", "0", "-m", "gpu", f"tests/srt/repository/servers/test_gpu.py::{test}")
    return Item(name, shows, command, deadline_s, exclusive, runs_on_cpu, cpu_only=cpu_only)


def _weight_sync(size: str, deadline_s: float) -> Item:
    options = ("--size", size, "--budget-s", str(deadline_s - 20))
    return Item(
        f"weight-sync-{size}",
        f"duration of an update of {size} parameters, compared with a copy on the device and SGLang's own methods",
        ("-m", "gpu_proof.weight_sync", *options),
        deadline_s,
        exclusive=True,
        cpu_options=("--size", "0.01B", "--rounds", "2"),
    )


ITEMS: Sequence[Item] = (
    _test(
        "device",
        "checksums, pinned memory, CUDA IPC between two processes, the caller's stream, and the source of a kernel",
        "TestDevice",
        90.0,
        exclusive=True,
        runs_on_cpu=False,
    ),
    _test(
        "first-server",
        "a server starts with our plugin and generates; the first server on a machine also compiles SGLang's kernels",
        "test_a_server_starts",
        200.0,
        exclusive=True,
    ),
    *(
        _test(
            f"log-probs-{dtype}",
            f"a {dtype} server has the log probabilities of Hugging Face, before and after an update",
            f"test_log_probabilities_equal_hugging_face[{dtype}]",
            cpu_only=NO_FLOAT32 if dtype == "float32" else "",
        )
        for dtype in ("float32", "bfloat16")
    ),
    *(
        _test(
            f"transport-{transport}",
            f"updates through {transport!r} are verified and served",
            f"test_transport[{transport}]",
            runs_on_cpu=transport != "cuda_ipc",
        )
        for transport in TRANSPORTS
    ),
    *(
        _test(
            f"two-ranks-{transport}",
            f"two trainer ranks on the GPU push through {transport!r}",
            f"test_two_ranks[{transport}]",
            runs_on_cpu=transport != "cuda_ipc",
        )
        for transport in ("shared_memory", "buckets", "cuda_ipc")
    ),
    _weight_sync("1.5B", 120.0),
    _weight_sync("8B", 180.0),
    _test(
        "memory",
        "release and resume give back and take the memory that the driver reports",
        "test_memory_is_released_and_resumed",
        120.0,
        exclusive=True,
    ),
    _test(
        "100-updates",
        "100 updates with generation in between: memory does not grow",
        "test_hundred_updates_do_not_grow",
        160.0,
        exclusive=True,
    ),
)
