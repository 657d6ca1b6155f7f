"""The manifest of a served model: names, full shapes and dtypes of its tensors, known before any weight is sent.

The manifest is read from the headers of the checkpoint that the server loaded. Without a checkpoint (dummy weights) it
comes from the architecture, built on torch's meta device. This runs in the trainer and reads no weights.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError, WeightManifestError
from verl_server.types import TensorSpec
from verl_server.weights.unknown_names import explain_unknown_name

CASTABLE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes that are cast to each other when a tensor is pushed, as SGLang does."""
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
DECODER_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Manifest:
    """The tensors that one served model accepts."""

    tensors: Mapping[str, TensorSpec]
    """Full shape and dtype of each tensor, by Hugging Face parameter name."""
    ignored: frozenset[str] = frozenset()
    """Names that may be pushed and are left out, because the server does not load them (see `_is_not_loaded`)."""

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
    ignored = {name for name in (*tensors, "lm_head.weight") if _is_not_loaded(name, config, server_args)}
    return Manifest({name: tensors[name] for name in tensors if name not in ignored}, frozenset(ignored))


def _is_not_loaded(name: str, config: Any, server_args: Mapping[str, Any]) -> bool:
    """Whether SGLang's loaders skip a tensor of the checkpoint: trainers often do not have it.

    These are tied output heads, tables of rotary embeddings, and the layers for multi-token prediction (MTP), which
    follow the last decoder layer, of a server without speculative decoding.
    """
    if name == "lm_head.weight":
        return bool(getattr(config, "tie_word_embeddings", False))
    if name.endswith("rotary_emb.inv_freq"):
        return True
    layer = DECODER_LAYER.match(name)
    text_config = config.get_text_config()
    return (
        layer is not None
        and bool(getattr(text_config, "num_nextn_predict_layers", 0))
        and not server_args.get("speculative_algorithm")
        and int(layer[1]) >= text_config.num_hidden_layers
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
