"""Token graphs, recorded sessions, divergences of forks, and batches for trainers."""

from __future__ import annotations

import enum
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_server.agent import Sample, SampleGroup, Task
from verl_server.agent.samples import find_segments
from verl_server.errors import BadInputError, ServerBusyError
from verl_server.trajectory import (
    NO_VERSION,
    ForkReason,
    Recorder,
    Span,
    TrajectoryGraph,
    find_divergences,
    list_sessions,
    load_session,
    session_file,
    to_batch,
    to_packed,
    to_tree,
)
from verl_server.trajectory.recorder import FILE_SUFFIX, digest

NODE = st.tuples(st.booleans(), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 3))
"""Whether the node is sampled, its token ids, and how many nodes before the last one its parent is."""


def make_spans(count: int, version: int) -> list[Span]:
    """Spans that cover `count` tokens: two versions if there are at least two tokens."""
    if count < 2:
        return [Span(version, 0, count)] if count else []
    return [Span(version, 0, 1), Span(version + 1, 1, count)]


def add_nodes(nodes: list[tuple[bool, list[int], int]], record: Recorder | TrajectoryGraph) -> None:
    """Add nodes below earlier nodes. The second and later children of a node are forks."""
    graph = record if isinstance(record, TrajectoryGraph) else record.graph
    for index, (sampled, token_ids, distance) in enumerate(nodes):
        parent = index - 1 - distance if index - 1 - distance >= 0 else None
        record.add_node(
            parent,
            token_ids,
            sampled=sampled,
            logprobs=[-0.1 * token for token in token_ids] if sampled else [],
            spans=make_spans(len(token_ids), index) if sampled else [],
            fork_reason=ForkReason.EDITED if graph.children(parent) else None,
            message={"index": index},
        )


@given(st.lists(NODE, min_size=1, max_size=12))
def test_path_contains_the_added_nodes(nodes: list[tuple[bool, list[int], int]]) -> None:
    graph = TrajectoryGraph("s")
    add_nodes(nodes, graph)
    for leaf in graph.leaves:
        sequence, path = graph.token_sequence(leaf), graph.path(leaf)
        assert sequence.token_ids == graph.token_ids(leaf) == [token for node in path for token in node.token_ids]
        assert len(sequence.token_ids) == graph.num_tokens(leaf)
        assert sequence.loss_mask == [int(node.sampled) for node in path for _ in node.token_ids]
        versions = zip(sequence.weight_versions, sequence.loss_mask, strict=True)
        assert all((version == NO_VERSION) == (bit == 0) for version, bit in versions)
        assert all(value == 0.0 for value, bit in zip(sequence.logprobs, sequence.loss_mask, strict=True) if not bit)
        assert sum(sequence.loss_mask) == graph.num_sampled_tokens(leaf)
        found, length = graph.longest_prefix([*sequence.token_ids, 999])
        assert length == len(sequence.token_ids)
        assert found is None or graph.token_ids(found) == sequence.token_ids[:length]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"token_ids": [1, -2], "sampled": False}, "0 or more"),
        ({"token_ids": [True], "sampled": False}, "0 or more"),
        ({"token_ids": [1], "sampled": False, "logprobs": [-0.1]}, "sampled tokens only"),
        ({"token_ids": [1, 2], "sampled": True, "logprobs": [-0.1]}, "2 log probabilities, got 1"),
        (
            {"token_ids": [1], "sampled": True, "logprobs": [None], "spans": [Span(1, 0, 1)]},
            r"finite numbers, got \(None",
        ),
        ({"token_ids": [1], "sampled": True, "logprobs": [float("nan")]}, "must be finite numbers"),
        ({"token_ids": [1], "sampled": True, "logprobs": [-0.1], "spans": []}, "without gaps"),
        ({"token_ids": [1], "sampled": True, "logprobs": [-0.1], "spans": [Span(1, 0, 2)]}, "without gaps"),
        ({"token_ids": [1], "sampled": True, "logprobs": [-0.1], "spans": [Span(-1, 0, 1)]}, "versions must be int"),
        ({"token_ids": [1], "sampled": True, "logprobs": [-0.1], "spans": [Span("1", 0, 1)]}, "versions must be int"),  # type: ignore[arg-type]
    ],
)
def test_inconsistent_nodes_are_refused(node: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        TrajectoryGraph("s").add_node(None, node.pop("token_ids"), **node)


def test_second_child_needs_a_fork_reason() -> None:
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1, 2], sampled=False)
    graph.add_node(0, [3], sampled=False)
    with pytest.raises(BadInputError, match="needs a fork_reason"):
        graph.add_node(0, [4], sampled=False)
    with pytest.raises(BadInputError, match="has no node 7"):
        graph.add_node(7, [4], sampled=False)
    with pytest.raises(BadInputError, match="pass 1 or 2 reward values, got 3"):
        graph.set_rewards(0, [1.0, 2.0, 3.0])


def test_last_termination_is_the_last_entry(tmp_path: Path) -> None:
    """Also when the same node was terminated before, as in a failed sample that was run again."""
    with Recorder(tmp_path, "s") as recorder:
        for parent, token in ((None, 1), (0, 2)):
            recorder.add_node(parent, [token], sampled=False)
        for node, stop_reason in ((1, "error"), (0, "error"), (1, "done")):
            recorder.terminate(node, stop_reason)
    terminations = list(load_session(session_file(tmp_path, "s")).terminations.values())
    assert [(termination.node, termination.stop_reason) for termination in terminations] == [(0, "error"), (1, "done")]


def test_a_record_is_no_symbolic_link(tmp_path: Path) -> None:
    """Somebody else may write into the folder. The content behind the link would be cut off as an unfinished record."""
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / f"s{FILE_SUFFIX}").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        Recorder(tmp_path, "s").close()
    assert target.read_text() == "mine"


def test_divergences_have_exact_positions() -> None:
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1, 2], sampled=False)
    graph.add_node(0, [3, 4], sampled=True, logprobs=[-1.0, -1.0], spans=[Span(1, 0, 2)])
    graph.add_node(1, [5, 6], sampled=False)
    graph.add_node(1, [5, 9, 9], sampled=False, fork_reason=ForkReason.EDITED)
    graph.add_node(0, [3], sampled=False, fork_reason=ForkReason.COMPACTED)
    first, second = find_divergences(graph)
    assert (first.node, first.original_node, first.num_turns) == (3, 2, 1)
    assert (first.position, first.original_token, first.new_token) == (5, 6, 9)
    assert first.fork_reason is ForkReason.EDITED
    assert (second.num_turns, second.position, second.original_token, second.new_token) == (0, 3, 4, None)


@settings(max_examples=25)
@given(nodes=st.lists(NODE, min_size=1, max_size=6), data=st.data())
def test_file_that_was_cut_anywhere_can_be_opened(
    nodes: list[tuple[bool, list[int], int]], data: Any, tmp_path_factory: Any
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with Recorder(run_dir, "s", sync=False) as recorder:
        add_nodes(nodes, recorder)
        recorder.set_rewards(0, [0.5])
        recorder.terminate(0, "stop")
        written = recorder.graph
    path = session_file(run_dir, "s")
    assert load_session(path) == written
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:length])
    with Recorder(run_dir, "s", sync=False) as reopened:
        num_complete_lines = content[:length].count(b"\n")
        complete_nodes = [line for line in content.splitlines()[:num_complete_lines] if line.startswith(b'{"node":')]
        assert reopened.graph.nodes == written.nodes[: len(complete_nodes)]
        fork_reason = ForkReason.RETRY if reopened.graph.children(None) else None
        reopened.add_node(None, [7], sampled=False, fork_reason=fork_reason)
        assert load_session(path) == reopened.graph
    assert list_sessions(run_dir) == [path]


def test_damaged_files_and_invalid_ids_are_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path, "s") as recorder:
        recorder.add_node(None, [1, 2], sampled=False)
    path = session_file(tmp_path, "s")
    path.write_bytes(path.read_bytes().replace(b'"id":0', b'"id":3'))
    with pytest.raises(BadInputError, match=r"the file of session 's' is damaged at byte \d+: node 3 follows"):
        load_session(path)
    for line in (b"7", b'"format"', b"{}", b"{"):
        path.write_bytes(line + b"\n")
        with pytest.raises(BadInputError, match="damaged at byte 0"):
            load_session(path)
    for bad in ("", "../x", "a/b", "x" * 300, 7):
        with pytest.raises(BadInputError, match="the id of a recorded session"):
            session_file(tmp_path, bad)  # type: ignore[arg-type]


def test_folder_is_no_session(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"is a folder.* write \[load_session\(path\) for path in list_"):
        load_session(tmp_path)


def test_nodes_of_other_or_unknown_inputs_are_refused(tmp_path: Path) -> None:
    """An attribute counts if both have it. Any other input counts if one of them has it."""
    inputs = {"tools": "1", "agent loop L: attribute 'url'": "2", "agent loop L: attribute 'old'": "3"}
    with Recorder(tmp_path, "s", inputs=inputs) as recorder:
        recorder.add_node(None, [1], sampled=False)
    path = session_file(tmp_path, "s")
    content = path.read_bytes()
    with Recorder(tmp_path, "s", inputs={"tools": "1", "agent loop L: attribute 'new'": "4"}) as recorder:
        assert recorder.graph.inputs == load_session(path).inputs == inputs
    others = [
        ({**inputs, "agent loop L: attribute 'url'": "9"}, "a different agent loop L: attribute 'url'.*begin its name"),
        ({**inputs, "tools": "9", "limits.max_turns": "1"}, "a different limits.max_turns, tools. A run_dir"),
        ({}, "a different tools. "),
    ]
    for other, expected in others:
        with pytest.raises(BadInputError, match=expected):
            Recorder(tmp_path, "s", inputs=other)
    for header in (b'{"format":2,"session_id":"s"}', b'{"format":2,"session_id":"s","inputs":{"tools":"1"}}'):
        path.write_bytes(header + content[content.index(b"\n") :])
        with pytest.raises(BadInputError, match=r"no digests of its inputs.* older version .* new run_dir"):
            Recorder(tmp_path, "s", inputs=inputs)
        with Recorder(tmp_path, "s") as recorder:
            assert len(recorder.graph.nodes) == 1


def test_a_session_with_notes_and_without_nodes_keeps_its_notes(tmp_path: Path) -> None:
    """The record of a gateway whose first prompt was too long is such a session."""
    with Recorder(tmp_path, "s", inputs={"tools": "1"}) as recorder:
        recorder.add_note(None, "refused", {"limit": "max_context_tokens"})
    content = session_file(tmp_path, "s").read_bytes()
    for inputs in (None, {"tools": "1"}):
        with Recorder(tmp_path, "s", inputs=inputs) as recorder:
            assert recorder.graph.inputs == {"tools": "1"}
            assert [note.name for note in recorder.graph.notes] == ["refused"]
        assert session_file(tmp_path, "s").read_bytes() == content


def test_files_of_other_formats_and_sessions_are_refused(tmp_path: Path) -> None:
    path = session_file(tmp_path, "s")
    for content, file_format in (
        (b'{"format":9,"session_id":"s"}\n', 9),
        (b'{"format":1,"session":"s"}\n{"node":{"id":0,"parent":null,"tokens":[1],"sampled":false}}\n', 1),
    ):
        path.write_bytes(content)
        expected = f"is of format {file_format}; this version of verl_server reads format 2 only"
        with pytest.raises(BadInputError, match=expected):
            load_session(path)
        with pytest.raises(BadInputError, match=expected):
            Recorder(tmp_path, "s")
        assert path.read_bytes() == content, "the file was changed"
    path.write_bytes(b'{"format":2,"session_id":"t"}\n')
    with pytest.raises(BadInputError, match=r"contains the session 't'; .* its name t.jsonl again"):
        load_session(path)


WRITER = """
import sys
from verl_server.trajectory import Recorder
with Recorder(sys.argv[1], "s") as recorder:
    for index in range(10**6):
        recorder.add_node(index - 1 if index else None, [index], sampled=False)
        print(index, flush=True)
"""


def test_killed_writer_loses_no_node_that_it_reported(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported = [int(process.stdout.readline()) for _ in range(50)]
    with pytest.raises(ServerBusyError, match="another process records"):
        Recorder(tmp_path, "s")
    os.kill(process.pid, signal.SIGKILL)
    reported += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    with Recorder(tmp_path, "s") as recorder:
        assert len(recorder.graph.nodes) >= len(reported)
        assert [node.token_ids for node in recorder.graph.nodes[: len(reported)]] == [(index,) for index in reported]


FULL_DISK = """
import resource, signal, sys
from verl_server.trajectory import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
recorder = Recorder(sys.argv[1], "s")
recorder.add_node(None, [1], sampled=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))
for limit in (150, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        recorder.add_node(0, [2] * 100, sampled=False, fork_reason="retry")
    except OSError as error:
        print(error.strerror)
"""


def test_line_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Also when there is space again: the lines after it would not fit to the file."""
    output = subprocess.check_output([sys.executable, "-c", FULL_DISK, str(tmp_path)], text=True)
    assert output == "File too large\nFile too large\n"
    path = session_file(tmp_path, "s")
    assert path.read_bytes().endswith(b"}\n")
    assert [node.token_ids for node in load_session(path).nodes] == [(1,)]


def make_conversation() -> TrajectoryGraph:
    """Prompt, turn, tool result, turn, and a second sample of the first turn."""
    graph = TrajectoryGraph("s")
    graph.add_node(None, [10, 11, 12], sampled=False)
    graph.add_node(0, [20, 21], sampled=True, logprobs=[-0.5, -0.25], spans=[Span(3, 0, 2)])
    graph.add_node(1, [30], sampled=False)
    graph.add_node(2, [40], sampled=True, logprobs=[-1.0], spans=[Span(4, 0, 1)])
    graph.add_node(0, [25], sampled=True, logprobs=[-2.0], spans=[Span(3, 0, 1)], fork_reason=ForkReason.SAMPLE)
    graph.set_rewards(3, [1.0])
    graph.set_rewards(1, [0.1, 0.2])
    graph.set_rewards(4, [0.0])
    return graph


def test_padded_batch() -> None:
    short = TrajectoryGraph("t")
    short.add_node(None, [50], sampled=False)
    short.add_node(0, [60], sampled=True, logprobs=[-3.0], spans=[Span(5, 0, 1)])
    short.set_rewards(1, [0.0])
    batch = to_batch([(make_conversation(), 3), (short, 1)], pad_token_id=0)
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


GRAPH = make_conversation()
PATH = (GRAPH, 3)


def test_a_batch_with_fixed_lengths() -> None:
    """Fixed lengths add padding only, and a path that does not fit is refused and not cut off."""
    paths = [(make_conversation(), 3), (make_conversation(), 4)]
    free = to_batch(paths, 7)
    exact = to_batch(paths, 7, prompt_length=3, response_length=4)
    names = set(free.keys())
    assert all(torch.equal(exact[name], free[name]) for name in names)
    batch = to_batch(paths, 7, prompt_length=5, response_length=6)
    assert set(batch.keys()) == names
    assert batch["prompts"].tolist() == [[7, 7, 10, 11, 12]] * 2
    assert batch["responses"].tolist() == [[20, 21, 30, 40, 7, 7], [25, 7, 7, 7, 7, 7]]
    for name in ("response_mask", "rollout_log_probs", "rm_scores", "weight_versions"):
        assert batch[name].shape == (2, 6)
        assert torch.equal(batch[name][:, :4], free[name]), name
        assert set(batch[name][:, 4:].flatten().tolist()) == {-1 if name == "weight_versions" else 0}
    assert batch["attention_mask"].tolist() == [[0, 0] + [1] * 7 + [0, 0], [0, 0] + [1] * 4 + [0] * 5]
    assert batch["position_ids"][0, 2:9].tolist() == list(range(7))
    assert torch.equal(batch["loss_weight"], free["loss_weight"])
    assert to_batch(paths, 7, response_length=9)["input_ids"].shape == (2, 3 + 9)

    with pytest.raises(
        BadInputError, match=r"response of path 0 \(session 's'\) has 4 tokens, .* response_length is 3"
    ):
        to_batch(paths, 7, response_length=3)
    with pytest.raises(BadInputError, match=r"prompt of path 0 \(session 's'\) has 3 tokens, .*pass prompt_length=3"):
        to_batch(paths, 7, prompt_length=2)
    longest_is_last = [(make_conversation(), 4), (make_conversation(), 3)]
    with pytest.raises(BadInputError, match="response of path 1"):
        to_batch(longest_is_last, 7, response_length=1)
    for wrong in (0, 2.5, "4"):
        with pytest.raises(BadInputError, match="prompt_length must be"):
            to_batch(paths, 7, prompt_length=wrong)  # type: ignore[arg-type]


def make_path(stop_reason: str | None) -> tuple[TrajectoryGraph, int]:
    """A path without a reward."""
    graph = TrajectoryGraph("failed-1")
    graph.add_node(None, [50], sampled=False)
    if stop_reason is not None:
        graph.terminate(0, stop_reason)
    return graph, 0


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (PATH, r"path 0 must be a tuple .* got TrajectoryGraph; pass \[sample.path for sample in samples\]"),
        (7, r"path 0 must be a tuple .* got int; pass \[sample.path for sample in samples\]"),
        ([PATH, GRAPH], r"path 1 must be a tuple .* got TrajectoryGraph; pass \[sample.path for sample"),
        ([SampleGroup(Task("t", [{"role": "user", "content": "x"}]), [])], "path 0 must be a tuple .* got SampleGroup"),
        (iter(()), "at least one path"),
        ([PATH, make_path("error")], r"path 1 is of a failed sample \(session 'failed-1'\).* sample.error is None"),
        ([make_path("error")], "path 0 is of a failed sample"),
        ([PATH, make_path("done")], r"path 1 \(session 'failed-1'\) has no reward, but other paths have rewards"),
    ],
)
def test_wrong_paths_are_refused(paths: Any, expected: str) -> None:
    for convert in (lambda: to_batch(paths, 0), lambda: to_packed(paths)):
        with pytest.raises(BadInputError, match=expected):
            convert()
        if isinstance(paths, Iterator):
            break


def test_a_termination_has_finite_numbers() -> None:
    for arguments in ({"reward": math.nan}, {"rewards": {"a": math.inf}}, {"segments": [(1, math.nan)]}):
        with pytest.raises(BadInputError, match="rewards and weights must be finite numbers"):
            make_conversation().terminate(1, "done", **arguments)


def test_failed_sample_with_a_reward_is_a_row() -> None:
    """A trainer may give failed samples a reward of its own. A sample without a turn has nothing to train."""
    graph = make_conversation()
    graph.terminate(4, "error")
    graph.set_rewards(4, [-1.0])
    batch = to_batch([PATH, (graph, 4)], pad_token_id=0)
    assert batch["rm_scores"][1].tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert to_packed([(graph, 4)])["rm_scores"].tolist() == [0.0, 0.0, 0.0, -1.0]
    del graph.rewards[4]
    with pytest.raises(BadInputError, match=r"path 1 .* without a reward; .*sample.graph.set_rewards\(sample.leaf"):
        to_batch([PATH, (graph, 4)], pad_token_id=0)
    prompt, node = make_path("error")
    prompt.set_rewards(node, [-1.0])
    with pytest.raises(BadInputError, match=r"path 0 .* without a sampled token.* if sample.num_turns"):
        to_batch([(prompt, node)], pad_token_id=0)


def test_reward_after_the_last_turn_belongs_to_its_last_token() -> None:
    """An episode can end after the result of a tool, which the policy did not sample."""
    graph = TrajectoryGraph("s")
    graph.add_node(None, [10], sampled=False)
    graph.add_node(0, [20, 21], sampled=True, logprobs=[-0.5, -0.5], spans=[Span(3, 0, 2)])
    graph.add_node(1, [30], sampled=False)
    graph.add_node(1, [40, 41, 42], sampled=False, fork_reason=ForkReason.EDITED)
    graph.set_rewards(2, [1.0])
    graph.set_rewards(3, [2.0])
    for leaf, scores in ((2, [0.0, 1.0, 0.0]), (3, [0.0, 2.0, 0.0, 0.0, 0.0])):
        assert to_batch([(graph, leaf)], pad_token_id=0)["rm_scores"].tolist() == [scores]
    assert to_packed([(graph, 2)])["rm_scores"].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert to_tree(graph)["rm_scores"].tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    graph.set_rewards(3, [0.5, 0.25, 0.125])
    assert to_packed([(graph, 3)])["rm_scores"].tolist() == [0.0, 0.0, 0.0, 0.5, 0.25, 0.125]


def test_reward_before_the_first_sampled_token_is_refused() -> None:
    """No sampled token could have it. A path without a sampled token is not trained, so its reward may stay."""
    graph = TrajectoryGraph("s")
    graph.add_node(None, [10, 11], sampled=False)
    graph.add_node(0, [], sampled=True)
    graph.add_node(1, [20], sampled=True, logprobs=[-0.5], spans=[Span(3, 0, 1)])
    for node, values in ((0, [1.0]), (0, [1.0, 2.0]), (1, [1.0])):
        graph.rewards.clear()
        graph.set_rewards(node, values)
        to_packed([(graph, 1)])
        for convert in (lambda: to_batch([PATH, (graph, 2)], 0), lambda: to_packed([PATH, (graph, 2)])):
            with pytest.raises(BadInputError, match=rf"path 1 .* node {node}.* sample.graph.set_rewards\(sample.leaf"):
                convert()


def test_batch_of_a_generator_and_without_rewards() -> None:
    assert to_batch((make_path("done") for _ in range(2)), pad_token_id=0)["rm_scores"].shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda wrong: to_batch([PATH], None), "pad_token_id must be .* got None .*tokenizer.eos_token_id"),  # type: ignore[arg-type]
        (lambda wrong: to_batch([PATH], 0.5), "pad_token_id must be a valid integer, got 0.5"),  # type: ignore[arg-type]
        (to_tree, "graph must be an instance of TrajectoryGraph, got .*Sample.*; pass sample.graph"),
        (find_divergences, "graph must be an instance of TrajectoryGraph, got .*Sample.*; pass sample.graph"),
    ],
)
def test_wrong_graphs_and_padding_are_refused(call: Any, expected: str) -> None:
    sample = Sample(Task("t", [{"role": "user", "content": "x"}]), 0, GRAPH, 3, "done")
    with pytest.raises(BadInputError, match=expected):
        call(sample)


def test_digests_are_equal_in_every_process() -> None:
    """Sets have another order in each process, and addresses of objects differ."""
    program = (
        "import numpy as np, threading\n"
        "from pathlib import Path\n"
        "from verl_server.trajectory.recorder import digest\n"
        "print(digest({'a': {'x', 'y', 'z'}, 1: np.arange(3), (1, 2): 1.5, 'b': object(), 'c': Path('/p'), "
        "'lock': threading.Lock(), 'text': '\\ud800', 'big': 2**80}))"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(results) == 1
    assert len(results.pop().strip()) == 16
    different = [{"a": 1}, {"a": "1"}, {"a": 1.5}, {"a": [1]}, {"b": 1}, {}, None, [1, 2], [2, 1], [[1], 2], "1", b"1"]
    assert len(set(map(digest, different))) == len(different)
    assert digest((1, np.int64(2))) == digest([1, 2]) == digest([1.0, np.float32(2)])
    assert digest(np.bool_(True)) == digest(True) != digest(1)
    assert digest({"q": np.str_("a")}) == digest({"q": "a"})


def test_arrays_have_digests_of_their_bytes() -> None:
    """Also a tensor of a dtype that numpy does not have. An array is no list, and its shape and its dtype count."""
    array = np.arange(6).reshape(2, 3)
    assert digest(array) == digest(torch.arange(6).reshape(2, 3)) == digest(np.asfortranarray(array))
    halves = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
    assert digest(halves) == digest(halves.clone().requires_grad_())
    changed = array.copy()
    changed[1, 2] = 7
    objects = [np.array([{1}], dtype=object), np.array([{2}], dtype=object)]
    different = [array, array.tolist(), array.ravel(), array.astype(np.int32), changed, halves, halves * 2, *objects]
    assert len({digest({"image": value}) for value in different}) == len(different)
    sparse = torch.eye(3).to_sparse()
    assert digest(sparse) == digest(sparse * 2) != digest(torch.eye(4).to_sparse())
    assert digest(torch.zeros(2, device="meta")) != digest(torch.zeros(3, device="meta"))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def make_nested(depth: int, innermost: Any) -> list[Any]:
    value = [innermost]
    for _ in range(depth):
        value = [value]
    return value


def make_cycle(text: str) -> dict[str, Any]:
    value: dict[str, Any] = {"text": text, "items": []}
    value["items"].append(value)
    return value


def test_every_value_has_a_digest() -> None:
    """Long ints, deep and cyclic values, classes, functions, and values of the standard library."""
    different = [
        10**5000, 10**5000 + 1, Fraction(10**5000, 3), Decimal("0.1"), 0.1, float("nan"), float("-inf"), 1j,
        make_nested(100, 1), make_nested(100, 2), make_nested(99, 1), make_nested(5000, 1),
        make_cycle("a"), make_cycle("b"),
        int, np.ndarray, Color, Color.RED, Color.BLUE, len, make_cycle, date(2026, 1, 2), date(2026, 1, 3),
        Span(1, 0, 1), Span(1, 0, 2), object(), "\udcff",
    ]  # fmt: skip
    assert len({digest({"answer": value}) for value in different}) == len(different)
    assert digest(make_cycle("a")) == digest(make_cycle("a"))
    assert digest(Decimal("1.5")) == digest(Fraction(3, 2)) == digest(1.5)
    assert digest(Span(1, 0, 2)) == digest({"version": 1, "start": 0, "end": 2})


def test_packed_batch_and_tree() -> None:
    graph = make_conversation()
    packed = to_packed([(graph, 3), (graph, 4)])
    assert packed["cu_seqlens"].tolist() == [0, 7, 11]
    assert packed["input_ids"].tolist() == [*graph.token_ids(3), *graph.token_ids(4)]
    assert packed["position_ids"].tolist() == [*range(7), *range(4)]
    tree = to_tree(graph)
    assert len(tree["input_ids"]) == 8, "the tree must contain the shared prompt once"
    assert tree["parent"].tolist() == [-1, 0, 1, 2, 0]
    for leaf in graph.leaves:  # each path can be reconstructed from the tree
        nodes = [node.id for node in graph.path(leaf)]
        on_path = torch.tensor([int(node) in nodes for node in tree["node"]])
        order = tree["position_ids"][on_path].argsort()
        assert tree["input_ids"][on_path][order].tolist() == graph.token_ids(leaf)
        assert tree["response_mask"][on_path][order].tolist() == graph.token_sequence(leaf).loss_mask


def test_loss_weights_of_paths() -> None:
    """A path has the weight of the first trained segment that contains its last node."""
    graph = make_conversation()
    paths = [(graph, 3), (graph, 4)]
    assert to_batch(paths, 0)["loss_weight"].tolist() == [1.0, 1.0], "a session that has not finished has no weights"
    graph.terminate(4, "done", segments=[(4, 0.5), (3, 0.25)])
    batch, packed = to_batch(paths, 0), to_packed(paths)
    assert batch["loss_weight"].tolist() == [0.25, 0.5]
    assert packed["loss_weight"].tolist() == [0.25] * 7 + [0.5] * 4
    assert batch["loss_weight"].dtype == packed["loss_weight"].dtype == to_tree(graph)["loss_weight"].dtype
    graph.terminate(4, "done", segments=[(3, 0.25)])
    assert to_batch(paths, 0)["loss_weight"].tolist() == [0.25, 0.0], "the last path is not trained"


def test_weights_of_the_tree() -> None:
    """A shared token has the weight of the first trained path. Tokens that are not trained have the weight 0."""
    graph = make_conversation()
    assert to_tree(graph)["loss_weight"].tolist() == [1.0] * 8, "a session that has not finished has no weights"
    graph.terminate(4, "done", segments=[(4, 0.5), (3, 0.25)])
    tree = to_tree(graph)
    expected = {node.id: 0.5 if node.id in (0, 4) else 0.25 for node in graph.nodes}
    assert tree["loss_weight"].tolist() == [expected[int(node)] for node in tree["node"]]
    graph.terminate(4, "done", segments=[(3, 2.0)])
    tree = to_tree(graph)
    assert tree["loss_weight"].tolist() == [0.0 if int(node) == 4 else 2.0 for node in tree["node"]]
    graph.terminate(4, "error", segments=[])
    assert not to_tree(graph)["loss_weight"].any()
    graph.add_node(4, [1], sampled=False)
    assert set(to_tree(graph)["loss_weight"].tolist()) == {1.0}, "the session continues after its termination"


TREE_NODE = st.tuples(
    st.sampled_from([True, True, False]), st.lists(st.integers(0, 300), min_size=1, max_size=3), st.integers(0, 3)
)


@given(st.lists(TREE_NODE, min_size=5, max_size=14), st.data())
def test_weights_of_the_tree_are_those_of_the_rows(nodes: list[tuple[bool, list[int], int]], data: Any) -> None:
    """The weights of all sampled tokens have the same sum as those of a step, whose rows are the trained paths."""
    graph = TrajectoryGraph("s")
    add_nodes(nodes, graph)
    ends = data.draw(st.permutations(graph.leaves))
    weights = [data.draw(st.sampled_from([1.0, 0.0])) * 2.0**-index for index in range(len(ends))]
    segments = find_segments(graph, list(zip(ends, weights, strict=True)))
    graph.terminate(len(nodes) - 1, "done", segments=[(segment.leaf, segment.loss_weight) for segment in segments])
    tree, expected = to_tree(graph), 0.0
    if segments:
        paths = [(graph, segment.leaf) for segment in segments]
        batch, packed = to_batch(paths, pad_token_id=0), to_packed(paths)
        assert batch["loss_weight"].tolist() == [segment.loss_weight for segment in segments]
        expected = float((batch["loss_weight"][:, None] * batch["response_mask"]).sum())
        assert float((packed["loss_weight"] * packed["response_mask"]).sum()) == expected
    assert float((tree["loss_weight"] * tree["response_mask"]).sum()) == expected


def test_common_turns_are_masked_in_all_fields_of_later_rows() -> None:
    """The age of tokens is often counted where the version is not -1."""
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1, 2], sampled=False)
    graph.add_node(0, [3], sampled=True, logprobs=[-0.5], spans=[Span(3, 0, 1)])
    for token, reason in ((4, None), (5, ForkReason.SAMPLE)):
        context = graph.add_node(1, [token], sampled=False, fork_reason=reason)
        graph.add_node(context.id, [token + 10], sampled=True, logprobs=[-0.25], spans=[Span(4, 0, 1)])
    packed = to_packed([(graph, 3), (graph, 5)])
    assert packed["response_mask"].tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 0, 1]
    assert packed["rollout_log_probs"].tolist() == [0, 0, -0.5, 0, -0.25, 0, 0, 0, 0, -0.25]
    assert packed["weight_versions"].tolist() == [-1, -1, 3, -1, 4, -1, -1, -1, -1, 4]


def test_rewards_and_the_termination_are_one_write(tmp_path: Path) -> None:
    """A process that is killed between two writes would leave rewards of one run and a termination of another."""
    with Recorder(tmp_path, "s") as record:
        node = record.add_node(None, [1], sampled=True, logprobs=[-1.0], spans=[Span(1, 0, 1)])
        record.graph.rewards[node.id] = [np.float32(2.0)]  # type: ignore[list-item]
        writes: list[bytes] = []
        path = session_file(tmp_path, "s")
        before = path.stat().st_size
        original = os.write

        def write(fd: int, data: bytes) -> int:
            writes.append(bytes(data))
            return original(fd, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", write)
            record.terminate(node.id, "done", reward=2.0)
        assert len(writes) == 1
        assert path.stat().st_size == before + len(writes[0])
    loaded = load_session(path)
    assert loaded.rewards == {node.id: [2.0]}
    assert loaded.last_termination is not None
    assert loaded.last_termination.reward == 2.0
