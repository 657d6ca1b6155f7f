"""Refuses images that an agent must not send: other formats, and images whose pixels need too much memory."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence

from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message, image_sources

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of the public APIs. Pillow would try all of its formats."""
MAX_SIGNATURE_BYTES = 16
"""Number of bytes at the beginning of a file by which Pillow recognises its format."""


def require_safe_images(messages: Sequence[Message], max_pixels: int) -> None:
    """Raise GatewayError for an image of another format, and if all images have more pixels than allowed.

    The sizes are read from the headers of the images: a few kilobytes can have a billion pixels.
    """
    num_pixels = 0
    for message in messages:
        for source in () if isinstance(message.get("content"), str) else image_sources(message):
            num_pixels += _num_pixels(source)
            if num_pixels > max_pixels:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the images of the request have {num_pixels} pixels or more, and {max_pixels} are allowed; send "
                    "fewer or smaller images",
                )


def _num_pixels(source: str) -> int:
    """The number of pixels of an image. Raises GatewayError for an image that cannot be read.

    `Image.open` also compares the number with a limit of Pillow: it writes a warning, or raises an error. Of the
    classes of the formats, which `Image.open` calls, only that of WebP does: it allocates the memory at once.
    """
    from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401 - registered

    try:
        content = base64.b64decode(source.partition(",")[2])
        for name in FORMATS:
            factory, accepts = Image.OPEN[name]
            if accepts is not None and accepts(content[:MAX_SIGNATURE_BYTES]) is True:
                with factory(io.BytesIO(content), "") as image:
                    return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # the latter if warnings are errors
        message = "an image of the request has too many pixels to be decoded; send smaller images"
        raise GatewayError(ErrorKind.TOO_LARGE, message) from None
    except (OSError, SyntaxError, ValueError, IndexError, TypeError, struct.error):  # as `Image.open` expects
        pass
    raise GatewayError(
        ErrorKind.INVALID_REQUEST,
        f"an image of the request cannot be read; send one of the formats {', '.join(FORMATS)}",
    )
