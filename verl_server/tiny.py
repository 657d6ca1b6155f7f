"""`make_model` writes the checkpoint of a tiny random model in a second, without a download.

The demo, the tests and the benchmarks use these models. The weights are random, but the architecture is that of a
released model family, so SGLang and Hugging Face transformers load the folder like that of a released model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}",
)
BYTE_VOCAB_SIZE = 320
"""Number of token ids of a tiny model whose tokenizer has a token for each byte."""
MAX_IMAGE_TOKENS = 64
"""Maximum number of tokens of an image for tiny vision-language models. Larger images are scaled down."""


class Architecture(enum.Enum):
    """The supported model families. The value is the `model_type` of Hugging Face."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    LLAMA = "llama"
    QWEN3_MOE = "qwen3_moe"


class VisionArchitecture(enum.Enum):
    """The supported families of vision-language models. The value is the `model_type` of Hugging Face."""

    QWEN2_VL = "qwen2_vl"
    QWEN2_5_VL = "qwen2_5_vl"
    QWEN3_VL = "qwen3_vl"


def make_tokenizer(
    folder: Path, *, vision: bool = False, texts: Sequence[str] = (), vocab_size: int = BYTE_VOCAB_SIZE
) -> Any:
    """Make a byte-level tokenizer and save it in `folder`. Ids 0 to 255 are bytes; `SPECIAL_TOKENS` follow.

    `vision`: with `VISION_TOKENS` after these, and a chat template that writes images. `texts`: text from which
    further tokens are learned, for long prompts. These are between the bytes and the special tokens, and the tokenizer
    has at most `vocab_size` tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(texts))
    if texts:
        num_tokens = vocab_size - len(SPECIAL_TOKENS + VISION_TOKENS * vision)
        make_trainer: Any = trainers.BpeTrainer
        trainer = make_trainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS + VISION_TOKENS * vision])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = VISION_CHAT_TEMPLATE if vision else CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_config(
    architecture: Architecture | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = BYTE_VOCAB_SIZE,
    context_length: int = 2048,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
) -> Any:
    """A Hugging Face config of the given family.

    Sizes are numbers of elements. `head_dim` of Qwen3 models is `hidden_size // heads`, at least 32: on a
    CPU, vLLM computes no smaller heads.
    """
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    architecture = Architecture(architecture)
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "dtype": dtype,
    }
    if architecture is Architecture.QWEN2:
        return Qwen2Config(**common)
    if architecture is Architecture.LLAMA:
        return LlamaConfig(**common)
    common["head_dim"] = max(hidden_size // heads, 32)
    if architecture is Architecture.QWEN3:
        return Qwen3Config(**common)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": intermediate_size // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Qwen3MoeConfig(**common, **experts)


def make_model(
    folder: Path | str,
    architecture: Architecture | str = Architecture.QWEN3,
    *,
    seed: int = 0,
    weight_std: float = 0.2,
    texts: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """Write a random model and its tokenizer into `folder`, and return the folder.

    `texts`: see `make_tokenizer`. `sizes` are the arguments of `make_config`. `weight_std`: standard deviation of the
    weights. Its default is larger than that of transformers, so that the largest logit of a random model is clear and
    greedy decoding does not depend on rounding. A smaller value makes the rounding errors of log probabilities smaller.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(architecture, **sizes)
    tokenizer = make_tokenizer(folder, texts=texts, vocab_size=config.vocab_size)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, sizes.get("dtype", "float32")))
        _randomize(model, weight_std)
    model.save_pretrained(folder)
    return folder


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
        _randomize(model, weight_std)
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
        tokenizer=make_tokenizer(folder, vision=True),
        chat_template=VISION_CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def _randomize(model: Any, weight_std: float) -> None:
    """Set the weights to random values with the given standard deviation, and the biases to small ones."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, weight_std)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
