"""Servers whose weights cannot be replaced by pushed tensors. They are refused by name before anything starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from verl_server.adapter.model_files import find_model_file, read_model_config
from verl_server.adapter.sglang.capabilities import TESTED_VERSION
from verl_server.errors import UnsupportedError

QUANTIZATION_ARGUMENTS = ("quantization", "torchao_config", "modelopt_quant")
NO_QUANTIZATION = (None, "", "unquant")
"""Values of these arguments that quantize nothing."""
QUANTIZED_FORMATS = frozenset({"bitsandbytes", "gguf"})
"""Values of `load_format` for quantized checkpoints. A model whose name ends with `.gguf` also is one."""
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_model_description.json")
"""Files with which ModelOpt and ModelSlim describe a quantized checkpoint outside of its `config.json`."""
EXTERNAL_KV_STORES = (
    "hicache_storage_backend", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker",
)  # fmt: skip
"""Arguments that keep the KV cache outside of the server's process, where `flush_cache` does not remove it."""
EXTERNAL_RADIX_CACHES = frozenset({"flexkv", "lmcache"})
"""Values of `radix_cache_backend` that keep the KV cache outside of the server's process."""
ALGORITHMS_WITHOUT_DRAFT_MODEL = frozenset({"NGRAM"})


PACKED_EXPERTS = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")
"""Values of `moe_runner_backend` whose kernels read the experts' weights in another order than the checkpoint's."""


INTERLEAVED_EXPERTS = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
"""Variable with which each end of an update session changes the order of the rows of experts, written or not."""


def require_pushable(server_args: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
    """Raise UnsupportedError if a server with these SGLang arguments cannot take pushed weights.

    `env`: the environment variables that are added for the server to those of this process. None: of a server that runs
    already, whose environment is not known.

    Each rule is a fact of SGLang 0.5.23. The second stages of a pipeline and the copies of data parallelism do not
    answer an update. A draft model for speculative decoding is passed the same update as the served model. A quantized
    model keeps scales that belong to its earlier weights. An external KV store keeps the KV cache of earlier weights.
    The scheduler of a server with a weight cache ends at the first update. Encoders of other servers are not updated.
    """
    if (reason := _reason(server_args, {} if env is None else os.environ | dict(env))) is not None:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with {reason}. Without weight updates, start such a server with "
            "HttpServerEngineAdapter.launch, or as replicas of a RolloutManager with mode='colocated'"
        )


def require_unpacked_experts(resolved_args: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a server without update sessions whose kernels need packed weights of experts.

    SGLang 0.5.15 packs the weights after it has read the checkpoint, and not after an update: the server would compute
    with weights in the wrong order. Later versions pack them again at the end of an update session. `resolved_args`:
    the arguments of a running server with the values that SGLang has chosen.
    """
    if (backend := resolved_args.get("moe_runner_backend")) in PACKED_EXPERTS:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with moe_runner_backend={backend!r} of an SGLang without "
            f"/begin_weight_update: use 'triton', or SGLang {TESTED_VERSION}"
        )


def _reason(server_args: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    """What makes pushed weights impossible, and what to use instead. None: nothing."""
    if (pp_size := server_args.get("pp_size") or 1) > 1:
        return f"pp_size={pp_size} pipeline stages: use tp_size instead"
    if (dp_size := server_args.get("dp_size") or 1) > 1 and not server_args.get("enable_dp_attention"):
        return f"dp_size={dp_size} data parallel copies: use that many replicas, or enable_dp_attention"
    algorithm = server_args.get("speculative_algorithm")
    if algorithm is not None and str(algorithm).upper() not in ALGORITHMS_WITHOUT_DRAFT_MODEL:
        return f"speculative_algorithm={algorithm!r}, which has a draft model: leave it out, or use 'NGRAM'"
    if (mode := server_args.get("weight_cache_mode") or "off") != "off":
        return f"weight_cache_mode={mode!r}, whose servers map the same weights: leave it out"
    if env.get(INTERLEAVED_EXPERTS, "").lower() in ("1", "true", "yes", "y"):
        return f"the environment variable {INTERLEAVED_EXPERTS}={env[INTERLEAVED_EXPERTS]}: remove it"
    if server_args.get("language_only"):
        return "language_only=True, whose images other servers encode: leave it out"
    return _external_kv_store(server_args) or _quantization(server_args)


def _external_kv_store(server_args: Mapping[str, Any]) -> str | None:
    """The argument that makes the server keep its KV cache outside of its process, and what to do. None: nothing."""
    names = [name for name in EXTERNAL_KV_STORES if server_args.get(name)]
    if str(server_args.get("radix_cache_backend")).lower() in EXTERNAL_RADIX_CACHES:
        names.append("radix_cache_backend")
    if not names:
        return None
    return (
        f"{names[0]}={server_args[names[0]]!r}: its external store keeps the KV cache of earlier weights: leave it out"
    )


def _quantization(server_args: Mapping[str, Any]) -> str | None:
    """What makes the served model a quantized model, and what to use instead. None: nothing."""
    for name in QUANTIZATION_ARGUMENTS:
        if server_args.get(name) not in NO_QUANTIZATION:
            return f"{name}={server_args[name]!r}: serve the model without quantization"
    unquantized = "serve an unquantized checkpoint, for example bfloat16"
    load_format, model_path = server_args.get("load_format"), str(server_args.get("model_path") or "")
    if load_format in QUANTIZED_FORMATS:
        return f"load_format={load_format!r}, a quantized checkpoint: {unquantized}"
    if PurePath(model_path).suffix == ".gguf":
        return f"model_path={model_path!r}, a quantized checkpoint: {unquantized}"
    config = {**(read_model_config(model_path) if model_path else {}), **_config_overrides(server_args)}
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"a quantized checkpoint (quant_method {method!r}): {unquantized}"
    for name in QUANTIZATION_FILES if model_path else ():
        if find_model_file(model_path, name) is not None:
            return f"a quantized checkpoint (it has the file {name}): {unquantized}"
    return None


def _config_overrides(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """What `json_model_override_args` changes in the model's `config.json`. SGLang reports invalid JSON."""
    overrides = server_args.get("json_model_override_args")
    try:
        overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
    except ValueError:
        return {}
    return dict(overrides) if isinstance(overrides, Mapping) else {}
