"""Files of questions, and the settings of a run that continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.errors import BadInputError
from verl_server.training import keep_settings, read_tasks, sum_tasks


def test_questions_of_a_file(tmp_path: Path) -> None:
    """Numbers are texts, a separator of lines inside a text is none, and a mark of byte order is no part of it."""
    file = tmp_path / "data.jsonl"
    text = '{"question": "1 + 1?", "answer": 2}\n\n{"question": "a\u2028b", "answer": "c", "source": "x"}\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    first, second = read_tasks(file)
    assert first.data == {"question": "1 + 1?", "answer": "2"}
    assert second.data == {"question": "a\u2028b", "answer": "c", "source": "x"}
    assert [first.id, second.id] == ["0", "1"]
    assert first.messages == [{"role": "user", "content": "1 + 1?"}]


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
        read_tasks(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"missing.jsonl"):
        read_tasks(tmp_path / "missing.jsonl")


def test_all_fields_of_a_line_are_data_and_a_prompt_has_its_messages(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"question": "1 + 1?", "answer": " 2 ", "level": 3}\n'
        '{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"}], "answer": "2"}\n'
    )
    first, second = read_tasks(file)
    assert first.data == {"question": "1 + 1?", "answer": "2", "level": 3}
    assert [message["content"] for message in second.messages] == ["Be brief.", "2?"]


def test_sums_to_test_with_are_none_to_train_on() -> None:
    """Nor are they their mirrors, and both kinds are equally hard: a random choice."""
    train, test = (
        [[int(number) for number in task.data["question"].split(" + ")] for task in part] for part in sum_tasks()
    )
    pairs = [{frozenset(pair) for pair in part} for part in (train, test)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == 20 * 21 // 2 - 1
    assert frozenset((2, 3)) not in pairs[0] | pairs[1]
    means = [sum(map(sum, part)) / len(part) for part in (train, test)]
    assert abs(means[0] - means[1]) < 2
    with pytest.raises(BadInputError, match="num_tests must be from 1 to 2"):
        sum_tasks(2, 50)
    assert all(int(task.data["answer"]) == sum(pair) for task, pair in zip(sum_tasks()[1], test, strict=True))


def test_a_run_continues_with_its_settings_only(tmp_path: Path) -> None:
    keep_settings(tmp_path / "run", {"lr": 1e-5, "data": None})
    (tmp_path / "run" / "metrics.jsonl").touch()
    keep_settings(tmp_path / "run", {"lr": 1e-5, "data": None})
    with pytest.raises(BadInputError, match=r"data=other.jsonl instead of None, lr=1.0 instead of 1e-05"):
        keep_settings(tmp_path / "run", {"lr": 1.0, "data": Path("other.jsonl")})


def test_a_run_that_did_not_begin_may_change_its_settings(tmp_path: Path) -> None:
    keep_settings(tmp_path, {"model": "misspelt"})
    keep_settings(tmp_path, {"model": "right"})
    (tmp_path / "samples").mkdir()
    with pytest.raises(BadInputError, match="model=other instead of right"):
        keep_settings(tmp_path, {"model": "other"})


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(BadInputError, match=r"settings.json is damaged"):
        keep_settings(tmp_path, {"lr": 1.0})
    with pytest.raises(BadInputError, match="run_dir"):
        keep_settings(tmp_path / "settings.json", {"lr": 1.0})
