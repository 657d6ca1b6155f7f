"""JSON schemas of the bodies that the dialects read, for `/openapi.json`. Unknown fields are allowed everywhere."""

from __future__ import annotations

from typing import Any

from verl_server.gateway.dialects.fields import MAX_STOP_CHARS, MAX_STOP_SEQUENCES
from verl_server.types import Json

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


def _number(minimum: float, maximum: float) -> Json:
    return _or_null({"type": "number", "minimum": minimum, "maximum": maximum})


def _typed(kind: str, *required: str, **properties: Any) -> Json:
    """An object with the field `type`."""
    return _object(("type", *required), type={"type": "string", "const": kind}, **properties)


SAMPLING: Json = {
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _or_null({"type": "integer", "minimum": -1}),
    "stream": _or_null(FLAG),
}
STOP_SEQUENCE: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP_SEQUENCES: Json = _list(STOP_SEQUENCE, maxItems=MAX_STOP_SEQUENCES)
STOP: Json = _or_null(_any_of(STOP_SEQUENCE, STOP_SEQUENCES))
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
CHAT: Json = _object(
    ("messages",),
    model=TEXT,
    messages=_list(_CHAT_MESSAGE, minItems=1),
    tools=_or_null(_list(_typed("function", "function", function=_FUNCTION))),
    tool_choice=_or_null(_any_of(TEXT, ANY_OBJECT)),
    max_tokens=_or_null(COUNT),
    max_completion_tokens=_or_null(COUNT),
    presence_penalty=_number(-2, 2),
    frequency_penalty=_number(-2, 2),
    stop=STOP,
    logprobs=_or_null(FLAG),
    response_format=_or_null(ANY_OBJECT),
    stream_options=_or_null(_object(include_usage=_or_null(FLAG))),
    **SAMPLING,
)

# -- OpenAI completions -----------------------------------------------------------------------------------

_TOKEN_IDS = _list({"type": "integer", "minimum": 0}, minItems=1)
COMPLETIONS: Json = _object(
    ("prompt",),
    model=TEXT,
    prompt=_any_of({"type": "string", "minLength": 1}, _TOKEN_IDS),
    max_tokens=_or_null(COUNT),
    presence_penalty=_number(-2, 2),
    frequency_penalty=_number(-2, 2),
    stop=STOP,
    logprobs=_or_null({"type": "integer", "minimum": 0, "maximum": 1}),
    stream_options=_or_null(_object(include_usage=_or_null(FLAG))),
    **SAMPLING,
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
RESPONSES: Json = _object(
    ("input",),
    model=TEXT,
    input=_any_of(TEXT, _list(_INPUT_ITEM, minItems=1)),
    instructions=_or_null(TEXT),
    tools=_or_null(_list(_RESPONSES_TOOL)),
    tool_choice=_or_null(_any_of(TEXT, ANY_OBJECT)),
    max_output_tokens=_or_null(COUNT),
    text=_or_null(_object(format=_or_null(ANY_OBJECT))),
    **SAMPLING,
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
MESSAGES: Json = _object(
    ("model", "messages", "max_tokens"),
    model=TEXT,
    messages=_list(_ANTHROPIC_MESSAGE, minItems=1),
    max_tokens=COUNT,
    system=_any_of(TEXT, _list(_BLOCK_TEXT)),
    tools=_list(_ANTHROPIC_TOOL),
    tool_choice=_object(("type",), type=TEXT, disable_parallel_tool_use=FLAG),
    stop_sequences=STOP_SEQUENCES,
    thinking=ANY_OBJECT,
    metadata=ANY_OBJECT,
    **SAMPLING,
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
