"""Agents: agent loops and their tools, episodes within limits, and runners for many tasks.

All names are imported lazily: `import verl_server.agent` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.agent.chat_scheduler import ChatScheduler, TurnCallback
    from verl_server.agent.episode import Episode, Task, Turn
    from verl_server.agent.fair_scheduler import FairScheduler
    from verl_server.agent.generate_fn import GenerateFn, as_generate_fn
    from verl_server.agent.limits import EpisodeStopped, RolloutLimits
    from verl_server.agent.loops import (
        AgentLoop,
        InterleavedLoop,
        SingleTurnLoop,
        ToolAgentLoop,
        get_agent_loop,
        register_agent_loop,
    )
    from verl_server.agent.mcp_client import mcp_tools
    from verl_server.agent.progress import with_progress
    from verl_server.agent.runner import RewardFn, RolloutRunner, RunnerCounters
    from verl_server.agent.samples import Sample, SampleGroup
    from verl_server.agent.tool_parsing import parse_hermes_tool_calls
    from verl_server.agent.tools import FunctionTool, Tool, ToolArgumentsError, ToolCall, ToolRegistry, ToolResult

__all__ = [
    "AgentLoop",
    "ChatScheduler",
    "Episode",
    "EpisodeStopped",
    "FairScheduler",
    "FunctionTool",
    "GenerateFn",
    "InterleavedLoop",
    "RewardFn",
    "RolloutLimits",
    "RolloutRunner",
    "RunnerCounters",
    "Sample",
    "SampleGroup",
    "SingleTurnLoop",
    "Task",
    "Tool",
    "ToolAgentLoop",
    "ToolArgumentsError",
    "ToolCall",
    "ToolRegistry",
    "ToolResult",
    "Turn",
    "TurnCallback",
    "as_generate_fn",
    "get_agent_loop",
    "mcp_tools",
    "parse_hermes_tool_calls",
    "register_agent_loop",
    "with_progress",
]

_MODULES = {
    "AgentLoop": "loops",
    "ChatScheduler": "chat_scheduler",
    "Episode": "episode",
    "EpisodeStopped": "limits",
    "FairScheduler": "fair_scheduler",
    "FunctionTool": "tools",
    "GenerateFn": "generate_fn",
    "InterleavedLoop": "loops",
    "RewardFn": "runner",
    "RolloutLimits": "limits",
    "RolloutRunner": "runner",
    "RunnerCounters": "runner",
    "Sample": "samples",
    "SampleGroup": "samples",
    "SingleTurnLoop": "loops",
    "Task": "episode",
    "Tool": "tools",
    "ToolAgentLoop": "loops",
    "ToolArgumentsError": "tools",
    "ToolCall": "tools",
    "ToolRegistry": "tools",
    "ToolResult": "tools",
    "Turn": "episode",
    "TurnCallback": "chat_scheduler",
    "as_generate_fn": "generate_fn",
    "get_agent_loop": "loops",
    "mcp_tools": "mcp_client",
    "parse_hermes_tool_calls": "tool_parsing",
    "register_agent_loop": "loops",
    "with_progress": "progress",
}
"""Module of this package that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
