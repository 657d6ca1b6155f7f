"""Server arguments that SGLang refuses: names that it does not have, and values that are none of the choices of a name.

Importing SGLang takes seconds. A process that has not imported it reads the declarations in SGLang's source files with
`find_early_refusal`; the server process, which has imported SGLang and its plugins, asks SGLang with `find_refusal`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import warnings
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_server.validation import did_you_mean

#: Files below `sglang/srt` that declare the arguments as `dtype: A[str, Arg(choices=[...])]` in class bodies.
SOURCES = ("server_args.py", "arg_groups/fields/*.py")
#: Names of arguments with their choices. None: any value.
Declarations = Mapping[str, Collection[Any] | None]


def find_early_refusal(server_args: Mapping[str, Any], own_names: Mapping[str, str]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no refusal is found.

    `own_names`: names that the caller takes under another name or by itself, and how its users write them. They are
    suggested for misspelled names. Imports SGLang only if a name is not in its source files. Choices that plugins of
    SGLang can extend are left to `find_refusal`.
    """
    declared = _read_declarations()
    if not declared.keys() >= server_args.keys():
        try:
            with warnings.catch_warnings(action="ignore"):  # about devices that this machine does not have
                declared = dict.fromkeys(_field_names()) | declared
        except Exception:  # noqa: BLE001 - SGLang is not installed or broken, which the start of the server reports
            return None
    return _describe_problems(server_args, declared, own_names)


def find_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no name and no choice is wrong.

    Imports SGLang.
    """
    from sglang.srt.server_args import ServerArgs

    parser = _ChoicesParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    declared = {name: parser.choices.get(name) for name in _field_names()}
    return _describe_problems(server_args, declared, {})


def _describe_problems(
    server_args: Mapping[str, Any], declared: Declarations, own_names: Mapping[str, str]
) -> str | None:
    problems = []
    for name, value in server_args.items():
        if name not in declared:
            similar = did_you_mean(name, {*declared, *own_names})
            for own_name, text in own_names.items():
                similar = similar.replace(repr(own_name), text)
            problems.append(f"SGLang {version('sglang')} has no argument {name!r}{similar}")
        choices = declared.get(name)
        # True is an option without its value on a command line.
        if choices and (isinstance(value, str) or value is True) and value not in choices:
            similar = did_you_mean(str(value), [choice for choice in choices if isinstance(choice, str)])
            problems.append(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}{similar}")
    return "; ".join(problems) or None


def _read_declarations() -> dict[str, Collection[Any] | None]:
    """The declarations in SGLang's source files. Only choices that are a list in the declaration itself are read."""
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else [Path(folder) / "srt" for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for pattern in SOURCES for file in folder.glob(pattern)]
    modules = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {
        field.target.id: _read_choices(field.annotation)
        for module in modules
        for statement in module.body
        if isinstance(statement, ast.ClassDef)
        for field in statement.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _read_choices(annotation: ast.expr) -> Collection[Any] | None:
    """The argument `choices=[...]` in an annotation."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg == "choices" and isinstance(node.value, ast.List):
            values = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
            return values if len(values) == len(node.value.elts) else None
    return None


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
        self.choices.setdefault(action.dest, None if action.choices is None else list(action.choices))
        return action
