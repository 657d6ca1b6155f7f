"""`EngineSource`: what a gateway needs of the engine behind it, which may not be there yet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verl_server.agent.generate_fn import GenerateFn
from verl_server.agent.limits import RolloutLimits
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json


@dataclass(frozen=True)
class EngineParts:
    """The engine as sessions use it."""

    generate: GenerateFn
    renderer: ChatRenderer
    max_tokens: int | None
    """Maximum number of tokens of a prompt with its response. None if the engine does not tell it."""

    def complete_limits(self, limits: RolloutLimits) -> RolloutLimits:
        """The limits, with the context length of the engine as `max_context_tokens` if they have none."""
        return limits if limits.max_context_tokens else dataclasses.replace(limits, max_context_tokens=self.max_tokens)


@dataclass(frozen=True)
class EngineReport:
    """What can be said about the engine at one moment."""

    problems: list[str]
    """Why no turn can be generated now, in words that every agent may read: without addresses. Empty: ready."""
    details: Json
    """The engine, its servers and their errors, for the admin."""


@runtime_checkable
class EngineSource(Protocol):
    """Where a gateway gets its engine from. All methods are called in the event loop of the gateway."""

    async def start(self) -> None:
        """Begin to look for the engine. Does not wait for it."""

    async def close(self) -> None:
        """Give back what `start` has opened. The engine keeps running."""

    def parts(self) -> EngineParts:
        """The engine. Raises GatewayError (503) while it is not known yet."""

    async def report(self) -> EngineReport:
        """Ask the engine how it is. Takes a few seconds at most and raises nothing."""
