"""Images of requests: those that cannot be read become texts. Those that need too much memory are refused."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.dialects.content import NO_IMAGES, decode_base64, replace_images
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.trajectory.rendering.vision import VisionRenderer

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
