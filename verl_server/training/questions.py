"""Questions with known answers, and the settings of a run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_server.agent.samples import Task
from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.messages import Message
from verl_server.validation import make_writable_folder

SETTINGS_NAME = "settings.json"


def read_tasks(path: Path | str) -> list[Task]:
    """The lines `{"question": "...", "answer": "..."}` of a JSONL file as tasks.

    The data of a task is its whole line, with the answer as a text without white space around it. A line may have a
    list of chat messages as `prompt` instead of the question. Empty lines are left out. The id of a task is its number.
    Raises BadInputError, which names the file and the line, for a file that is missing or has no questions, and for any
    other line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # a text may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the questions: {path}: {error}", argument="path") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = json.loads(line)
                data = {**value, "answer": _text(value["answer"]).strip()}
                if isinstance(value.get("prompt"), list):
                    tasks.append(Task(str(len(tasks)), value["prompt"], data))
                else:
                    tasks.append(_task(len(tasks), [], data | {"question": _text(value["question"])}))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise BadInputError(
                    f'{path}, line {number}: expected one JSON object in each line, {{"question": "...", "answer": '
                    f'"..."}}, got {line[:80]!r} ({type(error).__name__}: {error})',
                    argument="path",
                ) from error
    if not tasks:
        raise BadInputError(f"{path} has no questions", argument="path")
    return tasks


SUM_PROMPT: list[Message] = [
    {"role": "system", "content": "Answer with the number only."},
    {"role": "user", "content": "2 + 3"},
    {"role": "assistant", "content": "5"},
]
"""The messages before each question of `sum_tasks`."""


def sum_tasks(max_number: int = 20, num_tests: int = 50) -> tuple[list[Task], list[Task]]:
    """Sums of two numbers from 1 to `max_number`: the tasks to train on and those to test with, in random order.

    `num_tests` pairs of numbers are for tests, in both orders, so that no test is a training task with its numbers
    exchanged. 2 + 3 is in the prompt. The choice is the same in all runs. Raises BadInputError if no pair is left to
    train on.
    """
    numbers = range(1, max_number + 1)
    pairs = [pair for pair in itertools.combinations_with_replacement(numbers, 2) if pair != (2, 3)]
    pairs = random.Random(0).sample(pairs, len(pairs))
    if not 0 < num_tests < len(pairs):
        raise BadInputError(f"num_tests must be from 1 to {len(pairs) - 1}, got {num_tests}", argument="num_tests")

    def tasks(chosen: list[tuple[int, int]]) -> list[Task]:
        sums = [order for a, b in chosen for order in dict.fromkeys([(a, b), (b, a)])]
        random.Random(0).shuffle(sums)
        lines = [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in sums]
        return [_task(index, SUM_PROMPT, line) for index, line in enumerate(lines)]

    return tasks(pairs[num_tests:]), tasks(pairs[:num_tests])


def _task(index: int, before: list[Message], data: dict[str, Any]) -> Task:
    return Task(str(index), [*before, {"role": "user", "content": data["question"]}], data)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(f"{value!r} is no text")
    return str(value)


def keep_settings(run_dir: Path | str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run into its folder, or compare them with those that the run has begun with.

    A run that continues with another model, other data or another seed is another run, which its metrics do not show.
    Values are compared as texts. A folder with nothing but the settings is that of a run that did not begin, which may
    change them. Raises BadInputError, which names the settings that differ.
    """
    file = make_writable_folder("run_dir", run_dir) / SETTINGS_NAME
    texts = {name: str(value) for name, value in settings.items()}
    if not file.exists() or [path.name for path in file.parent.iterdir()] == [SETTINGS_NAME]:
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
