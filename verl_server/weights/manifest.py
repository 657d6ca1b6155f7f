"""The manifest of a served model: names, full shapes and dtypes of the tensors that can be pushed into it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from verl_server.adapter.model_files import ALL_LINEAR, PREFIX, plain_lora_config
from verl_server.errors import BadInputError, UnsupportedError, WeightManifestError
from verl_server.platforms.server_report import FLOAT_DTYPES, served_dtypes, widest_dtype
from verl_server.types import Json, TensorSpec
from verl_server.validation import did_you_mean

if TYPE_CHECKING:
    import torch


# -- Checkpoint names -------------------------------------------------------------------------------
# Conversion of a trainer's tensors to the names and shapes of checkpoints, by the rules of transformers.
#
# SGLang reads tensors by the names that checkpoints have. transformers 5 names some tensors differently in a model:
# for example, Mixtral's `block_sparse_moe.gate.weight` is `mlp.gate.weight`, and all experts of a layer are in two
# tensors, `experts.gate_up_proj` of shape [experts, 2 * intermediate, hidden] and `experts.down_proj` of shape
# [experts, hidden, intermediate]. `save_pretrained` converts them back. This module calls the same conversion for one
# tensor at a time.

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
    def _known_model(self) -> Any:
        """`model`, or None if its files are not on this machine or transformers cannot build it."""
        try:
            return self.model
        except (BadInputError, UnsupportedError):
            return None

    @cached_property
    def _model(self) -> Any:
        """`_known_model`, or None if transformers has no rules for it."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange
        except ImportError:  # transformers 4, whose models have the names of checkpoints
            return None
        if (model := self._known_model) is None:
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
        if (model := self._known_model) is None:
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
        tied = getattr(self._known_model, "_tied_weights_keys", None)
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


# -- Model definition -------------------------------------------------------------------------------
# The definition of a served model in Hugging Face transformers: configuration and architecture, without weights.


def read_config(server_args: Mapping[str, Any]) -> Any:
    """The configuration (`PretrainedConfig`) of the model that a server with these SGLang arguments serves.

    Raises BadInputError if it cannot be read.
    """
    from transformers import AutoConfig

    path = str(server_args["model_path"])
    try:
        config = AutoConfig.from_pretrained(
            path,
            trust_remote_code=bool(server_args.get("trust_remote_code")),
            revision=server_args.get("revision"),
        )
    except Exception as error:  # the code of the model can raise anything
        raise BadInputError(f"cannot read the configuration of the model at {path}: {error}") from error
    overrides = server_args.get("json_model_override_args")
    if overrides:
        config.update(json.loads(overrides))
    return config


def text_config(config: Any) -> Any:
    """The configuration of the text model in `config`. Raises UnsupportedError if there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedError(f"weights of {config.architectures} cannot be pushed: {error}") from error


def build_on_meta(config: Any, *, trust_remote_code: bool) -> Any:
    """The model (`PreTrainedModel`) without memory for its weights, on torch's meta device.

    Raises UnsupportedError if transformers cannot build the architecture.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    is_text_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    factory = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return factory.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # the code of the model can raise anything
        raise UnsupportedError(
            f"transformers cannot build {config.architectures or config.model_type}: {error}"
        ) from error


# -- Unknown names ----------------------------------------------------------------------------------

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components that wrappers of modules add to parameter names, for example DistributedDataParallel."""
PEFT_COMPONENTS = frozenset({
    "base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
})  # fmt: skip
"""Components of the names of a model's tensors after PEFT has added a LoRA adapter to the model."""
SERVER_FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Components of SGLang's parameter names, and the checkpoint's components that SGLang fuses into each of them."""


def fused_with(component: str) -> set[str]:
    """The components that SGLang fuses with `component`, itself, and the fused component."""
    groups = ({fused, *parts} for fused, parts in SERVER_FUSED_NAMES.items())
    return {component}.union(*(group for group in groups if component in group))


def explain_unknown_name(name: str, known: Collection[str]) -> str:
    """The end of an error message about the unknown tensor `name`: its cure, or the most similar of the `known` names.

    Empty if nothing is similar.
    """
    components = name.split(".")
    if not PEFT_COMPONENTS.isdisjoint(components):
        return (
            ": the trainer's model has a LoRA adapter of PEFT. Push it with load_lora_adapter. Or merge it into the "
            "weights (model.merge_adapter()), push them with the names of the checkpoint, that is without "
            "'base_model.model.' and '.base_layer' and without the tensors of the LoRA adapter, and unmerge it"
        )
    wrappers = [f"{component}." for component in dict.fromkeys(components) if component in WRAPPERS]
    plain = [component for component in components if component not in WRAPPERS]
    for start in range(len(plain)):
        if (end := ".".join(plain[start:])) in known:
            prefixes = wrappers or [".".join(plain[:start]) + "."]
            return f": remove {' and '.join(map(repr, prefixes))} from the names: {end!r}"
    for fused, parts in SERVER_FUSED_NAMES.items():
        if fused in components and any(parts[0] in each for each in known):
            return f": SGLang makes {fused} inside the server. Push the tensors of the checkpoint: {', '.join(parts)}"
    return did_you_mean(name, known)


# -- Manifest ---------------------------------------------------------------------------------------

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
    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

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

    def checkpoint_parts(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The checkpoint's named tensors for the trainer's tensor `name`, in the order of `checkpoint_specs`."""
        names = self._names_to_convert(name)
        return [(name, tensor)] if names is None else names.tensors(name, tensor)

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
                f"{name!r} has dtype {dtype}, the model expects {spec.dtype}. Only {', '.join(FLOAT_DTYPES)} are "
                "converted to each other: multiply a quantized tensor, for example of float8, by its scale",
                name=name,
                expected=spec.dtype,
                got=dtype,
            )
        return None if is_ignored else spec


MANIFEST = TypeAdapter(Manifest)
"""Converts a manifest to JSON and back, without `checkpoint_names`."""


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


# -- Read manifest ----------------------------------------------------------------------------------
# Reading the manifest of a served model, before any weight is sent.
#
# Names and shapes are read from the headers of the checkpoint that the server loaded. Without a checkpoint (dummy
# weights) they come from the architecture, built on torch's meta device. The dtypes are those that the servers report
# for their parameters. This runs in the trainer and reads no weights.

OUTPUT_HEAD = "lm_head.weight"
DECODER_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
MTP_PREFIX = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")
"""How the names of layers for multi-token prediction (MTP) begin, where they are not numbered as decoder layers."""
INDEX_FILE = "model.safetensors.index.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def read_manifest(server_args: Mapping[str, Any], reported_dtypes: Sequence[Json | None] = ()) -> Manifest:
    """Read the manifest of the model that servers with these SGLang arguments serve.

    `reported_dtypes`: the report of each server on the dtypes of its parameters. For a server without a report they
    come from the arguments and the checkpoint. Raises BadInputError if the model's configuration or its checkpoint
    cannot be read, and UnsupportedError if there are neither checkpoint headers nor an architecture that transformers
    can build.
    """
    config = read_config(server_args)
    names = checkpoint_names_of(server_args)
    tensors = {} if server_args.get("load_format") == "dummy" else checkpoint_tensors(server_args)
    if not tensors:
        tensors = _architecture_tensors(names, config)
    unreported: Json = {"main": _configured_dtype(server_args.get("dtype") or "auto", config), "others": {}}
    reports = [report or unreported for report in reported_dtypes] or [unreported]
    tensors, narrowest = _in_served_dtypes(tensors, served_dtypes(reports, tensors))
    optional = _optional_names(tensors, config)
    tied = _tied_names(tensors.keys() - optional, tensors, config)
    ignored = frozenset({OUTPUT_HEAD} - tensors.keys() if tied else ())
    return Manifest(tensors, optional, ignored, tied, narrowest, names)


def checkpoint_names_of(server_args: Mapping[str, Any]) -> CheckpointNames:
    """The conversion of a trainer's tensors for the model of a server. Reads the model's files at the first use."""

    def build_model() -> Any:
        return build_on_meta(read_config(server_args), trust_remote_code=bool(server_args.get("trust_remote_code")))

    return CheckpointNames(build_model)


def _optional_names(names: Iterable[str], config: Any) -> frozenset[str]:
    """The tensors of a checkpoint that most of SGLang's loaders skip, so that trainers often do not have them.

    These are tied output heads, tables of rotary embeddings, and the layers for multi-token prediction (MTP). A few of
    SGLang's models load such tensors. Therefore the tensors are sent if they are pushed. If they are not pushed and the
    server needs them, the update fails, because the server reports parameters that were not written.
    """
    num_layers = getattr(text_config(config), "num_hidden_layers", None)
    ties_output_head = bool(getattr(config, "tie_word_embeddings", False))

    def is_mtp(name: str) -> bool:
        layer = DECODER_LAYER.match(name)
        return bool(MTP_PREFIX.match(name)) or (
            layer is not None and num_layers is not None and int(layer[1]) >= num_layers
        )

    return frozenset(
        name
        for name in names
        if (name == OUTPUT_HEAD and ties_output_head) or name.endswith("rotary_emb.inv_freq") or is_mtp(name)
    )


def _tied_names(required: Iterable[str], tensors: Mapping[str, TensorSpec], config: Any) -> tuple[str, str] | None:
    """The names of the output head and of the embedding of a model that has one parameter for both, else None.

    The embedding is the only tensor among `required` of the head's shape.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return None
    text = text_config(config)
    shape: Any = (getattr(text, "vocab_size", None), getattr(text, "hidden_size", None))
    if OUTPUT_HEAD in tensors:
        shape = tensors[OUTPUT_HEAD].shape
    embeddings = [name for name in required if tensors[name].shape == shape]
    if len(embeddings) > 1:  # the vocabulary is as large as another dimension
        embeddings = [name for name in embeddings if name.endswith(EMBEDDINGS)]
    return (OUTPUT_HEAD, embeddings[0]) if len(embeddings) == 1 else None


#: Ends of the names of input embeddings in checkpoints.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def _configured_dtype(argument: str, config: Any) -> str | None:
    """The dtype that SGLang's `--dtype` gives the weights. None: that of the checkpoint.

    With "auto", SGLang serves float32 checkpoints as float16 on an accelerator.
    """
    names = {"half": "float16", "float": "float32"}
    if argument != "auto":
        return names.get(argument, argument)
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _in_served_dtypes(
    tensors: Mapping[str, TensorSpec], served: Mapping[str, set[str]]
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """The specs with the dtypes in which the tensors are pushed, and `Manifest.narrowest`.

    A tensor that has another dtype than most of the checkpoint, for example a router's bias in float32, is not pushed
    in a smaller one: a server without a report may have it in that dtype.
    """
    sizes: Counter[str] = Counter()
    for spec in tensors.values():
        sizes[spec.dtype] += math.prod(spec.shape)
    specs, narrowest = dict(tensors), dict[str, str]()
    for name, spec in tensors.items():
        if spec.dtype in CASTABLE_DTYPES and (held := served[name]):
            is_main = spec.dtype == max(sizes, key=lambda dtype: sizes[dtype])
            specs[name] = TensorSpec(spec.shape, widest_dtype(held if is_main else held | {spec.dtype}))
            narrowest[name] = min(held, key=FLOAT_DTYPES.index)
    return specs, {name: dtype for name, dtype in narrowest.items() if dtype != specs[name].dtype}


def checkpoint_tensors(server_args: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The specs of the checkpoint's tensors by name, empty if none of its safetensors files is on this machine.

    As in SGLang, only the files in the checkpoint's index count: folders of Mistral models contain a second copy of the
    weights.
    """
    folder = _local_folder(str(server_args["model_path"]), server_args.get("revision"))
    if folder is None:
        return {}
    from safetensors import SafetensorError

    index = folder / INDEX_FILE
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
            if not any(file.is_file() for file in files):  # only the small files of the model were downloaded
                return {}
        else:
            files = sorted(folder.glob("*.safetensors"))
            if [file.name for file in files] == [CONSOLIDATED_FILE, "model.safetensors"]:
                files = files[1:]
        return {name: spec for file in files for name, spec in _read_header(file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInputError(f"cannot read the checkpoint in {folder}: {type(error).__name__}: {error}") from error


def _local_folder(model_path: str, revision: str | None) -> Path | None:
    """The folder of a model, which may be in the local cache of the Hugging Face hub. None if it is not there."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _read_header(file: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes in the header of a safetensors file."""
    from safetensors import safe_open

    specs: dict[str, TensorSpec] = {}
    with safe_open(file, framework="pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118 - not a dict
            part = checkpoint.get_slice(name)
            dtype = part.get_dtype()
            specs[name] = TensorSpec(tuple(part.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype))
    return specs


def _architecture_tensors(names: CheckpointNames, config: Any) -> dict[str, TensorSpec]:
    """The specs of the tensors that a checkpoint of this architecture has, by name."""
    model = names.model
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    specs: dict[str, TensorSpec] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            specs.update(names.specs(name, TensorSpec.of(tensor)))
    return specs


# -- LoRA adapters ----------------------------------------------------------------------------------
# Checks of a LoRA adapter against the model before the LoRA adapter is sent. Pure functions.
#
# Tensors have PEFT's names: `base_model.model.<module>.lora_A.weight` of shape [rank, inputs], and
# `base_model.model.<module>.lora_B.weight` of shape [outputs, rank]. SGLang ignores names that it does not know and
# would then serve an incomplete LoRA adapter.

SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def check_lora_adapter(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest) -> Json:
    """Check that the LoRA adapter's tensors fit its configuration and the model. Returns the configuration for SGLang.

    `config` is PEFT's `adapter_config.json` with `r`, `lora_alpha` and `target_modules`. Raises BadInputError for an
    invalid configuration or a configuration that SGLang does not support, and WeightManifestError for a tensor that
    does not fit or is missing.
    """
    plain_config = plain_lora_config(config, specs)
    targets = config["target_modules"]
    if not specs:
        raise BadInputError("the LoRA adapter has no tensors: pass its lora_A and lora_B tensors as named_tensors")
    modules = {_module_of(name) for name in specs}
    for module in sorted(modules):
        if not _is_target(module, targets):
            raise WeightManifestError(
                f"the LoRA adapter has tensors for {module!r}, which target_modules={targets!r} do not match",
                name=module,
            )
        expected = Manifest(_lora_tensors(module, plain_config["r"], manifest))
        for name in expected.tensors:
            if name not in specs:
                raise WeightManifestError(f"the LoRA adapter lacks {name!r}", name=name)
            expected.check(name, specs[name].shape, specs[name].dtype)
    for target in () if isinstance(targets, str) else sorted(targets):
        if not any(_is_target(module, [target]) for module in modules):
            raise WeightManifestError(f"the LoRA adapter has no tensors for its target module {target!r}", name=target)
    return {**plain_config, "target_modules": sorted({module.rpartition(".")[2] for module in modules})}


def missing_fused_parts(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], manifest: Manifest
) -> dict[str, TensorSpec]:
    """Specs by name of the tensors that SGLang needs in addition to those of a checked LoRA adapter. Send zeros.

    SGLang fuses `q_proj`, `k_proj` and `v_proj` of a layer, and other modules. It fails or stops if a LoRA adapter has
    only some of them, for example `q_proj` without `v_proj`. Zeros do not change what the LoRA adapter computes.
    """
    modules = {_module_of(name) for name in specs}
    missing: dict[str, TensorSpec] = {}
    for module in modules:
        parent, _, own_part = module.rpartition(".")
        for part in fused_with(own_part):
            other = f"{parent}.{part}"
            if other not in modules and f"{other}.weight" in manifest.tensors:
                missing |= _lora_tensors(other, int(config["r"]), manifest)
    return missing


def _is_target(module: str, targets: Collection[str]) -> bool:
    """Whether `module` is among the targets, as in PEFT: names, the ends of paths, or one regular expression."""
    if isinstance(targets, str):
        try:
            return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
        except re.error as error:
            raise BadInputError(f"target_modules {targets!r} is no regular expression: {error}") from None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _lora_tensors(module: str, rank: int, manifest: Manifest) -> dict[str, TensorSpec]:
    """Specs of the module's tensors lora_A and lora_B by name. Raises WeightManifestError if it is no linear layer."""
    weight = manifest.tensors.get(f"{module}.weight")
    if manifest.tied is not None and f"{module}.weight" == manifest.tied[0]:
        raise WeightManifestError(
            f"{module!r} cannot have a LoRA adapter: it is one parameter with the embedding {manifest.tied[1]!r} "
            "(tie_word_embeddings). Leave it out of target_modules, or train and serve a checkpoint with "
            f"tie_word_embeddings=false in its config.json and with its own {manifest.tied[0]!r}",
            name=module,
        )
    if weight is None:
        raise WeightManifestError(f"the model has no module {module!r}", name=module)
    if len(weight.shape) != 2:
        raise WeightManifestError(
            f"{module!r} cannot have a LoRA adapter: it is no linear layer, its weight has shape {list(weight.shape)}",
            name=module,
        )
    shapes = (rank, weight.shape[1]), (weight.shape[0], rank)
    names = [f"{PREFIX}{module}{suffix}" for suffix in SUFFIXES]
    return {name: TensorSpec(shape, "float32") for name, shape in zip(names, shapes, strict=True)}


def _module_of(name: str) -> str:
    """The module that a tensor of a LoRA adapter belongs to. Raises WeightManifestError for another name."""
    for suffix in SUFFIXES:
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)]
    raise WeightManifestError(
        f"{name!r} is no tensor of a LoRA adapter: its tensors are called {PREFIX}<module>{SUFFIXES[0]} and "
        f"{PREFIX}<module>{SUFFIXES[1]}, as peft.get_peft_model_state_dict(model, save_embedding_layers=False) returns "
        "them. The LoRA adapter of an embedding, and whole tensors that were trained (modules_to_save), are not "
        "supported: merge the LoRA adapter into the weights and push them with update_weights_from_tensor",
        name=name,
    )
