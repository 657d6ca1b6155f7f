"""Rendering of messages with images, in which each image has the tokens that the model reads.

A chat template writes one placeholder token for each image. The model reads as many of these tokens as the image has
merged patches. Recorded paths contain all of them: the tokens of a path are those that the policy has seen. A request
to SGLang contains one placeholder for each image, which SGLang expands in the same way.

Models of the Qwen-VL families work so: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and those that are built like these.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import IMAGE_KEYS, IMAGE_TYPES, Message, image_sources, validate_messages
from verl_server.trajectory.rendering.tokenizer import require_tokenizer
from verl_server.types import Json

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from tensordict import TensorDict


# -- Images -----------------------------------------------------------------------------------------
# Images of messages: where their bytes come from, and how they are sent to a server.

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


# -- Vision renderer --------------------------------------------------------------------------------

MEDIA_KINDS = ("image", "video", "audio")
SGLANG_PLACEHOLDER = "<image>"
"""Text that SGLang takes for an image, whatever the placeholder of the model is."""
PROCESSOR_PARTS = ("image_processor", "tokenizer", "image_token", "image_token_id", "_get_num_multimodal_tokens")
"""Attributes of a Hugging Face processor that rendering needs."""
PROBE_IMAGE: tuple[Json, ...] = (
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "b"}]},
)
"""Messages with one image, for which a chat template must write one placeholder."""
PASS_PROCESSOR = "pass get_renderer(transformers.AutoProcessor.from_pretrained(model_path)) as the renderer"


def is_vision_processor(value: object) -> bool:
    """Whether `value` is a Hugging Face processor of images and text."""
    return hasattr(value, "image_processor") and hasattr(value, "tokenizer")


class VisionRenderer(ChatRenderer):
    """Renders chat messages with images to token ids, in which each image has as many tokens as the model reads.

    `processor`: `AutoProcessor.from_pretrained(model_path)`, with the tokenizer and the chat template of the model.
    `template_arguments`: variables of the template. Raises UnsupportedError for a processor that is not built like
    those of Qwen-VL models, and for a chat template that does not write one placeholder for each image, and the errors
    of `ChatRenderer`.
    """

    def __init__(self, processor: Any, **template_arguments: Any) -> None:
        if missing := [name for name in PROCESSOR_PARTS if not hasattr(processor, name)]:
            raise UnsupportedError(
                f"the processor {type(processor).__name__} has no {missing[0]}: images work with models of the Qwen-VL "
                "families only. Pass its tokenizer for messages without images"
            )
        tokenizer = processor.tokenizer
        require_tokenizer(tokenizer)
        if template := getattr(processor, "chat_template", None):  # may be another one than that of the tokenizer
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = template
        super().__init__(tokenizer, **template_arguments)
        self._processor = processor
        self._image_token_id = int(processor.image_token_id)
        names = (getattr(processor, f"{kind}_token", None) for kind in MEDIA_KINDS)
        self._placeholders = [str(name) for name in names if name]
        placeholders = super().render_prompt(PROBE_IMAGE).count(self._image_token_id)
        if placeholders != 1:
            raise UnsupportedError(f"the chat template writes {placeholders} placeholders for one image, not 1")

    def _construct(self, arguments: Json) -> ChatRenderer:
        return type(self)(self._processor, **arguments)

    @property
    def identity(self) -> Json:
        return super().identity | {"image_processor": self._processor.image_processor.to_dict()}

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        return self._expand(super().render_prompt(messages, tools), messages)

    def render_next_turn(
        self,
        messages: Sequence[Message],
        turn_ids: Sequence[int],
        preceding_ids: Sequence[int] = (),
        tools: Sequence[Json] | None = None,
    ) -> list[int]:
        return self._expand(super().render_next_turn(messages, turn_ids, preceding_ids, tools), messages)

    def collapse_images(self, token_ids: Sequence[int], num_images: int) -> list[int]:
        """The token ids with one placeholder for each image, as SGLang takes them.

        SGLang decodes the prompts of most families and looks for placeholders in the text: a message or a turn with
        their text, also as ordinary tokens, would stop the request for ever (SGLang 0.5.23). Raises BadInputError for
        such a prompt.
        """
        image = self._image_token_id
        collapsed = [token for before, token in pairwise([-1, *token_ids]) if not before == token == image]
        text = self.decode_all(collapsed)
        for placeholder in (*self._placeholders, SGLANG_PLACEHOLDER):
            is_image = placeholder == self._processor.image_token
            if text.count(placeholder) > is_image * num_images:
                raise BadInputError(
                    f"a message or a turn contains the text {placeholder!r}, which SGLang would take for an image, a "
                    "video or a sound of the prompt; remove it from the messages"
                )
        return collapsed

    def require_no_placeholder(self, turn_ids: Sequence[int]) -> None:
        """Raise BadInputError if the policy has sampled a token that stands for an image, a video or a sound.

        The engine and the trainer would look for its data.
        """
        if found := sorted(placeholder_ids(self._processor).intersection(turn_ids)):
            names = self.decode_all(found[:1])
            raise BadInputError(
                f"the policy has sampled {names!r} (token {found[0]}), which stands for an image, a video or a sound, "
                "so the turn cannot be read by the model again; sampling_params={'logit_bias': {'"
                f"{found[0]}': -100.0}}}} prevents it"
            )

    def can_read(self, source: str) -> bool:
        """Whether the policy can read an image: it can be decoded, and the image processor takes its size."""
        try:
            image = open_image(source)
            self._num_tokens([(image.height, image.width)])
        except BadInputError:
            return False
        return True

    def _num_tokens(self, sizes: list[tuple[int, int]]) -> list[int]:
        """The numbers of tokens of images with these sizes (height, width). Raises BadInputError."""
        try:
            return list(self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens)
        except ValueError as error:  # for example an image of 1 x 1000 pixels
            raise BadInputError(f"the image processor refuses the images {sizes} (height, width): {error}") from error

    def _expand(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """The token ids with all tokens of each image. Raises BadInputError for an image that cannot be read."""
        image, sources = self._image_token_id, [source for message in messages for source in image_sources(message)]
        if (placeholder_ids(self._processor) - {image}).intersection(token_ids):
            raise BadInputError("the chat template writes a placeholder of a video or a sound, which are not supported")
        if token_ids.count(image) != len(sources):
            raise BadInputError(
                f"the messages have {len(sources)} images, but the chat template writes {token_ids.count(image)} "
                "placeholders for them, so the policy would not see each image once"
            )
        if not sources:
            return token_ids
        if any(before == token == image for before, token in pairwise(token_ids)):
            raise UnsupportedError("the chat template writes the placeholders of two images without a token between")
        counts = iter(self._num_tokens(list(map(image_size, sources))))
        return [same for token in token_ids for same in [token] * (int(next(counts)) if token == image else 1)]


def placeholder_ids(processor: Any) -> set[int]:
    """The tokens that stand for images, videos and sounds."""
    ids = (getattr(processor, f"{kind}_token_id", None) for kind in MEDIA_KINDS)
    return {int(token) for token in ids if token is not None}


def require_vision_renderer(renderer: ChatRenderer) -> VisionRenderer:
    """Raise BadInputError unless a renderer renders images."""
    if not isinstance(renderer, VisionRenderer):
        raise BadInputError(f"a message has an image, which needs the processor of the model: {PASS_PROCESSOR}")
    return renderer


def read_images(messages: Sequence[Message], renderer: ChatRenderer) -> Sequence[Message]:
    """The messages with a data URL in place of each image, if the renderer renders images.

    Raises BadInputError for messages that are invalid, and for an image that cannot be read.
    """
    if not isinstance(renderer, VisionRenderer):
        return messages
    validate_messages(messages)
    return embed_images(messages)


def have_images(messages: Sequence[Message], renderer: ChatRenderer) -> bool:
    """Whether messages have an image. Raises BadInputError if they do and the renderer does not render images."""
    if not any(image_sources(message) for message in messages):
        return False
    require_vision_renderer(renderer)
    return True


def require_same_prompt(recorded: Sequence[int], prompt: Sequence[int]) -> None:
    """Raise BadInputError if the prompt that a server has read differs from the recorded tokens."""
    if list(recorded) != list(prompt):
        pairs = enumerate(zip(recorded, prompt, strict=False))
        place = next((index for index, (a, b) in pairs if a != b), min(len(recorded), len(prompt)))
        raise BadInputError(
            f"the server has read a prompt of {len(prompt)} tokens, but the renderer has made {len(recorded)}; they "
            f"differ at token {place}. The image processor of the renderer is not that of the server: pass the "
            "processor of the served model, and start the server without `mm_process_config`"
        )


# -- Vision -----------------------------------------------------------------------------------------
# The inputs of a vision-language model for recorded paths: what a trainer's forward pass needs beside the token ids.


@dataclass(frozen=True)
class PathInputs:
    """What the forward pass of a vision-language model needs for one path, beside its token ids."""

    position_ids: torch.Tensor
    """Temporal, height and width position of each token [3, T]."""
    images: dict[str, torch.Tensor]
    """`pixel_values` [patches, values] and `image_grid_thw` [images, 3]. Empty for a path without images."""


class VisionInputs:
    """Computes the inputs of a vision-language model for recorded paths: the argument `vision` of `to_batch`.

    `processor`: the processor of the renderer. `model`: the Hugging Face model of the trainer, whose `get_rope_index`
    computes the position ids; it may be wrapped, sharded, or on the meta device. Raises UnsupportedError for a model
    without such a function.
    """

    def __init__(self, processor: Any, model: torch.nn.Module) -> None:
        if not is_vision_processor(processor):
            raise BadInputError(f"VisionInputs needs the processor of the model, got {type(processor).__name__}")
        found = (getattr(module, "get_rope_index", None) for module in model.modules())
        self._get_rope_index: Any = next(filter(None, found), None)
        if self._get_rope_index is None:
            raise UnsupportedError(
                f"{type(model).__name__} has no get_rope_index(): images work with models of the Qwen-VL families only"
            )
        self._processor = processor

    def of_paths(self, paths: Sequence[tuple[Sequence[int], Sequence[str]]]) -> list[PathInputs]:
        """The inputs of paths, each given with its token ids and its images. An image of several paths is read once.

        Raises BadInputError for an image that cannot be read, or that has not as many tokens as its path.
        """
        encoded: dict[str, dict[str, torch.Tensor]] = {}
        for _, sources in paths:
            for source in sources:
                if source not in encoded:
                    encoded[source] = self._encode(source)
        return [self._of_path(token_ids, [encoded[source] for source in sources]) for token_ids, sources in paths]

    def add_padded(self, batch: TensorDict, paths: Sequence[tuple[Sequence[int], Sequence[str]]]) -> None:
        """Add the inputs of paths to a batch of padded rows, one for each path.

        `position_ids` become [B, 3, T]. `multi_modal_inputs` has a dict for each row, with `pixel_values` and
        `image_grid_thw` if the row has images.
        """
        import torch
        from tensordict import NonTensorData, NonTensorStack

        mask, inputs = batch["attention_mask"].bool(), self.of_paths(paths)
        position_ids = torch.zeros((len(paths), 3, mask.shape[1]), dtype=torch.long)
        for row, item in enumerate(inputs):
            position_ids[row, :, mask[row]] = item.position_ids
        batch["position_ids"] = position_ids
        batch.set("multi_modal_inputs", NonTensorStack(*(NonTensorData(item.images) for item in inputs)))

    def packed(self, paths: Sequence[tuple[Sequence[int], Sequence[str]]]) -> dict[str, torch.Tensor]:
        """The inputs of paths without padding: `position_ids` [4, T], `pixel_values` and `image_grid_thw`.

        The first row of `position_ids` counts the tokens of each path: with four rows, models of Hugging Face find out
        where a path begins, and let no path attend to another. The other rows are those of `PathInputs`.
        `pixel_values` and `image_grid_thw` have the images of all paths, and are absent if there is none.
        """
        import torch

        inputs = self.of_paths(paths)
        with_images = [item.images for item in inputs if item.images]
        names = with_images[0] if with_images else ()
        return {
            "position_ids": torch.cat(
                [torch.cat([torch.arange(item.position_ids.shape[1])[None], item.position_ids]) for item in inputs],
                dim=1,
            ),
            **{name: torch.cat([images[name] for images in with_images]) for name in names},
        }

    def _encode(self, source: str) -> dict[str, torch.Tensor]:
        result = self._processor.image_processor(images=[open_image(source)], return_tensors="pt")
        return {name: result[name] for name in ("pixel_values", "image_grid_thw")}

    def _of_path(self, token_ids: Sequence[int], images: Sequence[dict[str, torch.Tensor]]) -> PathInputs:
        import torch

        tensors = {name: torch.cat([image[name] for image in images]) for name in images[0]} if images else {}
        grids = tensors.get("image_grid_thw")
        types = self._processor.create_mm_token_type_ids([list(token_ids)])[0]
        merged = self._processor.image_processor.merge_size**2
        num_tokens = 0 if grids is None else int(grids.prod(dim=-1).sum()) // merged
        if sum(map(bool, types)) != num_tokens:
            raise BadInputError(
                f"a path has {sum(map(bool, types))} tokens of images, but its {len(images)} images have {num_tokens}: "
                "a file has changed since the rollout, or this is not the processor of the renderer"
            )
        position_ids, _ = self._get_rope_index(
            input_ids=torch.tensor([token_ids]), mm_token_type_ids=torch.tensor([types]), image_grid_thw=grids
        )
        return PathInputs(position_ids[:, 0].long(), tensors)


def require_vision_inputs(vision: object, image_counts: Sequence[int]) -> VisionInputs | None:
    """The argument `vision` of a batch. Raises BadInputError if it is missing for a path with images, or is wrong."""
    if vision is not None and not isinstance(vision, VisionInputs):
        raise BadInputError(
            f"vision must be VisionInputs, got {type(vision).__name__}; pass VisionInputs(processor, model)"
        )
    with_images = next((index for index, count in enumerate(image_counts) if count), None)
    if vision is None and with_images is not None:
        raise BadInputError(
            f"path {with_images} has images, so a trainer needs pixel values and other position ids; pass "
            "vision=VisionInputs(processor, model)"
        )
    return vision
