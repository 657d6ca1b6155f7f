"""Calls and results in a conversation, with the ids and the names that the policy has sampled."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.gateway.conversation import AssistantTurn
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json


class SampledCalls:
    """The calls of a session. Agents repeat the ids of the gateway, or other ids in their place. Some policies read the
    ids that they wrote.

    The renderer of a family needs the name of the tool beside each result. Agents send the id of the call only.
    """

    def __init__(self) -> None:
        self._sampled_ids: dict[str, str] = {}
        """Ids that the policy has sampled, by the ids of the gateway."""
        self._ids = dict[int, list[str]]()
        """Ids of the gateway for the calls of each turn, by the node of the turn."""
        self.nodes = dict[str, int]()
        """The node of the turn of each call, by the id of the gateway."""

    def add(self, turn: AssistantTurn) -> AssistantTurn:
        """Add the calls of a turn, which is returned."""
        self._sampled_ids |= {call.id: call.sampled_id for call in turn.tool_calls if call.sampled_id is not None}
        if turn.tool_calls:
            self._ids[turn.node] = [call.id for call in turn.tool_calls]
            self.nodes |= dict.fromkeys(self._ids[turn.node], turn.node)
        return turn

    def as_issued(self, node: int, turn: Message, messages: Sequence[Message]) -> list[Message]:
        """A recorded turn and the messages after it, with the ids of the gateway. `turn`: as the agent has sent it."""
        calls: Sequence[Json] = turn.get("tool_calls") or ()
        issued = {call["id"]: call_id for call, call_id in zip(calls, self._ids.get(node, ()), strict=False)}
        renamed = [{**call, "id": issued.get(call["id"], call["id"])} for call in calls]
        return [
            {**turn, "tool_calls": renamed} if calls else turn,
            *(
                {**message, "tool_call_id": issued[call_id]}
                if (call_id := message.get("tool_call_id")) in issued
                else message
                for message in messages
            ),
        ]

    def as_sampled(self, before: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
        """The messages for the policy. `before`: messages before them, with the calls whose results they may have.

        Results get the name of the call with their id. A result without such a call gets no name.
        """
        names = dict[str, str]()
        return [self._convert(message, names) for message in (*before, *messages)][len(before) :]

    def _convert(self, message: Message, names: dict[str, str]) -> Message:
        """`names`: names of the calls by the ids of the agent. Gets those of the message."""
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            named = {"name": names[call_id]} if call_id in names else {}
            return {**message, **named, "tool_call_id": self._sampled_ids.get(call_id, call_id)}
        calls: Sequence[Json] = message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls}
        known = [{**call, "id": self._sampled_ids.get(call["id"], call["id"])} for call in calls]
        return {**message, "tool_calls": known} if known else message
