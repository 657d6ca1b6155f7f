"""`make setup-vllm`, and `make test-all` where no wheel of torch for CPUs is found. Uses the real make and pip."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
TORCH = next(
    line for line in (REPOSITORY / "requirements-vllm.lock").read_text().splitlines() if line.startswith("torch==")
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the files that the set-up reads, whose other environments are ready."""
    folder = tmp_path / "clone"
    (folder / ".venv").mkdir(parents=True)
    for name in ("Makefile", "requirements.lock", "requirements-trainers.lock", "requirements-vllm.lock", "setup.py"):
        (folder / name).write_text((REPOSITORY / name).read_text())
    (folder / ".venv" / ".ready").touch()
    (tmp_path / "wheels").mkdir()
    return folder


def make(folder: Path, target: str) -> tuple[int, str]:
    """Exit code and output. pip finds only wheels of the folder `wheels`."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}
    variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder.parent / "wheels")}
    done = subprocess.run(["make", target], cwd=folder, env=variables, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of an empty distribution."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}," for path, digest in digests.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def test_without_a_wheel_of_torch_the_tests_of_vllm_are_skipped_with_the_cure(clone: Path) -> None:
    code, output = make(clone, "setup-vllm-if-found")
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("vLLM is not set up")]
    assert f"pip finds no {TORCH}" in line
    assert "Set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL" in line
    assert (clone / ".venv-vllm" / ".no-torch").read_text().strip() == line, "the reason of the skip"
    assert not (clone / ".venv-vllm" / ".ready").exists()
    assert make(clone, "setup-vllm")[0] != 0, "whoever asks for vLLM gets an error"


def test_every_other_failure_of_the_set_up_is_an_error(clone: Path) -> None:
    name, _, version = TORCH.partition("==")
    write_wheel(clone.parent / "wheels", name, version)
    code, output = make(clone, "setup-vllm-if-found")
    assert code != 0
    assert "No matching distribution" in output
    assert not (clone / ".venv-vllm" / ".no-torch").exists()
