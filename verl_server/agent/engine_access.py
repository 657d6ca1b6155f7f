"""`EngineAccess`: what a runner needs of the engine that generates: a generate function, the tokenizer, the limits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_server.agent.generate_fn import GenerateFn, as_generate_fn, limit_concurrency, require_generate_fn
from verl_server.agent.limits import RolloutLimits
from verl_server.errors import BadInputError, VerlServerError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json
from verl_server.weights.model_definition import read_config

if TYPE_CHECKING:
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.trajectory.batches.routed_experts import ExpertLayout

logger = logging.getLogger(__name__)

Engine: TypeAlias = (
    "VerlEngine | RolloutManager | HttpServerEngineAdapter | AsyncHttpServerEngineAdapter | RouterClient | GenerateFn"
)
"""What generates for a runner."""
ENGINES = (
    "a VerlEngine, a RolloutManager, an adapter of a server, a RouterClient, or a function such as "
    "fleet.router.generate"
)
MAX_CONCURRENT_QUESTIONS = 16
"""Number of servers of a fleet that are asked at a time."""
PASS_RENDERER = "pass renderer=get_renderer(tokenizer), or --model to the command"


async def _close_nothing() -> None:
    pass


@dataclass(frozen=True)
class EngineAccess:
    """The engine as a runner uses it."""

    generate: GenerateFn
    server_info: Json | None
    """SGLang's `/server_info` of one server. None if the engine cannot be asked."""
    max_tokens: int | None = None
    """Maximum number of tokens of a prompt with its response, on each server."""
    close_connections: Callable[[], Awaitable[None]] = _close_nothing
    """Closes the connections of the running event loop. A later generation opens others."""

    def make_renderer(self) -> ChatRenderer:
        """The renderer for the tokenizer of the server, or for the processor of a vision-language model.

        Raises BadInputError if the engine cannot be asked or the tokenizer cannot be loaded, and the errors of
        `get_renderer`.
        """
        if self.server_info is None:
            raise BadInputError(f"this engine does not tell its tokenizer; {PASS_RENDERER}")
        from transformers import AutoTokenizer

        from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer

        path = str(self.server_info.get("tokenizer_path") or self.server_info.get("model_path"))
        try:
            tokenizer = load_named_by_server(AutoTokenizer, path)
        except Exception as error:
            raise BadInputError(
                f"the tokenizer {path!r} of the engine cannot be loaded: {error}; {PASS_RENDERER}"
            ) from error
        renderer = get_renderer(tokenizer)
        if isinstance(renderer, FamilyRenderer):  # it knows the tool calls and thoughts of the model, and no images
            return renderer
        return _vision_renderer(self.server_info, path) or renderer

    def expert_layout(self) -> ExpertLayout | None:
        """The layout of the routed experts of the model. None if the engine cannot be asked.

        Raises BadInputError if the server does not return routed experts, or if its model has none.
        """
        if self.server_info is None:
            return None
        from verl_server.trajectory.batches.routed_experts import ExpertLayout

        if not self.server_info.get("enable_return_routed_experts"):
            raise BadInputError(
                "this server does not return routed experts; start it with enable_return_routed_experts=True, or leave "
                "out return_routed_experts"
            )
        try:
            config = read_config({**self.server_info, "trust_remote_code": False})
        except BadInputError as error:
            raise BadInputError(
                f"{error.message}; pass a function such as fleet.router.generate as the engine, and "
                "step.batch(expert_layout=ExpertLayout(...))"
            ) from error
        return ExpertLayout.from_config(config)

    def complete_limits(self, limits: RolloutLimits) -> RolloutLimits:
        """The limits, with the context length of the server as `max_context_tokens` if they have none."""
        return limits if limits.max_context_tokens else dataclasses.replace(limits, max_context_tokens=self.max_tokens)


def load_named_by_server(factory: Any, path: str) -> Any:
    """The tokenizer or processor at a path that a server has named, from files of this machine or of its Hub cache.

    Whoever answers at a server's URL chooses the path. So nothing is downloaded, and no code of the folder is executed,
    whatever the server says. The user can load such a tokenizer and pass a renderer.
    """
    return factory.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _vision_renderer(server_info: Json, path: str) -> ChatRenderer | None:
    """The renderer for messages with images. None for a model without images, and if its processor cannot be used.

    `path`: path of the tokenizer and the processor.
    """
    from transformers import AutoProcessor

    from verl_server.trajectory.rendering.families import get_renderer

    try:
        if not hasattr(read_config({**server_info, "trust_remote_code": False}), "vision_config"):
            return None
        return get_renderer(load_named_by_server(AutoProcessor, path))
    except Exception as error:  # noqa: BLE001 - code of another library: torchvision is not installed, for example
        logger.info("messages with images are refused, because the processor %r cannot be used: %s", path, error)
        return None


def access_engine(engine: object) -> EngineAccess:
    """The access to an engine. Asks a server for its arguments, except for an asynchronous adapter and a router.

    Raises BadInputError for an object that is no engine, for an engine without a server on this rank, and for a fleet
    without a running server; and the errors of the request.
    """
    if callable(engine):
        require_generate_fn("engine", engine)
        return EngineAccess(engine, None)
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.router.rollout_router import RolloutRouter

    if isinstance(engine, RolloutManager):
        adapters = [replica.adapter for replica in engine.replicas]
        running = [adapter for adapter in adapters if adapter is not None]
        if not running:
            raise BadInputError(f"no replica of this fleet runs, so it does not tell its tokenizer; {PASS_RENDERER}")
        with ThreadPoolExecutor(MAX_CONCURRENT_QUESTIONS) as pool:
            answers = list(pool.map(_ask, running))
        infos = [answer for answer in answers if not isinstance(answer, VerlServerError)]
        if not infos:
            raise next(answer for answer in answers if isinstance(answer, VerlServerError))
        return _access_servers(engine.router.generate, infos)
    if isinstance(engine, VerlEngine):
        if engine.adapter is None:
            raise BadInputError(
                "this VerlEngine has no server of its own on this rank; run the agents on rank 0, and for an engine "
                "with fleet=..., pass the fleet"
            )
        engine = engine.adapter
    if isinstance(engine, HttpServerEngineAdapter):
        return _access_server(engine)
    if isinstance(engine, AsyncHttpServerEngineAdapter):
        return EngineAccess(as_generate_fn(engine), None, close_connections=engine.close_connections)
    if isinstance(engine, RouterClient):
        return EngineAccess(engine.generate, None, close_connections=engine.close_connections)
    if isinstance(engine, RolloutRouter):
        return EngineAccess(engine.generate, None)
    raise BadInputError(f"engine must be {ENGINES}, got {type(engine).__name__}")


def _ask(adapter: HttpServerEngineAdapter) -> Json | VerlServerError:
    try:
        return adapter.get_server_info()
    except VerlServerError as error:  # this server is being replaced
        return error


def _access_server(server: HttpServerEngineAdapter) -> EngineAccess:
    from verl_server.adapter.sglang.replies import max_running_requests

    generate, server_info = as_generate_fn(server.asynchronous), server.get_server_info()
    limit = max_running_requests(server_info)
    access = _access_servers(generate if limit is None else limit_concurrency(generate, limit), [server_info])
    return dataclasses.replace(access, close_connections=server.asynchronous.close_connections)


def _access_servers(generate: GenerateFn, server_infos: Sequence[Json]) -> EngineAccess:
    from verl_server.adapter.sglang.replies import max_request_tokens

    numbers = [number for info in server_infos if (number := max_request_tokens(info)) is not None]
    return EngineAccess(generate, server_infos[0], min(numbers, default=None))


def with_stop_tokens(params: Mapping[str, Any], renderer: ChatRenderer) -> dict[str, Any]:
    """The sampling parameters, with the tokens that end a turn as `stop_token_ids` if no stop is given.

    The end of a turn in the chat template need not be the end token of the model.
    """
    is_given = any(params.get(name) is not None for name in ("stop", "stop_token_ids", "stop_regex"))
    if is_given or params.get("ignore_eos"):
        return dict(params)
    return {**params, "stop_token_ids": renderer.stop_token_ids} if renderer.stop_token_ids else dict(params)
