"""Compares the records of a gateway with what its client got: one turn for each request, none lost, the same tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway_chaos.client import Turn
from verl_server.gateway.turn_text.splitting import split_turn
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session
from verl_server.trajectory.graph import Node

Generated = Counter[tuple[tuple[int, ...], tuple[int, ...]]]
"""Prompts and outputs of the engine, with the number of times that each pair was generated."""


def find_violations(
    run_dir: Path, turns: Sequence[Turn], renderer: ChatRenderer, generated: Generated | None = None
) -> list[str]:
    """What is wrong in the records of the sessions. `generated`: what the engine has generated, if it is known."""
    by_session = defaultdict[str, list[Turn]](list)
    for turn in turns:
        by_session[turn.session_id].append(turn)
    violations, recorded = list[str](), Generated()
    for session_id, expected in by_session.items():
        graph = load_session(run_dir / f"{session_id}.jsonl")
        violations += [f"{session_id}: {text}" for text in _check_session(graph, expected, renderer)]
        for node in graph.nodes:
            if node.sampled and node.parent is not None:
                recorded[tuple(graph.token_ids(node.parent)), node.token_ids] += 1
    if generated is not None and generated != recorded:
        lost, invented = generated - recorded, recorded - generated
        violations.append(f"{lost.total()} generated turns are not recorded, {invented.total()} were not generated")
    return violations


def count_versions(run_dir: Path) -> Counter[int]:
    """Number of turns by the number of weight versions that generated them."""
    graphs = [load_session(path) for path in sorted(run_dir.glob("*.jsonl"))]
    return Counter(len(node.spans) for graph in graphs for node in graph.nodes if node.sampled)


def _check_session(graph: TrajectoryGraph, turns: Sequence[Turn], renderer: ChatRenderer) -> Iterator[str]:
    prompts = {question: node for node in graph.nodes if not node.sampled for question in [_question(node)]}
    if len(prompts) != sum(not node.sampled for node in graph.nodes):
        yield "a prompt is recorded twice"
    num_conversations = sum(not turn.history for turn in turns)
    if (num_roots := len(graph.children(None))) != num_conversations:
        yield f"{num_conversations} conversations have {num_roots} first prompts"
    if len(graph.leaves) != num_conversations:
        yield f"{num_conversations} conversations have {len(graph.leaves)} ends"
    if (num_sampled := sum(node.sampled for node in graph.nodes)) != len(turns):
        yield f"{len(turns)} turns were received, and {num_sampled} are recorded"
    for turn in turns:
        prompt = prompts.get(turn.question)
        if prompt is None:
            yield f"{turn.question} is not recorded"
        elif len(children := graph.children(prompt.id)) != 1:
            yield f"{turn.question} has {len(children)} turns"
        else:
            yield from _check_turn(graph, turn, graph.node(children[0]), renderer)


def _check_turn(graph: TrajectoryGraph, turn: Turn, node: Node, renderer: ChatRenderer) -> Iterator[str]:
    assert node.parent is not None
    path, reply = graph.path(node.id), turn.reply
    questions = [_question(item) for item in path if not item.sampled]
    if questions != [*(question for question, _ in turn.history), turn.question]:
        yield f"{turn.question} follows other turns than those of its conversation"
    texts = [
        split_turn(renderer, item.token_ids, graph.node(item.parent or 0).token_ids, (), "").text
        for item in path
        if item.sampled
    ]
    if texts != [*(answer for _, answer in turn.history), reply.text]:
        yield f"{turn.question} has other texts than the client got"
    if (reply.num_prompt_tokens, reply.num_tokens) != (graph.num_tokens(node.parent), len(node.token_ids)):
        yield f"{turn.question} has other numbers of tokens than the client got"
    if reply.logprobs is not None and reply.logprobs != node.logprobs:
        yield f"{turn.question} has other log probabilities than the client got"


def _question(node: Node) -> str:
    """The last message of a prompt."""
    return str((node.message or {})["messages"][-1]["content"])
