"""Refuses images that an agent must not send: other formats, and images whose pixels need too much memory."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence

from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message, image_sources

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of the public APIs. Pillow would try all of its formats."""


def require_safe_images(messages: Sequence[Message], max_pixels: int) -> None:
    """Raise GatewayError for an image of another format, and if all images have more pixels than allowed.

    The sizes are read from the headers of the images: a few kilobytes can have a billion pixels.
    """
    num_pixels = 0
    for message in messages:
        for source in image_sources(message):
            num_pixels += _num_pixels(source)
            if num_pixels > max_pixels:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the images of the request have more than {max_pixels} pixels; send fewer or smaller images",
                )


def _num_pixels(source: str) -> int:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])), formats=FORMATS) as image:
                return image.width * image.height
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise GatewayError(ErrorKind.TOO_LARGE, "an image of the request has too many pixels") from None
        except (OSError, SyntaxError, ValueError):
            message = f"an image of the request cannot be read; send one of the formats {', '.join(FORMATS)}"
            raise GatewayError(ErrorKind.INVALID_REQUEST, message) from None
