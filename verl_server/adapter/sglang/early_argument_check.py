"""Server arguments that SGLang refuses, found without an import of SGLang, which takes seconds.

The declarations in SGLang's source files say which names and choices SGLang has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires
from typing import Any

from verl_server.adapter.sglang.argument_table import read_options
from verl_server.server.argument_check import BOOLS, describe_problems

PLUGIN_GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")


def find_early_refusal(server_args: Mapping[str, Any], own_names: Mapping[str, str]) -> str | None:
    """Why SGLang refuses these fields of its `ServerArgs`, in one line. None if no refusal is found.

    `own_names` are those of `describe_problems`. Does not import SGLang: choices and names that plugins of SGLang can
    add are left to `find_refusal`.
    """
    declared: dict[str, Collection[Any] | None] = {}
    for option in read_options().values():
        if option.choices_of_constant is None:
            declared.setdefault(option.field, BOOLS if option.converter == "bool" else option.choices)
    if not declared or _has_third_party_plugins():
        server_args = {name: value for name, value in server_args.items() if name in declared}
    return describe_problems(server_args, declared, own_names)


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
