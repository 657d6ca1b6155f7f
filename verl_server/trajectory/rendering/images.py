"""Images of messages: where their bytes come from, and how they are sent to a server."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.messages import IMAGE_KEYS, IMAGE_TYPES, Message, image_sources

if TYPE_CHECKING:
    from PIL.Image import Image

DATA_PREFIX = "data:"
"""Beginning of a data URL, which contains the bytes of its image."""
MAX_PATH_CHARACTERS = 4096
"""Maximum number of characters of a path. Longer text is base64."""
FILE_PREFIX = "file://"
REMOTE_PREFIXES = ("http://", "https://")
SHOWN_CHARACTERS = 80
"""Maximum number of characters of a source in errors."""


def open_image(source: str) -> Image:
    """The decoded image of a source in `image_sources`, as SGLang decodes it: in RGB, without the rotation of EXIF.

    Raises BadInputError that names the source if it cannot be read, or is no image.
    """
    with _opened(source) as image:
        return image.convert("RGB")


@contextlib.contextmanager
def _opened(source: str) -> Iterator[Image]:
    """An image that is decoded in the body. Raises BadInputError that names the source."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield Image.open(io.BytesIO(_read(source)))
    except BadInputError:
        raise
    except Exception as error:  # the plugins of Pillow raise many errors for a file that is damaged
        reason = "its bytes are no image that Pillow can decode" if isinstance(error, UnidentifiedImageError) else error
        raise BadInputError(f"the image {shorten(source)} cannot be read: {reason}") from error


def image_size(source: str) -> tuple[int, int]:
    """Height and width of the image of a source, which is not decoded. Raises BadInputError as `open_image` does."""
    with _opened(source) as image:
        return image.height, image.width


def image_data_url(image: Image | bytes | str | os.PathLike[str]) -> str:
    """A data URL with the bytes of an image, for a message: `{"type": "image", "image": image_data_url(image)}`.

    `image`: an image of Pillow, which is encoded as PNG; the bytes of an image file; a path; or base64 text. A data URL
    is returned unchanged. Raises BadInputError for an image that cannot be read.
    """
    if isinstance(image, str) and image.startswith(DATA_PREFIX):
        return image
    if isinstance(image, (str, os.PathLike)):
        source = os.fspath(image)
        try:
            content = _read(source)
        except (OSError, ValueError) as error:
            if isinstance(error, BadInputError):
                raise
            raise BadInputError(f"the image {shorten(source)} cannot be read: {error}") from error
    elif isinstance(image, bytes):
        content = image
    else:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        content = buffer.getvalue()
    return f"data:image/{_format_of(content)};base64,{base64.b64encode(content).decode()}"


def embed_images(messages: Sequence[Message]) -> list[Message]:
    """The messages with a data URL in place of each image, so that a file is read once and may change later.

    Raises BadInputError for an image that cannot be read or decoded.
    """
    return [
        {**message, "content": [_embed(part) for part in message["content"]]} if image_sources(message) else message
        for message in messages
    ]


def _embed(part: Mapping[str, Any]) -> Mapping[str, Any]:
    key = next((key for key in IMAGE_KEYS if part.get(key)), None)
    if part.get("type") not in IMAGE_TYPES or key is None:
        return part
    value = part[key]
    url = image_data_url(value["url"] if isinstance(value, Mapping) else value)
    open_image(url)  # raises BadInputError for an image that cannot be decoded
    return {**part, key: {**value, "url": url} if isinstance(value, Mapping) else url}


def shorten(source: str) -> str:
    """The beginning of a source, for errors: a data URL has millions of characters."""
    cut = "..." if len(source) > SHOWN_CHARACTERS else ""
    return repr(source[:SHOWN_CHARACTERS] + cut)


def _read(source: str) -> bytes:
    """The bytes of a source. Raises OSError for a path that cannot be read, and BadInputError for other sources."""
    if source.startswith(REMOTE_PREFIXES):
        raise BadInputError(
            f"the image {shorten(source)} is on another machine, where it can change before the trainer reads it "
            "again; download the image and pass its path, or image_data_url(content)"
        )
    if source.startswith(FILE_PREFIX):
        return _read_file(Path(unquote(urlparse(source).path)), source)
    if source.startswith(DATA_PREFIX):
        _, _, encoded = source.partition(",")
    elif len(source) <= MAX_PATH_CHARACTERS and (os.path.exists(source) or not _is_base64(source)):
        return _read_file(Path(source).expanduser(), source)
    else:
        encoded = source
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise BadInputError(f"the image {shorten(source)} has no valid base64 data: {error}") from error


def _read_file(path: Path, source: str) -> bytes:
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BadInputError(f"the image {shorten(source)} is no regular file")
    return path.read_bytes()


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except binascii.Error:
        return False


def _format_of(content: bytes) -> str:
    """The subtype of an image's media type. SGLang decodes the bytes and ignores the type."""
    from PIL import Image, UnidentifiedImageError

    try:
        return (Image.open(io.BytesIO(content)).format or "png").lower()
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadInputError(f"{len(content)} bytes are no image that Pillow can decode: {error}") from error
