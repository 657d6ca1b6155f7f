"""Checkpoints of a model and its optimizer, for plain modules and for those sharded by FSDP2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl_server.errors import BadInputError, VerlServerError

LATEST = "latest"
"""Name of the file with the name of the last complete checkpoint."""


def save_checkpoint(folder: Path | str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the state after `step` steps in `folder`, and then remove all other checkpoints there.

    All ranks call this with the same `folder`, which all of them can read. A process that is killed meanwhile leaves
    the last complete checkpoint as it was. Parameters without a gradient, as those under LoRA adapters, are saved too.
    Raises BadInputError for a `step` below 0, and VerlServerError if the checkpoint cannot be written, for example
    because the disk is full.
    """
    folder = Path(folder)
    if step < 0:
        raise BadInputError(f"step must be 0 or more, got {step}", argument="step")
    name, last = f"step-{step:06d}", _read_latest(folder)
    target = folder / (name if name != last else f"{name}-again")
    _barrier()
    if _is_first_rank():
        shutil.rmtree(target, ignore_errors=True)  # what a killed process has left
    _barrier()
    weights, state = get_state_dict(model, optimizer)
    try:
        save({"model": weights, "optimizer": state}, checkpoint_id=str(target))
    except CheckpointException as error:  # a BaseException
        raise VerlServerError(f"the checkpoint {target} cannot be written: {error}") from error
    if _is_first_rank():
        partial = folder / f"{LATEST}.partial"
        partial.write_text(target.name, encoding="utf-8")
        partial.replace(folder / LATEST)
        for other in folder.glob("step-*"):
            if other != target:
                shutil.rmtree(other)
    _barrier()


def load_checkpoint(folder: Path | str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last complete checkpoint of `folder` into `model` and `optimizer`, on all ranks.

    Returns its number of steps, 0 if there is none. Raises BadInputError if the checkpoint is that of another model:
    with other parameters, shapes or dtypes.
    """
    if (last := _read_latest(Path(folder))) is None:
        return 0
    path = Path(folder) / last
    weights, state = get_state_dict(model, optimizer)
    try:
        saved = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise BadInputError(f"the checkpoint {path} is damaged: {error}", argument="folder") from error
    found = {name.removeprefix("model."): _kind(value) for name, value in saved.items() if name.startswith("model.")}
    wanted = {name: _kind(value) for name, value in weights.items()}
    if other := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        name = other[0]
        raise BadInputError(
            f"the checkpoint {path} is that of another model: {len(other)} parameters differ, for example {name} is "
            f"{found.get(name, 'missing')} there and {wanted.get(name, 'missing')} in the model",
            argument="folder",
        )
    states: dict[str, Any] = {"model": weights, "optimizer": state}
    try:
        load(states, checkpoint_id=str(path))
    except CheckpointException as error:
        message = f"the checkpoint {path} is damaged, or has another optimizer: {error}"
        raise BadInputError(message, argument="folder") from error
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return int(last.split("-")[1])


def save_pretrained(folder: Path | str, model: Any, tokenizer: Any) -> None:
    """Write the model and its tokenizer as `from_pretrained` of transformers or peft reads them.

    All ranks call this; rank 0 writes. The weights have the dtype of `model`. That of peft writes its adapters only.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if _is_first_rank():
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    _barrier()


def _kind(value: Any) -> str:
    """Shape and dtype of a tensor, or of its metadata in a checkpoint."""
    if isinstance(value, TensorStorageMetadata):
        return f"{list(value.size)} {value.properties.dtype}"
    return f"{list(value.shape)} {value.dtype}"


def _read_latest(folder: Path) -> str | None:
    """Name of the last complete checkpoint."""
    file = folder / LATEST
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
