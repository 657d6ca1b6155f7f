"""Exports of recorded sessions to verifiers' traces and to ATIF, their imports, and `verl-server trajectory export`."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from agent_helpers import ScriptedGenerateFn, renderer_with_template
from helpers import QWEN, chat_tokenizer, wait_until
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl_server.agent import AgentLoop, Episode, RolloutLimits, RolloutRunner, SampleGroup, Task
from verl_server.cli.app import app
from verl_server.errors import BadInputError
from verl_server.trajectory import (
    ForkReason,
    Node,
    Recorder,
    Span,
    Termination,
    TrajectoryGraph,
    from_atif,
    from_verifiers,
    list_sessions,
    load_session,
    to_atif,
    to_verifiers,
)
from verl_server.trajectory.exports import ExportFormat

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
"""Any Unicode text. Lone surrogates are refused when a session is recorded."""
CALL = st.builds(
    lambda call_id, name, arguments: {"id": call_id, "function": {"name": name, "arguments": arguments}},
    TEXT,
    TEXT,
    st.one_of(TEXT, st.dictionaries(TEXT, st.one_of(TEXT, st.none()), max_size=2)),
)
CONTENT = st.one_of(
    TEXT,
    st.lists(
        st.one_of(
            TEXT.map(lambda text: {"type": "text", "text": text}),
            st.sampled_from(
                [
                    {"type": "image", "image": "https://example.org/a.png"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}},
                    {"type": "video"},
                ]
            ),
        ),
        max_size=3,
    ),
)
MESSAGE: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, role=st.sampled_from(["system", "developer", "user"]), content=CONTENT),
    st.builds(dict, role=st.just("tool"), content=CONTENT, tool_call_id=TEXT, name=TEXT),
    st.builds(dict, role=st.just("assistant"), content=TEXT, reasoning_content=TEXT),
    st.builds(dict, role=st.just("assistant"), content=st.none(), tool_calls=st.lists(CALL, max_size=2)),
)
CONTEXT_MESSAGE: st.SearchStrategy[dict[str, Any] | None] = st.one_of(
    st.builds(dict, messages=st.lists(MESSAGE, max_size=3)),
    st.builds(dict, appended_text=TEXT),
    st.none(),
    st.just({"index": 1}),
)


@st.composite
def graphs(draw: st.DrawFn) -> TrajectoryGraph:
    """Graphs with forks, several roots, empty nodes, all kinds of messages, and any termination or none."""
    graph = TrajectoryGraph("session-0", inputs={"task.data": "0123"})
    for index in range(draw(st.integers(0, 8))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        sampled = draw(st.booleans())
        token_ids = draw(st.lists(st.integers(0, 2**31), max_size=4))
        middle = draw(st.integers(1, len(token_ids))) if token_ids else 0
        edges = sorted({0, middle, len(token_ids)})
        graph.add_node(
            parent,
            token_ids,
            sampled=sampled,
            logprobs=[draw(st.floats(-1e9, 0)) for _ in token_ids] if sampled else [],
            spans=[Span(start + 1, start, end) for start, end in itertools.pairwise(edges)] if sampled else [],
            message=draw(MESSAGE) if sampled else draw(CONTEXT_MESSAGE),
            fork_reason=draw(st.sampled_from(ForkReason)) if graph.children(parent) else None,
            finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])) if sampled else None,
            routed_experts=draw(st.sampled_from([None, "AAAA"])),
            temperature=draw(st.sampled_from([None, 0.7])) if sampled else None,
            branch=draw(st.sampled_from(["", "0", "0.1", "1"])),
        )
    has_termination = draw(st.booleans())
    if graph.nodes and has_termination:
        draw_termination(draw, graph)
    return graph


def draw_termination(draw: st.DrawFn, graph: TrajectoryGraph) -> None:
    node_ids = st.integers(0, len(graph.nodes) - 1)
    for node in draw(st.sets(node_ids, max_size=2)):
        graph.set_rewards(node, [draw(st.floats(-9, 9))])
    graph.terminate(
        draw(node_ids),
        draw(st.sampled_from(["done", "error", "timeout_s", "max_response_tokens"])),
        draw(st.sampled_from([None, {"type": "ValueError", "message": "é", "details": {"a": None}}])),
        draw(st.one_of(st.none(), st.floats(-9, 9))),
        draw(
            st.one_of(st.none(), st.lists(st.tuples(node_ids, st.floats(0, 2)), max_size=3, unique_by=lambda s: s[0]))
        ),
        draw(st.dictionaries(TEXT, st.floats(-9, 9), max_size=2)),
    )


def through_json(document: Any) -> Any:
    """What a reader of the file gets."""
    return orjson.loads(orjson.dumps(document))


def exported_ends(graph: TrajectoryGraph) -> list[int]:
    """Last nodes of the paths that an export must contain."""
    if not graph.terminations:
        return graph.leaves
    (termination,) = graph.terminations.values()
    if termination.segments is None:
        return [termination.node]
    return [leaf for leaf, _ in termination.segments] or [termination.node]


def without_ids(node: Node) -> Node:
    """The node for comparisons: an import numbers the nodes that it contains from 0."""
    return dataclasses.replace(node, id=0, parent=None)


def assert_same_paths(graph: TrajectoryGraph, imported: TrajectoryGraph) -> None:
    """The import has exactly the nodes of the exported paths, and the same termination and rewards."""
    kept = sorted({node.id for end in exported_ends(graph) for node in graph.path(end)})
    new_ids = {old: new for new, old in enumerate(kept)}
    assert imported.session_id == graph.session_id
    assert imported.inputs == (graph.inputs if kept else {})
    assert [without_ids(node) for node in imported.nodes] == [without_ids(graph.node(old)) for old in kept]
    for end in exported_ends(graph):
        assert [new_ids[node.id] for node in graph.path(end)] == [node.id for node in imported.path(new_ids[end])]
        ours, theirs = graph.token_sequence(end), imported.token_sequence(new_ids[end])
        assert dataclasses.replace(theirs, node_ids=[kept[node] for node in theirs.node_ids]) == ours
    assert imported.rewards == {new_ids[old]: values for old, values in graph.rewards.items() if old in new_ids}
    assert len(imported.terminations) == len(graph.terminations)
    for old, new in zip(graph.terminations.values(), imported.terminations.values(), strict=True):
        segments = None if old.segments is None else tuple((new_ids[leaf], weight) for leaf, weight in old.segments)
        assert dataclasses.replace(new, node=0) == dataclasses.replace(old, node=0, segments=segments)
        assert new.node == new_ids.get(old.node, len(kept) - 1)


@given(graphs())
def test_an_import_of_verifiers_gives_back_the_exported_paths(graph: TrajectoryGraph) -> None:
    line = to_verifiers(graph)
    imported = from_verifiers(through_json(line))
    if not graph.nodes:
        assert imported == []
        assert line["ok"] is False
        return
    assert_same_paths(graph, *imported)
    (trace,) = line["traces"]
    ends = set(exported_ends(graph))
    parents = {node.get("parent") for node in trace["nodes"]}
    num_branches = sum(index not in parents for index in range(len(trace["nodes"])))
    inner = {node.id for end in ends for node in graph.path(end)[:-1]}
    assert num_branches == len(ends - inner)  # each leaf of a trace is a training sample


@given(graphs())
def test_an_import_of_atif_gives_back_the_exported_paths(graph: TrajectoryGraph) -> None:
    documents = through_json(to_atif(graph))
    assert len(documents) == len(exported_ends(graph))
    if documents:
        assert_same_paths(graph, from_atif(documents))


@given(graphs())
def test_other_programs_read_the_same_tokens(graph: TrajectoryGraph) -> None:
    """Without what only this library reads, tokens, mask and log probabilities of each path are the same."""
    for end, document in zip(exported_ends(graph), to_atif(graph), strict=True):
        del document["extra"]["verl_server"]
        imported, turns = from_atif([document]), [node for node in graph.path(end) if node.sampled]
        sequence = imported.token_sequence(len(imported.nodes) - 1)
        num_tokens = graph.num_tokens(turns[-1].id) if turns else 0  # no field of ATIF has tokens after the last turn
        ours = graph.token_sequence(end)
        assert sequence.token_ids == ours.token_ids[:num_tokens]
        assert sequence.loss_mask == ours.loss_mask[:num_tokens]
        assert sequence.logprobs == ours.logprobs[:num_tokens]
    for trace in to_verifiers(graph)["traces"]:
        del trace["info"]["verl_server"]
        (imported,) = from_verifiers({**to_verifiers(graph), "traces": [trace]})
        recorded = {tuple(graph.token_ids(end)) for end in exported_ends(graph)}
        inner = {node.id for end in exported_ends(graph) for node in graph.path(end)[:-1]}
        leaves = {tuple(graph.token_ids(end)) for end in exported_ends(graph) if end not in inner}
        assert leaves <= {tuple(imported.token_ids(leaf)) for leaf in imported.leaves} <= recorded


def two_paths(logprob: float = -0.5, reward: float = 1.0) -> TrajectoryGraph:
    """A session whose two paths share a turn."""
    graph = TrajectoryGraph("s")
    first = graph.add_node(None, [1], sampled=False, message={"messages": [{"role": "user", "content": "a"}]})
    fields: Any = {"sampled": True, "logprobs": [logprob], "spans": [Span(3, 0, 1)]}
    shared = graph.add_node(first.id, [2], message={"role": "assistant", "content": "b"}, **fields)
    ends = [
        graph.add_node(
            shared.id, [3 + n], message={"role": "assistant", "content": "c"}, fork_reason=reason, **fields
        ).id
        for n, reason in enumerate((None, ForkReason.SAMPLE))
    ]
    graph.terminate(ends[0], "done", None, reward, [(end, 1.0) for end in ends])
    return graph


def test_documents_of_several_recordings_are_refused() -> None:
    """Those of one session id, for example of two steps of a training, and those without what this library adds."""
    documents = to_atif(two_paths())
    for others in (to_atif(two_paths(reward=0.0)), to_atif(two_paths(logprob=-0.9))):
        with pytest.raises(BadInputError, match=r"several recordings of session 's'|is different in two documents"):
            from_atif([documents[0], others[1]])
    without_details = copy.deepcopy(documents)
    for document in without_details:
        del document["extra"]["verl_server"]
    with pytest.raises(BadInputError, match=r"only some documents of session 's' have extra\.verl_server"):
        from_atif([documents[0], without_details[1]])
    imported = from_atif(without_details)
    assert sum(node.sampled for node in imported.nodes) == 3  # the second document has a copy of the shared turn


@pytest.mark.parametrize(
    "arguments",
    ['{"n": 100000000000000000000000}', '{"s": "\\ud800"}', '{"x": NaN}', '{"x": 1e999}', "[" * 300 + "]" * 300]
    + ['{"x": ' + "[" * depth + "]" * depth + "}" for depth in (200, 250, 300, 5000)],
)
def test_arguments_that_json_would_change_stay_text(arguments: str) -> None:
    graph = TrajectoryGraph("s")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    graph.add_node(None, [1], sampled=False, message={"messages": messages})
    graph.terminate(0, "done")
    assert from_atif(through_json(to_atif(graph))) == graph
    assert to_atif(graph)[0]["steps"][1]["tool_calls"][0]["function_name"] == "f"


def test_a_session_that_was_continued_after_a_failure_has_not_finished() -> None:
    graph = TrajectoryGraph("s")
    graph.add_node(None, [1], sampled=False)
    graph.terminate(0, "error", {"type": "RuntimeError", "message": "", "details": {}})
    graph.add_node(0, [2], sampled=True, logprobs=[-1.0], spans=[Span(0, 0, 1)])
    assert graph.last_termination is None
    assert graph.trained_segments is None
    (trace,) = to_verifiers(graph)["traces"]
    assert trace["is_completed"] is False
    assert [node["token_ids"] for node in trace["nodes"]] == [[1], [2]]


def make_session(record: TrajectoryGraph | Recorder) -> TrajectoryGraph:
    """A sample with a tool call, a turn that was sampled again, a sub-agent, and a compacted history."""
    graph = record if isinstance(record, TrajectoryGraph) else record.graph
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 = ?"}]
    call = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    result = {"role": "tool", "content": "3", "tool_call_id": "call1", "name": "add"}

    def turn(parent: int, token_ids: list[int], message: dict[str, Any], **fields: Any) -> int:
        spans = [Span(7, 0, 1), Span(8, 1, len(token_ids))] if len(token_ids) > 1 else [Span(8, 0, 1)]
        logprobs = [-token / 100 for token in token_ids]
        message = {"role": "assistant", **message}
        return record.add_node(
            parent, token_ids, sampled=True, logprobs=logprobs, spans=spans, message=message, **fields
        ).id

    prompt = record.add_node(None, [1, 2, 3], sampled=False, message={"messages": question}).id
    turn(prompt, [9], {"content": "?"}, finish_reason="abort")
    first = turn(
        prompt,
        [4, 5],
        {"content": "", "tool_calls": [call]},
        fork_reason=ForkReason.RETRY,
        finish_reason="stop",
    )
    tool = record.add_node(first, [6], sampled=False, message={"messages": [result]}).id
    fields: dict[str, Any] = {"sampled": False, "message": {"messages": [{"role": "user", "content": "Check 3."}]}}
    sub_prompt = record.add_node(None, [1, 7], fork_reason=ForkReason.SUB_AGENT, branch="0", **fields).id
    sub = turn(sub_prompt, [8], {"content": "Right."}, branch="0", finish_reason="stop")
    second = turn(tool, [10, 11], {"content": "3"}, finish_reason="length")
    fields["message"] = {"messages": [{"role": "user", "content": "So far: 3."}]}
    compacted = record.add_node(None, [1, 12], fork_reason=ForkReason.COMPACTED, branch="1", **fields).id
    last = turn(compacted, [13], {"content": "It is 3."}, finish_reason="stop")
    graph.set_rewards(last, [0.5])
    record.terminate(last, "done", None, 0.5, [(last, 1.0), (second, 1.0), (sub, 0.25)], {"correct": 1.0, "turns": 3.0})
    return graph


def test_verifiers_trace_has_the_fields_of_the_format() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    line = to_verifiers(make_session(TrajectoryGraph("sum-0-0")), model="policy", tools=[tool])
    assert line["ok"]
    assert line["id"] == "sum-0-0"
    (trace,) = line["traces"]
    assert trace["version"] == 1
    assert trace["is_completed"]
    assert trace["ok"]
    assert trace["stop_condition"] == "done"
    assert trace["rewards"] == {"reward": {"score": 0.5, "weight": 1.0}}
    assert trace["metrics"] == {"correct": 1.0, "turns": 3.0}
    assert trace["tools"] == trace["nodes"][0]["tools"] == [tool["function"]]
    nodes = trace["nodes"]
    assert [node["message"]["role"] for node in nodes] == [
        *("system", "user", "assistant", "tool"),  # the retried turn is no trained path
        *("user", "assistant", "assistant", "user", "assistant"),
    ]
    assert [node.get("parent") for node in nodes] == [None, 0, 1, 2, None, 4, 3, None, 7]
    assert nodes[0]["token_ids"] == []
    assert nodes[1]["token_ids"] == [1, 2, 3]
    assert nodes[2]["mask"] == [True, True]
    assert nodes[2]["logprobs"] == [-0.04, -0.05]
    assert nodes[2]["sampled"]
    assert nodes[2]["message"]["tool_calls"] == [{"id": "call1", "name": "add", "arguments": '{"a": 1, "b": 2}'}]
    assert nodes[3]["message"]["tool_call_id"] == "call1"
    assert nodes[5]["semantic_parents"] == [{"node": 2, "type": "subagent_call"}]
    assert nodes[8]["semantic_parents"] == [{"node": 6, "type": "compaction"}]
    assert trace["calls"][2] == {
        "node": 6,
        "model": "policy",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 6, "completion_tokens": 2},
    }
    details = trace["info"]["verl_server"]
    assert details["nodes"][1]["spans"] == [[7, 0, 1], [8, 1, 2]]
    assert details["num_nodes_left_out"] == 1


def test_atif_documents_have_the_fields_of_the_format() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    last, main, sub = to_atif(make_session(TrajectoryGraph("sum-0-0")), model="policy", tools=[tool])
    assert [document["trajectory_id"] for document in (last, main, sub)] == ["sum-0-0-8", "sum-0-0-6", "sum-0-0-5"]
    assert main["schema_version"] == "ATIF-v1.8"
    assert main["session_id"] == "sum-0-0"
    assert main["agent"]["model_name"] == "policy"
    assert main["agent"]["tool_definitions"] == [tool]
    assert main["continued_trajectory_ref"] == "sum-0-0-8.json"
    assert "continued_trajectory_ref" not in last
    assert [step["source"] for step in main["steps"]] == ["system", "user", "agent", "agent"]
    turn = main["steps"][2]
    assert turn["tool_calls"] == [
        {"tool_call_id": "call1", "function_name": "add", "arguments": {"a": 1, "b": 2}},
    ]
    answer, link = turn["observation"]["results"]
    assert answer == {"source_call_id": "call1", "content": "3", "extra": {"name": "add"}}
    (reference,) = link["subagent_trajectory_ref"]
    assert (reference["trajectory_id"], reference["trajectory_path"]) == ("sum-0-0-5", "sum-0-0-5.json")
    assert main["steps"][3]["metrics"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3, 4, 5, 6],
        "completion_token_ids": [10, 11],
        "logprobs": [-0.1, -0.11],
        "extra": {
            "finish_reason": "length",
            "weight_versions": [{"version": 7, "start": 0, "end": 1}, {"version": 8, "start": 1, "end": 2}],
        },
    }
    scores = {"reward": 0.5, "rewards": {"correct": 1.0, "turns": 3.0}}
    assert main["final_metrics"]["extra"] == {**scores, "weight": 1.0}
    assert sub["final_metrics"]["extra"] == {**scores, "weight": 0.25}
    assert main["extra"]["stop_reason"] == "done"


class CompactingLoop(AgentLoop):
    """A turn, a sub-agent, a second turn, and two compactions with a turn after each."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        await episode.new_root([{"role": "user", "content": "help"}]).generate()
        await episode.generate([{"role": "user", "content": "go on"}])
        for summary in ("first summary", "second summary"):
            episode.adopt(episode.new_root([{"role": "user", "content": summary}], reason=ForkReason.COMPACTED))
            await episode.generate()


def test_a_recorded_sample_with_a_sub_agent_and_compactions_is_linked(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    runner = RolloutRunner(
        CompactingLoop(),
        ScriptedGenerateFn(tokenizer, lambda prompt: f"turn {len(prompt)}"),
        renderer=renderer_with_template(tokenizer, QWEN),
        limits=RolloutLimits(500),
        reward=lambda _: 2.0,
        run_dir=tmp_path / "run",
    )

    async def collect() -> list[SampleGroup]:
        return [group async for group in runner.run([Task("t", [{"role": "user", "content": "hello"}])])]

    ((sample,),) = [group.samples for group in asyncio.run(collect())]
    assert sample.error is None
    assert sample.num_turns == 1
    (path,) = list_sessions(tmp_path / "run")
    graph = load_session(path)
    documents = {document["steps"][0]["message"]: document for document in to_atif(graph)}
    refs = {start: document.get("continued_trajectory_ref") for start, document in documents.items()}
    ids = {start: document["trajectory_id"] for start, document in documents.items()}
    assert refs == {
        "hello": f"{ids['first summary']}.json",
        "help": None,
        "first summary": f"{ids['second summary']}.json",
        "second summary": None,
    }
    (result,) = documents["hello"]["steps"][1]["observation"]["results"]
    assert [ref["trajectory_id"] for ref in result["subagent_trajectory_ref"]] == [ids["help"]]
    assert {document["final_metrics"]["extra"]["reward"] for document in documents.values()} == {2.0}
    (trace,) = to_verifiers(graph)["traces"]
    links = [link for node in trace["nodes"] for link in node["semantic_parents"]]
    assert links == [
        {"node": 1, "type": "subagent_call"},
        {"node": 5, "type": "compaction"},
        {"node": 7, "type": "compaction"},
    ]
    assert_same_paths(graph, from_atif(list(documents.values())))
    assert_same_paths(graph, *from_verifiers(through_json(to_verifiers(graph))))


def test_turns_of_several_atif_documents_are_copied_context_in_all_but_the_first() -> None:
    graph = TrajectoryGraph("s")
    prompt = graph.add_node(None, [1], sampled=False)
    shared = graph.add_node(prompt.id, [2], sampled=True, logprobs=[-1.0], spans=[Span(0, 0, 1)])
    fields: dict[str, Any] = {"sampled": True, "logprobs": [-2.0], "spans": [Span(0, 0, 1)]}
    one = graph.add_node(shared.id, [3], **fields)
    two = graph.add_node(shared.id, [4], fork_reason=ForkReason.SAMPLE, **fields)
    graph.terminate(two.id, "done", segments=[(one.id, 1.0), (two.id, 1.0)])
    first, second = to_atif(graph)
    assert [step.get("is_copied_context", False) for step in first["steps"]] == [False, False, False]
    assert [step.get("is_copied_context", False) for step in second["steps"]] == [True, True, False]
    partly = from_atif([second])
    assert [node.token_ids for node in partly.nodes] == [(1,), (2,), (4,)]
    assert partly.terminations[2].segments == ((2, 1.0),)


def test_failed_and_unfinished_sessions_are_not_marked_as_trained() -> None:
    graph = TrajectoryGraph("s")
    prompt = graph.add_node(None, [1, 2], sampled=False, message={"messages": [{"role": "user", "content": "x"}]})
    (unfinished,) = to_verifiers(graph)["traces"]
    assert not unfinished["is_completed"]
    assert not unfinished["ok"]
    assert not unfinished["agent"]["trainable"]
    graph.terminate(prompt.id, "error", {"type": "TimeoutError", "message": "late", "details": {}}, segments=[])
    (failed,) = to_verifiers(graph)["traces"]
    assert failed["is_completed"]
    assert not failed["ok"]
    assert not failed["agent"]["trainable"]
    assert failed["errors"] == [{"type": "TimeoutError", "message": "late"}]
    (document,) = to_atif(graph)
    assert document["extra"]["error"]["message"] == "late"
    assert document["extra"]["stop_reason"] == "error"
    assert document["extra"]["token_ids_after_last_turn"] == [1, 2]
    assert document["final_metrics"]["extra"]["weight"] == 0.0


def test_names_of_limits_are_those_of_verifiers() -> None:
    graph = make_session(TrajectoryGraph("s"))
    for reason, condition in {"max_response_tokens": "max_output_tokens", "max_turns": "max_turns"}.items():
        graph.terminate(3, reason)
        assert to_verifiers(graph)["traces"][0]["stop_condition"] == condition
    graph.terminate(3, "timeout_s")
    assert to_verifiers(graph)["traces"][0]["is_timeout"]


TRACE: dict[str, Any] = {
    "version": 1,
    "id": "abc",
    "verifiers": {"version": "0.4.0", "commit": None},
    "task": {"type": "SumTask", "data": {"idx": 0, "prompt": "1 + 1"}, "hash": "0"},
    "agent": {"config": {"model": "m", "harness": {"id": "bash"}}, "name": "solver"},
    "nodes": [
        {"message": {"role": "user", "content": "1 + 1"}, "token_ids": [1, 2], "mask": [False, False]},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "2", "provider_state": []},
            "sampled": True,
            "token_ids": [3, 4, 5],
            "mask": [False, True, True],
            "is_content": [False, True, True],
            "logprobs": [-0.5, -0.25],
        },
        {
            "parent": 0,
            "semantic_parents": [{"node": 1, "type": "compaction"}, {"node": 1, "type": "vendor:other"}],
            "message": {"role": "assistant", "content": "two"},
            "sampled": True,
            "token_ids": [3, 6],
            "mask": [False, True],
        },
    ],
    "calls": [{"node": 1, "finish_reason": "stop"}, {"node": 2, "finish_reason": "length"}],
    "rewards": {"correct": {"score": 0.5, "weight": 2.0}, "unscored": None},
    "metrics": {"turns": 1.0},
    "is_completed": True,
    "ok": True,
    "stop_condition": "agent_completed",
}
EPISODE: dict[str, Any] = {"id": "e", "task": TRACE["task"], "traces": [TRACE], "group": {"id": "g"}}


def test_a_trace_of_verifiers_itself_is_imported() -> None:
    (graph,) = from_verifiers(EPISODE)
    first, second = graph.leaves
    sequence = graph.token_sequence(first)
    assert sequence.token_ids == [1, 2, 3, 4, 5]
    assert sequence.loss_mask == [0, 0, 0, 1, 1]
    assert sequence.logprobs == [0.0, 0.0, 0.0, -0.5, -0.25]
    assert sequence.weight_versions == [-1, -1, -1, 0, 0]
    assert graph.node(first).message == {"role": "assistant", "content": "2"}
    assert graph.node(first).finish_reason == "stop"
    unknown = graph.token_sequence(second)  # has no log probabilities
    assert unknown.token_ids == [1, 2, 3, 6]
    assert unknown.loss_mask == [0, 0, 0, 0]
    assert graph.node(second).sampled
    assert graph.node(second).finish_reason == "length"
    assert [node.fork_reason for node in graph.nodes] == [None, None, None, ForkReason.COMPACTED, None]
    (termination,) = graph.terminations.values()
    assert (termination.reward, termination.rewards) == (1.0, {"correct": 0.5, "turns": 1.0})
    assert termination.stop_reason == "agent_completed"
    assert termination.segments == ((first, 1.0), (second, 1.0))


def changed(document: dict[str, Any], *place: Any, value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a place."""
    document = copy.deepcopy(document)
    target: Any = document
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return document


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("id",), None, "at id: "),
        (
            ("version",),
            2,
            r"at traces\[0\].version: .*trace version 2 is not supported; supported is version 1, got 2$",
        ),
        (("nodes", 1, "token_ids", 2), -5, r"at traces\[0\].nodes\[1\].token_ids\[2\]"),
        (("nodes", 1, "token_ids", 2), "5", r"at traces\[0\].nodes\[1\].token_ids\[2\]"),
        (("nodes", 1, "logprobs"), [-0.5], r"traces\[0\].nodes\[1\]: .*2 sampled tokens need as many logprobs, got 1"),
        (("nodes", 1, "logprobs", 0), math.nan, r"traces\[0\].nodes\[1\].logprobs\[0\]"),
        (("nodes", 1, "mask"), [True], r"traces\[0\].nodes\[1\]: .*3 token_ids need as many mask values"),
        (("nodes", 1, "parent"), 1, r"nodes\[1\].parent is 1; a parent comes before its children"),
        (("nodes", 1, "message", "role"), "critic", r"traces\[0\].nodes\[1\].message.role"),
        (("nodes", 0, "message", "content"), None, r"traces\[0\].nodes\[0\].message: .*needs content"),
        (("calls", 0, "node"), 3, "calls names node 3, but there are 3 nodes"),
        (("nodes",), "none", r"at traces\[0\].nodes: "),
        (("info",), {"verl_server": {"version": 2}}, r"traces\[0\] of episode 'e': info.verl_server .* at version"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_place(place: tuple[Any, ...], value: Any, message: str) -> None:
    document = changed(EPISODE, *(place if place == ("id",) else ("traces", 0, *place)), value=value)
    with pytest.raises(BadInputError, match=message):
        from_verifiers(document)


def test_an_edited_export_of_a_trace_is_refused() -> None:
    line = to_verifiers(make_session(TrajectoryGraph("s")))
    nodes = line["traces"][0]["nodes"]
    for place, value, message in [
        (("traces", 0, "nodes"), [*nodes, nodes[0]], "describes 9 messages, and the trace has 10"),
        (("traces", 0, "nodes"), nodes[:-1], r"at traces\[0\]: calls names node 8, but there are 8 nodes$"),
        (("traces", 0, "nodes", 1, "parent"), None, r"nodes\[0\] to nodes\[1\] do not follow each other"),
        (("traces", 0, "nodes", 2, "parent"), 0, r"nodes\[2\].parent is 0, within the messages of another node"),
        (("traces", 0, "nodes", 1, "mask"), [True, False, False], r"nodes\[0\] to nodes\[1\] differ from `sampled`"),
        (("traces", 0, "info", "verl_server", "nodes", 1, "spans"), [[7, 0, 1]], "node 2 of session 's': weight versi"),
    ]:
        with pytest.raises(BadInputError, match=message):
            from_verifiers(changed(line, *place, value=value))


ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "run-1",
    "agent": {"name": "terminus", "version": "2"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "List files", "timestamp": "2026-01-01T00:00:00Z"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "ls",
            "reasoning_content": "Easy.",
            "tool_calls": [{"tool_call_id": "c", "function_name": "run", "arguments": {"command": "ls"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "a.txt"}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
        },
        {"step_id": 3, "source": "agent", "message": "Done"},
    ],
}


def test_a_document_of_another_program_is_imported() -> None:
    graph = from_atif([ATIF])
    assert graph.session_id == "run-1"
    assert [(node.sampled, node.token_ids) for node in graph.nodes] == [
        (False, (1, 2)),
        (True, (3,)),
        (False, ()),
        (True, ()),
    ]
    assert graph.node(0).message == {"messages": [{"role": "user", "content": "List files"}]}
    assert (graph.node(1).message or {})["reasoning_content"] == "Easy."
    assert graph.node(2).message == {"messages": [{"role": "tool", "content": "a.txt", "tool_call_id": "c"}]}
    edited = changed(ATIF, "steps", 2, "metrics", value={"prompt_token_ids": [1, 9], "completion_token_ids": [4]})
    graph = from_atif([edited])  # the prompt of the second turn does not continue the first, and has no log probs
    assert graph.children(None) == [0, 2]
    assert graph.node(2).fork_reason is ForkReason.EDITED
    assert graph.token_sequence(graph.leaves[-1]).token_ids == [1, 9, 4]
    assert graph.token_sequence(graph.leaves[-1]).loss_mask == [0, 0, 0]
    child = {**ATIF, "schema_version": "ATIF-v1.8", "trajectory_id": "sub"}
    graph = from_atif([{**child, "subagent_trajectories": [child]}])
    assert [graph.node(root).fork_reason for root in graph.children(None)] == [None, ForkReason.SUB_AGENT]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), "ATIF-v1.9", "at schema_version: Input should be .*'ATIF-v1.8'"),
        (("steps",), [], "at steps: "),
        (("steps", 1, "step_id"), 3, r"steps\[1\].step_id is 3"),
        (("steps", 1, "metrics", "logprobs"), [], None),
        (("steps", 1, "metrics", "logprobs"), [-1.0, -2.0], r"at steps\[1\].metrics: .*1 completion_token_ids need"),
        (("steps", 1, "metrics", "prompt_token_ids", 0), 1.5, r"at steps\[1\].metrics.prompt_token_ids\[0\]"),
        (("steps", 1, "observation", "results", 0, "source_call_id"), "d", "result of the unknown tool call 'd'"),
        (("steps", 0, "colour"), "red", r"at steps\[0\].colour: Extra inputs are not permitted"),
        (("extra",), {"verl_server": []}, "extra.verl_server of ATIF document 0"),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(place: tuple[Any, ...], value: Any, message: str | None) -> None:
    document = changed(ATIF, *place, value=value)
    if message is None:
        assert from_atif([document]).nodes
        return
    with pytest.raises(BadInputError, match=message):
        from_atif([document])


def test_documents_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(BadInputError, match="documents must be a list, got dict"):
        from_atif(ATIF)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="pass at least one"):
        from_atif([])
    with pytest.raises(BadInputError, match="of several sessions"):
        from_atif([ATIF, {**ATIF, "session_id": "run-2"}])
    documents = to_atif(make_session(TrajectoryGraph("s")))
    for place, value, message in [
        (("steps", 3, "metrics", "prompt_token_ids", 2), 0, "the tokens of step 3 do not continue"),
        (("steps", 3, "metrics", "completion_token_ids"), [10, 11, 12], r"5 completion|need as many|and the document"),
        (("extra", "verl_server", "nodes", 0, "count"), 1, "describes|do not continue"),
    ]:
        with pytest.raises(BadInputError, match=message):
            from_atif([changed(documents[1], *place, value=value)])
    other = changed(documents[2], "extra", "verl_server", "nodes", 0, "id", value=0)
    with pytest.raises(BadInputError, match="node 0 of session 's' is different in two documents"):
        from_atif([documents[1], other])


def test_values_that_no_export_can_carry_are_refused() -> None:
    graph = make_session(TrajectoryGraph("s"))
    with pytest.raises(BadInputError, match="graph must be an instance of TrajectoryGraph, got a value of type dict"):
        to_verifiers({})  # type: ignore[arg-type]
    graph.terminations[1] = Termination(1, "done", reward=math.nan)  # as from a file of an earlier version
    with pytest.raises(BadInputError, match=r"session 's' cannot be exported: Reward\.score: .*finite number, got nan"):
        to_verifiers(graph)
    with pytest.raises(
        BadInputError, match=r"session 's' cannot be exported: Scores\.reward: .*finite number, got nan"
    ):
        to_atif(graph)


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder with a session of a step, an unfinished session, and a session without a node."""
    folder = tmp_path / "sessions"
    with Recorder(folder / "step-000001", "sum-0-0", sync=False) as record:
        make_session(record)
        record.record_all_rewards()
    with Recorder(folder, "later-0-0", sync=False) as record:
        record.add_node(None, [1], sampled=False, message={"messages": [{"role": "user", "content": "é"}]})
    Recorder(folder, "empty-0-0", sync=False).close()
    return folder


def run(*args: object) -> str:
    """The output of `verl-server trajectory export`. Raises its error."""
    result = CliRunner().invoke(app, ["trajectory", "export", *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_command_writes_one_line_for_each_session(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "traces.jsonl"
    assert "(sessions: 3, lines: 3)" in run(run_dir, "--format", "verifiers", "--output", output, "--model", "m")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["empty-0-0", "later-0-0", "sum-0-0"]
    assert [len(line["traces"]) for line in lines] == [0, 1, 1]
    recorded = load_session(run_dir / "step-000001" / "sum-0-0.jsonl")
    assert_same_paths_of_session(recorded, from_verifiers(lines[2])[0])
    assert lines[2]["traces"][0]["agent"]["config"] == {"model": "m"}
    assert os.listdir(output.parent) == ["traces.jsonl"]


def test_the_command_writes_one_file_for_each_path(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "atif"
    assert "(sessions: 3, files: 4)" in run(run_dir, "--format", "atif", "--output", output)
    found = sorted(str(path.relative_to(output)) for path in output.rglob("*.json"))
    names = ["step-000001/sum-0-0-5.json", "step-000001/sum-0-0-6.json", "step-000001/sum-0-0-8.json"]
    assert found == ["later-0-0-0.json", *names]
    documents = [json.loads((output / name).read_text()) for name in names]
    recorded = load_session(run_dir / "step-000001" / "sum-0-0.jsonl")
    assert_same_paths_of_session(recorded, from_atif(documents))
    for document in documents:
        if reference := document.get("continued_trajectory_ref"):
            assert (output / "step-000001" / reference).is_file()


def assert_same_paths_of_session(recorded: TrajectoryGraph, imported: TrajectoryGraph) -> None:
    assert_same_paths(recorded, imported)
    assert imported.num_turns(len(imported.nodes) - 1) == 1


@pytest.mark.parametrize("kind", list(ExportFormat))
def test_the_command_overwrites_nothing_and_leaves_no_part_of_a_failed_export(
    kind: str, run_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "export"
    source = run_dir / "later-0-0.jsonl"
    assert "(sessions: 1, " in run(source, "--format", kind, "--output", output)
    with pytest.raises(BadInputError, match="exists, and an export overwrites nothing"):
        run(source, "--format", kind, "--output", output)
    (run_dir / "sum-9-9.jsonl").write_text('{"format": 2, "session_id": "sum-9-9"}\nno json\n')
    with pytest.raises(BadInputError, match="session 'sum-9-9' is damaged"):
        run(run_dir, "--format", kind, "--output", tmp_path / "out" / "second")
    assert os.listdir(tmp_path / "out") == ["export"]


@pytest.mark.parametrize("kind", list(ExportFormat))
def test_nothing_is_left_of_an_export_that_is_ended(kind: str, run_dir: Path, tmp_path: Path) -> None:
    content = (run_dir / "step-000001" / "sum-0-0.jsonl").read_text()
    for number in range(3000):
        (run_dir / f"sum-{number}-1.jsonl").write_text(content.replace('"sum-0-0"', f'"sum-{number}-1"'))
    output = tmp_path / "out" / "export"
    arguments = ["trajectory", "export", str(run_dir), "--format", kind, "--output", str(output)]
    command = subprocess.Popen([sys.executable, "-m", "verl_server.cli", *arguments])
    wait_until(lambda: output.parent.is_dir() and bool(os.listdir(output.parent)), 60.0, "the export has not begun")
    command.terminate()
    assert command.wait(30) == 128 + signal.SIGTERM
    assert not os.listdir(output.parent)


def test_the_command_says_what_is_wrong_with_its_arguments(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        run(tmp_path / "none", "--format", "atif", "--output", tmp_path / "x")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInputError, match="has no recorded session"):
        run(tmp_path / "nothing", "--format", "atif", "--output", tmp_path / "x")
    with pytest.raises(BadInputError, match="would count as a session"):
        run(run_dir, "--format", "verifiers", "--output", run_dir / "traces.jsonl")
    with pytest.raises(BadInputError, match="cannot write"):
        run(run_dir / "later-0-0.jsonl", "--format", "verifiers", "--output", run_dir / "later-0-0.jsonl" / "x")
