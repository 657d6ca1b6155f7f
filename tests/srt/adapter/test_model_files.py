"""A model's folder that an engine cannot load is named before a process starts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_server import HttpServerEngineAdapter, RolloutManager
from verl_server.adapter.server_engine import require_loadable_model
from verl_server.errors import BadInputError

WEIGHTS = "model.safetensors"


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def name_a_missing_shard(folder: Path) -> None:
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": "second.safetensors"}}))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "notes.txt").touch()


def leave_an_adapter(folder: Path) -> None:
    empty(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base", "r": 8}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (empty, r"no config.json: it is not a model's folder. It has: notes.txt"),
    "adapter": (leave_an_adapter, "is a LoRA adapter of base: serve that model with enable_lora=True"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file with weights; load_format='dummy'"),
    "truncated": (truncate, rf"incomplete: {WEIGHTS} has \d+ bytes but should have \d+"),
    "pointer": (lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com"), "git-lfs pointer"),
    "missing shard": (name_a_missing_shard, "second.safetensors is missing"),
    "shard without an index": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model-00002-of-00003.safetensors"),
        "2 of 3 files are missing",
    ),
    "damaged index": (
        lambda folder: (folder / f"{WEIGHTS}.index.json").write_text("version https://git-lfs.github.com"),
        "index.json cannot be read",
    ),
    "damaged config": (lambda folder: (folder / "config.json").write_text("[]x"), "config.json is no JSON object"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer .*skip_tokenizer_init=True"),
}


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny("qwen3"), tmp_path / "model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_folder_is_named_before_a_server_starts(damage: str, folder: Path) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    started = time.monotonic()
    with pytest.raises(BadInputError, match=message):
        HttpServerEngineAdapter(folder)
    with pytest.raises(BadInputError, match=message):
        RolloutManager(2, model_path=folder)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("damage", "arguments"),
    [
        ("no weights", {"load_format": "dummy"}),
        ("no tokenizer", {"skip_tokenizer_init": True}),
        ("no tokenizer", {"tokenizer_path": "elsewhere"}),
    ],
)
def test_what_the_engine_does_not_read_may_be_missing(damage: str, arguments: dict[str, object], folder: Path) -> None:
    DAMAGES[damage][0](folder)
    require_loadable_model({"model_path": str(folder), **arguments})


def make_mistral(folder: Path) -> None:
    (folder / "params.json").write_text("{}")
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")


def make_links(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "blob")
    (folder / WEIGHTS).symlink_to(folder / "blob")


def make_other_format(folder: Path) -> None:
    name_a_missing_shard(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "another format": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "another format beside an index": make_other_format,
    "Mistral": make_mistral,
    "a tokenizer of own code": lambda folder: (folder / "tokenizer.json").rename(folder / "tokenization_own.py"),
    "links of a cache": make_links,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unusual_folders_are_left_to_the_engine(layout: str, folder: Path) -> None:
    LAYOUTS[layout](folder)
    require_loadable_model({"model_path": str(folder)})
