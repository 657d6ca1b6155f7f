"""Views of recorded sessions: the model, the output of `verl-server trajectory show`, and the HTML page."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from verl_server.cli.app import app
from verl_server.errors import BadInputError
from verl_server.trajectory import ForkReason, Recorder, Span, TrajectoryGraph, load_session
from verl_server.trajectory.view import (
    LOGPROB_LABELS,
    NodeView,
    TokenTexts,
    as_text,
    logprob_level,
    make_session_view,
    print_session,
    render_page,
    text_parts,
    visible,
)

COMMAND = [sys.executable, "-m", "verl_server.cli", "trajectory", "show"]
ATTACK = "<script>alert(1)</script>"
ERROR = {"type": "InfrastructureError", "message": f"lost {ATTACK}", "details": {"exit_code": 137}}


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=120)


def invoke(*args: object) -> str:
    """The output of the command in this process, which has imported transformers already."""
    done = CliRunner().invoke(app, ["trajectory", "show", *map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def add_turn(record: Any, parent: int, token_ids: Sequence[int], text: str, **fields: Any) -> int:
    """A sampled turn, whose first token has the weight version 4 and whose other tokens have the version 5."""
    spans = [Span(4, 0, 1), Span(5, 1, len(token_ids))] if len(token_ids) > 1 else [Span(4, 0, 1)]
    message = {"role": "assistant", "content": text}
    logprobs = [-0.05 - 0.5 * index for index in range(len(token_ids))]
    fields = {"finish_reason": "stop", "spans": spans, "message": message, "logprobs": logprobs, **fields}
    return int(record.add_node(parent, token_ids, sampled=True, **fields).id)


def add_messages(record: Any, parent: int | None, token_ids: Sequence[int], *messages: Any, **fields: Any) -> int:
    return int(record.add_node(parent, token_ids, sampled=False, message={"messages": list(messages)}, **fields).id)


def record_session(record: Any) -> None:
    """An episode with a tool, a fork, a sub-agent, a compaction, a failed first attempt and rewards.

    Path 1: nodes 0 to 3. Path 2, a fork after node 2: node 4. Path 3, a sub-agent: nodes 5 and 6. Path 4, a compaction:
    nodes 7 and 8.
    """
    add_messages(record, None, [10, 11], {"role": "system", "content": "be brief"}, {"role": "user", "content": ATTACK})
    add_turn(record, 0, [20, 21, 22], "calls the tool")
    add_messages(record, 1, [30], {"role": "tool", "name": "add", "tool_call_id": "call1", "content": "42"})
    add_turn(record, 2, [40, 41], "the answer is 42")
    add_turn(record, 2, [40, 49], "cut off", fork_reason=ForkReason.SAMPLE, branch="0", finish_reason="length")
    add_messages(
        record, None, [12], {"role": "user", "content": "review"}, fork_reason=ForkReason.SUB_AGENT, branch="1"
    )
    add_turn(record, 5, [50], "looks good", branch="1")
    add_messages(record, None, [10, 13], {"role": "user", "content": "so far"}, fork_reason=ForkReason.COMPACTED)
    add_turn(record, 7, [60, 61], "done")
    record.set_rewards(1, [0.0, 0.25, 0.5])
    record.set_rewards(8, [1.0])
    record.terminate(3, "error", ERROR)
    record.terminate(8, "done", None, 1.0, [(3, 1.0), (6, 0.5), (8, 1.0)], {"is_correct": 1.0, ATTACK: 2.0})


@pytest.fixture
def session(tmp_path: Path) -> Path:
    with Recorder(tmp_path, "sum-0") as recorder:
        record_session(recorder)
    return tmp_path / "sum-0.jsonl"


# -- the model ---------------------------------------------------------------------------------------


def test_paths_contain_each_node_once() -> None:
    graph = TrajectoryGraph("s")
    record_session(graph)
    view = make_session_view(graph)
    assert [[node.id for node in path.nodes] for path in view.paths] == [[0, 1, 2, 3], [4], [5, 6], [7, 8]]
    assert [path.origin for path in view.paths] == [
        "begins with the first prompt",
        "forks after node 2 of path 1: sample",
        "begins with the prompt of a sub-agent: sub_agent",
        "begins with a compacted history: compacted",
    ]
    nodes = [node for path in view.paths for node in path.nodes]
    assert {node.id: node.forks for node in nodes if node.forks} == {2: (2,)}
    assert [node.depth for node in nodes] == [0, 1, 2, 3, 3, 0, 1, 0, 1]
    assert [node.id for node in nodes if node.sampled] == [1, 3, 4, 6, 8]
    assert [node.id for node in nodes if node.is_left_out] == [4], "node 4 is in no trained segment"


def test_kinds_of_conversations_and_notes() -> None:
    """The kind of a path is that of its conversation. Other notes have their node, and texts from outside are safe."""
    graph = TrajectoryGraph("s")
    record_session(graph)
    for node, kind in ((0, "edited"), (0, "main"), (2, "summary"), (5, ATTACK)):
        graph.add_note(node, "conversation", kind)
    graph.add_note(1, "refused", {"limit": "max_turns", "num_tokens": None})
    graph.add_note(None, f"other\n{ATTACK}", 5)
    view = make_session_view(graph)
    assert [path.kind for path in view.paths] == ["main", "summary", ATTACK, None]
    assert view.paths[2].origin == "begins with a prompt of its own", "not that of a sub-agent"
    notes = [("refused: limit max_turns (after node 1)", (1,)), (f"other\u240a{ATTACK}: 5", ())]
    assert [(line.text, line.nodes) for line in dict(view.sections)["Notes"]] == notes
    assert "begins a conversation of the kind summary" in view.paths[0].nodes[2].facts
    html = render_page(view)
    assert "script" not in Page(html).tags
    console = Console(record=True, width=200, file=io.StringIO())
    print_session(view, console)
    for text in (Page(html).text, console.export_text()):
        assert f"Path 3 ({ATTACK})" in text or f"Path 3 {ATTACK}" in text
        assert "refused: limit max_turns (after node 1)" in text


def test_terminations_segments_and_divergences() -> None:
    graph = TrajectoryGraph("s")
    record_session(graph)
    view = make_session_view(graph)
    sections = dict(view.sections)
    assert [(line.text, line.nodes, line.is_error) for line in sections["Terminations"]] == [
        ("earlier attempt: stop reason error at node 3 of path 1, no reward", (3,), True),
        (f"InfrastructureError: lost {ATTACK}", (), True),
        ("exit_code: 137", (), True),
        ("stop reason done at node 8 of path 4, reward 1", (8,), False),
        (f"is_correct 1, {ATTACK} 2", (), False),
    ]
    assert [(line.text, line.nodes) for line in sections["Trained segments"]] == [
        ("path 1 up to node 3: weight 1, 8 tokens, of which 5 are sampled", (3,)),
        ("path 3 up to node 6: weight 0.5, 2 tokens, of which 1 are sampled", (6,)),
        ("path 4 up to node 8: weight 1, 4 tokens, of which 2 are sampled", (8,)),
    ]
    first, second, third = sections["Divergences"]
    assert [line.nodes for line in (first, second, third)] == [(3, 4), (0, 5), (0, 7)]
    differs = "path 2 (node 4) differs from path 1 (node 3) after 1 turn, at token 7: 49 instead of 41 (sample)"
    assert first.text == differs
    assert "at token 1: 13 instead of 11 (compacted)" in third.text
    assert [path.divergence for path in view.paths] == [None, first, second, third]


def test_facts_of_a_turn() -> None:
    graph = TrajectoryGraph("s")
    record_session(graph)
    view = make_session_view(graph)
    assert view.versions == (4, 5)
    facts = view.paths[0].nodes[1].facts
    expected = ("turn 1", "3 tokens", "weights 4 and 5", "finish reason stop", "log prob mean -0.550, min -1.050")
    assert facts == (*expected, "rewards of 3 tokens, sum 0.75")
    assert "in no trained segment" in view.paths[1].nodes[0].facts
    assert "branch 0" in view.paths[1].nodes[0].facts
    assert "reward 1" in view.paths[3].nodes[1].facts
    first, second = view.paths[0].nodes[1].runs
    assert (first.version, [token.id for token in first.tokens]) == (4, [20])
    assert (second.version, [token.reward for token in second.tokens]) == (5, [0.25, 0.5])
    (context,) = view.paths[0].nodes[0].runs
    assert (context.version, [token.logprob for token in context.tokens]) == (None, [None, None])
    assert "16 tokens, of which 10 are sampled (loss mask 1)" in view.facts


def test_session_that_has_not_finished() -> None:
    graph = TrajectoryGraph("s")
    assert "the session has not finished" in make_session_view(graph).facts
    add_messages(graph, None, [1], {"role": "user", "content": "a"})
    add_turn(graph, 0, [2], "b")
    view = make_session_view(graph)
    assert view.sections == ()
    assert not any(node.is_left_out for path in view.paths for node in path.nodes)


def test_segments_of_an_earlier_version() -> None:
    """Files without segments: the path of the last termination is trained, if it has a turn."""
    graph = TrajectoryGraph("s")
    add_messages(graph, None, [1], {"role": "user", "content": "a"})
    graph.terminate(0, "error", {"message": 3})
    assert "Trained segments" not in dict(make_session_view(graph).sections)
    add_turn(graph, 0, [2], "b")
    graph.terminate(1, "done")
    (line,) = dict(make_session_view(graph).sections)["Trained segments"]
    assert line.text.startswith("path 1 up to node 1: weight 1, ")


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 255), max_size=3), st.integers(0, 4)), max_size=12),
    st.booleans(),
)
@settings(max_examples=50)
def test_every_graph_has_a_view_with_all_of_its_tokens(
    nodes: list[tuple[bool, list[int], int]], with_texts: bool
) -> None:
    graph = TrajectoryGraph("s")
    for index, (sampled, token_ids, distance) in enumerate(nodes):
        parent = index - 1 - distance if index - 1 - distance >= 0 else None
        reason = ForkReason.RETRY if graph.children(parent) else None
        spans = [Span(1, 0, len(token_ids))] if token_ids and sampled else []
        logprobs = [-1.0] * len(token_ids) if sampled else []
        graph.add_node(parent, token_ids, sampled=sampled, spans=spans, logprobs=logprobs, fork_reason=reason)
    view = make_session_view(graph, (lambda ids: bytes(ids).decode("utf-8", "replace")) if with_texts else None)
    shown = {node.id: [token.id for run in node.runs for token in run.tokens] for node in nodes_of(view)}
    assert shown == {node.id: list(node.token_ids) for node in graph.nodes}
    assert sum(len(path.nodes) for path in view.paths) == len(graph.nodes)
    assert sorted(path.nodes[-1].id for path in view.paths) == graph.leaves
    assert render_page(view).startswith("<!doctype html>")


def nodes_of(view: Any) -> list[NodeView]:
    return [node for path in view.paths for node in path.nodes]


def test_levels_of_log_probs() -> None:
    values = [0.0, -0.05, -0.2, -1.0, -3.0, -5.0, -20.0]
    assert [logprob_level(value) for value in values] == [0, 0, 1, 2, 3, 4, 5]
    assert len(LOGPROB_LABELS) == 6


@given(st.text(max_size=30), st.binary(max_size=6))
def test_texts_of_tokens_are_the_text_of_the_sequence(text: str, garbage: bytes) -> None:
    """Also when the bytes of a character are several tokens, and when the bytes are no text."""
    encoded = text.encode("utf-8", "ignore")
    texts = TokenTexts(lambda ids: bytes(ids).decode("utf-8", "replace"))(list(encoded))
    assert "".join(texts) == encoded.decode()
    assert len(texts) == len(encoded)
    assert len(TokenTexts(lambda ids: bytes(ids).decode("utf-8", "replace"))(list(garbage))) == len(garbage)


def test_texts_of_tokens_that_lose_a_space_at_the_beginning() -> None:
    words = {1: " the", 2: " cat", 3: "s"}
    texts = TokenTexts(lambda ids: "".join(words[token] for token in ids).removeprefix(" "))
    assert texts([1, 2, 3, 2]) == ["the", " cat", "s", " cat"]


def test_control_characters_are_visible() -> None:
    assert visible("\x1b[31mred\x07\r\n\tend\x9b") == "␛[31mred␇␍\n\tend\\x9b"
    assert visible("safe\u202eexe") == "safe\\u202eexe"
    assert visible("\ud800é日本") == "\\ud800é日本"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (None, []),
        ({"appended_text": "wait"}, [("appended text", "wait")]),
        ({"index": 3}, [("message", '{"index": 3}')]),
        ({"messages": ["x", {"role": "user", "content": None}]}, [("message", "x"), ("user", "")]),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}], "name": "bob"},
            [("assistant bob", 'tool_calls: [{"id": "a"}]')],
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]},
            [("user", 'see\n[image] {"type": "image", "image": "a.png"}')],
        ),
    ],
)
def test_recorded_messages_of_any_form_are_shown(message: Any, expected: list[tuple[str, str]]) -> None:
    assert [(part.label, part.text) for part in text_parts(message)] == expected


def test_images_are_shortened() -> None:
    (part,) = text_parts({"role": "user", "content": [{"type": "image", "image": "x" * 1_000_000}]})
    assert len(part.text) < 200
    assert "(1000030 characters)" in part.text


def test_numbers_and_other_values_are_text() -> None:
    assert [as_text(value) for value in (1.0, 0.1 + 0.2, None, True, 7, "a")] == ["1", "0.3", "null", "true", "7", "a"]


# -- the terminal ------------------------------------------------------------------------------------


def test_a_pipe_gets_all_facts_without_colours(session: Path) -> None:
    done = run(session)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for expected in (
        "Session sum-0",
        "4 paths",
        "weight versions 4 (5 tokens) and 5 (5 tokens)",
        "! earlier attempt: stop reason error at node 3 of path 1, no reward",
        f"! InfrastructureError: lost {ATTACK}",
        "! exit_code: 137",
        "stop reason done at node 8 of path 4, reward 1",
        "is_correct 1",
        "path 3 up to node 6: weight 0.5, 2 tokens, of which 1 are sampled",
        "path 2 (node 4) differs from path 1 (node 3) after 1 turn, at token 7: 49 instead of 41 (sample)",
        "Path 4 begins with a compacted history: compacted",
        "│ node 2 context  1 token",
        "│ tool add call1: 42",
        "│ forks here: path 2",
        "█ node 3 sampled  turn 2 · 2 tokens · weights 4 and 5 · finish reason stop · log prob mean -0.300, min -0.550",
        "█ assistant: the answer is 42",
        "finish reason length",
        "in no trained segment",
    ):
        assert expected in done.stdout, expected
    assert "tokens:" not in done.stdout


def test_tokens_with_and_without_a_tokenizer(session: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer(tokenizer)
    without = invoke(session, "--tokens")
    assert "█ tokens with weights 5: 21 -0.550 reward 0.25  22 -1.050 reward 0.5\n" in without
    assert "│ tokens: 10 11\n" in without
    with_texts = invoke(session, "--tokens", "--tokenizer", tokenizer)
    assert "│ tokens: 10 '+'  11 ','\n" in with_texts
    assert "█ tokens with weights 4: 50 'S' -0.050\n" in with_texts
    assert "at token 7: 49 'R' instead of 41 'J'" in with_texts


def test_control_characters_of_a_session_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with Recorder(tmp_path, "s") as recorder:
        add_messages(recorder, None, [1], {"role": "tool", "name": "\x1b]0;x\x07", "content": "\x1b[2J[bold]no[/bold]"})
        recorder.terminate(0, "error", {"type": "\x1bE", "message": "\x1b[31m", "details": {"\x1bk": "\x9b1m"}})
    done = run(tmp_path / "s.jsonl")
    assert done.returncode == 0, done.stderr
    assert not set("\x1b\x07\x9b") & set(done.stdout)
    assert "␛[2J[bold]no[/bold]" in done.stdout, "square brackets are no markup"


def test_control_characters_in_errors_do_not_reach_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "\x1b[31ms.jsonl"
    file.write_text('{"format": "\\u001b[2J", "type": "\\u001b[2J"}\n')
    done = run(file)
    assert done.returncode == 2, done.stderr
    assert "␛[" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_terminal_without_unicode_shows_the_session(session: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, str(session)], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "node 3 sampled" in done.stdout


def test_long_lines_keep_their_sign_on_a_terminal(tmp_path: Path) -> None:
    with Recorder(tmp_path, "s") as recorder:
        add_messages(recorder, None, [1], {"role": "user", "content": "word " * 100})
    shown = show_on_terminal(tmp_path / "s.jsonl")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines() if "word" in line]
    assert "\x1b[" in shown
    assert len(lines) > 5
    assert all(line.startswith("│ ") and len(line) <= 80 for line in lines)


def show_on_terminal(file: Path) -> str:
    """What a terminal with 80 columns receives."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen([*COMMAND, str(file)], stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        received = b""
        try:
            while part := os.read(leader, 1 << 16):
                received += part
        except OSError:  # Linux reports the end of a terminal as an error
            pass
        finally:
            os.close(leader)
    assert process.returncode == 0, received
    return received.decode()


# -- folders and mistakes ----------------------------------------------------------------------------


def test_a_folder_is_listed(session: Path) -> None:
    with Recorder(session.parent / "step-000003", "sum-1") as recorder:
        add_messages(recorder, None, [1, 2, 3], {"role": "user", "content": "a"})
    done = run(session.parent)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line[0] == "│"]
    assert rows == [
        ["step-000003/sum-1.jsonl", "0", "3", "0", "not finished", "-"],
        ["sum-0.jsonl", "5", "16", "10", "done", "1"],
    ]
    example = done.stdout.splitlines()[-1].removeprefix("Show a session: verl-server trajectory show ")
    assert load_session(example).session_id == "sum-1"


def test_a_damaged_file_of_a_folder_is_named_and_the_others_are_listed(session: Path) -> None:
    (session.parent / "bad.jsonl").write_bytes(b"{\n")
    done = run(session.parent)
    assert done.returncode == 2
    assert "sum-0.jsonl" in done.stdout
    assert "1 of 2 files" in done.stderr
    assert "bad.jsonl: the file of session 'bad' is damaged at byte 0" in done.stderr


def test_a_torn_file_is_shown_up_to_its_last_complete_line(session: Path) -> None:
    content = session.read_bytes()
    session.write_bytes(content[: content.index(b'"id":3') + 20])
    done = run(session)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the session has not finished" in done.stdout
    assert "node 2" in done.stdout
    assert "node 3" not in done.stdout


def test_mistakes_are_explained(session: Path) -> None:
    folder = session.parent
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("keep me")
    (folder / "copy").mkdir()
    (folder / "copy" / "sum-0.jsonl").write_bytes(session.read_bytes().replace(b'"id":3', b'"id":7'))
    (folder / "digests.jsonl").write_bytes(b'{"format":2,"session_id":"digests","input_digests":7}\n')
    session.with_name("renamed.jsonl").write_bytes(session.read_bytes())
    cases: list[tuple[list[object], str]] = [
        (
            [folder / "none.jsonl"],
            "cannot be read: No such file (a session gets its file with its first request); pass",
        ),
        ([folder / "copy" / "sum-0.jsonl"], "is damaged at byte"),
        ([folder / "digests.jsonl"], "is damaged: input_digests is no JSON object"),
        ([folder / "renamed.jsonl"], "contains the session 'sum-0'"),
        ([folder / "empty"], "has no recorded sessions"),
        ([folder, "--tokens"], "is a folder; --html, --tokens and --tokenizer need the file of one session"),
        ([session, "--tokenizer", folder / "empty"], "add --tokens, or --html OUT"),
        ([session, "--tokens", "--tokenizer", folder / "empty"], "cannot be loaded"),
        ([session, "--html", folder], "is a folder or a device"),
        ([session, "--html", session], "exists and is no HTML page"),
        ([session, "--html", folder / "notes.txt"], "exists and is no HTML page"),
        ([session, "--html", folder / "notes.txt" / "page.html"], "cannot be written: "),
    ]
    for args, expected in cases:
        error = CliRunner().invoke(app, ["trajectory", "show", *map(str, args)]).exception
        assert isinstance(error, BadInputError), (args, error)
        assert expected in error.message, (args, error)
    assert (folder / "notes.txt").read_text() == "keep me"


def test_mistakes_have_exit_code_2(tmp_path: Path) -> None:
    for args, expected in (
        ([], "Missing argument 'FILE'"),
        ([tmp_path / "none.jsonl"], "cannot be read: No such file"),
    ):
        done = run(*args)
        assert done.returncode == 2
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


# -- the page ----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page: names of all tags, tooltips by class, the text, and the addresses that it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.columns: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [values[name] for name in ("href", "src", "action") if name in values]
        self.handlers += [name for name in values if name.startswith("on")]
        self.ids += [values["id"]] if "id" in values else []
        if tag == "i":
            self.tokens.append((values["class"], values["title"]))
        if tag == "article":
            self.columns.append(values["style"])

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_all_facts_and_loads_nothing(session: Path) -> None:
    output = session.with_name("page.html")
    done = run(session, "--html", output)
    assert (done.returncode, done.stdout) == (0, f"Wrote {output}\n"), done.stderr
    page = Page(output.read_text())
    assert "default-src 'none'" in output.read_text()
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(address.startswith("#n") and address[1:] in page.ids for address in page.addresses)
    view = make_session_view(load_session(session))
    texts = [
        *view.facts,
        *(path.origin for path in view.paths),
        *(line.text for _, lines in view.sections for line in lines),
    ]
    texts += [fact for node in nodes_of(view) for fact in node.facts]
    texts += [part.text for node in nodes_of(view) for part in node.parts]
    for text in [*texts, "InfrastructureError", "exit_code: 137", "is_correct", "0.5", "v4", "v5", "□ context"]:
        assert text in page.text, text
    assert ("p1", "id 21, log prob -0.550, weights 5, reward 0.25") in page.tokens
    assert len(page.tokens) == 10, "each sampled token once"
    assert page.columns[3:6] == ["grid-area: 4 / 1", "grid-area: 4 / 2", "grid-area: 1 / 3"], "forks side by side"
    assert run(session, "--html", output).returncode == 0, "a page may be written again"


def test_text_from_outside_never_becomes_html(tmp_path: Path) -> None:
    attack = f"""{ATTACK} "><img src=x onerror=alert(1)> ' onmouseover='alert(1) </style> {{{{7*7}}}}"""
    graph = TrajectoryGraph(attack)
    add_messages(graph, None, [1], {"role": attack, "name": attack, "content": attack, attack: attack})
    add_turn(graph, 0, [2, 3], attack, finish_reason=attack, branch=attack, routed_experts=attack)
    error = {"type": attack, "message": attack, "details": {attack: attack}}
    graph.terminate(1, attack, error, rewards={attack: 1.0})
    for decode in (None, lambda ids: attack * len(ids)):
        html = render_page(make_session_view(graph, decode))
        page = Page(html)
        assert not {"script", "img"} & set(page.tags)
        assert page.tags.count("style") == 1
        assert page.handlers == []
        assert page.text.count("{{7*7}}") >= 10
        assert page.text.count(ATTACK) >= 10


def test_names_are_in_one_line() -> None:
    """Two names that look the same would be taken for one, and a line feed for the next reward."""
    graph = TrajectoryGraph("s")
    add_messages(graph, None, [1], {"role": "user\nassistant", "content": "a\nb"})
    add_turn(graph, 0, [2], "x")
    graph.terminate(1, "done\u200b", rewards={"correct\nformat 1.0": 0.0})
    view = make_session_view(graph)
    end, rewards = dict(view.sections)["Terminations"]
    assert rewards.text == "correct\u240aformat 1.0 0"
    assert end.text.startswith("stop reason done\\u200b at ")
    assert view.paths[0].nodes[0].parts[0].label == "user\u240aassistant"
    assert view.paths[0].nodes[0].parts[0].text == "a\nb"


def test_the_page_shows_texts_of_tokens_with_a_tokenizer(session: Path, tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "tokenizer")
    output = tmp_path / "page.html"
    invoke(session, "--html", output, "--tokens", "--tokenizer", tmp_path / "tokenizer")
    html = output.read_text()
    assert ">R</i>" in html
    assert "<details open>" in html
    assert len(Page(html).tokens) == 10


def test_a_large_session_is_a_small_page() -> None:
    """100 turns with 20,000 sampled tokens: about 100 bytes for each token."""
    graph = TrajectoryGraph("s")
    leaf = add_messages(graph, None, [1], {"role": "user", "content": "a"})
    for _ in range(100):
        leaf = add_turn(graph, leaf, range(1000, 1200), "text")
        leaf = add_messages(graph, leaf, [1, 2, 3], {"role": "tool", "content": "result"})
    page = render_page(make_session_view(graph, lambda ids: "".join(f" t{token}" for token in ids)))
    assert len(Page(page).tokens) == 20_000
    assert len(page) < 2_500_000
