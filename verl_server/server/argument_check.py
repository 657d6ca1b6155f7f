"""Server arguments that SGLang refuses: names that it does not have, and values that are none of the choices of a name.

The server process, which has imported SGLang and its plugins, asks SGLang with `find_refusal`. A process that has not
imported SGLang uses `adapter/sglang/early_argument_check.py`.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

from verl_server.validation import did_you_mean

BOOLS = (True, False)  # the text "False" would be true
#: Names of arguments with their choices. None: any value.
Declarations = Mapping[str, Collection[Any] | None]


def find_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no name and no choice is wrong.

    Imports SGLang.
    """
    from sglang.srt.server_args import ServerArgs

    parser = _ChoicesParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    declared = {name: parser.choices.get(name) for name in _field_names()}
    return describe_problems(server_args, declared, {}, version("sglang"))


def describe_problems(
    server_args: Mapping[str, Any], declared: Declarations, own_names: Mapping[str, str], sglang_version: str
) -> str | None:
    """The names that are not declared and the values that are none of the choices, in one line. None without any.

    `own_names`: names that the caller takes under another name or by itself, and how its users write them. They are
    suggested for misspelled names.
    """
    problems = []
    for name, value in server_args.items():
        if name not in declared:
            similar = did_you_mean(name, {*declared, *own_names})
            for own_name, text in own_names.items():
                similar = similar.replace(repr(own_name), text)
            problems.append(f"SGLang {sglang_version} has no argument {name!r}{similar}")
        choices = declared.get(name)
        if choices and isinstance(value, (str, int)) and value not in choices:
            similar = did_you_mean(str(value), [choice for choice in choices if isinstance(choice, str)])
            problems.append(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}{similar}")
    return "; ".join(problems) or None


def _field_names() -> list[str]:
    """The fields of SGLang's `ServerArgs`. Imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    return list(inspect.signature(ServerArgs).parameters)


class _ChoicesParser(argparse.ArgumentParser):
    """Collects the choices of the options that are added to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices: dict[str, Collection[Any] | None] = {}
        """Choices by field. The first option of a field counts; later ones are deprecated."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        choices = BOOLS if action.nargs == 0 else action.choices
        self.choices.setdefault(action.dest, None if choices is None else list(choices))
        return action
