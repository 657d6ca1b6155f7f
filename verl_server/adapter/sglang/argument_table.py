"""The options of SGLang's command line, read from the declarations in SGLang's source files.

SGLang declares a server argument as `name: A[type, Arg(...)]` in a class body, and a few options with
`parser.add_argument(...)`. Reading the source takes a fraction of a second; importing SGLang takes seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError
from verl_server.platforms import ENTRY_POINTS

if TYPE_CHECKING:
    from verl_server.server.interpreter.report import InterpreterReport

SGLANG = "sglang"
#: Files below `sglang/srt` with the fields, and those with the calls of `add_argument`. SGLang 0.5.15 has no files of
#: the first kind: its fields are in the class `ServerArgs` of `server_args.py`.
FIELD_SOURCES, CALL_SOURCES, FIELD_CLASS = "arg_groups/fields/*.py", "server_args.py", "ServerArgs"
FLAG_ACTIONS = {"store_true", "BooleanOptionalAction", "DeprecatedStoreTrueAction"}


@dataclass(frozen=True)
class SglangInstallation:
    """The SGLang of one environment."""

    folder: Path | None
    """Folder of the package. None: not installed."""
    version: str
    """Version, or an empty string for sources that are not installed."""
    has_other_plugins: bool
    """Whether a plugin is installed that neither this package nor a package that SGLang requires brings."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of SGLang's command line."""

    field: str
    """Field of SGLang's `ServerArgs` that the option sets."""
    converter: str
    """Name of the function that SGLang converts a value with, for example `int`. `bool`: the option takes no value."""
    nargs: str | None = None
    """Number of values: None is one value, "?" at most one, "+" a list, "*" a list that can be empty."""
    constant: Any = None
    """The result when the option has no value, and for `choices_of_constant`."""
    choices: Collection[Any] | None = None
    """Accepted values. None: all values, or values that are known only to a process that has imported SGLang."""
    choices_of_constant: Collection[Any] | None = None
    """The values of a deprecated option that sets another field to `constant`."""
    is_written: bool = True
    """Whether SGLang's command line has an option of this name. Otherwise it is the name of a field only."""


def find_sglang_here() -> SglangInstallation:
    """The SGLang of this process's environment. Does not import SGLang."""
    spec = importlib.util.find_spec(SGLANG)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    try:
        version, required = metadata.version(SGLANG), metadata.requires(SGLANG) or []
    except metadata.PackageNotFoundError:  # SGLang runs from a folder of sources
        version, required = "", []
    known = {_normalize(name) for name in ("verl-server", *(re.split(r"[^\w.-]", line)[0] for line in required))}
    plugins = [plugin for group in ENTRY_POINTS for plugin in metadata.entry_points(group=group)]
    has_other_plugins = any(plugin.dist is None or _normalize(plugin.dist.name) not in known for plugin in plugins)
    return SglangInstallation(Path(folders[0]) if folders else None, version, has_other_plugins)


def find_sglang_in(report: InterpreterReport) -> SglangInstallation:
    """The SGLang of another interpreter's environment."""
    folder = report.folders.get(SGLANG)
    has_other_plugins = any(not plugin.startswith("verl_server.") for plugin in report.plugins)
    return SglangInstallation(
        None if folder is None else Path(folder), report.versions.get(SGLANG) or "", has_other_plugins
    )


@functools.cache
def read_options(sglang: SglangInstallation | None = None) -> Mapping[str, Option]:
    """The options by their names, with underscores and without leading dashes. Empty if SGLang is not installed.

    `sglang`: the SGLang whose options are read; None is that of this process's environment.

    An argument is also found by the name of its field, where SGLang's option has another name.
    """
    options: dict[str, Option] = {}
    folder = (find_sglang_here() if sglang is None else sglang).folder
    field_modules, call_modules = _parse_files(folder, FIELD_SOURCES), _parse_files(folder, CALL_SOURCES)
    classes = [node for module in field_modules for node in _classes(module)]
    if not field_modules:
        classes = [node for module in call_modules for node in _classes(module) if node.name == FIELD_CLASS]
    for node in classes:
        for field in _annotated_fields(node):
            options |= _read_field(*field)
    fields = {option.field for option in options.values()}
    for module in call_modules:
        for call in _add_argument_calls(module):
            name, option = _read_call(call)
            if option.field in fields:
                options[name] = option
    flags = {name: option for name, option in options.items() if option.converter == "bool"}
    return options | {f"no_{name}": replace(option, constant=False) for name, option in flags.items()}


def find_option(name: str, sglang: SglangInstallation | None = None) -> tuple[str, Option | None]:
    """Find the option that `name` means on a command line.

    `name` may be abbreviated if only one option begins with it; SGLang's own parser (argparse) has the same rule. A
    name of no option is returned without an option. Raises BadInputError when the names of several options begin with
    `name`.
    """
    options = read_options(sglang)
    if name in options:
        return name, options[name]
    is_negation = name.startswith("no_")
    found = [full for full in options if full.startswith(name) and (is_negation or not full.startswith("no_"))]
    found = [full for full in found if options[full].is_written] or found
    if any(options[full] != options[found[0]] for full in found):
        written = ", ".join(f"--{full.replace('_', '-')}" for full in found)
        raise BadInputError(f"--{name.replace('_', '-')} can mean several options; write one of {written}")
    return (found[0], options[found[0]]) if found else (name, None)


def _parse_files(folder: Path | None, pattern: str) -> list[ast.Module]:
    """The source files of SGLang, whose package is `folder`, that match `pattern`."""
    files = [] if folder is None else (folder / "srt").glob(pattern)
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def _classes(module: ast.Module) -> list[ast.ClassDef]:
    return [node for node in module.body if isinstance(node, ast.ClassDef)]


def _annotated_fields(declaration: ast.ClassDef) -> Iterator[tuple[str, ast.expr, list[ast.expr]]]:
    """Name, type and metadata of all `name: A[type, metadata]` in a class body. `name: type` has no metadata."""
    for node in declaration.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            inner, metadata = _split_annotation(node.annotation)
            yield node.target.id, inner, metadata


def _split_annotation(annotation: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
    """Type and metadata of `A[type, metadata]`."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[inner, *metadata])):
            return inner, metadata
    return annotation, []


def _add_argument_calls(module: ast.Module) -> Iterator[ast.Call]:
    """All calls `parser.add_argument("--name", ...)` in the methods of the module's classes."""
    for declaration in _classes(module):
        for node in ast.walk(declaration):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                yield node


def _read_field(name: str, annotation: ast.expr, metadata: list[ast.expr]) -> dict[str, Option]:
    """The options of one annotated field. Empty if SGLang sets the field itself."""
    calls = {_last_name(node.func): node for node in metadata if isinstance(node, ast.Call)}
    if "Derived" in calls:
        return {}
    keywords = _keywords(calls["Arg"]) if "Arg" in calls else {}
    converter, nargs, choices = _read_type(annotation)
    if "type_parser" in keywords:
        converter, nargs = _last_name(keywords["type_parser"]), None
    option = _with_keywords(Option(field=name, converter=converter, nargs=nargs, choices=choices), keywords)
    written = [_value(keywords[key]) for key in ("cli_name", "aliases") if key in keywords]
    aliases = [alias for value in written for alias in (value if isinstance(value, list) else [value])]
    is_option = bool(metadata) and not ("no_cli" in keywords and _value(keywords["no_cli"]))
    own = replace(option, is_written=is_option and "cli_name" not in keywords)
    return {name: own} | {option_name(alias): replace(option, is_written=is_option) for alias in aliases}


def _read_call(call: ast.Call) -> tuple[str, Option]:
    """Name and option of one `parser.add_argument`."""
    keywords = _keywords(call)
    name = option_name(str(_value(call.args[0])))
    field = str(_value(keywords["dest"])) if "dest" in keywords else name
    return name, _with_keywords(Option(field=field, converter="str"), keywords)


def _with_keywords(option: Option, keywords: Mapping[str, ast.expr]) -> Option:
    """`option` with the keywords of `Arg` or of `add_argument`."""
    action = keywords.get("action")
    action_name = None if action is None else str(_value(action) or _last_name(action))
    choices = _value(keywords["choices"]) if "choices" in keywords else option.choices
    changes: dict[str, Any] = {"choices": choices}
    if "type" in keywords:
        changes["converter"] = _last_name(keywords["type"])
    if "nargs" in keywords:
        changes["nargs"] = _value(keywords["nargs"])
    if "const" in keywords:
        changes["constant"] = _value(keywords["const"])
    if action_name in FLAG_ACTIONS:
        changes |= {"converter": "bool"}
    elif "const_value" in keywords:
        constant = _value(keywords["const_value"])
        changes |= {"constant": constant, "choices": None, "choices_of_constant": choices}
    elif action_name is not None:
        changes["converter"] = action_name
    if changes.get("converter", option.converter) == "bool":
        changes["constant"] = True
    return replace(option, **changes)


def _read_type(annotation: ast.expr) -> tuple[str, str | None, list[Any] | None]:
    """Converter, nargs and choices of a declared type, by the rules of SGLang's `add_cli_args_from_dataclass`."""
    members = [node for node in _union_members(annotation) if not (isinstance(node, ast.Constant) and not node.value)]
    only = members[0] if len(members) == 1 else None
    if isinstance(only, ast.Subscript) and _last_name(only.value) == "Literal":
        choices = [_value(node) for node in (only.slice.elts if isinstance(only.slice, ast.Tuple) else [only.slice])]
        return _scalar(type(choices[0]).__name__), None, choices
    if isinstance(only, ast.Subscript) and _last_name(only.value) in ("List", "list"):
        return _scalar(_last_name(only.slice)), "+", None
    name = "" if only is None else _last_name(only)
    return (name if name == "bool" else _scalar(name)), None, None


def _union_members(annotation: ast.expr) -> list[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        return [*_union_members(annotation.left), *_union_members(annotation.right)]
    if isinstance(annotation, ast.Subscript) and _last_name(annotation.value) in ("Optional", "Union"):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return [member for node in inner for member in _union_members(node)]
    return [annotation]


def _scalar(name: str) -> str:
    return name if name in ("int", "float") else "str"


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    """The keywords of a call. Those in `action_kwargs={...}` count as keywords of the call."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    nested = keywords.pop("action_kwargs", None)
    if isinstance(nested, ast.Dict):
        pairs = zip(nested.keys, nested.values, strict=True)
        keywords |= {str(_value(key)): value for key, value in pairs if key is not None}
    return keywords


def _last_name(node: ast.expr) -> str:
    """`loads` of `json.loads`, and an empty string for what is not a name."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _value(node: ast.expr) -> Any:
    """The value of a literal. None for other expressions."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def option_name(text: str) -> str:
    """The name of `--an-option` in the table: `an_option`."""
    return text.lstrip("-").replace("-", "_")


def _normalize(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
