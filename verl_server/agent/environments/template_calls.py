"""Whether `ToolAgentLoop` finds the tool calls that a model writes, according to the chat template of the model."""

from __future__ import annotations

from verl_server.agent.loops import ToolAgentLoop
from verl_server.agent.samples import Turn
from verl_server.agent.tools.tool import ToolCall
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.template_check.call_turn import ARGUMENTS, NAME, sample_call_turn

CURE = (
    "Pass the renderer of the model family, get_renderer(tokenizer, family=...), or define parse_tool_calls in a "
    "subclass of ToolAgentLoop"
)
"""What to do if the calls are not found."""


def find_unread_call(renderer: ChatRenderer) -> str | None:
    """Why the calls that the chat template writes are not found, in one sentence. Empty if they are found.

    The turn is read as `ToolAgentLoop` reads the turns of a policy. None if the template does not show how a call is
    written.
    """
    if (sampled := sample_call_turn(renderer)) is None:
        return None
    turn_ids, tools = sampled
    parsed, decoded = renderer.parse_turn(turn_ids, (), tools), renderer.decode(turn_ids)
    text = renderer.decode_raw(turn_ids, decoded)
    calls = ToolAgentLoop().parse_tool_calls(
        Turn(decoded, turn_ids, 0, "stop", None if parsed is None else parsed.tool_calls, text)
    )
    if calls == [ToolCall(NAME, ARGUMENTS)]:
        return ""
    if not calls:
        return f"the chat template writes the call of a tool as {text!r}, in which ToolAgentLoop finds no call"
    (call, *_) = calls
    found = f"{call.name}({call.arguments})" if isinstance(call, ToolCall) else f"{call.content!r}"
    return f"the chat template writes the call of a tool as {text!r}, which ToolAgentLoop reads as {found}"
