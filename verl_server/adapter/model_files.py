"""A model's own configuration file, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_model_config(model_path: str) -> dict[str, Any]:
    """The model's `config.json`, from a folder or from the local cache of the hub.

    An empty dict when it is not there.
    """
    file = Path(model_path) / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model_path, "config.json") if model_path.count("/") == 1 else None
        if not isinstance(cached, str):
            return {}
        file = Path(cached)
    return dict(json.loads(file.read_text(encoding="utf-8")))
