"""The bodies of control and weight requests. What would end the server is refused here, before it is sent."""

from __future__ import annotations

import base64
import pickletools
from collections.abc import Sequence
from typing import Any

from verl_server.adapter.sglang.requests import require
from verl_server.config import MemoryTag, PauseMode
from verl_server.errors import BadInputError

Json = dict[str, Any]


def abort_payload(rid: str | None, abort_all: bool) -> Json:
    """SGLang aborts by *prefix* of the rid; an empty rid would abort everything."""
    require(abort_all or bool(rid), "abort_request needs a non-empty rid, or abort_all=True")
    return {"rid": rid or "", "abort_all": abort_all}


def pause_payload(mode: str) -> Json:
    known = [each.value for each in PauseMode if each is not PauseMode.WAIT]
    if mode == PauseMode.WAIT:
        raise BadInputError(f"one server cannot wait for its requests, as new ones come: take one of {known}")
    require(mode in known, f"pause mode must be one of {known}, got {mode!r}")
    return {"mode": str(mode)}


def memory_tags(tags: Sequence[str] | None) -> list[str]:
    """The tags as SGLang spells them; None means all."""
    if tags is None:
        return [tag.value for tag in MemoryTag]
    require(not isinstance(tags, str), f"tags must be a list of strings, got the string {tags!r}")
    try:
        found = [MemoryTag(tag).value for tag in tags]
    except ValueError:
        raise BadInputError(f"memory tags are {[t.value for t in MemoryTag]}, got {list(tags)!r}") from None
    require(len(found) > 0, "tags is empty; leave it out to mean all")
    require(len(set(found)) == len(found), f"a tag is named twice: {found}")
    return found


def check_tensor_payloads(
    serialized: Any, tp_size: int | None, load_format: str | None, loaders: Sequence[str]
) -> None:
    """Refuse what ends the server: too few payloads, undecodable ones, load formats that it does not know."""
    require(
        isinstance(serialized, (list, tuple)) and all(isinstance(item, str) for item in serialized),
        "serialized_named_tensors must be a list of base64 strings, one per TP rank",
    )
    require(
        tp_size is None or len(serialized) == tp_size,
        f"{len(serialized)} payloads for {tp_size} TP ranks; SGLang needs one for each",
    )
    known = (None, "flattened_bucket", *loaders)
    require(load_format in known, f"load_format {load_format!r} would end this server; it takes {known}")
    for rank, item in enumerate(serialized):
        try:
            for _ in pickletools.genops(base64.b64decode(item, validate=True)):
                pass
        except ValueError as error:
            raise BadInputError(f"payload {rank} is no base64 of a pickle of tensors: {error}") from error


def update_from_tensor_payload(
    serialized: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: str | None
) -> Json:
    """`serialized` holds one base64 payload per TP rank."""
    return _update({"serialized_named_tensors": list(serialized)}, load_format, flush_cache, weight_version)


def update_from_distributed_payload(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None,
    flush_cache: bool,
    weight_version: str | None,
) -> Json:
    require(
        len(names) == len(dtypes) == len(shapes) > 0,
        f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must be equally many, and not none",
    )
    body = {
        "names": list(names),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
    }
    return _update(body, load_format, flush_cache, weight_version)


def update_from_disk_payload(
    model_path: str, *, load_format: str | None, flush_cache: bool, weight_version: str | None
) -> Json:
    require(isinstance(model_path, str) and model_path != "", f"model_path must be a path, got {model_path!r}")
    return _update({"model_path": model_path}, load_format, flush_cache, weight_version)


def _update(body: Json, load_format: str | None, flush_cache: bool, weight_version: str | None) -> Json:
    body["flush_cache"] = flush_cache
    if load_format is not None:
        body["load_format"] = load_format
    if weight_version is not None:
        body["weight_version"] = str(weight_version)
    return body


def checker_payload(action: str) -> Json:
    actions = ("checksum", "snapshot", "compare", "reset_tensors")
    require(action in actions, f"weights_checker knows the actions {actions}, got {action!r}")
    return {"action": action}
