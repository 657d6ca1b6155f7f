"""The weights of TRL's model by the names of its checkpoint, as `VerlEngine` takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.integrations.trl.servers import RolloutServers, require_trl
from verl_server.types import WeightUpdateResult

if TYPE_CHECKING:
    import torch

#: Parts of parameter names that wrappers insert: DDP, activation checkpointing, `torch.compile`.
WRAPPER_PARTS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def require_pushable(accelerator: Any, model: Any) -> None:
    """Raise UnsupportedError for a model that has parts or packed values instead of its parameters.

    `accelerator`: that of the trainer. `model`: the trainer's model without wrappers of Accelerate.
    """
    deepspeed, fsdp = (getattr(accelerator.state, name, None) for name in ("deepspeed_plugin", "fsdp_plugin"))
    if (deepspeed is not None and deepspeed.zero_stage == 3) or (fsdp is not None and fsdp.fsdp_version != 2):
        raise UnsupportedError(
            "DeepSpeed ZeRO-3 and FSDP1 keep the parameters of a model in parts, which cannot be pushed: use FSDP2, "
            "which is `fsdp_version: 2` in the configuration of accelerate, or ZeRO-2"
        )
    if any(getattr(model, name, False) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")):
        raise UnsupportedError(
            "the trainer's model is quantized, and the servers need its whole weights: load it without a "
            "quantization_config, for example in bfloat16"
        )


def require_mergeable(model: Any) -> None:
    """Raise UnsupportedError for a model whose weights are not those that the servers need.

    `model`: the trainer's model without wrappers of Accelerate.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning:
            raise UnsupportedError(
                f"the adapter {name!r} is prompt learning of PEFT ({config.peft_type}), which has no weights to merge: "
                "use LoraConfig"
            )
        if getattr(config, "trainable_token_indices", None):
            raise UnsupportedError(
                f"trainable_token_indices of the adapter {name!r} are not supported: train the whole embedding with "
                'modules_to_save=["embed_tokens"], and with ensure_weight_tying=True if the output head is tied to it'
            )
    if _is_peft(model):
        _require_untied(model)


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs of name and tensor of all parameters, and of the buffers that checkpoints have.

    Sharded parameters of FSDP2 are DTensors. `model` is the trainer's model without wrappers of Accelerate. Of a PEFT
    model, the pairs are the parameters of the base model with the active adapters. The model itself keeps its bits,
    also if the caller stops before the end.
    """
    saved = model.state_dict(keep_vars=True).keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)  # biases of routers
    if not _is_peft(model):
        yield from ((_clean(name), tensor.detach()) for name, tensor in (*model.named_parameters(), *buffers))
        return
    layers, merged = _adapted_layers(model), dict[int, torch.Tensor]()
    for name, parameter in model.named_parameters():
        base_name = _base_name(model, name)
        if base_name is None:
            continue
        if id(parameter) not in merged and id(parameter) in layers:
            merged = _merge(layers[id(parameter)])
        yield base_name, merged.pop(id(parameter), parameter.detach())
    yield from ((base_name, buffer) for name, buffer in buffers if (base_name := _base_name(model, name)) is not None)


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "merge_adapter")


def _adapted_layers(model: Any) -> dict[int, list[Any]]:
    """The adapter layers that change a parameter, by the `id` of the parameter. Several can wrap the same module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for parameter in module.get_base_layer().parameters(recurse=False):
                layers.setdefault(id(parameter), []).append(module)
    return layers


def _require_untied(model: Any) -> None:
    """Raise UnsupportedError if an adapter changes a weight that two modules share: the servers have it once.

    A copy of only one of the two modules (`modules_to_save`) is such a change, too.
    """
    owners: dict[int, list[str]] = {}
    used: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        base_name = _base_name(model, name)
        if base_name is not None:
            used[base_name] = id(parameter)
        original = base_name or _base_name(model, name.replace(".original_module.", "."))
        if original is not None:
            owners.setdefault(id(parameter), []).append(original)
    adapted = _adapted_layers(model)
    for parameter_id, names in owners.items():
        if len(names) > 1 and parameter_id in adapted:
            raise UnsupportedError(
                f"an adapter changes a weight that is tied: {' and '.join(names)}. Leave its modules out of "
                "target_modules"
            )
        if len({used[name] for name in names if name in used}) > 1:
            raise UnsupportedError(
                f"modules_to_save of an adapter copies a weight that is tied: {' and '.join(names)}. The copies would "
                "become different, and the servers have one weight for both. Set ensure_weight_tying=True in "
                "LoraConfig, or train a model with tie_word_embeddings=False"
            )


@torch.no_grad()
def _merge(layers: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Copies of the parameters of one module with its adapters, by the `id` of the parameter.

    PEFT merges in place and subtracts afterwards, which rounds: in bfloat16 the base model would drift with each push.
    Therefore the parameters get their old bits back.
    """
    parameters = list(layers[0].get_base_layer().parameters(recurse=False))
    own = [(parameter.data, parameter.data.clone()) for parameter in parameters]
    try:
        for layer in layers:
            layer.merge()
        return {id(parameter): parameter.data.clone() for parameter in parameters}
    finally:
        for layer in reversed(layers):
            if layer.merged:
                layer.unmerge()
        for parameter, (memory, bits) in zip(parameters, own, strict=True):
            memory.copy_(bits)
            parameter.data = memory


def _base_name(model: Any, name: str) -> str | None:
    """The name in the base model. None for parameters of adapters, and for the originals of replaced modules."""
    name = re.sub(r"(\.base_layer)+\.", ".", _clean(name).removeprefix("base_model.model."))
    if model.prefix in name or ".original_module." in name:
        return None
    if (found := re.search(r"\.modules_to_save\.([^.]+)\.", name)) is not None:
        if found[1] not in model.active_adapters:  # TRL keeps the reference policy as the adapter "ref"
            return None
        name = name.replace(found[0], ".")
    return name


def _clean(name: str) -> str:
    for part in WRAPPER_PARTS:
        name = name.removeprefix(part) if part == "module." else name.replace(part, "")
    return name


# -- Weight transfer --------------------------------------------------------------------------------
# `FleetWeightTransfer`: how the weights of an `AsyncGRPOTrainer` get into the servers.

USABLE_PAUSE_MODES = (PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.WAIT)
"""Modes in which running generations have all their tokens at the end."""


class FleetWeightTransfer:
    """Pushes the weights of an `AsyncGRPOTrainer` into all servers. Implements TRL's `WeightTransferProtocol`.

    Pass it as `AsyncGRPOTrainer(weight_transfer=...)`. TRL calls it in the main thread of rank 0: once before the first
    step, and then after every `weight_sync_steps` steps.
    """

    def __init__(self, servers: RolloutServers, *, pause_mode: PauseMode | str = PauseMode.RETRACT) -> None:
        """`pause_mode`: what happens to running generations. `retract`: their KV cache is computed again with the new
        weights. `in_place`: they continue with the KV cache of the old weights, which is faster. `wait`: the push waits
        until they have ended. `abort` is refused, because TRL would train on completions that were cut off.

        Raises UnsupportedError for another version of TRL, and for several trainer ranks; BadInputError.
        """
        require_trl()
        if servers.mesh.size() > 1:
            raise UnsupportedError(
                "AsyncGRPOTrainer sends the weights from rank 0 alone, which VerlEngine on several ranks cannot do: "
                "start the trainer with one process, or use GRPOTrainer with FleetRolloutFunc"
            )
        if pause_mode not in USABLE_PAUSE_MODES:
            raise BadInputError(
                f"pause_mode must be one of {[mode.value for mode in USABLE_PAUSE_MODES]}, got {str(pause_mode)!r}"
            )
        self._engine, self._pause_mode = servers.engine, PauseMode(pause_mode)
        self.last_update: WeightUpdateResult | None = None
        """Result of the last push."""

    def init_weight_transfer(self) -> None:
        """Nothing: the engine is connected since it was made."""

    def pause(self) -> None:
        """Nothing: `send_weights` pauses the servers only while they load."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all tensors and verify them. The servers serve the new weights when the call returns.

        Raises WeightManifestError, TornWeightsError, ServerDiedError.
        """
        self.last_update = self._engine.update_weights_from_tensor(
            iterator, pause_mode=self._pause_mode, flush_cache=self._pause_mode is not PauseMode.IN_PLACE
        )

    def resume(self) -> None:
        """Nothing: `send_weights` has resumed the servers."""

    def destroy(self) -> None:
        """Nothing: who started the servers ends them."""
