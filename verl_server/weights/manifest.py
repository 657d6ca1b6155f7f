"""The manifest of a served model: names, full shapes and dtypes of the tensors that can be pushed into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.platforms.parameter_dtypes import FLOAT_DTYPES
from verl_server.types import TensorSpec
from verl_server.weights.checkpoint_names import CheckpointNames
from verl_server.weights.unknown_names import explain_unknown_name

CASTABLE_DTYPES = frozenset(FLOAT_DTYPES)
"""Dtypes that are cast to each other when a tensor is pushed, as SGLang does."""
LOADED_TOGETHER = (".q_a_proj.", ".kv_a_proj_with_mqa.")
"""Parts of names of tensors that SGLang 0.5.23 loads when it has got both in one update. It ignores one alone."""


@dataclass(frozen=True)
class Manifest:
    """The tensors that one served model accepts."""

    tensors: Mapping[str, TensorSpec]
    """Full shape and dtype of each tensor, by its name in checkpoints. A tensor is pushed in this dtype, which is that
    of the served parameter, whatever the checkpoint has: values are rounded once. If servers have several dtypes, it is
    one to which all of these are cast without a loss, and the servers round."""
    optional: frozenset[str] = frozenset()
    """Names in `tensors` that an update of the whole model may lack: tied output heads, tables of rotary embeddings,
    and layers for multi-token prediction."""
    ignored: frozenset[str] = frozenset()
    """Names that are not in `tensors`, may be pushed and are left out: a tied output head that no checkpoint has."""
    tied: tuple[str, str] | None = None
    """Names of the output head and of the embedding, where the servers have one parameter for both."""
    narrowest: Mapping[str, str] = field(default_factory=dict)
    """The dtype with the smallest range that servers have for a tensor, where it is another one than in `tensors`."""
    checkpoint_names: CheckpointNames | None = field(default=None, compare=False)
    """Converts the names that a model has in the trainer. None: the names are the same."""

    unserved: frozenset[str] = frozenset()
    """Names in `tensors` that the servers' model class ignores, as an update of the whole model has shown."""

    @cached_property
    def required(self) -> frozenset[str]:
        """The names that an update of the whole model must have: those of served tensors.

        A checkpoint may have tensors that its model does not use: value heads, masks, layers of other models.
        """
        names = self.checkpoint_names
        unused = frozenset() if names is None else names.unused_names(self.tensors.keys())
        return self._perhaps_required - unused

    @cached_property
    def _perhaps_required(self) -> frozenset[str]:
        return frozenset(self.tensors.keys() - self.optional - self.unserved)

    @cached_property
    def not_required(self) -> frozenset[str]:
        """The names that an update of the whole model may lack. A server need not read these tensors."""
        return frozenset(self.tensors.keys() - self.required)

    def is_whole(self, names: Iterable[str]) -> bool:
        """Whether an update of the tensors `names` is an update of the whole model."""
        return self.num_missing(names) == 0

    def num_missing(self, names: Iterable[str]) -> int:
        """Number of required tensors that an update of the tensors `names` lacks."""
        missing = self._perhaps_required.difference(names)
        return len(missing & self.required) if missing else 0

    def checkpoint_specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The specs of the checkpoint's tensors, by name in order, that the trainer's tensor `name` becomes.

        Raises WeightManifestError for a tensor that is to be converted and has another shape than that of the model.
        """
        names = self._names_to_convert(name)
        return {name: spec} if names is None else names.specs(name, spec)

    def is_converted(self, name: str, spec: TensorSpec) -> bool:
        """Whether the checkpoint has other values or shapes than the trainer's tensor `name`, not only another name.

        Raises WeightManifestError for a tensor that is to be converted and has another shape than that of the model.
        """
        names = self._names_to_convert(name)
        return names is not None and names.is_converted(name, spec)

    def _names_to_convert(self, name: str) -> CheckpointNames | None:
        """The conversion for the trainer's tensor `name`. None for a name that checkpoints have."""
        return None if name in self.tensors or name in self.ignored else self.checkpoint_names

    def are_vocabulary(self, names: Iterable[str]) -> bool:
        """Whether the trainer's tensors `names` are an output head, its embedding, or both. False if it is unknown."""
        converter = self.checkpoint_names
        if converter is None:
            return False
        own = {converter.checkpoint_name(name) for name in names}
        return any(own <= vocabulary for vocabulary in converter.vocabularies)

    def require_loaded_together(self, names: Iterable[str]) -> None:
        """Raise BadInputError if SGLang would ignore one of the tensors `names`, because a tensor is not among them."""
        given = set(names)
        first, second = LOADED_TOGETHER
        for name in given:
            other = name.replace(first, second) if first in name else name.replace(second, first)
            if other not in given and other in self.tensors:
                raise BadInputError(
                    f"the update has {name!r} without {other!r}, but SGLang loads these two tensors only together: "
                    "push both in one update",
                    name=name,
                    expected=other,
                )

    def require_served(self, names: Iterable[str]) -> None:
        """Raise WeightManifestError if the servers are known to ignore one of the tensors `names`."""
        if unserved := sorted(self.unserved.intersection(names)):
            raise WeightManifestError(
                f"the model class of the inference engine ignores {len(unserved)} of the tensors, for example "
                f"{unserved[0]!r}, as an earlier update has shown. If the trainer's model does not use them either, "
                "leave them out. Otherwise the policy that it serves is another one: use a model that the engine "
                "computes completely",
                name=unserved[0],
            )

    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec | None:
        """The spec that a pushed tensor must have, or None if the tensor is to be left out.

        Raises WeightManifestError for an unknown name, another shape, or a dtype that cannot be cast.
        """
        is_ignored = name in self.ignored
        if is_ignored and self.tied is None:
            return None
        spec = self.tensors.get(self.tied[1] if is_ignored and self.tied is not None else name)
        if spec is None:
            converted = () if self.checkpoint_names is None else self.checkpoint_names.model_names
            known = {*self.tensors, *self.ignored, *converted}
            raise WeightManifestError(
                f"the model has no parameter {name!r}{explain_unknown_name(name, known)}", name=name
            )
        if shape != spec.shape:
            cure = _shape_cure(shape, dtype)
            if not cure and shape[1:] == spec.shape[1:] and self.are_vocabulary([name]):
                cure = (
                    ". If the vocabulary was resized or padded: push only the rows that the checkpoint has, or save "
                    "the resized model (save_pretrained) and start the server from it"
                )
            raise WeightManifestError(
                f"{name!r} has shape {list(shape)}, the model expects {list(spec.shape)}{cure}",
                name=name,
                expected=list(spec.shape),
                got=list(shape),
            )
        if dtype != spec.dtype and not (dtype in CASTABLE_DTYPES and spec.dtype in CASTABLE_DTYPES):
            raise WeightManifestError(
                f"{name!r} has dtype {dtype}, the model expects {spec.dtype}{_dtype_cure(spec.dtype)}",
                name=name,
                expected=spec.dtype,
                got=dtype,
            )
        return None if is_ignored else spec


def _shape_cure(shape: tuple[int, ...], dtype: str) -> str:
    """The end of an error about a shape: the usual cause and its cure. Empty for an unknown cause."""
    if 0 in shape:
        return (
            ". It has no elements here: DeepSpeed ZeRO-3 and FSDP1 keep a parameter in parts. Gather it before the "
            "push (deepspeed.zero.GatheredParameters, FSDP.summon_full_params), or use FSDP2"
        )
    if dtype in ("uint8", "int8"):
        return ". Quantized weights (QLoRA) are packed: push the dequantized tensor, or the LoRA adapter"
    return ""


def _dtype_cure(expected: str) -> str:
    """The end of an error about a dtype that cannot be cast to `expected`."""
    if expected not in CASTABLE_DTYPES:
        return ""
    return (
        f". These dtypes are converted: {', '.join(sorted(CASTABLE_DTYPES))}. Convert the tensor to one of them, and "
        "multiply a quantized tensor, for example of float8, by its scale"
    )
