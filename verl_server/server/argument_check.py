"""Server arguments that SGLang refuses: names that it does not have, and values that its own parser refuses.

The server process, which has imported SGLang and its plugins, asks SGLang before it loads a model.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from verl_server.validation import did_you_mean

BOOLS = (True, False)  # the text "False" would be true


def find_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no name and no value is wrong.

    Imports SGLang.
    """
    return parse_arguments(server_args)[1]


def parse_arguments(server_args: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The arguments with the types that SGLang's command line gives them, and `find_refusal`. Imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    parser = _OptionsParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    names = list(inspect.signature(ServerArgs).parameters)
    parsed, problems = dict(server_args), []
    for name, value in server_args.items():
        if name not in names:
            other = parser.find_field(name)
            similar = f"; did you mean {other!r}?" if other in names else did_you_mean(name, names)
            problems.append(f"SGLang {version('sglang')} has no argument {name!r}{similar}")
            continue
        try:
            value = parsed[name] = parser.parse_value(name, value)
        except (_RefusedError, AssertionError) as error:  # SGLang's actions assert
            problems.append(str(error))
            continue
        choices = parser.choices(name)
        if choices and isinstance(value, (str, int)) and value not in choices:
            similar = did_you_mean(str(value), [choice for choice in choices if isinstance(choice, str)])
            problems.append(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}{similar}")
    return parsed, "; ".join(problems) or None


class _RefusedError(Exception):
    """SGLang's parser refuses a value."""


class _OptionsParser(argparse.ArgumentParser):
    """Parses the values of single options that are added to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: dict[str, argparse.Action] = {}
        """Options by field. The first option of a field counts; later ones are deprecated."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        action.required = False
        self.options.setdefault(action.dest, action)
        return action

    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)

    def find_field(self, name: str) -> str | None:
        """The field that the option `--name` sets."""
        action = self._option_string_actions.get(f"--{name.replace('_', '-')}")
        return None if action is None else action.dest

    def choices(self, field: str) -> Collection[Any] | None:
        action = self.options.get(field)
        found = None if action is None else BOOLS if action.nargs == 0 else action.choices
        return None if found is None else list(found)

    def parse_value(self, field: str, value: Any) -> Any:
        """`value` if it has the type of its option. The text of a command line is parsed. Raises _RefusedError."""
        action = self.options.get(field)
        values = value if isinstance(value, list) else [] if value is True else [value]
        if action is None or action.nargs == 0 or not all(type(each) in (str, int, float) for each in values):
            return value
        has_type = all(isinstance(each, str) == (action.type in (None, str)) for each in values)
        is_list, takes_list = isinstance(value, list), action.nargs in ("+", "*")
        has_form = type(action) is argparse._StoreAction and value is not True and is_list == takes_list
        if is_list and action.nargs is None and action.type in (None, str, int, float):
            raise _RefusedError(f"{field} takes one value, got a list of {len(values)}")
        if (has_type and has_form) or (is_list and not takes_list):
            return value
        return getattr(self.parse_args([action.option_strings[0], *map(str, values)]), field)
