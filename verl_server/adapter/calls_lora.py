"""LoRA adapters over HTTP."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from verl_server.adapter import sglang as api
from verl_server.adapter.calls_weights import WeightCalls

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


class LoraCalls(WeightCalls):
    """Adapters beside the weights, used by requests with `lora_path=name`. The server needs `enable_lora=True`."""

    async def load_lora_adapter_from_tensors(
        self, lora_name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> None:
        """`tensors` by PEFT's names, on the CPU; `config` is PEFT's `adapter_config.json`.

        Every TP rank compares SHA-256 sums of what it received. Raises BadInputError when the server refuses
        (no `enable_lora`, a rank above `max_lora_rank`, a name that is loaded already).
        """
        plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        payload = base64.b64encode(pickle.dumps(plain)).decode()
        ranks = int((await self._arguments()).get("tp_size") or 1)
        body = {
            "lora_name": lora_name,
            "config_dict": dict(config),
            "serialized_named_tensors": [payload] * ranks,
            "expected_checksums": {name: _sha256(tensor) for name, tensor in plain.items()},
        }
        await self._weights_call(api.LOAD_LORA, body)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """New requests that name it are refused at once; returns when those in flight have ended."""
        await self._weights_call(api.UNLOAD_LORA, {"lora_name": lora_name})


def _sha256(tensor: torch.Tensor) -> str:
    import torch

    return sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
