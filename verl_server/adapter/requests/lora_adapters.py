"""Requests that load and unload LoRA adapters. They are methods of `AsyncHttpServerEngineAdapter`.

Generation requests use a LoRA adapter with `lora_path=name`. The server needs `enable_lora=True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verl_server.adapter.lora_config import plain_lora_config
from verl_server.adapter.sglang import endpoints
from verl_server.adapter.sglang.payloads import load_lora_payload
from verl_server.adapter.sglang.server_arguments import require_lora
from verl_server.adapter.vllm.lora import vllm_lora_payload
from verl_server.config import EngineKind
from verl_server.errors import BadInputError
from verl_server.validation import as_pairs

if TYPE_CHECKING:
    import torch

    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


async def load_lora_adapter(
    adapter: AsyncHttpServerEngineAdapter,
    name: str,
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
) -> None:
    """Load a LoRA adapter. `tensors` have PEFT's names, `config` is PEFT's `adapter_config.json`.

    Every TP rank compares SHA-256 sums of the tensors that it received. Unlike `VerlEngine.load_lora_adapter`, this
    method does not compare the tensors with the model. Raises BadInputError for a server without `enable_lora`, for a
    configuration that SGLang does not support and for tensors with the same name, and ServerError when the server
    refuses: a LoRA rank above `max_lora_rank`, or a name that is loaded already.
    """
    try:
        pairs = list(as_pairs(tensors))
        tensors = dict(pairs)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"tensors must be a dict of tensors by name or pairs of name and tensor: {error}") from None
    if len(tensors) != len(pairs):
        raise BadInputError("a name occurs more than once in tensors: pass each tensor of a LoRA adapter once")
    plain_config = plain_lora_config(config, tensors)
    server_args = await adapter.connection.get_resolved_args()
    require_lora(server_args)
    if server_args.get("engine_kind") == EngineKind.VLLM:
        body = vllm_lora_payload(name, tensors, plain_config)
    else:
        body = load_lora_payload(name, tensors, plain_config, await adapter.connection.get_tp_size())
    await adapter.connection.call_weights(endpoints.LOAD_LORA, body)


async def unload_lora_adapter(adapter: AsyncHttpServerEngineAdapter, name: str) -> None:
    """Unload a LoRA adapter. New requests for it are refused at once; returns when its running requests have ended.

    Raises BadInputError for a server without `enable_lora`, and ServerError for a name that is not loaded.
    """
    require_lora(await adapter.connection.get_resolved_args())
    await adapter.connection.call_weights(endpoints.UNLOAD_LORA, {"lora_name": name})


async def list_lora_adapters(adapter: AsyncHttpServerEngineAdapter) -> list[str]:
    """Names of the LoRA adapters that the server has, whoever loaded them. Empty for a server without `enable_lora`."""
    if not (await adapter.connection.get_resolved_args()).get("enable_lora"):
        return []
    models = (await adapter.connection.call(endpoints.MODELS)).get("data") or []
    return [str(model["id"]) for model in models if model.get("parent") is not None]
