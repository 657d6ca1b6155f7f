"""`RoutedReplica`: one replica as a router knows it: its server, its state and its running requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_server.router.policy import ReplicaLoad
from verl_server.router.replica_status import ReplicaStats
from verl_server.router.snapshot import ReplicaSnapshot


class GenerationServer(Protocol):
    """The part of `AsyncHttpServerEngineAdapter` that a router needs."""

    base_url: str
    api_key: str | None

    async def generate(self, **request: Any) -> Any: ...
    def generate_stream(self, **request: Any) -> Any: ...


@dataclass
class RoutedReplica:
    """One replica of a router: its server, its state and its running requests."""

    name: str
    server: GenerationServer
    """Adapter of the replica's server."""
    weight_version: int
    """Version of the weights that the replica serves."""
    admitted: bool = True
    """Whether the replica may receive requests."""
    suspect: bool = False
    """Whether the replica made no progress for a long time."""
    will_serve: bool = True
    """Whether the replica serves requests, or will serve them again without an action of the user."""
    request_tokens: dict[str, int] = field(default_factory=dict)
    """Number of tokens (prompt and received output) of each running request."""
    num_started: int = 0
    """Number of requests that have started on the replica."""
    last_progress_at: float = field(default_factory=time.monotonic)
    """Time of the last new token, or of the first request after an idle period (`time.monotonic`)."""

    @property
    def running_requests(self) -> int:
        """Number of requests that run on the replica."""
        return len(self.request_tokens)

    def start_request(self, key: str, prompt_tokens: int) -> None:
        """Record that a request runs on the replica."""
        self.request_tokens[key] = prompt_tokens
        self.num_started += 1
        if len(self.request_tokens) == 1:
            self.last_progress_at = time.monotonic()

    def starts_alone(self) -> Callable[[], bool]:
        """A function that says whether the request that starts next has run alone on the replica until now."""
        was_idle, number = not self.request_tokens, self.num_started + 1
        return lambda: was_idle and self.num_started == number

    def record_progress(self, key: str, tokens: int) -> None:
        """Record that a running request has `tokens` tokens, prompt and output together."""
        self.last_progress_at = time.monotonic()
        self.request_tokens[key] = tokens

    def load(self) -> ReplicaLoad:
        """What a routing decision depends on. This runs for every replica and request, so it must be fast."""
        tokens, running = sum(self.request_tokens.values()), len(self.request_tokens)
        return ReplicaLoad(self.name, tokens, running, self.weight_version, self.admitted, self.suspect)

    def stats(self) -> ReplicaStats:
        """What the router observes of the replica's requests."""
        running = self.running_requests
        return ReplicaStats(running, self.last_progress_at if running else 0.0, self.admitted)

    def snapshot(self) -> ReplicaSnapshot:
        """A frozen copy of the replica's state. Any thread may call this."""
        tokens = list(self.request_tokens.values())
        return ReplicaSnapshot(self.name, self.admitted, self.suspect, self.weight_version, len(tokens), sum(tokens))
