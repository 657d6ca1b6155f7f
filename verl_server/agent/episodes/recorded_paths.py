"""Lets an episode end at paths that other code has recorded in its graph, for example a session of the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.agent.episodes.episode import Episode


def end_at(episode: Episode, ends: Sequence[int]) -> None:
    """Make a branch of each path to `ends`, and let the episode end with the path that has the most turns.

    Each path is a segment of the sample, for example that of a sub-agent, or the conversation before a compaction. Of
    paths with equally many turns, the episode ends with the last one.
    """
    branches = []
    for end in ends:
        branch = episode.fork(end)
        branch._cursor.has_turns = True
        branches.append(branch)
    if branches:
        episode.adopt(max(reversed(branches), key=lambda branch: episode.graph.num_turns(branch.leaf or 0)))
