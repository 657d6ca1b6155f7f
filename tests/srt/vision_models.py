"""`make_vision_model` writes the checkpoint of a tiny random vision-language model, without a download."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from verl_server.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, Architecture, make_config, make_tokenizer, randomize

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}",
)
MAX_IMAGE_TOKENS = 64
"""Maximum number of tokens of an image for tiny vision-language models. Larger images are scaled down."""


class VisionArchitecture(enum.Enum):
    """The supported families of vision-language models. The value is the `model_type` of Hugging Face."""

    QWEN2_VL = "qwen2_vl"
    QWEN2_5_VL = "qwen2_5_vl"
    QWEN3_VL = "qwen3_vl"


def make_vision_model(
    folder: Path | str,
    architecture: VisionArchitecture | str = VisionArchitecture.QWEN2_5_VL,
    *,
    seed: int = 0,
    weight_std: float = 0.2,
) -> Path:
    """Write a random vision-language model in float32 and its processor into `folder`, and return the folder.

    The text model has the sizes of `make_config`. The vision model has two layers. An image has at most
    `MAX_IMAGE_TOKENS` tokens.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    folder, architecture = Path(folder), VisionArchitecture(architecture)
    folder.mkdir(parents=True, exist_ok=True)
    config = _vision_config(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).to(torch.float32)
        randomize(model, weight_std)
    model.save_pretrained(folder)
    _save_processor(folder, architecture, config.vision_config.patch_size)
    return folder


def _vision_config(architecture: VisionArchitecture) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig

    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: 256 + len(SPECIAL_TOKENS) + index for index, name in enumerate(names)} | {"tie_word_embeddings": False}
    text = make_config(Architecture.QWEN2 if architecture is not VisionArchitecture.QWEN3_VL else Architecture.QWEN3)
    sizes = {name: value for name, value in text.to_diff_dict().items() if name not in ("model_type", "architectures")}
    half = getattr(text, "head_dim", text.hidden_size // text.num_attention_heads) // 2
    # Numbers of rotary frequencies for time, height and width: together half of the head size.
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if architecture is VisionArchitecture.QWEN2_VL:
        vision |= {"patch_size": 14, "in_chans": 3, "embed_dim": 32, "hidden_size": text.hidden_size, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=sizes | {"rope_parameters": rope}, vision_config=vision, **ids)
    vision |= {"hidden_size": 32, "out_hidden_size": text.hidden_size, "intermediate_size": 64}
    if architecture is VisionArchitecture.QWEN2_5_VL:
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=sizes | {"rope_parameters": rope}, vision_config=vision, **ids)
    rope["mrope_interleaved"] = True
    vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=sizes | {"rope_parameters": rope}, vision_config=vision, **ids)


def _save_processor(folder: Path, architecture: VisionArchitecture, patch_size: int) -> None:
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[architecture.value]
    video = "Qwen3VL" if architecture is VisionArchitecture.QWEN3_VL else "Qwen2VL"
    patches: dict[str, Any] = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    token_pixels = (2 * patch_size) ** 2
    size = {"shortest_edge": token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels}
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**patches, size=size),
        video_processor=getattr(transformers, f"{video}VideoProcessor")(**patches),
        tokenizer=make_tokenizer(
            folder, special_tokens=SPECIAL_TOKENS + VISION_TOKENS, chat_template=VISION_CHAT_TEMPLATE
        ),
        chat_template=VISION_CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
