"""Agents: agent loops and their tools, episodes within limits, and runners for many tasks.

All names are imported lazily: `import verl_server.agent` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.agent.chat_scheduler import ChatScheduler, TurnCallback
    from verl_server.agent.environments.environment import Environment
    from verl_server.agent.environments.rewards import RewardFn, reward
    from verl_server.agent.episodes.episode import Episode
    from verl_server.agent.generate_fn import GenerateFn, as_generate_fn
    from verl_server.agent.groups.group_filter import GroupFilter, has_variance
    from verl_server.agent.groups.group_runner import RunnerCounters
    from verl_server.agent.groups.step import RolloutStep
    from verl_server.agent.limits import EpisodeStopped, RolloutLimits
    from verl_server.agent.loops import (
        AgentLoop,
        InterleavedLoop,
        SingleTurnLoop,
        ToolAgentLoop,
        get_agent_loop,
        register_agent_loop,
    )
    from verl_server.agent.progress import with_progress
    from verl_server.agent.runner import RolloutRunner
    from verl_server.agent.samples import Sample, SampleGroup, Segment, Task, Turn
    from verl_server.agent.sandboxes.docker_sandbox import DockerSandbox
    from verl_server.agent.sandboxes.local_sandbox import LocalSandbox
    from verl_server.agent.sandboxes.sandbox import CommandResult, Sandbox, SandboxLimits
    from verl_server.agent.tools.mcp_client import mcp_tools
    from verl_server.agent.tools.options import tool
    from verl_server.agent.tools.parsing import parse_hermes_tool_calls
    from verl_server.agent.tools.registry import ToolRegistry
    from verl_server.agent.tools.tool import FunctionTool, Tool, ToolArgumentsError, ToolCall, ToolResult

__all__ = [
    "AgentLoop",
    "ChatScheduler",
    "CommandResult",
    "DockerSandbox",
    "Environment",
    "Episode",
    "EpisodeStopped",
    "FunctionTool",
    "GenerateFn",
    "GroupFilter",
    "InterleavedLoop",
    "LocalSandbox",
    "RewardFn",
    "RolloutLimits",
    "RolloutRunner",
    "RolloutStep",
    "RunnerCounters",
    "Sample",
    "SampleGroup",
    "Sandbox",
    "SandboxLimits",
    "Segment",
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
    "has_variance",
    "mcp_tools",
    "parse_hermes_tool_calls",
    "register_agent_loop",
    "reward",
    "tool",
    "with_progress",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.agent.chat_scheduler": (
            "ChatScheduler",
            "TurnCallback",
        ),
        "verl_server.agent.environments.environment": ("Environment",),
        "verl_server.agent.environments.rewards": ("RewardFn", "reward"),
        "verl_server.agent.episodes.episode": ("Episode",),
        "verl_server.agent.generate_fn": (
            "GenerateFn",
            "as_generate_fn",
        ),
        "verl_server.agent.groups.group_filter": ("GroupFilter", "has_variance"),
        "verl_server.agent.groups.group_runner": ("RunnerCounters",),
        "verl_server.agent.groups.step": ("RolloutStep",),
        "verl_server.agent.limits": (
            "EpisodeStopped",
            "RolloutLimits",
        ),
        "verl_server.agent.loops": (
            "AgentLoop",
            "InterleavedLoop",
            "SingleTurnLoop",
            "ToolAgentLoop",
            "get_agent_loop",
            "register_agent_loop",
        ),
        "verl_server.agent.progress": ("with_progress",),
        "verl_server.agent.runner": ("RolloutRunner",),
        "verl_server.agent.samples": (
            "Sample",
            "SampleGroup",
            "Segment",
            "Task",
            "Turn",
        ),
        "verl_server.agent.sandboxes.docker_sandbox": ("DockerSandbox",),
        "verl_server.agent.sandboxes.local_sandbox": ("LocalSandbox",),
        "verl_server.agent.sandboxes.sandbox": ("CommandResult", "Sandbox", "SandboxLimits"),
        "verl_server.agent.tools.mcp_client": ("mcp_tools",),
        "verl_server.agent.tools.options": ("tool",),
        "verl_server.agent.tools.parsing": ("parse_hermes_tool_calls",),
        "verl_server.agent.tools.registry": ("ToolRegistry",),
        "verl_server.agent.tools.tool": (
            "FunctionTool",
            "Tool",
            "ToolArgumentsError",
            "ToolCall",
            "ToolResult",
        ),
    },
)
