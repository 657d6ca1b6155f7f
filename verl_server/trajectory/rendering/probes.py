"""Conversations and texts with which a chat template and a tokenizer are checked when a renderer is made."""

from __future__ import annotations

from verl_server.trajectory.rendering.messages import Message, with_call_ids
from verl_server.types import Json

FIRST_HISTORY: tuple[Json, ...] = ({"role": "user", "content": "a"},)
LATER_TURNS: tuple[Json, ...] = (
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
)
OTHER_HISTORIES: tuple[tuple[Json, ...], ...] = (LATER_TURNS, ({"role": "system", "content": "b"}, *LATER_TURNS))
"""Conversations after which new messages must be rendered as after `FIRST_HISTORY`. Some templates refuse the last."""
PROBE_MESSAGES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "f"},),
    ({"role": "user", "content": " \n g"}, {"role": "user", "content": "h"}),
)
"""New messages with which a template is checked, where it accepts them: some templates refuse two user messages."""
PROBE_RESULTS: tuple[Message, ...] = tuple(with_call_ids([{"role": "tool", "content": "r"}]))
"""The result of a tool, with which a template is checked when it gets tools."""
PROBE_TURN_ENDS = ("x", "x ", "y\n")
"""Ends of assistant turns after which the tokenizer must keep a token boundary."""
