"""Requests that update weights: the bare endpoints. They are methods of `AsyncHttpServerEngineAdapter`.

`VerlEngine.update_weights_from_tensor` is the call for whole models. It checks, sends and verifies them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from verl_server.adapter.sglang import endpoints
from verl_server.adapter.sglang.payloads import (
    check_tensor_payloads,
    checker_payload,
    update_from_disk_payload,
    update_from_distributed_payload,
    update_from_tensor_payload,
    weight_version_label,
)
from verl_server.adapter.sglang.pushable import require_unpacked_experts
from verl_server.errors import ServerError, VerlServerError
from verl_server.types import Json

if TYPE_CHECKING:
    import torch

    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


async def begin_weight_update(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Open an update session. When this version of SGLang has no sessions, only check that it can do without.

    A session that a dead trainer left open is closed first. Raises UnsupportedError if an update needs a session.
    """
    if not (await adapter.capabilities()).update_sessions:
        require_unpacked_experts(await adapter.connection.get_resolved_args())
        return
    try:
        await adapter.connection.call(endpoints.BEGIN_UPDATE, {})
    except VerlServerError as error:
        if "already open" not in error.message:
            raise
        await adapter.connection.call(endpoints.END_UPDATE, {})
        await adapter.connection.call(endpoints.BEGIN_UPDATE, {})


async def end_weight_update(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Close the update session. The server then finishes quantized layers."""
    if (await adapter.capabilities()).update_sessions:
        await adapter.connection.call(endpoints.END_UPDATE, {})


async def update_weights_from_tensor(
    adapter: AsyncHttpServerEngineAdapter,
    serialized_named_tensors: Sequence[str],
    load_format: str | None = None,
    flush_cache: bool = True,
    weight_version: int | None = None,
) -> Json:
    """Load one bucket of tensors. `serialized_named_tensors` holds one base64 payload per TP rank.

    `load_format` is None, "flattened_bucket", or a custom weight loader of the server. Raises BadInputError for
    payloads that would end the server.
    """
    connection = adapter.connection
    server_args = await connection.get_server_args()
    weight_loaders = server_args.get("custom_weight_loader") or ()
    check_tensor_payloads(serialized_named_tensors, await connection.get_tp_size(), load_format, weight_loaders)
    body = update_from_tensor_payload(
        serialized_named_tensors, load_format=load_format, flush_cache=flush_cache, weight_version=weight_version
    )
    return await connection.call_weights(endpoints.UPDATE_FROM_TENSOR, body)


async def init_weights_update_group(
    adapter: AsyncHttpServerEngineAdapter,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
) -> Json:
    """Join a process group for broadcasts of weights. The trainer, which is rank 0, must join at the same time."""
    body = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }
    return await adapter.connection.call_weights(endpoints.INIT_UPDATE_GROUP, body)


async def destroy_weights_update_group(
    adapter: AsyncHttpServerEngineAdapter, group_name: str = "weight_update_group"
) -> Json:
    """Leave the process group of `init_weights_update_group`."""
    return await adapter.connection.call_weights(endpoints.DESTROY_UPDATE_GROUP, {"group_name": group_name})


async def update_weights_from_distributed(
    adapter: AsyncHttpServerEngineAdapter,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype | str],
    shapes: Sequence[Sequence[int]],
    group_name: str = "weight_update_group",
    flush_cache: bool = True,
    weight_version: int | None = None,
    load_format: str | None = None,
) -> Json:
    """Receive tensors by broadcast from the trainer, in the order of `names`."""
    body = update_from_distributed_payload(
        names,
        dtypes,
        shapes,
        group_name=group_name,
        load_format=load_format,
        flush_cache=flush_cache,
        weight_version=weight_version,
    )
    return await adapter.connection.call_weights(endpoints.UPDATE_FROM_DISTRIBUTED, body)


async def update_weights_from_disk(
    adapter: AsyncHttpServerEngineAdapter,
    model_path: str | os.PathLike[str],
    load_format: str | None = None,
    flush_cache: bool = True,
    weight_version: int | None = None,
) -> Json:
    """Load a checkpoint folder, which the server reads on its own machine.

    The folder must contain all weights if the server's weights were released. Raises ServerError if it is not loaded.
    """
    body = update_from_disk_payload(
        model_path, load_format=load_format, flush_cache=flush_cache, weight_version=weight_version
    )
    try:
        reply = await adapter.connection.call_weights(endpoints.UPDATE_FROM_DISK, body)
    except ServerError as error:
        if "body" not in error.details:
            raise
        host = urlsplit(adapter.base_url).hostname
        raise ServerError(
            f"the server at {adapter.base_url} could not load {body['model_path']}: {error.details['body']} The server "
            f"reads it on its own machine, {host}: check that the folder is there, at the same path and complete (a "
            "file system that trainer and servers share), and that its tensors fit the model",
            **error.details,
        ) from error
    adapter.connection.weights_undefined = False
    return reply


async def update_weight_version(
    adapter: AsyncHttpServerEngineAdapter, weight_version: int, abort_all_requests: bool = False
) -> None:
    """Set the version of the weights that the server has now. The weights do not change.

    Raises BadInputError for a version that is not a whole number of at least 0.
    """
    body = {"new_version": weight_version_label(weight_version), "abort_all_requests": abort_all_requests}
    adapter.connection.known_versions.add(weight_version)
    await adapter.connection.call(endpoints.WEIGHT_VERSION, body)


async def weights_checker(adapter: AsyncHttpServerEngineAdapter, action: str = "checksum") -> Json:
    """Compute checksums of the served weights (`checksum`), save a copy of them (`snapshot`) or compare with it."""
    return await adapter.connection.call_weights(endpoints.WEIGHTS_CHECKER, checker_payload(action))
