"""Checkpoints of a model and its optimizer, for plain modules and for those sharded by FSDP2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl_server.errors import BadInputError

_PREFIX, _WRITTEN = "step-", ".written"


def save_checkpoint(folder: Path | str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the state after `step` steps in `folder`, and then remove all other checkpoints there.

    All ranks call this with the same `folder`, which all of them can read. A process that is killed meanwhile leaves
    the last complete checkpoint as it was. Parameters without a gradient, as those under LoRA adapters, are saved too.
    """
    target = Path(folder) / f"{_PREFIX}{step:06d}"
    if _is_first_rank():
        shutil.rmtree(target, ignore_errors=True)  # what a killed process has left
    _barrier()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=str(target))
    if _is_first_rank():
        (target / _WRITTEN).touch()
        for other in _folders(Path(folder)):
            if other != target:
                shutil.rmtree(other)
    _barrier()


def load_checkpoint(folder: Path | str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint of `folder` into `model` and `optimizer`, on all ranks.

    Returns its number of steps, 0 if there is none. Raises BadInputError if the checkpoint is that of another model.
    """
    complete = [path for path in _folders(Path(folder)) if (path / _WRITTEN).exists()]
    if not complete:
        return 0
    weights, state = get_state_dict(model, optimizer)
    states: dict[str, Any] = {"model": weights, "optimizer": state}
    try:
        load(states, checkpoint_id=str(complete[-1]))
    except CheckpointException as error:
        raise BadInputError(
            f"the checkpoint {complete[-1]} does not fit to the model: {error}", argument="folder"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return int(complete[-1].name.removeprefix(_PREFIX))


def _folders(folder: Path) -> list[Path]:
    """The folders of all checkpoints, the oldest first."""
    return sorted(folder.glob(f"{_PREFIX}*"), key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
