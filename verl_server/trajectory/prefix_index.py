"""`PrefixIndex`: finds the nodes of a token graph whose paths are a prefix of a token sequence. Pure data, no I/O."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from verl_server.trajectory.nodes import Node

ROOT = 0
"""Place of the empty sequence."""


class _Edge(NamedTuple):
    """The tokens between two places: a part of the tokens of a node."""

    token_ids: tuple[int, ...]
    """Tokens of the node."""
    start: int
    end: int
    place: int
    """Place at the end of the edge."""


class PrefixIndex:
    """A radix tree of the paths of a graph, in which paths share the tokens with which they begin.

    Each edge begins with another token, so the work of `find` grows with the number of tokens in the sequence, and not
    with the number of nodes. Places have numbers, and edges refer to the tokens of the nodes.
    """

    def __init__(self) -> None:
        self._edges: list[dict[int, _Edge]] = [{}]
        """Edges after each place, by their first token."""
        self._nodes_at: list[list[int]] = [[]]
        """Ids of the nodes whose paths end at each place."""
        self._places: list[int] = []
        """Place at the end of each node."""

    def add(self, nodes: Sequence[Node]) -> None:
        """Add the nodes of a graph that are not in the index. `nodes`: all nodes of the graph."""
        for node in nodes[len(self._places) :]:
            place = self._place_after(ROOT if node.parent is None else self._places[node.parent], node.token_ids)
            self._nodes_at[place].append(node.id)
            self._places.append(place)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Ids of all nodes whose paths are a prefix of the tokens, the shortest paths first."""
        tokens, position, place, found = tuple(token_ids), 0, ROOT, list(self._nodes_at[ROOT])
        while position < len(tokens) and (edge := self._edges[place].get(tokens[position])) is not None:
            length = edge.end - edge.start
            if tokens[position : position + length] != edge.token_ids[edge.start : edge.end]:
                break
            position, place = position + length, edge.place
            found += self._nodes_at[place]
        return found

    def _place_after(self, place: int, token_ids: tuple[int, ...]) -> int:
        """The place of tokens after a place, which is made if there is none."""
        position = 0
        while position < len(token_ids):
            edge = self._edges[place].get(token_ids[position])
            if edge is None:
                return self._add_edge(place, token_ids, position, len(token_ids))
            known, new = edge.token_ids[edge.start : edge.end], token_ids[position : position + edge.end - edge.start]
            length = len(new) if known == new else _num_equal(known, new)
            place = edge.place if length == len(known) else self._split(place, edge, length)
            position += length
        return place

    def _add_edge(self, place: int, token_ids: tuple[int, ...], start: int, end: int) -> int:
        """Add an edge to a new place, which is returned."""
        self._edges.append({})
        self._nodes_at.append([])
        self._edges[place][token_ids[start]] = _Edge(token_ids, start, end, len(self._edges) - 1)
        return len(self._edges) - 1

    def _split(self, place: int, edge: _Edge, length: int) -> int:
        """Divide an edge after a number of its tokens. Returns the new place between its parts."""
        middle = self._add_edge(place, edge.token_ids, edge.start, edge.start + length)
        rest = edge._replace(start=edge.start + length)
        self._edges[middle][rest.token_ids[rest.start]] = rest
        return middle


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    length = min(len(first), len(second))
    return next(itertools.compress(itertools.count(), map(operator.ne, first, second)), length)
