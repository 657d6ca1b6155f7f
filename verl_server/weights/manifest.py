"""What a served model accepts: names, full shapes and dtypes, known before a byte moves.

Taken from the headers of the checkpoint that the server loaded; where there is no checkpoint (dummy
weights), from the architecture built on torch's meta device. Runs in the trainer and reads no weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError, WeightManifestError
from verl_server.types import TensorSpec

#: Float types that a trainer may hold a parameter in. Other floats are cast on the way, as SGLang does.
CASTABLE = frozenset({"float32", "bfloat16", "float16"})
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The tensors of one model. `ignored` are names that trainers send and the model derives (tied heads)."""

    tensors: Mapping[str, TensorSpec]
    ignored: frozenset[str] = frozenset()

    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec | None:
        """The slot for a tensor, or None if it is to be left out. Raises WeightManifestError otherwise."""
        if name in self.ignored:
            return None
        spec = self.tensors.get(name)
        if spec is None:
            raise WeightManifestError(
                f"the model has no parameter {name!r}{_suggestion(name, self.tensors)}", name=name
            )
        if shape != spec.shape:
            raise WeightManifestError(
                f"{name!r} has shape {list(shape)}, the model wants {list(spec.shape)}",
                name=name,
                expected=list(spec.shape),
                got=list(shape),
            )
        if dtype != spec.dtype and not (dtype in CASTABLE and spec.dtype in CASTABLE):
            raise WeightManifestError(
                f"{name!r} has dtype {dtype}, the model wants {spec.dtype}",
                name=name,
                expected=spec.dtype,
                got=dtype,
            )
        return spec


def _suggestion(name: str, known: Mapping[str, TensorSpec]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def manifest_of(server_args: Mapping[str, Any]) -> Manifest:
    """The manifest of the model that a server with these arguments serves.

    Raises UnsupportedError where neither checkpoint headers nor the architecture tell.
    """
    from transformers import AutoConfig

    path = str(server_args["model_path"])
    trust = bool(server_args.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust, revision=server_args.get("revision"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read the model's configuration at {path}: {error}") from error
    overrides = server_args.get("json_model_override_args")
    if overrides:
        config.update(json.loads(overrides))
    files = sorted(Path(path).glob("*.safetensors")) if server_args.get("load_format") != "dummy" else []
    tensors: dict[str, TensorSpec] = {}
    for file in files:
        tensors.update(_header_of(file))
    if not tensors:
        tensors = _meta_tensors(config, trust)
    served = _served_dtype(server_args.get("dtype") or "auto", config)
    if served is not None:
        tensors = {
            name: TensorSpec(spec.shape, served if spec.dtype in CASTABLE else spec.dtype)
            for name, spec in tensors.items()
        }
    tied = bool(getattr(config, "tie_word_embeddings", False))
    ignored = frozenset({"lm_head.weight"} - tensors.keys()) if tied else frozenset()
    return Manifest(tensors, ignored)


def _served_dtype(argument: str, config: Any) -> str | None:
    """SGLang's `--dtype`: 'auto' serves float32 checkpoints as float16 on an accelerator; None keeps."""
    names = {"half": "float16", "float": "float32"}
    if argument != "auto":
        return names.get(argument, argument)
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _header_of(file: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a safetensors file (format: 8 bytes of length, then JSON)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: TensorSpec(tuple(entry["shape"]), SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]))
        for name, entry in header.items()
    }


def _meta_tensors(config: Any, trust_remote_code: bool) -> dict[str, TensorSpec]:
    import torch
    from transformers import AutoModelForCausalLM

    from verl_server.weights.names import unfused_spec

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise UnsupportedError(
            f"cannot tell which weights this model takes: no safetensors header beside its configuration, and "
            f"transformers cannot build {getattr(config, 'architectures', None)}: {error}"
        ) from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    found: dict[str, TensorSpec] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            found.update(unfused_spec(name, spec))
    return found
