"""Servers whose weights cannot be replaced by pushed tensors. They are refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.adapter.model_files import read_model_config
from verl_server.errors import UnsupportedError

QUANTIZATION_ARGUMENTS = ("quantization", "torchao_config")
NO_QUANTIZATION = (None, "", "unquant")
"""Values of these arguments that quantize nothing."""
ALGORITHMS_WITHOUT_DRAFT_MODEL = frozenset({"NGRAM"})


def require_pushable(server_args: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if a server with these SGLang arguments cannot take pushed weights.

    Each rule is a fact of SGLang 0.5.23. The second stages of a pipeline and the copies of data parallelism do not
    answer an update. A draft model for speculative decoding is passed the same update as the served model. A quantized
    model keeps scales that belong to its earlier weights.
    """
    if (reason := _reason(server_args)) is not None:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with {reason}. Without weight updates, start such a server with "
            "HttpServerEngineAdapter.launch, or as replicas of a RolloutManager with mode='colocated'"
        )


def _reason(server_args: Mapping[str, Any]) -> str | None:
    """What makes pushed weights impossible, and what to use instead. None: nothing."""
    if (pp_size := server_args.get("pp_size") or 1) > 1:
        return f"pp_size={pp_size} pipeline stages: use tp_size instead"
    if (dp_size := server_args.get("dp_size") or 1) > 1 and not server_args.get("enable_dp_attention"):
        return f"dp_size={dp_size} data parallel copies: use that many replicas, or enable_dp_attention"
    algorithm = server_args.get("speculative_algorithm")
    if algorithm is not None and str(algorithm).upper() not in ALGORITHMS_WITHOUT_DRAFT_MODEL:
        return f"speculative_algorithm={algorithm!r}, which has a draft model: leave it out, or use 'NGRAM'"
    for name in QUANTIZATION_ARGUMENTS:
        if server_args.get(name) not in NO_QUANTIZATION:
            return f"{name}={server_args[name]!r}: serve the model without quantization"
    if storage := server_args.get("hicache_storage_backend"):
        return f"hicache_storage_backend={storage!r}, which keeps the KV cache of earlier weights: leave it out"
    config = read_model_config(str(server_args["model_path"])) if server_args.get("model_path") else {}
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return (
            f"a quantized checkpoint (quant_method {method!r}): serve an unquantized checkpoint, for example bfloat16"
        )
    return None
