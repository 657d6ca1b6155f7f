"""Digests of the inputs of a recorded session: what its tokens depend on, for example the messages of its task.

A later run with the same session id uses a recorded session only if all inputs are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import to_plain


def digest(value: object) -> str:
    """A short digest of a value, equal in every process. For an object of an unknown type, the type counts only."""
    return hashlib.sha256(_canonical_text(value).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def require_same_inputs(path: Path, recorded: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise BadInputError with the names of the inputs if a file was recorded with other inputs than those given.

    `recorded` and `given`: the digest of each input by the name of the input.
    """
    changed = [name for name in {**given, **recorded} if given.get(name) != recorded.get(name)]
    if changed:
        raise BadInputError(
            f"the session {path.stem!r} in the folder {path.parent} was recorded with other inputs: a different "
            f"{', '.join(changed)}. A run_dir belongs to one run, which can be resumed with the same inputs only: pass "
            'a run_dir of its own for each run, for example run_dir="sessions/step-7" for a training step',
            argument="run_dir",
        )


def _canonical_text(value: Any) -> str:
    value = to_plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_canonical_text(key)}:{_canonical_text(value[key])}' for key in value))}}}"
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(_canonical_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_canonical_text, value))}]"
    return f"{type(value).__module__}.{type(value).__qualname__}"
