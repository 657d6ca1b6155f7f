"""Server arguments that SGLang refuses: names that it does not have, and values that are none of the choices of a name.

Importing SGLang takes seconds. A process that has not imported it uses the declarations in SGLang's source files with
`find_early_refusal`; the server process, which has imported SGLang and its plugins, asks SGLang with `find_refusal`.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Any

from verl_server.server.argument_table import read_options
from verl_server.validation import did_you_mean

PLUGIN_GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")
BOOLS = (True, False)  # the text "False" would be true
#: Names of arguments with their choices. None: any value.
Declarations = Mapping[str, Collection[Any] | None]


def find_early_refusal(server_args: Mapping[str, Any], own_names: Mapping[str, str]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no refusal is found.

    `own_names`: names that the caller takes under another name or by itself, and how its users write them. They are
    suggested for misspelled names. Does not import SGLang: choices and names that plugins of SGLang can add are left to
    `find_refusal`.
    """
    declared: dict[str, Collection[Any] | None] = {}
    for option in read_options().values():
        if option.choices_of_constant is None:
            declared.setdefault(option.field, BOOLS if option.converter == "bool" else option.choices)
    if not declared or _has_third_party_plugins():
        server_args = {name: value for name, value in server_args.items() if name in declared}
    return _describe_problems(server_args, declared, own_names)


def _has_third_party_plugins() -> bool:
    """Whether a plugin is installed that neither this package nor a package that SGLang requires brings."""
    try:
        required = [re.split(r"[^\w.-]", line)[0] for line in requires("sglang") or ()]
    except PackageNotFoundError:  # SGLang runs from a folder of sources
        required = []
    known = {_normalize(name) for name in ("verl-server", *required)}
    plugins = [plugin for group in PLUGIN_GROUPS for plugin in entry_points(group=group)]
    return any(plugin.dist is None or _normalize(plugin.dist.name) not in known for plugin in plugins)


def _normalize(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


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
