"""Weight updates over HTTP: the bare endpoints. `VerlEngine` pushes whole models through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.adapter import sglang as api
from verl_server.adapter.calls_information import InformationCalls
from verl_server.errors import VerlServerError

Json = dict[str, Any]


class WeightCalls(InformationCalls):
    """Update sessions, and weights from tensors, from a process group and from disk."""

    async def begin_weight_update(self) -> None:
        """Open an update session, where this version of SGLang has sessions.

        A session that a dead trainer left open is closed first: it belongs to nobody.
        """
        if not (await self.capabilities()).update_sessions:
            return
        try:
            await self._http.call(api.BEGIN_UPDATE, {})
        except VerlServerError as error:
            if "already open" not in error.message:
                raise
            await self._http.call(api.END_UPDATE, {})
            await self._http.call(api.BEGIN_UPDATE, {})

    async def end_weight_update(self) -> None:
        """Close the session; the server then finishes quantized layers."""
        if (await self.capabilities()).update_sessions:
            await self._http.call(api.END_UPDATE, {})

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> Json:
        """One bucket of an update. `serialized_named_tensors`: one base64 payload per TP rank.

        `VerlEngine.update_weights_from_tensor` is the call for whole models; this one is the bare endpoint.
        """
        args = await self._arguments()
        api.check_tensor_payloads(
            serialized_named_tensors,
            int(args.get("tp_size") or 1),
            load_format,
            args.get("custom_weight_loader") or (),
        )
        body = api.update_from_tensor_payload(
            serialized_named_tensors,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        return await self._weights_call(api.UPDATE_FROM_TENSOR, body)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Json:
        """Join a process group that the trainer opens at the same time (its rank 0 broadcasts)."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        return await self._weights_call(api.INIT_UPDATE_GROUP, body)

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Json:
        """Leave the process group."""
        return await self._weights_call(api.DESTROY_UPDATE_GROUP, {"group_name": group_name})

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        weight_version: str | None = None,
        load_format: str | None = None,
    ) -> Json:
        """Receive tensors by broadcast from the trainer, in the order given."""
        body = api.update_from_distributed_payload(
            names,
            [str(dtype) for dtype in dtypes],
            shapes,
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        return await self._weights_call(api.UPDATE_FROM_DISTRIBUTED, body)

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> Json:
        """Load a checkpoint folder that the server can read."""
        body = api.update_from_disk_payload(
            model_path, load_format=load_format, flush_cache=flush_cache, weight_version=weight_version
        )
        return await self._weights_call(api.UPDATE_FROM_DISK, body)

    async def update_weight_version(self, version: str, abort_all_requests: bool = False) -> None:
        """Name the weights that are served now."""
        body = {"new_version": str(version), "abort_all_requests": abort_all_requests}
        await self._http.call(api.WEIGHT_VERSION, body)

    async def weights_checker(self, action: str = "checksum") -> Json:
        """Hash (`checksum`), remember (`snapshot`) or compare the weights inside the server."""
        return await self._weights_call(api.WEIGHTS_CHECKER, api.checker_payload(action))

    async def _arguments(self) -> Mapping[str, Any]:
        """The server's arguments, asked for once where somebody else started it."""
        if not self.server_args:
            self.server_args = await self.get_server_info()
        return self.server_args

    async def _weights_call(self, endpoint: api.Endpoint, body: Json) -> Json:
        reply = await self._http.call(endpoint, body)
        return api.require_success(reply, self.base_url + endpoint.path)
