"""Reading the manifest of a served model, before any weight is sent.

Names and shapes are read from the headers of the checkpoint that the server loaded. Without a checkpoint (dummy
weights) they come from the architecture, built on torch's meta device. The dtypes are those that the servers report for
their parameters. This runs in the trainer and reads no weights.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError
from verl_server.platforms.parameter_dtypes import FLOAT_DTYPES, served_dtypes, widest_dtype
from verl_server.types import Json, TensorSpec
from verl_server.weights.checkpoint_names import CheckpointNames
from verl_server.weights.layout import SAFETENSORS_DTYPES
from verl_server.weights.manifest import CASTABLE_DTYPES, Manifest
from verl_server.weights.model_definition import build_on_meta, read_config, text_config

OUTPUT_HEAD = "lm_head.weight"
DECODER_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
MTP_PREFIX = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")
"""How the names of layers for multi-token prediction (MTP) begin, where they are not numbered as decoder layers."""
INDEX_FILE = "model.safetensors.index.json"
CONSOLIDATED_FILE = "consolidated.safetensors"


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
