"""Copies of received tensors on the accelerator of a TP rank, from which a model loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def copies_on(device: torch.device, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Copies of host tensors on an accelerator. The next copy runs while the model loads the present one.

    What a model writes to a tensor while it loads stays in the copy. The generator holds a reference to a host tensor
    until its copy is finished: a bucket is filled again when no reference to it is left. Tensors that are on an
    accelerator already are passed on. Where the accelerator has no memory for a copy, the copy is on the host.
    """
    import torch

    module = torch.get_device_module(device)
    stream = module.Stream(device)
    ahead: Any = None

    def start(name: str, tensor: torch.Tensor) -> Any:
        try:
            with module.stream(stream):
                copy = tensor.to(device, non_blocking=True)
                return name, tensor, copy, stream.record_event()
        except torch.OutOfMemoryError:
            return name, tensor, tensor.clone(), None

    def finish(started: Any) -> tuple[str, torch.Tensor]:
        name, _, copy, event = started
        if event is not None:
            event.synchronize()
            copy.record_stream(module.current_stream(device))
        return name, copy

    for name, tensor in named_tensors:
        if tensor.device.type != "cpu":
            # The model holds this tensor until it gets the next one. A reader that is asked for a tensor in advance
            # would wait for the bucket of a tensor that the model still holds.
            yield name, tensor
            del tensor
            continue
        started = start(name, tensor)
        del tensor
        if ahead is not None:
            yield finish(ahead)
        ahead, started = started, None
    if ahead is not None:
        yield finish(ahead)
