"""Sessions: what a path is, what survives a crash, where a fork drifts, and what a trainer gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_server.errors import BadInputError, ServerBusyError
from verl_server.trajectory.batches import to_batch, to_packed, to_tree
from verl_server.trajectory.divergence import drifts
from verl_server.trajectory.graph import ForkReason, Session, Span
from verl_server.trajectory.recorder import Recorder, file_of, parse, read, recorded

TURN = st.tuples(st.booleans(), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 3))


def spans_over(count: int, version: int) -> list[Span]:
    """One span, or two where there is room."""
    if count < 2:
        return [Span(str(version), 0, count)] if count else []
    return [Span(str(version), 0, 1), Span(str(version + 1), 1, count)]


def grown(turns: list[tuple[bool, list[int], int]], target: Any) -> None:
    """Nodes below earlier ones; a second child is a fork."""
    session = getattr(target, "session", target)
    for number, (sampled, tokens, back) in enumerate(turns):
        parent = number - 1 - back if number - 1 - back >= 0 else None
        fork = ForkReason.EDITED if session.children(parent) else None
        logprobs = [-0.1 * token for token in tokens] if sampled else []
        spans = spans_over(len(tokens), number) if sampled else []
        target.add(parent, tokens, sampled=sampled, logprobs=logprobs, spans=spans, fork=fork, message={"n": number})


@given(st.lists(TURN, min_size=1, max_size=12))
def test_a_path_is_what_was_put_there(turns: list[tuple[bool, list[int], int]]) -> None:
    session = Session("s")
    grown(turns, session)
    for leaf in session.leaves:
        whole, path = session.trajectory(leaf), session.path(leaf)
        assert whole.ids == session.ids(leaf) == [token for node in path for token in node.tokens]
        assert len(whole.ids) == session.length(leaf)
        assert whole.mask == [int(node.sampled) for node in path for _ in node.tokens]
        assert all((version is None) == (bit == 0) for version, bit in zip(whole.versions, whole.mask, strict=True))
        assert all(value == 0.0 for value, bit in zip(whole.logprobs, whole.mask, strict=True) if not bit)
        assert sum(whole.mask) == session.sampled_tokens(leaf)
        located, length = session.locate([*whole.ids, 999])
        assert length == len(whole.ids)
        assert located is None or session.ids(located) == whole.ids[:length]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"tokens": [1, -2], "sampled": False}, "0 or more"),
        ({"tokens": [True], "sampled": False}, "0 or more"),
        ({"tokens": [1], "sampled": False, "logprobs": [-0.1]}, "sampled tokens only"),
        ({"tokens": [1, 2], "sampled": True, "logprobs": [-0.1]}, "2 log probs, got 1"),
        ({"tokens": [1], "sampled": True, "logprobs": [-0.1], "spans": []}, "without gaps"),
        ({"tokens": [1], "sampled": True, "logprobs": [-0.1], "spans": [Span("1", 0, 2)]}, "without gaps"),
    ],
)
def test_what_cannot_be_true_is_refused(node: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Session("s").add(None, node.pop("tokens"), **node)


def test_a_second_child_needs_its_reason() -> None:
    session = Session("s")
    session.add(None, [1, 2], sampled=False)
    session.add(0, [3], sampled=False)
    with pytest.raises(BadInputError, match="the reason of the fork"):
        session.add(0, [4], sampled=False)
    with pytest.raises(BadInputError, match="has no node 7"):
        session.add(7, [4], sampled=False)
    with pytest.raises(BadInputError, match="rewards are 1 or 2 values, got 3"):
        session.reward(0, [1.0, 2.0, 3.0])


def test_drift_says_where() -> None:
    session = Session("s")
    session.add(None, [1, 2], sampled=False)
    session.add(0, [3, 4], sampled=True, logprobs=[-1.0, -1.0], spans=[Span("1", 0, 2)])
    session.add(1, [5, 6], sampled=False)
    session.add(1, [5, 9, 9], sampled=False, fork=ForkReason.EDITED)
    session.add(0, [3], sampled=False, fork=ForkReason.COMPACTED)
    first, second = drifts(session)
    assert (first.node, first.beside, first.turn, first.at, first.was, first.became) == (3, 2, 1, 5, 6, 9)
    assert first.reason is ForkReason.EDITED
    assert (second.turn, second.at, second.was, second.became) == (0, 3, 4, None)


@settings(max_examples=25, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=6), data=st.data())
def test_a_record_cut_anywhere_is_opened_again(
    turns: list[tuple[bool, list[int], int]], data: Any, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("record")
    with Recorder(folder, "s", sync=False) as recorder:
        grown(turns, recorder)
        recorder.reward(0, [0.5])
        recorder.end(0, "stop")
        written = recorder.session
    path = file_of(folder, "s")
    assert read(path) == written
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    with Recorder(folder, "s", sync=False) as again:
        whole = content[:cut].count(b"\n")
        kept = [line for line in content.splitlines()[:whole] if b'"node"' in line]
        assert again.session.nodes == written.nodes[: len(kept)]
        again.add(None, [7], sampled=False, fork=ForkReason.RETRY if again.session.children(None) else None)
        assert read(path) == again.session
    assert recorded(folder) == [path]


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    with Recorder(tmp_path, "s") as recorder:
        recorder.add(None, [1, 2], sampled=False)
    path = file_of(tmp_path, "s")
    path.write_bytes(path.read_bytes().replace(b'"id":0', b'"id":3'))
    with pytest.raises(BadInputError, match=r"the record of 's' is damaged at byte \d+: node 3 follows"):
        read(path)
    for bad in ("", "../x", "a/b", "x" * 300, 7):
        with pytest.raises(BadInputError, match="recorded session's id"):
            file_of(tmp_path, bad)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="of format 9"):
        parse("s", b'{"format":9,"session":"s"}\n')


WRITER = """
import sys
from verl_server.trajectory.recorder import Recorder
with Recorder(sys.argv[1], "s") as recorder:
    for number in range(10**6):
        recorder.add(number - 1 if number else None, [number], sampled=False)
        print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_has_said(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(50)]
    with pytest.raises(ServerBusyError, match="another process records"):
        Recorder(tmp_path, "s")
    os.kill(process.pid, signal.SIGKILL)
    said += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    with Recorder(tmp_path, "s") as again:
        assert len(again.session.nodes) >= len(said)
        assert [node.tokens for node in again.session.nodes[: len(said)]] == [(number,) for number in said]


def conversation() -> Session:
    """Prompt, turn, tool, turn; and one more sample of the first turn."""
    session = Session("s")
    session.add(None, [10, 11, 12], sampled=False)
    session.add(0, [20, 21], sampled=True, logprobs=[-0.5, -0.25], spans=[Span("3", 0, 2)])
    session.add(1, [30], sampled=False)
    session.add(2, [40], sampled=True, logprobs=[-1.0], spans=[Span("4", 0, 1)])
    session.add(0, [25], sampled=True, logprobs=[-2.0], spans=[Span("3", 0, 1)], fork=ForkReason.SAMPLE)
    session.reward(3, [1.0])
    session.reward(1, [0.1, 0.2])
    return session


def test_a_padded_batch() -> None:
    short = Session("t")
    short.add(None, [50], sampled=False)
    short.add(0, [60], sampled=True, logprobs=[-3.0], spans=[Span("5", 0, 1)])
    batch = to_batch([(conversation(), 3), (short, 1)], pad_token_id=0)
    expected = {
        "prompts": [[10, 11, 12], [0, 0, 50]],
        "responses": [[20, 21, 30, 40], [60, 0, 0, 0]],
        "response_mask": [[1, 1, 0, 1], [1, 0, 0, 0]],
        "input_ids": [[10, 11, 12, 20, 21, 30, 40], [0, 0, 50, 60, 0, 0, 0]],
        "attention_mask": [[1] * 7, [0, 0, 1, 1, 0, 0, 0]],
        "weight_versions": [[3, 3, -1, 4], [5, -1, -1, -1]],
    }
    assert batch.batch_size == torch.Size([2])
    for name, values in expected.items():
        assert batch[name].tolist() == values, name
    assert batch["position_ids"][0].tolist() == list(range(7))
    assert batch["position_ids"][1, 2:4].tolist() == [0, 1]
    torch.testing.assert_close(batch["rollout_log_probs"][0], torch.tensor([-0.5, -0.25, 0.0, -1.0]))
    torch.testing.assert_close(batch["rm_scores"][0], torch.tensor([0.1, 0.2, 0.0, 1.0]))
    with pytest.raises(BadInputError, match="at least one path"):
        to_batch([], pad_token_id=0)


def test_packed_and_tree() -> None:
    session = conversation()
    packed = to_packed([(session, 3), (session, 4)])
    assert packed["cu_seqlens"].tolist() == [0, 7, 11]
    assert packed["input_ids"].tolist() == [*session.ids(3), *session.ids(4)]
    assert packed["position_ids"].tolist() == [*range(7), *range(4)]
    tree = to_tree(session)
    assert len(tree["input_ids"]) == 8, "the shared prompt is there once"
    assert tree["parent"].tolist() == [-1, 0, 1, 2, 0]
    for leaf in session.leaves:  # each path can be read from it again
        nodes = [node.id for node in session.path(leaf)]
        chosen = torch.tensor([int(node) in nodes for node in tree["node"]])
        order = tree["position_ids"][chosen].argsort()
        assert tree["input_ids"][chosen][order].tolist() == session.ids(leaf)
        assert tree["response_mask"][chosen][order].tolist() == session.trajectory(leaf).mask
