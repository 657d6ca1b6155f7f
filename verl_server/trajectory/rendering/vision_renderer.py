"""Rendering of messages with images, in which each image has the tokens that the model reads.

A chat template writes one placeholder token for each image. The model reads as many of these tokens as the image has
merged patches. Recorded paths contain all of them: the tokens of a path are those that the policy has seen. A request
to SGLang contains one placeholder for each image, which SGLang expands in the same way.

Models of the Qwen-VL families work so: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and those that are built like these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.images import embed_images, image_size, open_image
from verl_server.trajectory.rendering.messages import Message, image_sources, validate_messages
from verl_server.trajectory.rendering.tokenizer import require_tokenizer
from verl_server.types import Json

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
