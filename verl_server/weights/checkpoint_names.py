"""Conversion of a trainer's tensors to the names and shapes of checkpoints, by the rules of transformers.

SGLang reads tensors by the names that checkpoints have. transformers 5 names some tensors differently in a model: for
example, Mixtral's `block_sparse_moe.gate.weight` is `mlp.gate.weight`, and all experts of a layer are in two tensors,
`experts.gate_up_proj` of shape [experts, 2 * intermediate, hidden] and `experts.down_proj` of shape [experts, hidden,
intermediate]. `save_pretrained` converts them back. This module calls the same conversion for one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, UnsupportedError, WeightManifestError
from verl_server.types import TensorSpec

if TYPE_CHECKING:
    import torch

GATE_UP_SUFFIX = ".experts.gate_up_proj"
DOWN_SUFFIX = ".experts.down_proj"


class CheckpointNames:
    """The conversion for one model.

    `build_model` returns the model on torch's meta device. It is called when the first tensor has to be converted.
    """

    def __init__(self, build_model: Callable[[], Any]) -> None:
        self._build_model = build_model
        self._converted: dict[str, dict[str, TensorSpec]] = {}
        self._renamed: set[str] = set()
        """Names in `_converted` of the tensors that the checkpoint has with the same values under another name."""

    @cached_property
    def model(self) -> Any:
        """The model on torch's meta device. Raises BadInputError or UnsupportedError if it cannot be built."""
        return self._build_model()

    @cached_property
    def _model(self) -> Any:
        """The model on torch's meta device, or None if it cannot be built or transformers has no rules for it."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange
        except ImportError:  # transformers 4, whose models have the names of checkpoints
            return None
        try:
            model = self.model
        except (BadInputError, UnsupportedError):  # its files are not on this machine, or its code is not known
            return None
        # As `save_pretrained` does for a model that was not loaded from a checkpoint, but once, not for each tensor.
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in mapping if not isinstance(rule, PrefixChange)]
        model._weight_conversions = rules
        return model if rules else None

    @cached_property
    def _model_specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of each tensor of the model, by the model's names."""
        tensors = {} if self._model is None else self._model.state_dict()
        return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}

    def unused_names(self, checkpoint: Collection[str]) -> frozenset[str]:
        """The names among those of a `checkpoint` that the model has no tensor for: value heads, masks, other models.

        Empty if the model cannot be built, or if the checkpoint has other names than transformers saves.
        """
        try:
            model = self.model
        except (BadInputError, UnsupportedError):
            return frozenset()
        tensors: dict[str, Any] = model.state_dict()
        used = {new for name, tensor in tensors.items() for new in self.specs(name, TensorSpec.of(tensor))}
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        return frozenset(checkpoint).difference(used) if used <= {*checkpoint, *tied} else frozenset()

    @cached_property
    def vocabularies(self) -> list[set[str]]:
        """Names of checkpoints of each output head and its embedding, which may be one parameter in the trainer.

        Empty if the model cannot be built.
        """
        try:
            tied = getattr(self.model, "_tied_weights_keys", None)
        except (BadInputError, UnsupportedError):
            return []
        pairs = tied.items() if isinstance(tied, Mapping) else ()  # transformers 4 has names without their partners
        return [{self.checkpoint_name(name) for name in pair} for pair in pairs]

    def checkpoint_name(self, name: str) -> str:
        """The name that the checkpoint has for the trainer's tensor `name`, or the first of its parts."""
        spec = self._model_specs.get(name)
        return name if spec is None else next(iter(self.specs(name, spec)))

    @property
    def model_names(self) -> Collection[str]:
        """Names of the model's tensors. Empty if transformers has no rules for the model."""
        return self._model_specs.keys()

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The specs of the checkpoint's tensors, by name in order, for the trainer's tensor `name`.

        Returns `name` itself if it is not a tensor of the model that transformers converts. Raises WeightManifestError
        for a wrong shape.
        """
        model_spec = self._model_specs.get(name)
        if model_spec is None:
            return {name: spec}
        if name not in self._converted:
            import torch

            tensor = torch.empty(model_spec.shape, device="meta")
            parts = self._revert(name, tensor)
            if len(parts) == 1 and next(iter(parts.values())) is tensor:
                self._renamed.add(name)
            self._converted[name] = {new: TensorSpec.of(part) for new, part in parts.items()}
        converted = self._converted[name]
        if spec.shape != model_spec.shape and list(converted) != [name]:
            names = ", ".join(list(map(repr, converted))[:2])
            raise WeightManifestError(
                f"{name!r} has shape {list(spec.shape)}, the model expects {list(model_spec.shape)}. It stands for "
                f"{len(converted)} tensors of the checkpoint ({names} ...), which can be pushed by their own names",
                name=name,
                expected=list(model_spec.shape),
                got=list(spec.shape),
            )
        return {new: TensorSpec(part.shape, spec.dtype) for new, part in converted.items()}

    def is_converted(self, name: str, spec: TensorSpec) -> bool:
        """Whether the checkpoint has other values or shapes than the trainer's tensor `name`.

        An operation may keep the shape and exchange rows. Raises WeightManifestError for a wrong shape.
        """
        self.specs(name, spec)
        return name in self._converted and name not in self._renamed

    def tensors(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The checkpoint's named tensors for the trainer's tensor `name`, in the order of `specs`.

        The tensors of fused experts are views; another conversion may copy. Raises WeightManifestError for a wrong
        shape.
        """
        spec = TensorSpec.of(tensor)
        names = list(self.specs(name, spec))
        if not self.is_converted(name, spec):
            return [(names[0], tensor)]
        if name.endswith(DOWN_SUFFIX) and len(names) == len(tensor):
            return list(zip(names, tensor, strict=True))
        if name.endswith(GATE_UP_SUFFIX) and len(names) == 2 * len(tensor):
            gates, ups = tensor.chunk(2, dim=1)
            return list(zip(names, (*gates, *ups), strict=True))
        return list(self._revert(name, tensor).items())

    def _revert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint's named tensors for one tensor, by the conversion of transformers."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, {name: tensor}))
