"""`/openapi.json`: the description of the gateway's API. Anybody may read it; it has no secret."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
import pydantic
from fastapi import FastAPI, Response

from verl_server.gateway.http.admin import MAX_LISTED_SESSIONS, NewSession, SessionEnd, SessionQuery
from verl_server.gateway.http.exports import RECORD_FORMATS
from verl_server.gateway.http.health import LIVE_PATHS, METRICS_PATH, PING_PATH, READY_PATH
from verl_server.gateway.http.openapi_bodies import BODIES
from verl_server.types import Json

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

    return {
        "openapi": "3.1.0",
        "info": {"title": "verl_server gateway", "version": __version__},
        "paths": {**_dialect_paths(), **_admin_paths(), **_health_paths(), **_ui_paths()},
        "components": {
            "securitySchemes": {
                "sessionKey": {"type": "http", "scheme": "bearer"},
                "sessionKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "adminKey": {"type": "http", "scheme": "bearer"},
            }
        },
    }


def _dialect_paths() -> Json:
    paths: Json = {}
    models = _operation("The names of the model", SESSION_KEY, errors=(401, 404))
    model = _operation("A model. Each name is accepted", SESSION_KEY, errors=(401, 404))
    for prefix, parameters in (("", []), ("/session/{session_key}", [_path_parameter("session_key")])):
        for path, schema in BODIES.items():
            types = (JSON,) if path.endswith("count_tokens") else (JSON, EVENTS)
            post = _operation(f"POST {path}", SESSION_KEY, body=schema, types=types, errors=tuple(ERRORS))
            paths[prefix + path] = {"parameters": parameters, "post": post}
        paths[f"{prefix}/v1/models"] = {"parameters": parameters, "get": models}
        paths[f"{prefix}/v1/models/{{name}}"] = {"parameters": [*parameters, _path_parameter("name")], "get": model}
    return paths


def _admin_paths() -> Json:
    errors = (400, 401, 413, 415)
    query: list[Json] = [
        {"name": "format", "in": "query", "schema": {"type": "string", "enum": list(RECORD_FORMATS)}},
        {"name": "model", "in": "query", "schema": {"type": "string"}},
    ]
    listing = {**_operation("List the sessions", ADMIN_KEY, errors=(400, 401, 404)), "parameters": _session_query()}
    create = _operation("Create a session", ADMIN_KEY, body=_schema(NewSession), errors=errors)
    end = _operation("End a session", ADMIN_KEY, body=_schema(SessionEnd), errors=(*errors, 404))
    show = _operation("Read a session", ADMIN_KEY, errors=(401, 404))
    record = _operation("Read the record of a session", ADMIN_KEY, types=(LINES,), errors=(400, 401, 404))
    parameters = [_path_parameter("session_id")]
    return {
        "/admin/sessions": {"get": listing, "post": create},
        "/admin/sessions/{session_id}": {"parameters": parameters, "get": show},
        "/admin/sessions/{session_id}/end": {"parameters": parameters, "post": end},
        "/admin/sessions/{session_id}/record": {"parameters": parameters, "get": {**record, "parameters": query}},
    }


def _session_query() -> list[Json]:
    """The parameters of the list of sessions."""
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED_SESSIONS}
    schemas: Json = {"limit": limit, "after": {"type": "string"}, "open": {"type": "boolean"}}
    assert schemas.keys() == SessionQuery.model_fields.keys()
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


def _health_paths() -> Json:
    alive = _operation("Whether the event loop runs", NO_KEY)
    ready = _operation("Whether turns can be generated", NO_KEY, errors=(503,))
    ping = _operation("Generate one token through the engine", ADMIN_KEY, errors=(401, 503))
    metrics = _operation("Metrics in the text format of Prometheus", NO_KEY, types=(PLAIN,))
    return {
        **{path: {"get": alive} for path in LIVE_PATHS},
        READY_PATH: {"get": ready},
        PING_PATH: {"get": ping},
        METRICS_PATH: {"get": metrics},
    }


def _ui_paths() -> Json:
    show = _operation("Page of a session", SESSION_KEY, types=(HTML,), errors=(401, 404, 413))
    return {
        "/ui": {"get": _operation("The live page", NO_KEY, types=(HTML,))},
        "/ui/sessions": {"get": _operation("The sessions that the key may read", SESSION_KEY, errors=(401,))},
        "/ui/sessions/{session_id}": {"parameters": [_path_parameter("session_id")], "get": show},
    }


def _operation(
    summary: str,
    security: list[Json],
    *,
    body: Json | None = None,
    types: tuple[str, ...] = (JSON,),
    errors: tuple[int, ...] = (),
) -> Json:
    replies: dict[str, Any] = {"200": {"description": "OK", "content": {kind: {} for kind in types}}}
    for status in errors:
        replies[str(status)] = {"description": ERRORS[status], "content": {JSON: {"schema": {"type": "object"}}}}
    operation: Json = {"summary": summary, "security": security, "responses": replies}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _schema(body: type[pydantic.BaseModel]) -> Json:
    return body.model_json_schema()
