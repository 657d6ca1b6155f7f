"""Values of SGLang's options, converted from the text of a command line as SGLang's own command line converts them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from verl_server.adapter.sglang.argument_table import Option
from verl_server.errors import BadInputError

SI_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
IEC_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
NUMBER_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T)|(\d+)(Ki|Mi|Gi|Ti)")
BOOLS = {"true": True, "false": False}


def convert(written: str, option: Option, texts: list[str]) -> Any:
    """The value of an option that was written as `written` with the values `texts`. Raises BadInputError."""
    if option.converter == "bool":
        return _convert_bool(written, option, texts)
    if not texts and option.nargs != "*":
        if option.nargs == "?":
            return option.constant
        raise BadInputError(f"{written} needs a value: write {written} VALUE")
    if len(texts) > 1 and option.nargs not in ("*", "+"):
        raise BadInputError(f"{written} takes one value, got {len(texts)}: {' '.join(texts)}")
    if option.choices_of_constant is not None:
        if texts[0] not in option.choices_of_constant:
            raise BadInputError(f"{written} must be {' or '.join(option.choices_of_constant)}, got {texts[0]!r}")
        return option.constant
    values = [_convert_text(written, option.converter, text) for text in texts]
    return values if option.nargs in ("*", "+") else values[0]


def guess_value(text: str) -> Any:
    """The value of an option whose type is not known: `text` as JSON, or `text` itself if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _convert_bool(written: str, option: Option, texts: list[str]) -> bool:
    value = BOOLS.get(texts[0].lower()) if len(texts) == 1 else None
    if texts and value is None:
        name = written.removeprefix("--").removeprefix("no-" if option.constant is False else "")
        raise BadInputError(
            f"{written} is on or off and takes no other value, got {' '.join(texts)!r}; write --{name} to turn it on, "
            f"and leave it out or write --no-{name} to turn it off"
        )
    return bool(option.constant) if value in (None, True) else not option.constant


def _convert_text(written: str, converter: str, text: str) -> Any:
    if converter not in CONVERTERS:
        return guess_value(text)
    convert_text, expected = CONVERTERS[converter]
    try:
        return convert_text(text)
    except ValueError:
        raise BadInputError(f"{written} must be {expected}, got {text!r}") from None


def _whole_number_with_unit(text: str) -> int:
    match = NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, si_unit, whole_number, iec_unit = match.groups()
    return int(Decimal(number) * SI_UNITS[si_unit]) if si_unit else int(whole_number) * IEC_UNITS[iec_unit]


def _lora_path(text: str) -> Any:
    text = text.strip()
    return json.loads(text) if text.startswith("{") and text.endswith("}") else text


#: SGLang's converters by their names, and the values that each of them expects.
CONVERTERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "human_readable_int": (_whole_number_with_unit, "a whole number, for example 4096, 4k or 4Ki"),
    "loads": (json.loads, "JSON"),
    "json_list_type": (json.loads, "JSON"),
    "parse_cuda_graph_config_arg": (json.loads, "JSON"),
    "parse_cuda_graph_backend_arg": (str, "text"),
    "nullable_str": (lambda text: None if text in ("", "None") else text, "text"),
    "LoRAPathAction": (_lora_path, "PATH, NAME=PATH or JSON"),
}
