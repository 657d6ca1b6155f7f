"""The process group that broadcasts weights: gloo between hosts, NCCL between GPUs. Not torch's default group."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verl_server.errors import DeadlineError, ServerError
from verl_server.weights.broadcast.placement import POLL_INTERVAL_S
from verl_server.weights.broadcast.store import FORMING_TIMEOUT_S

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo


def form_gloo_group(store: Any, name: str, rank: int, size: int, address: str) -> ProcessGroupGloo:
    """Form a gloo group. It is not registered with torch, so it does not affect any other group of the process."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=FORMING_TIMEOUT_S)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]


def form_group(device_type: str, store: Any, name: str, rank: int, size: int, address: str) -> Any:
    """Form a group for tensors on `device_type`: NCCL for "cuda", gloo for "cpu"."""
    if device_type == "cpu":
        return form_gloo_group(store, name, rank, size, address)
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=1)  # this library has its own deadlines: NCCL's would end the process
    with _without_nccl_error_handling():
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]
    _connect_nccl(group)
    return group


def _connect_nccl(group: Any) -> None:
    """Connect the members of an NCCL group now. By default they connect at the first broadcast, without a deadline."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            with torch.cuda.device(device):
                group.eager_connect_single_device(device)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            failures.append(error)

    thread = threading.Thread(target=connect, name="verl-server-nccl", daemon=True)
    thread.start()
    thread.join(FORMING_TIMEOUT_S)
    if not thread.is_alive() and not failures:
        return
    group.abort()
    if failures:
        raise failures[0]
    raise DeadlineError(
        f"NCCL did not connect the members of the group within {FORMING_TIMEOUT_S:g} s",
        operation="broadcast",
        seconds=FORMING_TIMEOUT_S,
    )


@contextlib.contextmanager
def _without_nccl_error_handling() -> Iterator[None]:
    """An NCCL group that is created in the body does not end this process when another member dies."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def broadcast_memory(group: ProcessGroupGloo, memory: memoryview, timeout_s: float) -> None:
    """Broadcast the bytes of rank 0's `memory` into that of the other members, and wait until that is done.

    Raises RuntimeError when a member dies or the time is over.
    """
    import torch

    start_broadcast(group, torch.frombuffer(memory, dtype=torch.uint8), timeout_s).wait()


def start_broadcast(group: Any, tensor: torch.Tensor, timeout_s: float) -> Any:
    """Start a broadcast of rank 0's tensor. Returns torch's work handle."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.timeout = datetime.timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def wait_for_work(work: Any, deadline: float, timeout_s: float, is_wanted: Callable[[], bool]) -> None:
    """Wait until a collective operation is finished, also on the device.

    `deadline` is a time of `time.monotonic`, `timeout_s` the number of seconds from the start of the update to it.
    Raises the error of the operation, DeadlineError, or ServerError when `is_wanted()` becomes false.
    """
    import torch

    while not work.is_completed():
        if not is_wanted():
            raise ServerError("the other end of the broadcast has abandoned the update")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the broadcast of the weights was not finished within {timeout_s:g} s: "
                "raise Timeouts(weights_s=...) if the network is slow",
                operation="broadcast",
                seconds=timeout_s,
            )
        time.sleep(POLL_INTERVAL_S)
    work.wait(datetime.timedelta(seconds=10.0))  # the operation is finished: this raises its error, if there is one
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
