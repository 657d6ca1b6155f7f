"""Agents: agent loops and their tools, episodes within limits, and runners for many tasks.

All names are imported lazily: `import verl_server.agent` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.agent.engines import GenerateFn, as_generate_fn
    from verl_server.agent.environments import Environment, RewardFn, reward
    from verl_server.agent.episode import Episode
    from verl_server.agent.limits import EpisodeStopped, RolloutLimits
    from verl_server.agent.loops import (
        AgentLoop,
        ChatScheduler,
        InterleavedLoop,
        SingleTurnLoop,
        ToolAgentLoop,
        TurnCallback,
        get_agent_loop,
        register_agent_loop,
    )
    from verl_server.agent.runner import RolloutRunner, with_progress
    from verl_server.agent.samples import Sample, SampleGroup, Segment, Task, Turn
    from verl_server.agent.sandboxes.docker_sandbox import DockerSandbox
    from verl_server.agent.sandboxes.local_sandbox import LocalSandbox
    from verl_server.agent.sandboxes.sandbox import CommandResult, Sandbox, SandboxLimits
    from verl_server.agent.steps.groups import GroupFilter, RunnerCounters, has_variance
    from verl_server.agent.steps.stream import RolloutStep
    from verl_server.agent.tools.mcp_client import mcp_tools
    from verl_server.agent.tools.parsing import parse_hermes_tool_calls
    from verl_server.agent.tools.tool import (
        FunctionTool,
        Tool,
        ToolArgumentsError,
        ToolCall,
        ToolRegistry,
        ToolResult,
        tool,
    )

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
        "verl_server.agent.environments": ("Environment", "RewardFn", "reward"),
        "verl_server.agent.episode": ("Episode",),
        "verl_server.agent.engines": ("GenerateFn", "as_generate_fn"),
        "verl_server.agent.steps.groups": ("GroupFilter", "RunnerCounters", "has_variance"),
        "verl_server.agent.steps.stream": ("RolloutStep",),
        "verl_server.agent.limits": ("EpisodeStopped", "RolloutLimits"),
        "verl_server.agent.loops": (
            "AgentLoop",
            "ChatScheduler",
            "InterleavedLoop",
            "SingleTurnLoop",
            "ToolAgentLoop",
            "TurnCallback",
            "get_agent_loop",
            "register_agent_loop",
        ),
        "verl_server.agent.runner": ("RolloutRunner", "with_progress"),
        "verl_server.agent.samples": ("Sample", "SampleGroup", "Segment", "Task", "Turn"),
        "verl_server.agent.sandboxes.docker_sandbox": ("DockerSandbox",),
        "verl_server.agent.sandboxes.local_sandbox": ("LocalSandbox",),
        "verl_server.agent.sandboxes.sandbox": ("CommandResult", "Sandbox", "SandboxLimits"),
        "verl_server.agent.tools.mcp_client": ("mcp_tools",),
        "verl_server.agent.tools.tool": (
            "FunctionTool",
            "Tool",
            "ToolArgumentsError",
            "ToolCall",
            "ToolRegistry",
            "ToolResult",
            "tool",
        ),
        "verl_server.agent.tools.parsing": ("parse_hermes_tool_calls",),
    },
)
