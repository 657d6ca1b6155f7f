"""The grammar of a turn: what the server lets the policy write, for forced tool calls and for structured output.

A grammar never takes away what the request allows: the rest of a thought that the prompt has opened, a thought where
the model writes thoughts, and calls where the request has tools.

The schemas of tools come from strangers. `_Schemas` keeps what every grammar backend compiles: types, properties,
required properties, whether there may be other properties, items, enumerations and alternatives. A constraint that is
left out, such as a pattern, `allOf`, or a required name without a schema, does not bind. The grammar orders the
properties: those of the schema come first, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from verl_server.agent.tools.parsing import closes_thought, opens_thought
from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.dialects.base import referenced
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.turn_text.splitting import (
    CALL_END,
    CALL_START,
    THOUGHT_END,
    THOUGHT_START,
    reads_hermes_calls,
    writes_thoughts,
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

    A grammar of the session is that of the whole turn, also of its thought. `preceding_ids`: token ids before the turn.
    Raises GatewayError (400) if the turn needs a grammar of tool calls, and the calls of the model family have another
    format than that of Hermes.
    """
    if any(session.get(name) for name in GRAMMARS):
        return {name: value for name, value in request.sampling_params.items() if name not in GRAMMARS} | session
    params = request.sampling_params | session
    schema = params.get("json_schema")
    needs_calls = request.allows_calls and bool(request.forced_tools or schema)
    if not needs_calls and not schema:
        return params
    answers = [_format_of_calls(renderer, request)] if needs_calls else []
    if schema and not request.forced_tools:
        answers.append({"type": "json_schema", "json_schema": orjson.loads(schema)})
    thought = None if request.raw_prompt is not None else _format_of_thought(renderer, preceding_ids)
    if thought is None and not needs_calls:
        return params  # not every grammar backend has structural tags
    answer = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
    tag = {"type": "structural_tag", "format": answer if thought is None else _sequence(thought, answer)}
    params = {name: value for name, value in params.items() if name not in GRAMMARS}
    return {**params, "structural_tag": orjson.dumps(tag).decode()}


def has_grammar_of_calls(request: TurnRequest, params: Json) -> bool:
    """Whether the grammar of a turn limits its calls. `params`: what `turn_params` has returned."""
    return request.allows_calls and CALL_START in str(params.get("structural_tag"))


def _format_of_calls(renderer: ChatRenderer, request: TurnRequest) -> Json:
    """One or more calls of the tools of which the turn must call one, or of all tools."""
    if not reads_hermes_calls(renderer):
        cause = "'tool_choice' cannot force a call" if request.forced_tools else "structured output cannot have tools"
        cure = "Use auto" if request.forced_tools else "Leave out the format or the tools"
        raise GatewayError(
            ErrorKind.INVALID_REQUEST,
            f"{cause}: the tool calls of this family of models have a format without a grammar. {cure}, or start the "
            "gateway with renderer=ChatRenderer(tokenizer)",
        )
    schemas = _Schemas()
    functions = [tool["function"] for tool in request.tools]
    return {
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
            if not request.forced_tools or function["name"] in request.forced_tools
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not request.allows_parallel_calls,
    }


def _format_of_thought(renderer: ChatRenderer, preceding_ids: Sequence[int]) -> Json | None:
    """The thought before the answer: the rest of one that the prompt has opened, or one that the policy may write.

    None if there is none: the prompt has a whole thought already (`enable_thinking=False`), or the model writes none.
    """
    if opens_thought(renderer, preceding_ids):
        return _thought("")
    if closes_thought(renderer, preceding_ids) or not writes_thoughts(renderer):
        return None
    return {"type": "optional", "content": _thought(THOUGHT_START)}


def _thought(begin: str) -> Json:
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THOUGHT_END}
    return _sequence(thought, {"type": "const_string", "value": "\n\n"})


def _sequence(*formats: Json) -> Json:
    return {"type": "sequence", "elements": list(formats)}


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
            return self._relax(referenced(schema["$ref"], root), root, levels - 1)
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
        if schema.get("patternProperties"):  # names that match a pattern need not have the schema of the others
            return True
        return self._relax(others, root, levels - 1) or True
