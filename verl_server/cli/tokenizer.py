"""Tokenizers for commands. A folder without a tokenizer and an unreachable Hub are found within seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError

HUB_TIMEOUT_S = 10.0
"""Maximum seconds of the question whether the Hub has a model. transformers repeats failed requests for a minute."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
"""Files of which a folder with a tokenizer has at least one."""


def load_tokenizer(name: str, hint: str) -> Any:
    """The tokenizer of a folder or of a name on the Hugging Face Hub. Raises BadInputError, which ends with `hint`."""
    from transformers import AutoTokenizer

    folder = Path(os.path.expanduser(name))
    try:
        if folder.exists():
            _require_tokenizer_files(folder)
            return AutoTokenizer.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(name, local_files_only=not _is_on_hub(name))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise BadInputError(f"the tokenizer {name!r} cannot be loaded: {reason}; {hint}") from error


def _require_tokenizer_files(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file")
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise FileNotFoundError(f"the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")


def _is_on_hub(name: str) -> bool:
    """Whether the Hub can be asked for the files of a model. If not, they can still be in the cache of this machine.

    Raises FileNotFoundError for the path of a folder, and if the Hub answers that it has no such model.
    """
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError("there is no such folder")

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise FileNotFoundError("there is no such folder, and the Hub has no such model that you may read") from None
    except HfHubHTTPError:  # a mirror may lack this question
        return True
    except Exception:  # noqa: BLE001 - offline or unreachable; versions of the Hub's client have errors of other HTTP libraries
        return False
    return True
