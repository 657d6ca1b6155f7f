"""The inputs of a vision-language model for recorded paths: what a trainer's forward pass needs beside the token ids.

`rendering/vision_renderer.py` names the families of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.images import open_image
from verl_server.trajectory.rendering.vision_renderer import is_vision_processor

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


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
