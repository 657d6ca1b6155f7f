"""The field `tool_choice`: which tools a turn may call, or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_server.gateway.dialects.fields import bad_request
from verl_server.types import Json

SUPPORTED = "use auto, none, required or one function"


def force_call(tools: Sequence[Json], name: Any = None) -> tuple[str, ...]:
    """The names of the tools of which the turn must call one: all tools, or the tool `name`.

    Raises GatewayError if there is no such tool.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names:
        raise bad_request("'tool_choice' forces a call, but the request has no tools that the policy can call")
    if name is None:
        return names
    if not isinstance(name, str) or name not in names:
        raise bad_request(f"'tool_choice' names the tool {str(name)[:80]!r}, which is not in 'tools'")
    return (name,)


def parse_openai_choice(body: Json, tools: Sequence[Json]) -> tuple[Sequence[Json], tuple[str, ...] | None]:
    """The tools that the policy sees, and the names of those of which the turn must call one. None: no call is forced.
    Empty: the turn has no call.

    A function is named in the way of chat completions, or in that of responses.
    """
    choice = body.get("tool_choice")
    if choice is None or choice == "auto":
        return tools, None
    if choice == "none":
        return (), ()
    if choice == "required":
        return tools, force_call(tools)
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else choice.get("name")
        return tools, force_call(tools, "" if named is None else named)
    raise bad_request(f"'tool_choice' = {str(choice)[:40]} is not supported: {SUPPORTED}")
