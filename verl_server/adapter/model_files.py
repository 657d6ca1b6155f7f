"""A model's own configuration file, read without transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import is_finite_number, is_list, require_whole_number

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def find_model_file(model_path: str, name: str) -> Path | None:
    """The file of that name in the model's folder, or in the local cache of the hub. None when it is not there."""
    file = Path(model_path) / name
    if file.is_file():
        return file
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_path, name) if model_path.count("/") == 1 else None
    return Path(cached) if isinstance(cached, str) else None


def read_model_config(model_path: str, name: str = "config.json") -> dict[str, Any]:
    """The model's `config.json`, or another JSON file, from a folder or from the local cache of the hub.

    An empty dict when it is not there. Raises BadInputError for a file that is no JSON object.
    """
    if (file := find_model_file(model_path, name)) is None:
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{file} is no JSON object: {error}", argument="model_path") from error


def read_model_configs(model_path: str, tokenizer_path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The files `config.json`, `generation_config.json` and `tokenizer_config.json`."""
    return (
        read_model_config(model_path),
        read_model_config(model_path, "generation_config.json"),
        read_model_config(tokenizer_path, "tokenizer_config.json"),
    )


# -- Files of a model's folder ----------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
TOKENIZER_FILES = ("tokenizer.json*", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
#: Files with weights that are not safetensors.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.npcache")


def require_complete_folder(folder: Path, *, weights: bool, tokenizer: bool) -> None:
    """Raise BadInputError for a model's folder that an engine cannot load: it would say so late and at length.

    `weights`, `tokenizer`: whether the engine reads them from this folder. Only names, sizes and headers are read.
    """
    if (folder / "params.json").is_file():  # the format of Mistral
        return
    if not (folder / "config.json").is_file():
        hint = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        if (folder / CONFIG_FILE).is_file():
            raise BadInputError(
                f"model_path {folder} is a LoRA adapter of {read_model_config(str(folder), CONFIG_FILE).get(BASE)}: "
                "serve that model with enable_lora=True and load the adapter into it (load_lora_adapter), or write a "
                "whole model with merge_and_unload() of peft",
                argument="model_path",
            )
        raise BadInputError(
            f"model_path {folder} has no config.json: it is not a model's folder. It has: {hint}", argument="model_path"
        )
    read_model_config(str(folder))
    if weights and (problems := _weight_problems(folder)):
        raise BadInputError(
            f"the weights of model_path {folder} are incomplete: {'; '.join(problems[:5])}. "
            "Copy or download them again",
            argument="model_path",
        )
    if tokenizer and not tokenizer_files(folder) and not any(folder.glob("tokenization_*.py")):
        raise BadInputError(
            f"model_path {folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}). Save that of the original model "
            "there, pass tokenizer_path, or serve token ids only with skip_tokenizer_init=True",
            argument="model_path",
        )


def _weight_problems(folder: Path) -> list[str]:
    """What is wrong with the safetensors files of a folder. Files of other formats are left to the engine."""
    if not any(folder.glob("*.safetensors")):
        if any(file for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)):
            return []
        return ["it has no file with weights; load_format='dummy' starts with random ones"]
    try:
        names = weight_files(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{INDEX} cannot be read ({type(error).__name__}: {error})"]
    problems = [f"{name} {problem}" for name in sorted(names) if (problem := read_header(folder / name)[1])]
    numbered = {found[1]: int(found[2]) for name in names if (found := SHARD.search(name)) is not None}
    total = max(numbered.values(), default=0)
    if 0 < len(numbered) < total:
        problems.append(f"{total - len(numbered)} of {total} files are missing")
    return problems


def weight_files(folder: Path) -> set[str]:
    """Names of the safetensors files that an engine reads: those of the index, if there is one."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return {file.name for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")}


def tokenizer_files(folder: Path) -> list[str]:
    return sorted({file.name for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})


def read_header(file: Path) -> tuple[dict[str, Any], str]:
    """Read the header of a safetensors file (8 bytes of length, then JSON).

    Returns the header, and the problem of the file or "".
    """
    if not file.is_file():
        return {}, "is missing"
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return {}, "is a git-lfs pointer instead of the file"
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            return {}, "is truncated or not a safetensors file"
        opened.seek(8)
        try:
            header: dict[str, Any] = dict(json.loads(opened.read(length)))
        except (ValueError, TypeError):
            return {}, "has a damaged header"
    end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    if size != 8 + length + end:
        return header, f"has {size} bytes but should have {8 + length + end}"
    return header, ""


# -- Facts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFacts:
    """The sizes and names in a model's `config.json`. Sizes are numbers of elements; 0 if the file has no value."""

    architecture: str
    model_type: str = ""
    dtype: str = "bfloat16"
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    """Elements per token and layer that multi-head latent attention caches instead of keys and values."""
    intermediate: int = 0
    moe_intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    vocab: int = 0
    context: int = 0
    quantized: bool = False
    own_code: bool = False
    """Whether the folder contains its own modelling code (`auto_map`)."""


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Read the values of the language model from a Hugging Face config."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def number(*names: str) -> int:
        return next((int(text[name]) for name in names if isinstance(text.get(name), (int, float))), 0)

    heads = number("num_attention_heads", "n_head")
    hidden = number("hidden_size", "n_embd")
    rank = number("kv_lora_rank")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        architecture=(config.get("architectures") or [""])[0],
        model_type=str(config.get("model_type", "")),
        dtype=str(dtype or "bfloat16").removeprefix("torch."),
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or (hidden // heads if heads else 0),
        latent=rank + number("qk_rope_head_dim") if rank else 0,
        intermediate=number("intermediate_size", "n_inner"),
        moe_intermediate=number("moe_intermediate_size"),
        experts=number(*EXPERT_KEYS),
        experts_per_token=number("num_experts_per_tok", "num_experts_per_token"),
        vocab=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions"),
        quantized=bool(config.get("quantization_config")),
        own_code="auto_map" in config,
    )


# -- Lora config ------------------------------------------------------------------------------------
# Configurations of LoRA adapters: from PEFT's `LoraConfig` to what SGLang computes. Pure functions, except for files.
#
# SGLang 0.5.23 reads only `peft_type`, `r`, `lora_alpha`, `target_modules` and `use_dora` of a configuration
# (srt/lora/model_files.py), and multiplies by `lora_alpha / r` (srt/lora/lora.py).

PREFIX = "base_model.model."
"""Beginning of the names that PEFT gives the tensors of a LoRA adapter."""
ALL_LINEAR = "all-linear"
"""PEFT's value of `target_modules` for every linear layer except the output head."""
UNSUPPORTED_FIELDS = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication",
    "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config",
)  # fmt: skip
"""Fields of PEFT's `LoraConfig` that change what a LoRA adapter computes, and that SGLang does not support. The other
fields choose the modules, which the names of the tensors show, or are used only for training."""
CHANGES_THE_MODEL = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Beginnings of the values of `init_lora_weights` with which PEFT changes the model's own weights."""
CONFIG_FILE, BASE = "adapter_config.json", "base_model_name_or_path"
TENSORS_FILE = "adapter_model.safetensors"


def plain_lora_config(config: Mapping[str, Any], tensor_names: Iterable[str]) -> Json:
    """The configuration with which SGLang computes the same outputs as PEFT, for the LoRA adapter with these tensors.

    It has the fields `peft_type`, `r`, `lora_alpha` and `target_modules` only.

    `config` is PEFT's `adapter_config.json` or `LoraConfig.to_dict()`, with `r`, `lora_alpha` and `target_modules`.
    `tensor_names`: PEFT's names. Raises BadInputError for a configuration that is invalid or that SGLang does not
    support.
    """
    if not isinstance(config, Mapping):
        raise BadInputError(
            "config must be a dict with the content of PEFT's adapter_config.json (LoraConfig.to_dict()), got "
            f"{type(config).__name__}",
            argument="config",
        )
    peft_type = config.get("peft_type")
    if str(getattr(peft_type, "value", peft_type) or "LORA").upper() != "LORA":
        raise BadInputError(f"only LoRA adapters can be served, but the configuration has peft_type={peft_type!r}")
    bias = config.get("bias")
    for field, value in [("bias", None if bias == "none" else bias), *((f, config.get(f)) for f in UNSUPPORTED_FIELDS)]:
        if value:
            raise _unsupported(field, value)
    _require_unchanged_model(config.get("init_lora_weights"))
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensor_names if ".lora_" in name}
    rank = _value_of_all(modules, config, "r", "rank_pattern")
    alpha = _value_of_all(modules, config, "lora_alpha", "alpha_pattern")
    targets = config.get("target_modules")
    rank = require_whole_number("the LoRA rank `r` of the configuration", rank)
    if not is_finite_number(alpha):
        raise BadInputError(f"a LoRA configuration needs lora_alpha, a number; got {alpha!r}")
    are_names = isinstance(targets, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in targets)
    if not targets or not (are_names or isinstance(targets, str)):
        raise BadInputError(
            f"a LoRA configuration needs target_modules: a list of names, {ALL_LINEAR!r} or a regular expression; got "
            f"{targets!r}"
        )
    # PEFT multiplies the output of a rank-stabilized LoRA adapter by alpha / sqrt(r), SGLang by alpha / r.
    scaled_alpha = float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)
    if isinstance(targets, str):  # SGLang knows no regular expressions
        targets = sorted({module.rpartition(".")[2] for module in modules}) or targets
    else:
        targets = sorted(targets)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scaled_alpha, "target_modules": targets}


def check_lora_paths(lora_paths: Any) -> None:
    """Check the LoRA adapters in the server argument `lora_paths`, as far as their folders are on this machine.

    SGLang loads them from their files, so that their configurations cannot be converted. Raises BadInputError for a
    LoRA adapter that SGLang would serve wrongly.
    """
    for folder in map(Path, lora_paths_by_name(lora_paths).values()):
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # SGLang reports a file that is missing or damaged
            continue
        try:
            plain = plain_lora_config(config, _tensor_names(folder))
        except BadInputError as error:
            raise BadInputError(f"the LoRA adapter in {folder}: {error.message}", **error.details) from None
        read = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
        needed = {name: plain[name] for name in read}
        if read != needed:
            raise BadInputError(
                f"the LoRA adapter in {folder} has use_rslora, rank_pattern or alpha_pattern, which SGLang ignores. It "
                f"needs {needed} instead of {read} to compute the outputs of the trainer. Load the LoRA adapter with "
                f"load_lora_adapter, which converts the configuration, or write these values into {CONFIG_FILE}",
                argument="lora_paths",
            )


def parse_lora_paths(lora_paths: Any) -> list[Json]:
    """SGLang's server argument `lora_paths` as dicts with `lora_name` and `lora_path`.

    The argument is a dict of paths by name, or a list of `name=path`, paths, dicts or their JSON texts. One string is a
    list with one item, as on SGLang's own command line. A path without a name is its own name. Raises BadInputError for
    another value.
    """
    if isinstance(lora_paths, Mapping):
        return [{"lora_name": str(name), "lora_path": str(path)} for name, path in lora_paths.items()]
    items = [lora_paths] if isinstance(lora_paths, str) else [] if lora_paths is None else lora_paths
    if not is_list(items):
        raise BadInputError(
            f"lora_paths must be a dict of folders by name, or a list of folders, got {lora_paths!r}; write for "
            'example lora_paths={"a": "/adapters/a"}',
            argument="lora_paths",
        )
    parsed = []
    for item in items:
        if isinstance(item, str) and item.startswith("{"):
            with suppress(ValueError):
                item = json.loads(item)
        if isinstance(item, Mapping):
            parsed.append(dict(item))  # SGLang's parser refuses one with other names
        else:
            name, _, path = str(item).partition("=")
            parsed.append({"lora_name": name, "lora_path": path or name})
    return parsed


def lora_paths_by_name(lora_paths: Any) -> dict[str, str]:
    """SGLang's server argument `lora_paths` as paths by name. Raises BadInputError for a wrong value."""
    return {str(item.get("lora_name")): str(item.get("lora_path")) for item in parse_lora_paths(lora_paths)}


def _unsupported(field: str, value: Any) -> BadInputError:
    return BadInputError(
        f"SGLang does not support {field}={value!r} of a LoRA configuration, and would compute other outputs than the "
        "trainer. Train without it, or merge the LoRA adapter into the weights and push them with "
        "update_weights_from_tensor",
        argument=field,
    )


def _require_unchanged_model(initialization: Any) -> None:
    """Raise BadInputError if PEFT has changed the model's own weights when it made the LoRA adapter."""
    if not isinstance(initialization, str) or not initialization.lower().startswith(CHANGES_THE_MODEL):
        return
    raise BadInputError(
        f"with init_lora_weights={initialization!r} PEFT has changed the weights of the trainer's model: the LoRA "
        "adapter gives wrong outputs with the original weights. Push the weights of the trainer's model with "
        "update_weights_from_tensor, and load the LoRA adapter with init_lora_weights=True in its configuration. PEFT "
        "can also convert such a LoRA adapter to a plain one, except with LoftQ: "
        "save_pretrained(folder, path_initial_model_for_weight_conversion=...)",
        argument="init_lora_weights",
    )


def _value_of_all(modules: Collection[str], config: Mapping[str, Any], field: str, pattern_field: str) -> Any:
    """The value that `field` has in all modules. `pattern_field`: other values by regular expression, as in PEFT.

    Raises BadInputError if the modules have different values.
    """
    default, pattern = config.get(field), config.get(pattern_field) or {}
    if not isinstance(pattern, Mapping):
        raise BadInputError(f"{pattern_field} must be a dict of numbers by name, got {type(pattern).__name__}")
    try:
        matching = [
            next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)
            for module in modules
        ]
    except re.error as error:
        raise BadInputError(f"a name in {pattern_field} is no regular expression: {error}") from None
    values = matching or [default, *pattern.values()]  # without names of tensors, every pattern may match
    if any(value != values[0] for value in values):
        raise _unsupported(pattern_field, pattern)
    return values[0]


def _tensor_names(folder: Path) -> list[str]:
    """Names of the tensors of a LoRA adapter on disk, empty if its file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / TENSORS_FILE, framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError):
        return []
