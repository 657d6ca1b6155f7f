"""Requests that are sent again after something failed: each of them has one recorded turn. No test needs a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_gateway_faults import Served, renderer

from verl_server.trajectory import ChatRenderer, load_session

__all__ = ["renderer"]

RETRY = {"x-stainless-retry-count": "1"}


def num_turns(served: Served) -> int:
    """Number of recorded turns of the session `a`."""
    return sum(node.sampled for node in load_session(served.store.record_file("a")).nodes)


class UnreadableTurns(ChatRenderer):
    """A renderer that cannot parse turns."""

    def parse_turn(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the turn cannot be parsed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, RETRY])
def test_a_turn_that_cannot_be_read_is_not_sampled_again(
    renderer: ChatRenderer, tmp_path: Path, headers: dict[str, str], stream: bool
) -> None:
    """Also not by a later gateway, which serves the other requests of the session."""

    async def run(served: Served, key: dict[str, str]) -> None:
        served.engine.go.set()
        for sent in (key, key | headers, key | headers):
            reply = await served.post(sent, stream=stream)
            assert reply.status_code == (200 if stream else 500)
            assert "RuntimeError" in reply.text
        assert num_turns(served) == 1

    first = Served(UnreadableTurns(renderer.tokenizer), tmp_path)
    key = first.key("a")
    asyncio.run(run(first, key))
    first.store.close()
    second = Served(UnreadableTurns(renderer.tokenizer), tmp_path)
    asyncio.run(run(second, key))
    second.store.close()
    third = Served(renderer, tmp_path)
    third.engine.go.set()
    assert asyncio.run(third.post(key | RETRY, stream=stream)).status_code == 200
    assert (num_turns(third), third.engine.num_calls) == (1, 0)
