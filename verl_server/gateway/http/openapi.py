"""`/openapi.json`: the description of the gateway's API. Anybody may read it; it has no secret."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import orjson
import pydantic
from fastapi import FastAPI, Response

from verl_server.gateway.dialects.anthropic import MessagesFields
from verl_server.gateway.dialects.base import TurnFields
from verl_server.gateway.dialects.chat import ChatFields, CompletionFields
from verl_server.gateway.dialects.responses import ResponsesFields
from verl_server.gateway.http.routes import (
    LIVE_PATHS,
    METRICS_PATH,
    PING_PATH,
    READY_PATH,
    RECORD_FORMATS,
    NewSession,
    SessionEnd,
    SessionQuery,
)
from verl_server.types import Json

# -- Openapi bodies ---------------------------------------------------------------------------------
# JSON schemas of the bodies that the dialects read, for `/openapi.json`. Unknown fields are allowed everywhere.

TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 1}
ANY_OBJECT: Json = {"type": "object"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _any_of(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _typed(kind: str, *required: str, **properties: Any) -> Json:
    """An object with the field `type`."""
    return _object(("type", *required), type={"type": "string", "const": kind}, **properties)


def _body(fields: type[TurnFields], required: tuple[str, ...], **properties: Any) -> Json:
    """The body of a turn: the fields that the dialect reads, and what is described here."""
    return _object(required, **(_properties(fields) | properties))


def _properties(model: type[pydantic.BaseModel]) -> Json:
    properties: Json = model.model_json_schema()["properties"]
    return properties


IMAGE_URL: Json = {"type": "string", "pattern": "^data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]*=*$"}

# -- OpenAI chat ------------------------------------------------------------------------------------------

_FUNCTION = _object(("name",), name=TEXT, description=_or_null(TEXT), parameters=_or_null(ANY_OBJECT))
_CHAT_PARTS = _list(
    _any_of(
        _typed("text", "text", text=TEXT), _typed("image_url", "image_url", image_url=_object(("url",), url=IMAGE_URL))
    )
)
_CHAT_CALL = _typed("function", "function", id=TEXT, function=_object(("name", "arguments"), name=TEXT, arguments=TEXT))
_CHAT_CONTENT = _or_null(_any_of(TEXT, _CHAT_PARTS))
_CHAT_MESSAGE = _any_of(
    _object(("role", "content"), role=_one_of("system", "developer", "user"), content=_any_of(TEXT, _CHAT_PARTS)),
    _object(("role",), role=_one_of("assistant"), content=_CHAT_CONTENT, tool_calls=_or_null(_list(_CHAT_CALL))),
    _object(("role", "content", "tool_call_id"), role=_one_of("tool"), content=TEXT, tool_call_id=TEXT),
)
CHAT: Json = _body(
    ChatFields,
    ("messages",),
    messages=_list(_CHAT_MESSAGE, minItems=1),
    tools=_or_null(_list(_typed("function", "function", function=_FUNCTION))),
    tool_choice=_or_null(_any_of(TEXT, ANY_OBJECT)),
    response_format=_or_null(ANY_OBJECT),
)

# -- OpenAI completions -----------------------------------------------------------------------------------

_TOKEN_IDS = _list({"type": "integer", "minimum": 0}, minItems=1)
COMPLETIONS: Json = _body(
    CompletionFields,
    ("prompt",),
    prompt=_any_of({"type": "string", "minLength": 1}, _TOKEN_IDS),
)

# -- OpenAI responses -------------------------------------------------------------------------------------

_INPUT_PARTS = _list(
    _any_of(
        _typed("input_text", "text", text=TEXT),
        _typed("output_text", "text", text=TEXT),
        _typed("input_image", "image_url", image_url=IMAGE_URL),
    )
)
_INPUT_CONTENT = _any_of(TEXT, _INPUT_PARTS)
_INPUT_ITEM = _any_of(
    _object(("role", "content"), role=_one_of("user", "assistant", "system", "developer"), content=_INPUT_CONTENT),
    _typed("reasoning", id=TEXT, summary=_list(ANY_OBJECT)),
    _typed("function_call", "call_id", "name", "arguments", call_id=TEXT, name=TEXT, arguments=TEXT),
    _typed("function_call_output", "call_id", "output", call_id=TEXT, output=_INPUT_CONTENT),
    _typed("custom_tool_call", "call_id", "name", "input", call_id=TEXT, name=TEXT, input=TEXT),
    _typed("custom_tool_call_output", "call_id", "output", call_id=TEXT, output=_INPUT_CONTENT),
)
_RESPONSES_TOOL = _object(("type",), type=TEXT, name=TEXT, description=_or_null(TEXT), parameters=_or_null(ANY_OBJECT))
RESPONSES: Json = _body(
    ResponsesFields,
    ("input",),
    input=_any_of(TEXT, _list(_INPUT_ITEM, minItems=1)),
    instructions=_or_null(TEXT),
    tools=_or_null(_list(_RESPONSES_TOOL)),
    tool_choice=_or_null(_any_of(TEXT, ANY_OBJECT)),
    text=_or_null(_object(format=_or_null(ANY_OBJECT))),
)

# -- Anthropic messages -----------------------------------------------------------------------------------

_BLOCK_TEXT = _typed("text", "text", text=TEXT)
_SOURCE = _typed(
    "base64",
    "media_type",
    "data",
    media_type=_one_of("image/png", "image/jpeg", "image/gif", "image/webp"),
    data={"type": "string", "format": "byte"},
)
_RESULT = _any_of(TEXT, _list(_BLOCK_TEXT))
_BLOCKS = _list(
    _any_of(
        _BLOCK_TEXT,
        _typed("image", "source", source=_SOURCE),
        _typed("tool_use", "id", "name", "input", id=TEXT, name=TEXT, input=ANY_OBJECT),
        _typed(
            "tool_result", "tool_use_id", tool_use_id=TEXT, content=_any_of(TEXT, _list(_BLOCK_TEXT)), is_error=FLAG
        ),
        _typed("thinking", "thinking", thinking=TEXT, signature=TEXT),
    )
)
_ANTHROPIC_MESSAGE = _object(
    ("role", "content"), role=_one_of("user", "assistant", "system"), content=_any_of(TEXT, _BLOCKS)
)
_ANTHROPIC_TOOL = _object(("name", "input_schema"), name=TEXT, description=TEXT, input_schema=ANY_OBJECT)
MESSAGES: Json = _body(
    MessagesFields,
    ("model", "messages", "max_tokens"),
    messages=_list(_ANTHROPIC_MESSAGE, minItems=1),
    max_tokens=COUNT,
    system=_any_of(TEXT, _list(_BLOCK_TEXT)),
    tools=_list(_ANTHROPIC_TOOL),
    tool_choice=_object(("type",), type=TEXT, disable_parallel_tool_use=FLAG),
    thinking=ANY_OBJECT,
    metadata=ANY_OBJECT,
)
COUNT_TOKENS: Json = {**MESSAGES, "required": ["model", "messages"]}

BODIES: dict[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
}
"""Schema of the body by the path of the endpoint."""


# -- Openapi ----------------------------------------------------------------------------------------

SESSION_KEY: list[Json] = [{"sessionKey": []}, {"sessionKeyHeader": []}]
ADMIN_KEY: list[Json] = [{"adminKey": []}]
NO_KEY: list[Json] = []
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/jsonl"
PLAIN, HTML = "text/plain", "text/html"
ERRORS = {
    400: "The request is not valid",
    401: "The key is missing or wrong",
    403: "The session has ended",
    404: "There is no such session",
    413: "The request is too large",
    415: "The body is compressed in a way that the gateway does not know",
    429: "A limit of the session is reached",
    503: "The engine cannot generate now; send the request again",
    529: "As 503, in the dialect of Anthropic",
}


def add_openapi_route(app: FastAPI) -> None:
    """Add the route of the description."""

    async def describe() -> Response:
        return Response(orjson.dumps(make_openapi()), media_type=JSON)

    app.add_api_route("/openapi.json", describe, methods=["GET"])


@cache
def make_openapi() -> Json:
    """The description, in version 3.1 of OpenAPI."""
    from verl_server import __version__

    paths = {path: {"parameters": _path_parameters(path), **operations} for path, operations in _operations().items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "verl_server gateway", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "sessionKey": {"type": "http", "scheme": "bearer"},
                "sessionKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "adminKey": {"type": "http", "scheme": "bearer"},
            }
        },
    }


def _operations() -> dict[str, Json]:
    """The operations of each path by method."""
    errors = (400, 401, 413, 415)
    formats = {"format": {"type": "string", "enum": list(RECORD_FORMATS)}, "model": TEXT}
    turns: dict[str, Json] = {
        "/v1/models": {"get": _operation("The names of the model", SESSION_KEY, errors=(401, 404))},
        "/v1/models/{name}": {"get": _operation("A model. Each name is accepted", SESSION_KEY, errors=(401, 404))},
    }
    for path, schema in BODIES.items():
        types = (JSON,) if path.endswith("count_tokens") else (JSON, EVENTS)
        turns[path] = {"post": _operation(f"POST {path}", SESSION_KEY, body=schema, types=types, errors=tuple(ERRORS))}
    return {
        **turns,
        **{f"/session/{{session_key}}{path}": operations for path, operations in turns.items()},
        "/admin/sessions": {
            "get": _operation("List the sessions", ADMIN_KEY, query=_properties(SessionQuery), errors=(400, 401, 404)),
            "post": _operation("Create a session", ADMIN_KEY, body=NewSession.model_json_schema(), errors=errors),
        },
        "/admin/sessions/{session_id}": {"get": _operation("Read a session", ADMIN_KEY, errors=(401, 404))},
        "/admin/sessions/{session_id}/end": {
            "post": _operation("End a session", ADMIN_KEY, body=SessionEnd.model_json_schema(), errors=(*errors, 404))
        },
        "/admin/sessions/{session_id}/record": {
            "get": _operation(
                "Read the record of a session", ADMIN_KEY, query=formats, types=(LINES,), errors=(400, 401, 404)
            )
        },
        **{path: {"get": _operation("Whether the event loop runs", NO_KEY)} for path in LIVE_PATHS},
        READY_PATH: {"get": _operation("Whether turns can be generated", NO_KEY, errors=(503,))},
        PING_PATH: {"get": _operation("Generate one token through the engine", ADMIN_KEY, errors=(401, 503))},
        METRICS_PATH: {"get": _operation("Metrics in the text format of Prometheus", NO_KEY, types=(PLAIN,))},
        "/ui": {"get": _operation("The live page", NO_KEY, types=(HTML,))},
        "/ui/sessions": {"get": _operation("The sessions that the key may read", SESSION_KEY, errors=(401,))},
        "/ui/sessions/{session_id}": {
            "get": _operation("Page of a session", SESSION_KEY, types=(HTML,), errors=(401, 404, 413))
        },
    }


def _path_parameters(path: str) -> list[Json]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]


def _operation(
    summary: str,
    security: list[Json],
    *,
    body: Json | None = None,
    query: Json | None = None,
    types: tuple[str, ...] = (JSON,),
    errors: tuple[int, ...] = (),
) -> Json:
    """`query`: schemas of the parameters by name."""
    replies: dict[str, Any] = {"200": {"description": "OK", "content": {kind: {} for kind in types}}}
    for status in errors:
        replies[str(status)] = {"description": ERRORS[status], "content": {JSON: {"schema": ANY_OBJECT}}}
    operation: Json = {"summary": summary, "security": security, "responses": replies}
    if query is not None:
        operation["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation
