"""Checkpoints of a model and its optimizer, for plain modules and for those sharded by FSDP2.

A checkpoint is a folder of `torch.distributed.checkpoint` with the tensors `model.NAME` and `optimizer.NAME.KEY`, by
the names of parameters, and `groups`: the options of the optimizer's groups as JSON. A parameter that has had no
gradient has no state in the optimizer, and none in the checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl_server.errors import BadInputError, VerlServerError
from verl_server.validation import require_whole_number

LATEST = "latest"
"""Name of the file with the name of the last complete checkpoint."""
METADATA = ".metadata"
"""The file of torch that is written last into a checkpoint."""
NAME = re.compile(r"step-\d{6,}(-again)?")
_MODEL, _OPTIMIZER, _GROUPS = "model.", "optimizer.", "groups"


def save_checkpoint(
    folder: Path | str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 1
) -> None:
    """Save the state after `step` steps in `folder`, and then remove earlier checkpoints: the last `keep` ones stay.

    All ranks call this with the same `folder`, which all of them can read. A process that is killed meanwhile leaves
    the last complete checkpoint as it was. Parameters without a gradient, as those under LoRA adapters, are saved too.
    Other files and folders are not touched. Raises BadInputError for a `step` below 0, a `keep` below 1, and a folder
    that `load_checkpoint` refuses, and VerlServerError if the checkpoint cannot be written, for example because the
    disk is full.
    """
    require_whole_number("step", step, minimum=0)
    require_whole_number("keep", keep, minimum=1)
    folder = Path(folder)
    name, last = f"step-{step:06d}", _read_latest(folder)
    target = folder / (name if name != last else f"{name}-again")
    _barrier()
    if _is_first_rank():
        shutil.rmtree(target, ignore_errors=True)  # what a killed process has left
    _barrier()
    state: dict[str, Any] = {f"{_MODEL}{name}": value for name, value in get_model_state_dict(model).items()}
    for name, parameter in _parameters(model, optimizer).items():
        state |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    state[_GROUPS] = json.dumps(_options(optimizer), default=float)
    try:
        save(state, checkpoint_id=str(target))
        if _is_first_rank():
            partial = folder / f"{LATEST}.partial"
            partial.write_text(target.name, encoding="utf-8")
            partial.replace(folder / LATEST)
    except (CheckpointException, OSError) as error:  # the first is a BaseException
        raise VerlServerError(f"the checkpoint {target} cannot be written: {error}") from error
    if _is_first_rank():
        others = [path for path in _checkpoints(folder) if path != target]
        complete = [path for path in others if (path / METADATA).is_file()]
        kept = complete[len(complete) - keep + 1 :] if keep > 1 else []
        for other in others:
            if other not in kept:
                shutil.rmtree(other)
    _barrier()


def load_checkpoint(folder: Path | str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last complete checkpoint of `folder` into `model` and `optimizer`, on all ranks.

    Returns its number of steps, 0 if there is none. Raises BadInputError for a checkpoint that is damaged, for that of
    another model (with other parameters, shapes or dtypes) or of another optimizer, for a folder that is itself a
    checkpoint, and for one that has checkpoints, but not the file `latest` with the name of the last complete one.
    """
    if (last := _read_latest(Path(folder))) is None:
        return 0
    path = Path(folder) / last
    try:
        saved = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise BadInputError(f"the checkpoint {path} is damaged: {error}", argument="folder") from error
    weights = get_model_state_dict(model)
    found = {name.removeprefix(_MODEL): _kind(value) for name, value in saved.items() if name.startswith(_MODEL)}
    wanted = {name: _kind(value) for name, value in weights.items()}
    if other := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        name = other[0]
        raise BadInputError(
            f"the checkpoint {path} is that of another model: {len(other)} parameters differ, for example {name} is "
            f"{found.get(name, 'missing')} there and {wanted.get(name, 'missing')} in the model",
            argument="folder",
        )
    parameters = _parameters(model, optimizer)
    groups_on_device = [group for group in optimizer.param_groups if group.get("capturable") or group.get("fused")]
    on_device = {parameter for group in groups_on_device for parameter in group["params"]}
    state = {name: _empty_state(name, p, saved, step_on_device=p in on_device) for name, p in parameters.items()}
    tensors: dict[str, Any] = {f"{_MODEL}{name}": value for name, value in weights.items()}
    tensors |= {f"{_OPTIMIZER}{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    if unknown := sorted(name for name in saved if name.startswith(_OPTIMIZER) and name not in tensors):
        raise BadInputError(
            f"the checkpoint {path} is that of another optimizer, which has trained {unknown[0]}", argument="folder"
        )
    tensors[_GROUPS] = ""
    try:
        load(tensors, checkpoint_id=str(path))
    except CheckpointException as error:
        raise BadInputError(f"the checkpoint {path} is damaged: {error}", argument="folder") from error
    groups = json.loads(tensors[_GROUPS])
    if [group.keys() for group in groups] != [group.keys() for group in _options(optimizer)]:
        raise BadInputError(f"the checkpoint {path} is that of another optimizer", argument="folder")
    set_model_state_dict(model, {name: tensors[f"{_MODEL}{name}"] for name in weights})
    for name, entry in state.items():
        optimizer.state[parameters[name]] = {key: tensors[f"{_OPTIMIZER}{name}.{key}"] for key in entry}
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    return int(last.split("-")[1])


def _parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The parameters of the optimizer by their names in the model."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if parameter in trained}


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of all groups, such as the learning rate."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _empty_state(
    name: str, parameter: torch.nn.Parameter, saved: dict[str, Any], *, step_on_device: bool
) -> dict[str, Any]:
    """What a checkpoint has of the state of a parameter, to load into: tensors, and None for other values.

    The tensors are where torch's own `Optimizer.load_state_dict` has them: on the device of the parameter, except
    `step`, which is there for capturable and fused optimizers only.
    """
    prefix, entry = f"{_OPTIMIZER}{name}.", dict[str, Any]()
    for full_name, value in saved.items():
        if full_name.startswith(prefix) and "." not in (key := full_name.removeprefix(prefix)):
            entry[key] = None
            if isinstance(value, TensorStorageMetadata):
                if value.size == parameter.shape:
                    entry[key] = torch.zeros_like(parameter, dtype=value.properties.dtype, requires_grad=False)
                else:
                    device = parameter.device if step_on_device or key != "step" else None
                    entry[key] = torch.zeros(value.size, dtype=value.properties.dtype, device=device)
    return entry


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
    """Name of the last complete checkpoint. Raises BadInputError if there seems to be one that cannot be named."""
    file = folder / LATEST
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    if (folder / METADATA).is_file():
        raise BadInputError(f"{folder} is itself a checkpoint: pass the folder that contains it", argument="folder")
    if complete := [path.name for path in _checkpoints(folder) if (path / METADATA).is_file()]:
        raise BadInputError(
            f"{folder} has the checkpoints {', '.join(complete)}, but no file {LATEST!r}. Write the name of the one to "
            "continue with into it, or choose another folder",
            argument="folder",
        )
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, also those that a killed process has not finished, the earliest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    own = [path for path in found if all(part.suffix == ".distcp" or part.name == METADATA for part in path.iterdir())]
    return sorted(own, key=lambda path: (int(path.name.split("-")[1]), path.name))


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
