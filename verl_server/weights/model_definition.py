"""The definition of a served model in Hugging Face transformers: configuration and architecture, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError


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
