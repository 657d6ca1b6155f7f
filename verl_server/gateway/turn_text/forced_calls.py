"""Turns that must be tool calls: a grammar, with which the server lets the policy write nothing else.

The schemas of tools come from strangers. `_Schemas` keeps what every grammar backend compiles: types, properties,
required properties, whether there may be other properties, items, enumerations and alternatives. A constraint that is
left out, such as a pattern, `allOf`, or a required name without a schema, does not bind. The grammar orders the
properties: those of the schema come first, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from verl_server.agent.tools.parsing import opens_thought
from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.turn_text.turn_parsing import (
    CALL_END,
    CALL_START,
    THOUGHT_END,
    reads_hermes_calls,
)
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters that are a grammar. A server takes one of them."""
MAX_SCHEMA_PARTS = 2000
"""Maximum number of schemas within the schemas of all tools of a turn. The others allow any JSON."""
MAX_SCHEMA_BYTES = 64 << 10
"""Maximum number of bytes of the constants, enumerations and names of properties in these schemas, as JSON. A constant
that several references name counts several times.
"""
MAX_SCHEMA_LEVELS = 16
PLAIN_TYPES = ("string", "number", "integer", "boolean", "null")
ANY_OBJECT: Json = {"type": "object", "additionalProperties": True}
MAX_SPACES = 1
"""Maximum number of white space characters between two parts of the JSON of a call."""


def turn_params(renderer: ChatRenderer, request: TurnRequest, preceding_ids: Sequence[int], session: Json) -> Json:
    """The sampling parameters of a turn. Those of the session replace those of the request.

    `preceding_ids`: token ids before the turn. Raises GatewayError (400) for a turn that must be a tool call, if the
    calls of the model family have another format than that of Hermes.
    """
    params = dict(request.sampling_params)
    if request.forced_tools and not any(session.get(name) for name in GRAMMARS):
        if not reads_hermes_calls(renderer):
            raise GatewayError(
                ErrorKind.INVALID_REQUEST,
                "'tool_choice' cannot force a call: the tool calls of this family of models have a format without a "
                "grammar. Use auto, or start the gateway with renderer=ChatRenderer(tokenizer)",
            )
        params = {name: value for name, value in params.items() if name not in GRAMMARS}
        format_of_turn = _format_of_turn(request, is_thought_open=opens_thought(renderer, preceding_ids))
        params["structural_tag"] = orjson.dumps({"type": "structural_tag", "format": format_of_turn}).decode()
    return params | session


def _format_of_turn(request: TurnRequest, *, is_thought_open: bool) -> Json:
    """The structural tag of xgrammar: the rest of the thought, if the prompt has opened a thought, and the calls."""
    forced, schemas = set(request.forced_tools or ()), _Schemas()
    functions = [tool["function"] for tool in request.tools if tool["function"]["name"] in forced]
    calls: Json = {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": f'{CALL_START}\n{{"name": {orjson.dumps(function["name"]).decode()}, "arguments": ',
                "content": {
                    "type": "json_schema",
                    "json_schema": schemas.arguments_of(function["parameters"]),
                    "max_whitespace_cnt": MAX_SPACES,
                },
                "end": f"}}\n{CALL_END}",
            }
            for function in functions
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not request.allows_parallel_calls,
    }
    if not is_thought_open:
        return calls
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THOUGHT_END}
    return {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "\n\n"}, calls]}


class _Schemas:
    """Simplifies JSON schemas of strangers, so that each of them can be compiled within a bounded time."""

    def __init__(self) -> None:
        self._num_left, self._bytes_left = MAX_SCHEMA_PARTS, MAX_SCHEMA_BYTES

    def arguments_of(self, parameters: Json) -> Json:
        """The schema of the arguments of a call: an object."""
        relaxed = self._relax(parameters, parameters, MAX_SCHEMA_LEVELS)
        return relaxed if relaxed.get("type") == "object" else ANY_OBJECT

    def _relax(self, schema: Any, root: Json, levels: int) -> Json:
        """A simpler schema that allows each value of the schema: few conditions are kept. `root`: for references."""
        self._num_left -= 1
        if not isinstance(schema, dict) or levels == 0 or self._num_left < 0:
            return {}
        if "$ref" in schema:
            return self._relax(_referenced(schema["$ref"], root), root, levels - 1)
        if "const" in schema:
            return {"const": schema["const"]} if self._has_room_for(schema["const"]) else {}
        values, alternatives = schema.get("enum"), schema.get("anyOf") or schema.get("oneOf")
        if isinstance(values, list) and values:
            self._num_left -= len(values)
            return {"enum": values} if self._num_left >= 0 and self._has_room_for(values) else {}
        if isinstance(alternatives, list) and len(alternatives) > self._num_left:
            return {}
        if isinstance(alternatives, list) and alternatives:
            return {"anyOf": [self._relax(item, root, levels - 1) for item in alternatives]}
        kind = schema.get("type", "object" if isinstance(schema.get("properties"), dict) else None)
        if isinstance(kind, list) and kind:
            known = [item for item in ("object", "array", *PLAIN_TYPES) if item in kind]
            return (
                {"anyOf": [self._relax({**schema, "type": item}, root, levels - 1) for item in known]} if known else {}
            )
        if kind == "object":
            return self._relax_object(schema, root, levels)
        if kind == "array":
            items = None if "prefixItems" in schema else schema.get("items")  # with it, `items` are the others
            return {"type": "array", "items": self._relax(items, root, levels - 1)}
        return {"type": kind} if kind in PLAIN_TYPES else {}

    def _has_room_for(self, value: Any) -> bool:
        """Count the bytes of a value that the grammar repeats. False if there is no room left for the value."""
        self._bytes_left -= len(orjson.dumps(value)) if self._bytes_left > 0 else 0
        return self._bytes_left > 0

    def _relax_object(self, schema: Json, root: Json, levels: int) -> Json:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not 0 < len(properties) <= self._num_left:
            return ANY_OBJECT
        if not self._has_room_for(list(properties)):
            return ANY_OBJECT
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        return {
            "type": "object",
            "properties": {name: self._relax(value, root, levels - 1) for name, value in properties.items()},
            "required": [name for name in properties if name in names],  # xgrammar would misread other names
            "additionalProperties": self._relax_others(schema, root, levels),
        }

    def _relax_others(self, schema: Json, root: Json, levels: int) -> bool | Json:
        """The schema of properties that have no schema of their own. A schema that does not tell it allows all."""
        others = schema.get("additionalProperties")
        if others is False and not schema.get("patternProperties"):
            return False
        return self._relax(others, root, levels - 1) or True


def _referenced(reference: Any, root: Json) -> Any:
    """The schema that a reference within the same document names. None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        if key:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
