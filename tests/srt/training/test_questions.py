"""Files of questions, and the settings of a run that continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.errors import BadInputError
from verl_server.training import keep_settings, read_questions


def test_questions_of_a_file(tmp_path: Path) -> None:
    """Numbers are texts, a separator of lines inside a text is none, and a mark of byte order is no part of it."""
    file = tmp_path / "data.jsonl"
    text = '{"question": "1 + 1?", "answer": 2}\n\n{"question": "a\u2028b", "answer": "c", "source": "x"}\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_questions(file) == [
        {"question": "1 + 1?", "answer": "2"},
        {"question": "a\u2028b", "answer": "c"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no questions"),
        (b"\n", "has no questions"),
        (b'{"question": "a", "answer": "b"}\n{"question": "a"', "data.jsonl, line 2: expected"),
        (b'{"question": "a"}', r"line 1: .* \(KeyError: \'answer\'\)"),
        (b'["a", "b"]', "line 1: .*TypeError"),
        (b'{"question": "a", "answer": ["b"]}', "is no text"),
        (b'{"question": "a", "answer": null}', "None is no text"),
        (b"\xff\xfe", "cannot read the questions"),
    ],
)
def test_a_wrong_line_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        read_questions(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"missing.jsonl"):
        read_questions(tmp_path / "missing.jsonl")


def test_a_run_continues_with_its_settings_only(tmp_path: Path) -> None:
    keep_settings(tmp_path / "run", {"lr": 1e-5, "data": None})
    keep_settings(tmp_path / "run", {"lr": 1e-5, "data": None})
    with pytest.raises(BadInputError, match=r"data=other.jsonl instead of None, lr=1.0 instead of 1e-05"):
        keep_settings(tmp_path / "run", {"lr": 1.0, "data": Path("other.jsonl")})


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(BadInputError, match=r"settings.json is damaged"):
        keep_settings(tmp_path, {"lr": 1.0})
    with pytest.raises(BadInputError, match="run_dir"):
        keep_settings(tmp_path / "settings.json", {"lr": 1.0})
