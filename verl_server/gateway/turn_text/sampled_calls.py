"""Calls and results in a conversation, with the ids and the names that the policy has sampled."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.gateway.conversation import AssistantTurn
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json


class SampledCalls:
    """The calls of a session. An agent repeats the ids of the gateway, and some policies read the ids that they wrote.

    The renderer of a family needs the name of the tool beside each result. Agents send the id of the call only.
    """

    def __init__(self) -> None:
        self._sampled_ids: dict[str, str] = {}
        """Ids that the policy has sampled, by the ids of the gateway."""

    def add(self, turn: AssistantTurn) -> AssistantTurn:
        """Add the calls of a turn, which is returned."""
        self._sampled_ids |= {call.id: call.sampled_id for call in turn.tool_calls if call.sampled_id is not None}
        return turn

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
