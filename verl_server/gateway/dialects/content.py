"""The content of messages, as a policy reads it: texts and images. All other parts become short texts.

An agent repeats its history with each request. So a part that the policy cannot read must not be an error: all later
requests of the conversation would fail, too. There is one rule for the parts of all dialects, also of types that are
not known. The text is always the same, so that the conversation is recognised when the part is repeated.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.dialects.base import bad_request, derive, read_text, require_recordable
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.trajectory.rendering.vision import DATA_PREFIX, VisionRenderer
from verl_server.types import Json

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of the text by the type of a part."""
IMAGES = ("image", "image_url", "input_image")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of thoughts. They are dropped: the recorded tokens of a turn contain its thought."""
CALLS = ("tool_use", "tool_result")
"""Types of the blocks of Anthropic's messages that are no content of the message around them."""
NO_IMAGES = "the model reads no images"
MAX_KIND_CHARS = 40
"""Maximum number of characters of a type in a text for the policy."""


def read_content(content: Any, role: Any, name: str = "content") -> Json:
    """`content` of a chat message: a text, or a list of parts if there are images. `omitted`: what was left out.

    `content`: a text or a list of parts, of any dialect. The result of a tool may be any JSON value. `role`: that of
    the message; chat templates take images of the user and of tools. `name`: for errors. Raises GatewayError for a
    content that is malformed.
    """
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    items = [content] if isinstance(content, dict) and content.get("type") in (*TEXTS, *IMAGES) else content
    is_list = isinstance(items, list) and all(isinstance(item, (str, dict)) for item in items)
    if role == "tool" and not (is_list and all(isinstance(item, str) or "type" in item for item in items)):
        require_recordable(name, content)
        return {"content": orjson.dumps(content).decode()}
    if not is_list:
        raise bad_request(f"{name!r} must be a string or a list of content parts")
    parts = [part for index, item in enumerate(items) for part in read_part(item, f"{name}[{index}]")]
    return _joined(parts if role in ("user", "tool") else _without_images(parts, lambda source: NO_IMAGES))


def _joined(parts: Sequence[Json]) -> Json:
    omitted = [part["omitted"] for part in parts if "omitted" in part]
    shown = [{key: value for key, value in part.items() if key != "omitted"} for part in parts]
    is_text = all(part["type"] == "text" for part in shown)
    content: Any = "".join(part["text"] for part in shown) if is_text else shown
    return {"content": content, "omitted": omitted} if omitted else {"content": content}


def read_part(part: Json | str, name: str) -> list[Json]:
    """The parts of a chat message for a part of any dialect. `name`: for errors. Raises GatewayError."""
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    kind = part.get("type")
    if not isinstance(kind, str) or kind in CALLS:
        raise bad_request(f"'{name}.type' = {str(kind)[:MAX_KIND_CHARS]!r} is not the type of a content part")
    if kind in TEXTS:
        if not isinstance(text := part.get(TEXTS[kind]), str):
            raise bad_request(f"'{name}.{TEXTS[kind]}' must be a string")
        return [{"type": "text", "text": text}]
    if kind in THOUGHTS:
        return []
    if kind in IMAGES:
        url = _image_url(part, name)
        if url is None or url[: len(DATA_PREFIX)].lower() != DATA_PREFIX:
            return [_omitted("image", "the gateway downloads no files")]
        head, _, encoded = url.partition(",")
        url = f"{head.lower()},{''.join(encoded.split())}"  # lines of base64, as in mails, which engines refuse
        return [{"type": "image_url", "image_url": {"url": url}}]
    return _texts_within(part, name) or [_omitted(kind, "the model cannot read it")]


def _omitted(kind: str, reason: str) -> Json:
    """The text in place of a part. `omitted`: its type, for the record."""
    kind = kind.removeprefix("input_").removesuffix("_url")[:MAX_KIND_CHARS]
    return {"type": "text", "text": f"[{kind} omitted: {reason}]", "omitted": kind}


def _image_url(part: Json, name: str) -> str | None:
    """The URL of an image in the form of any dialect. None for an image that is named by the id of a file."""
    source, image = part.get("source"), part.get("image_url")
    if isinstance(source, dict) and isinstance(source.get("type"), str):
        if source["type"] != "base64":
            return None
        return f"data:{read_text(source, 'media_type', default='')};base64,{read_text(source, 'data')}"
    url = image.get("url") if isinstance(image, dict) else image
    if url is None and isinstance(part.get("file_id"), str):
        return None
    if not isinstance(url, str):
        form = "'source' must be an object with a 'type'" if part["type"] == "image" else "'image_url' must be a URL"
        raise bad_request(f"'{name}': {form}")
    return url


def _texts_within(part: Json, name: str) -> list[Json]:
    """The parts within a part of another type, such as a document or a search result. Empty if none can be read."""
    for holder in (part, *(value for value in part.values() if isinstance(value, dict))):
        content, data = holder.get("content"), holder.get("file_data")
        if holder.get("type") == "text" and isinstance(holder.get("data"), str):
            return [{"type": "text", "text": holder["data"]}]
        if isinstance(data, str) and data.startswith("data:text/") and (text := _decoded(data)) is not None:
            return [{"type": "text", "text": text}]
        if isinstance(content, str) and content:
            return [{"type": "text", "text": content}]
        if isinstance(content, list) and all(isinstance(item, dict) for item in content):
            parts = [found for item in content for found in read_part(item, name)]
            if not all("omitted" in found for found in parts):
                return parts
    return []


def _decoded(data_url: str) -> str | None:
    """The text of a data URL. None if it is no base64 of a text."""
    try:
        return decode_base64(data_url.partition(",")[2]).decode()
    except ValueError:
        return None


def decode_base64(text: str) -> bytes:
    """The bytes of base64, which may have white space. Raises ValueError."""
    return base64.b64decode("".join(text.split()), validate=True)


def replace_images(request: TurnRequest, reason_of: Callable[[str], str | None]) -> TurnRequest:
    """The request with a text in place of each image that the policy does not read.

    `reason_of`: why it does not read the image of a source (`image_sources`). None if it does.
    """
    messages = [dict(message) for message in request.messages]
    for message in messages:
        if isinstance(message["content"], list):
            joined = _joined(_without_images(message["content"], reason_of))
            message |= {**joined, "omitted": [*message.get("omitted", ()), *joined.get("omitted", ())]}
    return dataclasses.replace(request, messages=messages)


def _without_images(parts: Sequence[Json], reason_of: Callable[[str], str | None]) -> list[Json]:
    reasons = [next(map(reason_of, image_sources({"content": [part]})), None) for part in parts]
    return [_omitted("image", why) if why else part for part, why in zip(parts, reasons, strict=True)]


def read_tools(tools: Sequence[Json], parse: Callable[[Json], Json | None]) -> tuple[list[Json], list[str]]:
    """The schemas of the tools that the policy may call, and the types of the others, which are left out.

    The policy can only call functions with JSON arguments. `parse`: a function of a module that returns None for a tool
    of another type. Raises GatewayError.
    """
    schemas, omitted = list[Json](), list[str]()
    for index, tool in enumerate(tools):
        try:
            schema = derive(parse, tool)
            kind = read_text(tool, "type", default="")
        except GatewayError as error:
            raise bad_request(f"tools.{index}: {error.message}") from None
        if schema is None:
            omitted.append(kind[:MAX_KIND_CHARS])
        else:
            schemas.append(schema)
    return schemas, omitted


def parse_arguments(arguments: Any) -> Json:
    """The arguments of a tool call as a dict, which chat templates need. Other values get the name `input`."""
    value = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(arguments.strip() or "{}")
    require_recordable("arguments", value)
    return value if isinstance(value, dict) else {} if value is None else {"input": arguments}


def tool_schema(name: str, description: Any, parameters: Any) -> Json:
    """The schema of a tool in the form that all dialects share."""
    if not isinstance(parameters or {}, dict):
        raise bad_request(f"the parameters of the tool {name!r} must be a JSON schema")
    require_recordable("parameters", parameters)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": str(description or ""),
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


# -- Image check ------------------------------------------------------------------------------------
# Images that cannot be read become texts. Those that need too much memory are refused.

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of the public APIs. Pillow would try all of its formats."""
MAX_SIGNATURE_BYTES = 16
"""Number of bytes at the beginning of a file by which Pillow recognises its format."""
MAX_KNOWN_IMAGES = 4096
"""Number of images that are remembered. All are forgotten when there are more."""


class ImageCheck:
    """Decides which images the policy of a session reads. Each image is decoded once. May be used in several threads.

    An agent repeats its images with each request: an image that cannot be read must not be an error.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer if isinstance(renderer, VisionRenderer) else None
        self._known = dict[bytes, tuple[int, bool]]()
        """Number of pixels of an image, and whether it can be read, by the digest of its source."""

    def is_short(self, request: TurnRequest) -> bool:
        """Whether the check of a request takes no time: it decodes no images."""
        return self._renderer is None or all(isinstance(message["content"], str) for message in request.messages)

    def check(self, request: TurnRequest, max_pixels: int) -> TurnRequest:
        """The request with texts in place of the images that the policy does not read.

        Raises GatewayError (413) if the images have more than `max_pixels` pixels together. Their sizes are read from
        their headers, before an image is decoded: a few kilobytes can have a billion pixels.
        """
        if all(isinstance(message["content"], str) for message in request.messages):
            return request
        if self._renderer is None:
            return replace_images(request, lambda source: NO_IMAGES)
        found = self._find(request.messages, max_pixels, self._renderer)
        return replace_images(request, lambda source: None if found[_digest(source)][1] else "it cannot be read")

    def _find(
        self, messages: Sequence[Message], max_pixels: int, renderer: VisionRenderer
    ) -> dict[bytes, tuple[int, bool]]:
        """What is known of each image in the messages."""
        found, new, total = dict[bytes, tuple[int, bool]](), dict[bytes, str](), 0
        for source in (source for message in messages for source in image_sources(message)):
            digest = _digest(source)
            if digest not in found:
                known = self._known.get(digest)
                if known is None:
                    pixels = num_pixels(source)
                    known = pixels or 0, False
                    new |= {} if pixels is None else {digest: source}
                found[digest] = known
            total += found[digest][0]
            if total > max_pixels:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the images of the request have {total} pixels or more, and {max_pixels} are allowed; send fewer "
                    "or smaller images",
                )
        found |= {digest: (found[digest][0], renderer.can_read(source)) for digest, source in new.items()}
        if len(self._known) + len(found) > MAX_KNOWN_IMAGES:
            self._known.clear()
        self._known |= found
        return found


def _digest(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()


def num_pixels(source: str) -> int | None:
    """The number of pixels of an image, from its header. None for an image that cannot be read, or of another format.

    `Image.open` also compares the number with a limit of Pillow: it writes a warning, or raises an error. Of the
    classes of the formats, which `Image.open` calls, only that of WebP does: it allocates the memory at once.
    """
    from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401 - registered

    try:
        content = decode_base64(source.partition(",")[2])
        for name in FORMATS:
            factory, accepts = Image.OPEN[name]
            if accepts is not None and accepts(content[:MAX_SIGNATURE_BYTES]) is True:
                with factory(io.BytesIO(content), "") as image:
                    return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # the latter if warnings are errors
        message = "an image of the request has too many pixels to be decoded; send smaller images"
        raise GatewayError(ErrorKind.TOO_LARGE, message) from None
    except Exception:  # noqa: BLE001 - the classes of the formats raise many errors
        pass
    return None
