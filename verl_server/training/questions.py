"""Questions with known answers, and the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import make_writable_folder

SETTINGS_NAME = "settings.json"


def read_questions(path: Path | str) -> list[dict[str, str]]:
    """The lines `{"question": "...", "answer": "..."}` of a JSONL file, as dicts with these two texts.

    A number as an answer becomes its text. Empty lines are left out. Raises BadInputError, which names the file and the
    line, for a file that is missing or has no questions, and for any other line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # a text may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the questions: {path}: {error}", argument="path") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = json.loads(line)
                questions.append({"question": _text(value["question"]), "answer": _text(value["answer"])})
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise BadInputError(
                    f'{path}, line {number}: expected {{"question": "...", "answer": "..."}}, got {line[:80]!r} '
                    f"({type(error).__name__}: {error})",
                    argument="path",
                ) from error
    if not questions:
        raise BadInputError(f"{path} has no questions", argument="path")
    return questions


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(f"{value!r} is no text")
    return str(value)


def keep_settings(run_dir: Path | str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run into its folder, or compare them with those that the run has begun with.

    A run that continues with another model, other data or another seed is another run, which its metrics do not show.
    Values are compared as texts. Raises BadInputError, which names the settings that differ.
    """
    file = make_writable_folder("run_dir", run_dir) / SETTINGS_NAME
    texts = {name: str(value) for name, value in settings.items()}
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{file} is damaged: {error}", argument="run_dir") from error
    other = sorted(name for name in before.keys() | texts.keys() if before.get(name) != texts.get(name))
    if other:
        none = "(nothing)"
        changes = ", ".join(f"{name}={texts.get(name, none)} instead of {before.get(name, none)}" for name in other)
        raise BadInputError(f"the run in {run_dir} has begun with other settings: {changes}. Choose another folder")
