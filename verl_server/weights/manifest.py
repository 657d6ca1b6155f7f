"""The manifest of a served model: names, full shapes and dtypes of its tensors, known before any weight is sent.

The manifest is read from the headers of the checkpoint that the server loaded. Without a checkpoint (dummy weights) it
comes from the architecture, built on torch's meta device. This runs in the trainer and reads no weights.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError, WeightManifestError
from verl_server.types import TensorSpec
from verl_server.weights.unknown_names import explain_unknown_name

OUTPUT_HEAD = "lm_head.weight"
CASTABLE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes that are cast to each other when a tensor is pushed, as SGLang does."""
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
DECODER_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
MTP_PREFIX = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")
"""How the names of layers for multi-token prediction (MTP) begin, where they are not numbered as decoder layers."""
OWN_MTP_ALGORITHMS = frozenset({"EAGLE", "NEXTN"})
"""Speculative decoding whose draft model is, by default, made of the model's own MTP layers."""


@dataclass(frozen=True)
class Manifest:
    """The tensors that one served model accepts."""

    tensors: Mapping[str, TensorSpec]
    """Full shape and dtype of each tensor, by Hugging Face parameter name."""
    optional: frozenset[str] = frozenset()
    """Names in `tensors` that an update of the whole model need not have (see `_is_optional`)."""
    ignored: frozenset[str] = frozenset()
    """Names that are not in `tensors`, may be pushed and are left out: a tied output head that no checkpoint has."""

    @cached_property
    def required(self) -> frozenset[str]:
        """The names that an update of the whole model must have."""
        return frozenset(self.tensors.keys() - self.optional)

    def is_whole(self, names: Iterable[str]) -> bool:
        """Whether an update of the tensors `names` is an update of the whole model."""
        return self.num_missing(names) == 0

    def num_missing(self, names: Iterable[str]) -> int:
        """Number of required tensors that an update of the tensors `names` lacks."""
        return len(self.required.difference(names))

    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec | None:
        """The spec that a pushed tensor must have, or None if the tensor is to be left out.

        Raises WeightManifestError for an unknown name, another shape, or a dtype that cannot be cast.
        """
        if name in self.ignored:
            return None
        spec = self.tensors.get(name)
        if spec is None:
            raise WeightManifestError(
                f"the model has no parameter {name!r}{explain_unknown_name(name, self.tensors)}", name=name
            )
        if shape != spec.shape:
            raise WeightManifestError(
                f"{name!r} has shape {list(shape)}, the model expects {list(spec.shape)}",
                name=name,
                expected=list(spec.shape),
                got=list(shape),
            )
        if dtype != spec.dtype and not (dtype in CASTABLE_DTYPES and spec.dtype in CASTABLE_DTYPES):
            raise WeightManifestError(
                f"{name!r} has dtype {dtype}, the model expects {spec.dtype}",
                name=name,
                expected=spec.dtype,
                got=dtype,
            )
        return spec


def read_manifest(server_args: Mapping[str, Any]) -> Manifest:
    """Read the manifest of the model that a server with these SGLang arguments serves.

    Raises BadInputError if the model's configuration cannot be read, and UnsupportedError if there are neither
    checkpoint headers nor an architecture that transformers can build.
    """
    from transformers import AutoConfig

    path = str(server_args["model_path"])
    trust_remote_code = bool(server_args.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, revision=server_args.get("revision")
        )
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read the configuration of the model at {path}: {error}") from error
    overrides = server_args.get("json_model_override_args")
    if overrides:
        config.update(json.loads(overrides))
    files = sorted(Path(path).glob("*.safetensors")) if server_args.get("load_format") != "dummy" else []
    tensors: dict[str, TensorSpec] = {}
    for file in files:
        tensors.update(_read_header(file))
    if not tensors:
        tensors = _meta_tensors(config, trust_remote_code)
    served = _served_dtype(server_args.get("dtype") or "auto", config)
    if served is not None:
        tensors = {
            name: TensorSpec(spec.shape, served if spec.dtype in CASTABLE_DTYPES else spec.dtype)
            for name, spec in tensors.items()
        }
    optional = _optional_names(tensors, config, server_args)
    ties_output_head = bool(getattr(config, "tie_word_embeddings", False))
    return Manifest(tensors, optional, frozenset({OUTPUT_HEAD} - tensors.keys() if ties_output_head else ()))


def _optional_names(names: Iterable[str], config: Any, server_args: Mapping[str, Any]) -> frozenset[str]:
    """The tensors of a checkpoint that most of SGLang's loaders skip, so that trainers often do not have them.

    These are tied output heads, tables of rotary embeddings, and the layers for multi-token prediction (MTP) of a
    server whose speculative decoding does not use them. A few of SGLang's models load such tensors. Therefore the
    tensors are sent if they are pushed. If they are not pushed and the server needs them, the update fails, because the
    server reports parameters that were not written.
    """
    try:
        text_config = config.get_text_config()
    except ValueError as error:  # the configuration of a model with several text models, such as speech models
        raise BadInputError(f"cannot read the text model of {config.architectures}: {error}") from error
    num_layers = getattr(text_config, "num_hidden_layers", None)
    ties_output_head = bool(getattr(config, "tie_word_embeddings", False))
    draft_model = server_args.get("speculative_draft_model_path") or server_args["model_path"]
    algorithm = str(server_args.get("speculative_algorithm") or "").upper()
    serves_mtp = algorithm in OWN_MTP_ALGORITHMS and str(draft_model) == str(server_args["model_path"])

    def is_mtp(name: str) -> bool:
        layer = DECODER_LAYER.match(name)
        return bool(MTP_PREFIX.match(name)) or (
            layer is not None and num_layers is not None and int(layer[1]) >= num_layers
        )

    return frozenset(
        name
        for name in names
        if (name == OUTPUT_HEAD and ties_output_head)
        or name.endswith("rotary_emb.inv_freq")
        or (is_mtp(name) and not serves_mtp)
    )


def _served_dtype(argument: str, config: Any) -> str | None:
    """The dtype that SGLang's `--dtype` gives the weights. None: that of the checkpoint.

    With "auto", SGLang serves float32 checkpoints as float16 on an accelerator.
    """
    names = {"half": "float16", "float": "float32"}
    if argument != "auto":
        return names.get(argument, argument)
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _read_header(file: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a safetensors file. The file begins with 8 bytes of length and a JSON header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: TensorSpec(tuple(entry["shape"]), SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]))
        for name, entry in header.items()
    }


def _meta_tensors(config: Any, trust_remote_code: bool) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of the architecture, built by transformers on torch's meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl_server.weights.names import unfuse_spec

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise UnsupportedError(
            f"the weights of this model are not known: there is no safetensors file beside its configuration, and "
            f"transformers cannot build {getattr(config, 'architectures', None)}: {error}"
        ) from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    specs: dict[str, TensorSpec] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            specs.update(unfuse_spec(name, spec))
    return specs
