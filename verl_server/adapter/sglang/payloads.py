"""Bodies of control and weight requests. Values that would end the server are refused here, before they are sent."""

from __future__ import annotations

import base64
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from verl_server.adapter.sglang.requests import require
from verl_server.config import PauseMode
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import is_whole_number, to_plain

if TYPE_CHECKING:
    import torch


CHECKER_ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")


def abort_payload(rid: str | None, abort_all: bool) -> Json:
    """SGLang aborts the request `rid` and those whose id starts with `rid`. An empty `rid` would abort all requests."""
    require(abort_all or bool(rid), "abort_request needs a non-empty rid, or abort_all=True")
    return {"rid": rid or "", "abort_all": abort_all}


def pause_payload(mode: str) -> Json:
    modes = [each.value for each in PauseMode if each is not PauseMode.WAIT]
    if mode == PauseMode.WAIT:
        raise BadInputError(
            f"one server cannot wait for its requests, because new requests keep arriving: use one of {modes}"
        )
    require(mode in modes, f"pause mode must be one of {modes}, got {mode!r}")
    return {"mode": str(mode)}


def check_tensor_payloads(
    serialized_named_tensors: Any, tp_size: int, load_format: str | None, weight_loaders: Sequence[str]
) -> None:
    """Refuse payloads that would end the server: a wrong number of payloads, undecodable data, unknown load formats.

    `weight_loaders` are the server's custom weight loaders, which are load formats as well.
    """
    require(
        isinstance(serialized_named_tensors, (list, tuple))
        and all(isinstance(item, str) for item in serialized_named_tensors),
        "serialized_named_tensors must be a list of base64 strings, one per TP rank",
    )
    require(
        len(serialized_named_tensors) == tp_size,
        f"{len(serialized_named_tensors)} payloads for {tp_size} TP ranks; SGLang needs one payload for each TP rank",
    )
    formats = (None, "flattened_bucket", *weight_loaders)
    require(
        load_format in formats, f"load_format {load_format!r} would end this server; it accepts one of {list(formats)}"
    )
    for rank, item in enumerate(serialized_named_tensors):
        try:
            for _ in pickletools.genops(base64.b64decode(item, validate=True)):
                pass
        except ValueError as error:
            raise BadInputError(f"payload {rank} is not the base64 text of a pickle of tensors: {error}") from error


def update_from_tensor_payload(
    serialized_named_tensors: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: int | None
) -> Json:
    """`serialized_named_tensors` holds one base64 payload per TP rank."""
    body = {"serialized_named_tensors": list(serialized_named_tensors)}
    return _update_payload(body, load_format, flush_cache, weight_version)


def update_from_distributed_payload(
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None,
    flush_cache: bool,
    weight_version: int | None,
) -> Json:
    require(
        len(names) == len(dtypes) == len(shapes) > 0,
        f"names, dtypes and shapes must be equally many, and not none: got {len(names)} names, {len(dtypes)} dtypes "
        f"and {len(shapes)} shapes",
    )
    body = {
        "names": list(names),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
    }
    return _update_payload(body, load_format, flush_cache, weight_version)


def update_from_disk_payload(
    model_path: str | os.PathLike[str], *, load_format: str | None, flush_cache: bool, weight_version: int | None
) -> Json:
    path = to_plain(model_path)
    require(isinstance(path, str) and path != "", f"model_path must be a path, got {model_path!r}")
    return _update_payload({"model_path": path}, load_format, flush_cache, weight_version)


def _update_payload(body: Json, load_format: str | None, flush_cache: bool, weight_version: int | None) -> Json:
    """Add the fields that all weight updates share. SGLang labels weights with strings."""
    body["flush_cache"] = flush_cache
    if load_format is not None:
        body["load_format"] = load_format
    if weight_version is not None:
        body["weight_version"] = weight_version_label(weight_version)
    return body


def weight_version_label(weight_version: int) -> str:
    """The server's label of a weight version. No client could read the replies of a server with another label."""
    require(
        is_whole_number(weight_version) and weight_version >= 0,
        f"weight_version must be a whole number of at least 0, got {weight_version!r}",
    )
    return str(int(weight_version))


def checker_payload(action: str) -> Json:
    require(action in CHECKER_ACTIONS, f"weights_checker knows the actions {CHECKER_ACTIONS}, got {action!r}")
    return {"action": action}


def load_lora_payload(name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], tp_size: int) -> Json:
    """The whole LoRA adapter for each TP rank, with SHA-256 sums that every TP rank compares."""
    cpu_tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    serialized = base64.b64encode(pickle.dumps(cpu_tensors)).decode()
    return {
        "lora_name": name,
        "config_dict": dict(config),
        "serialized_named_tensors": [serialized] * tp_size,
        "expected_checksums": {name: _sha256(tensor) for name, tensor in cpu_tensors.items()},
    }


def _sha256(tensor: torch.Tensor) -> str:
    import torch

    return sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
