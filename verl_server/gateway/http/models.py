"""The routes for names of models, and the root, which Claude Code asks for."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.http.access import Access
from verl_server.types import Json

CREATED_AT = "2026-01-01T00:00:00Z"


def add_model_routes(app: FastAPI, access: Access, config: GatewayConfig) -> None:
    """Add `/v1/models` and `/`."""

    async def models(request: Request) -> Json:
        access.session_of(request)
        return list_models(config.model_names, request.headers)

    async def model(request: Request) -> Json:
        """A model by its name, or the list without a name. The gateway accepts every name."""
        if not (name := request.path_params["name"]):
            return await models(request)
        access.session_of(request)
        return _model(name, request.headers)

    async def root() -> Response:
        return Response()

    for prefix in ("", "/session/{session_key}"):
        app.add_api_route(f"{prefix}/v1/models", models, methods=["GET"])
        app.add_api_route(f"{prefix}/v1/models/{{name:path}}", model, methods=["GET"])
        app.add_api_route(f"{prefix}/", root, methods=["GET", "HEAD"])


def list_models(names: tuple[str, ...], headers: Mapping[str, str]) -> Json:
    """The names of the model, as Anthropic writes them for its clients, and otherwise as OpenAI does."""
    models = [_model(name, headers) for name in names]
    if "anthropic-version" in headers:
        return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": models}


def _model(name: str, headers: Mapping[str, str]) -> Json:
    if "anthropic-version" in headers:
        return {"type": "model", "id": name, "display_name": name, "created_at": CREATED_AT}
    return {"id": name, "object": "model", "created": 0, "owned_by": "verl_server"}
