"""Requests and replies of a router: bodies, checks of what a caller asks, errors, and the size of a prompt."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.sglang.requests import ROUTER_FIELDS
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
    to_wire,
)
from verl_server.router.placement import VersionRequirement
from verl_server.router.resumable_generation import version_spans
from verl_server.types import Json, without_half_characters
from verl_server.validation import is_finite_number, is_list

CHARACTERS_PER_TOKEN = 4
"""Assumed number of characters per token of a prompt that is text."""
MAX_ID_LENGTH = 512
"""Maximum number of characters of a request id or a session id."""

MAX_SERVER_DEATHS = 2
"""Maximum number of servers that may end while one request runs alone on them, before they return a token. Such a
request probably ends every server, so it is not tried on further replicas. A request that ran beside others on so many
servers is tried once more on a replica that tries no other request of this kind. It is given up if that server ends,
too."""


MEDIA_FIELDS = frozenset({"audio_data", "image_data", "video_data"})
"""Fields of `/generate` with images, videos and audio."""
_MEDIA_KEYS = MEDIA_FIELDS | {"audio_url", "image_url", "input", "source", "video_url"}
"""Keys of JSON objects, in the bodies of all paths, whose values are media or hold media."""
_TEXT_KEYS = frozenset({"input", "source"})
"""Those of them whose strings are text: the media are in objects."""
_LOCATION_KEYS = ("audio", "image", "url", "video")
"""Keys of an object that describes a medium, with its location."""
_LOCATIONS = ("data:", "http://", "https://")
"""Beginnings of the locations that are accepted."""


def validate_id(value: str | None, name: str) -> None:
    """Raises BadInputError unless the id is None or a string of 1 to MAX_ID_LENGTH characters."""
    if value is None:
        return
    if not isinstance(value, str) or not value or len(value) > MAX_ID_LENGTH:
        got = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise BadInputError(f"{name} must be a string of 1 to {MAX_ID_LENGTH} characters, got {got}")


def validate_timeout(timeout_s: float | None) -> None:
    """Raises BadInputError unless the timeout is None, infinity or a positive number of seconds."""
    if timeout_s is None or timeout_s == math.inf:
        return
    if not is_finite_number(timeout_s):
        raise BadInputError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
    if not timeout_s > 0:
        raise BadInputError(f"timeout_s is {timeout_s}: the deadline has passed already")


def take_router_fields(request: Mapping[str, Any]) -> tuple[Any, Json, Json]:
    """Divide a request into its `rid`, the options of `Dispatcher.generate`, and the request to a server.

    Raises BadInputError for a required weight version that is not a whole number.
    """
    rest = dict(request)
    values = {name: rest.pop(name, None) for name in ROUTER_FIELDS}
    requirement = VersionRequirement(values.pop("weight_version"), values.pop("min_weight_version"))
    return rest.pop("rid", None), {**values, "requirement": requirement}, rest


def rids_of_batch(rid: Any, num_prompts: int) -> list[str | None]:
    """The request id of each prompt of a request with several prompts. Each id is None when the request has none.

    Raises BadInputError unless `rid` is None or a list with one id for each prompt. Two prompts with the same id would
    have one generation.
    """
    if rid is None:
        return [None] * num_prompts
    if not is_list(rid) or len(rid) != num_prompts:
        got = f"a list of {len(rid)}" if is_list(rid) else type(rid).__name__
        raise BadInputError(f"{num_prompts} prompts need a list of {num_prompts} request ids as rid, got {got}")
    known: set[str] = set()
    for prompt_rid in rid:
        if isinstance(prompt_rid, str):
            if prompt_rid in known:
                raise BadInputError(f"{prompt_rid!r} is the request id of several prompts; each needs a rid of its own")
            known.add(prompt_rid)
    return list(rid)


def require_versions(reply: Json, requirement: VersionRequirement, problem: str) -> None:
    """Raises NotReadyError, which begins with `problem`, unless every token has a weight version that is required."""
    versions = {span["version"] for span in version_spans(reply)}
    if not all(requirement.is_met_by(version) for version in versions):
        raise NotReadyError(
            f"{problem}: {requirement} is required, but the tokens have the weight versions {sorted(versions)}"
        )


def has_lost_server(error: BaseException) -> bool:
    """Whether an attempt's error says that the connection broke after the server had received the request."""
    return was_received(error.__cause__)


def was_received(cause: BaseException | None) -> bool:
    """Whether a connection broke that had been made. A lost machine accepts none: then the request was not sent."""
    is_broken = isinstance(cause, (aiohttp.ClientError, ConnectionError))
    return is_broken and not isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


def is_out_of_files(error: BaseException) -> bool:
    """Whether an attempt's error says that this process or this machine cannot open another connection."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def repeated_death_error(error: VerlServerError, request: Mapping[str, Any]) -> ServerDiedError:
    """The error of a request that is not tried again, because several servers ended while they ran it.

    `error`: the error of the last server.
    """
    given = {
        name: value for name, value in request.items() if value is not None and name not in ("prompt", "input_ids")
    }
    return ServerDiedError(
        "the request was given up, because each server that ran it ended before it returned a token. The fields of the "
        f"request are the likely cause: {given!r:.500}. Check them, and read the end of the server's log. "
        f"The last error: {error.message}",
        **error.details,
    )


def estimate_prompt_tokens(request: Mapping[str, Any]) -> int:
    """Estimated number of prompt tokens. An invalid prompt counts as 0; the replica's adapter refuses it later."""
    token_ids, text = request.get("input_ids"), request.get("prompt")
    if is_list(token_ids):
        return len(token_ids)
    return len(text) // CHARACTERS_PER_TOKEN if isinstance(text, str) else 0


def check_forwarded_body(body: Json) -> None:
    """Raise BadInputError for a body of an OpenAI path with `session_params` or with media from the servers' files."""
    if body.get("session_params") is not None:
        raise BadInputError(
            "session_params is refused: a session of SGLang continues on the KV cache of earlier weights"
        )
    refuse_local_media(body)


def refuse_local_media(body: Json) -> None:
    """Raise BadInputError unless all images, videos and audio of a request are data URLs or HTTP URLs.

    SGLang takes other strings for paths of files, which it opens: a caller on another machine must not read the files
    of the servers. HTTP URLs are limited by the server itself (`allowed_media_domains`). The inputs of tools are text.
    """
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(item for item in value if isinstance(item, (dict, list)))
        elif isinstance(value, dict) and value.get("type") != "tool_use":
            for key, item in value.items():
                if key in _MEDIA_KEYS:
                    _check_locations(key, item)
                if isinstance(item, (dict, list)):
                    pending.append(item)


def _check_locations(key: str, value: Any) -> None:
    """Raise BadInputError for the location of a local file in the value of a key of `_MEDIA_KEYS`."""
    pending: list[tuple[Any, bool]] = [(value, key in _TEXT_KEYS)]
    while pending:
        item, is_text = pending.pop()
        if isinstance(item, list):
            pending.extend((element, is_text) for element in item)
        elif isinstance(item, dict):
            pending.extend((item.get(name), False) for name in _LOCATION_KEYS)
        elif isinstance(item, str) and not is_text and not item.startswith(_LOCATIONS):
            raise BadInputError(
                f"{key} must be a data URL or an HTTP URL, got {item!r:.100}: a router passes no paths of files to its "
                "servers. Write base64 data as data:image/png;base64,..."
            )


# -- Bodies -----------------------------------------------------------------------------------------
# Bodies of requests and replies as JSON, and the HTTP status of each error.

BODY_TIMEOUT_S = 300.0
"""Seconds in which the body of a request must arrive."""
MAX_LEVELS = 100
"""Maximum number of lists and objects within each other in a body: code that follows must not exhaust its stack."""
#: HTTP status for each error class; the first class that matches decides.
ERROR_STATUSES: tuple[tuple[type[VerlServerError], int], ...] = (
    (BadInputError, 400), (ServerBusyError, 429), (NotReadyError, 503), (DeadlineError, 504), (ShutDownError, 503),
    (ServerDiedError, 502), (ServerError, 502), (UnsupportedError, 501), (TornWeightsError, 503),
)  # fmt: skip


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_status(error: VerlServerError) -> int:
    """The HTTP status of an error: that of the replica, if a replica has answered with one."""
    replica_status = error.details.get("status")
    if isinstance(replica_status, int) and replica_status >= 400:
        return replica_status
    return next((code for kind, code in ERROR_STATUSES if isinstance(error, kind)), 500)


def error_response(error: VerlServerError) -> web.Response:
    """An error as JSON: `type`, `message` and `details` of `to_wire`, and `retryable`."""
    return json_response({"error": {**to_wire(error), "retryable": error.retryable}}, error_status(error))


async def read_body(request: web.BaseRequest) -> bytes:
    """The body of a request. Raises BadInputError for a compressed one (415), and for one that arrives slowly (408)."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the router takes no compressed bodies; send the body without Content-Encoding: {encoding[:40]}"
        raise BadInputError(message, status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return without_half_characters(await request.read())
    except TimeoutError:
        raise BadInputError(f"the body has not arrived within {BODY_TIMEOUT_S:g} s", status=408) from None


def parse_object(raw: bytes) -> Json:
    """The JSON object in a request's body. Raises BadInputError for another body, and for one of too many levels."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInputError(f"the request body must be a JSON object, got {type(body).__name__}")
    level: list[Any] = [body]
    for _ in range(MAX_LEVELS):
        values = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in values if type(item) in (dict, list)]
        if not level:
            return body
    raise BadInputError(f"the request body has more than {MAX_LEVELS} levels of lists and objects")
