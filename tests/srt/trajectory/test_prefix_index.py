"""The search of a token graph for the longest recorded path with which a prompt begins."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.trajectory import ForkReason, TrajectoryGraph

TOKENS = st.lists(st.integers(0, 2), max_size=5)
"""Few different tokens: many nodes have equal tokens, or none."""


def plain_longest_prefix(graph: TrajectoryGraph, token_ids: Sequence[int]) -> tuple[int | None, int]:
    """Compares the tokens with all children of each node whose path is a prefix. The first of equal paths wins."""
    best: tuple[int | None, int] = (None, 0)
    pending = [best]
    while pending:
        parent, length = pending.pop()
        for child in graph.children(parent):
            added = graph.node(child).token_ids
            if tuple(token_ids[length : length + len(added)]) == added:
                pending.append((child, graph.num_tokens(child)))
                best = max(best, pending[-1], key=lambda found: found[1])
    return best


def add(graph: TrajectoryGraph, parent: int | None, token_ids: Sequence[int]) -> None:
    reason = ForkReason.SAMPLE if graph.children(parent) else None
    graph.add_node(parent, token_ids, sampled=False, fork_reason=reason)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 4)), max_size=25), st.lists(TOKENS, min_size=1, max_size=4))
def test_the_longest_prefix_is_that_of_a_plain_search(
    planned: list[tuple[list[int], int]], parts: list[list[int]]
) -> None:
    """Also while the graph grows, and of several nodes with equal paths."""
    graph = TrajectoryGraph("s")
    others = [[token for part in parts[:end] for token in part] for end in range(len(parts) + 1)]
    for number, (token_ids, distance) in enumerate(planned):
        add(graph, None if distance > number - 1 else number - 1 - distance, token_ids)
        for prompt in (*others, graph.token_ids(number), [*graph.token_ids(number // 2), *parts[0]]):
            assert graph.longest_prefix(prompt) == plain_longest_prefix(graph, prompt)
            assert graph.longest_prefix(tuple(prompt)) == plain_longest_prefix(graph, prompt)
    again: TrajectoryGraph = pickle.loads(pickle.dumps(graph))
    assert again == graph
    assert [again.longest_prefix(prompt) for prompt in others] == [graph.longest_prefix(prompt) for prompt in others]


class ComparedToken(int):
    """A token that counts how often tokens are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).num_compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def num_compared(num_prompts: int, *, is_new: bool) -> int:
    """Number of tokens that are compared for a prompt of 100 tokens in a session with a number of prompts."""
    graph, prompt = TrajectoryGraph("s"), list(range(100))
    for number in range(num_prompts):
        add(graph, None, [*prompt[: 95 - number % 50], 1000 + number, *prompt[:3]])
    graph.longest_prefix([])
    if is_new:
        add(graph, None, [*prompt, 1000])
    ComparedToken.num_compared = 0
    graph.longest_prefix([ComparedToken(token) for token in prompt])
    return ComparedToken.num_compared


@pytest.mark.parametrize("is_new", [False, True])
def test_the_work_for_a_prompt_does_not_grow_with_the_number_of_prompts(is_new: bool) -> None:
    """The prompts have different lengths, and a common beginning."""
    assert 0 < num_compared(30, is_new=is_new) < 500
    assert num_compared(1000, is_new=is_new) < 500


def test_a_long_conversation_is_found_turn_by_turn() -> None:
    """Each turn adds its own tokens to the index only. The index of a deep graph can be pickled."""
    graph, parent = TrajectoryGraph("s"), None
    for number in range(3000):
        add(graph, parent, [number, number + 1])
        parent = number
    token_ids = graph.token_ids(2999)
    assert graph.longest_prefix([*token_ids, 7]) == (2999, 6000)
    assert graph.longest_prefix(token_ids[:4001]) == (1999, 4000)
    assert pickle.loads(pickle.dumps(graph)).longest_prefix(token_ids) == (2999, 6000)
