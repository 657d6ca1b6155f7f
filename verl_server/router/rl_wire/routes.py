"""`RlRoutes`: handlers of the routes of vLLM-RL servers that generate, and of `/v1/models`."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from verl_server.errors import BadInputError
from verl_server.router.dispatcher import Dispatcher, gather_all
from verl_server.router.http.bodies import json_response, parse_object, read_body
from verl_server.router.request_checks import validate_id
from verl_server.router.rl_wire.completions import completion_reply, is_token_completion, sampling_of_completion
from verl_server.router.rl_wire.generate import (
    TokenRequest,
    check_generate_body,
    generate_reply,
    require_prompt,
    router_fields_of,
)
from verl_server.router.rl_wire.models import ServedModel, ServedModels
from verl_server.router.rl_wire.sampling import parse_sampling, with_given_names
from verl_server.types import Json

SESSION_HEADER, REQUEST_HEADER = "X-Session-ID", "X-Request-Id"


class RlRoutes:
    """Requests with vLLM's names. Each sample is a generation of the `Dispatcher`, which survives lost replicas."""

    def __init__(self, dispatcher: Dispatcher, models: ServedModels) -> None:
        self._dispatcher, self._models = dispatcher, models

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """`POST /inference/v1/generate`."""
        body = parse_object(await read_body(request))
        check_generate_body(body)
        model = await self._models.find(body.get("model"))
        tokens = _token_request(body, body["token_ids"], body.get("sampling_params", {}), model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request), "token_ids", "sampling_params")
        return json_response(generate_reply(body, rid, tokens, replies, model.name))

    async def completions(
        self, request: web.BaseRequest, forward: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """`POST /v1/completions`. Requests with a text as prompt, with several prompts, and streams are forwarded."""
        body = parse_object(await read_body(request))
        if not is_token_completion(body):
            return await forward(request)
        params = sampling_of_completion(body)
        model = await self._models.find(body.get("model"))
        tokens = _token_request(body, body["prompt"], params, model, request)
        rid, replies = await self._sample(tokens, _request_id(body, request), "prompt", "")
        return json_response(completion_reply(rid, tokens, replies, model.name))

    async def models(self, _: web.BaseRequest) -> web.StreamResponse:
        """`GET /v1/models`. It is answered also while the router is paused."""
        return json_response(await self._models.listing())

    async def _sample(self, request: TokenRequest, rid: str | None, prompt: str, params: str) -> tuple[str, list[Json]]:
        """The id of the request, which is a random one if it has none, and the replies of its samples.

        The samples of a repeated id are those of the first call. `prompt` and `params`: see `with_given_names`.
        """
        count = request.sampling.n
        rids = [rid if count == 1 or rid is None else f"{rid}/{index}" for index in range(count)]
        try:
            replies = await gather_all(
                self._dispatcher.generate_request({**request.of_sample(index), "rid": sample_rid}, is_remote=True)
                for index, sample_rid in enumerate(rids)
            )
        except BadInputError as error:
            raise with_given_names(error, prompt, params) from error
        return rid or uuid.uuid4().hex, replies


def _token_request(body: Json, prompt: Any, params: Any, model: ServedModel, request: web.BaseRequest) -> TokenRequest:
    require_prompt(prompt, "the prompt")
    sampling = parse_sampling(params, len(prompt), model.max_model_len)
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadInputError(f"cache_salt must be a non-empty string, got {salt!r:.100}")
    session_id = request.headers.get(SESSION_HEADER) or body.get("session_id")
    return TokenRequest(list(prompt), sampling, model.lora_path, salt, router_fields_of(body, session_id))


def _request_id(body: Json, request: web.BaseRequest) -> str | None:
    """The id that the caller gave to the request. As in vLLM, that of the header comes first."""
    rid = request.headers.get(REQUEST_HEADER) or body.get("request_id")
    validate_id(rid, "request_id")
    return rid
