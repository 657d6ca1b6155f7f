"""`GatewayConfig`: the settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from verl_server.agent.limits import RolloutLimits
from verl_server.server.process import open_file_limit
from verl_server.types import Json

MIN_ADMIN_KEY_CHARS = 8
"""Minimum number of characters of the key of the admin API, as of the key of a server."""
MIN_SESSION_KEY_CHARS = 16
"""Minimum number of characters of the key of a session."""


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of a gateway."""

    run_dir: Path
    """Folder of the records."""
    admin_key: str | None
    """Key of the admin API. None switches the admin API off."""
    limits: RolloutLimits
    """Limits of each session."""
    is_open: bool = False
    """Whether a request without any key is served, in the session `open`. For a laptop only."""
    model_names: tuple[str, ...] = ("policy",)
    """Names of the model that `/v1/models` lists. Any other name is accepted too."""
    max_body_bytes: int = 16 << 20
    """Maximum number of bytes of a request."""
    max_messages: int = 10_000
    """Maximum number of messages of a request."""
    max_tools: int = 1000
    """Maximum number of tools of a request."""
    max_tool_name_chars: int = 256
    """Maximum number of characters of the name of a tool."""
    max_content_parts: int = 10_000
    """Maximum number of content parts in the messages of a request."""
    max_image_pixels: int = 128 << 20
    """Maximum number of pixels of all images of a request."""
    max_session_requests: int = 256
    """Maximum number of open requests of a session."""
    max_requests: int = 4096
    """Maximum number of open requests of all sessions."""
    max_connections: int = field(default_factory=lambda: min(8192, open_file_limit() // 2))
    """Maximum number of connections, with those that have no open request: at most half of the limit of open files."""
    head_timeout_s: float = 30.0
    """Seconds in which the head of a request must arrive, from the connection or from its first byte on."""
    body_timeout_s: float = 300.0
    """Seconds in which the body of a request must arrive after its head."""
    idle_timeout_s: int = 75
    """Seconds after a reply in which the next request must begin: more than the 60 seconds for which nginx and load
    balancers keep an idle connection. They would send requests on connections that the gateway closes."""
    keep_alive_s: float = 10.0
    """Seconds between two signs of life of a stream whose turn is being generated."""
    session_expiry_s: float | None = None
    """Seconds after which a session ends by itself."""
    chat_template_kwargs: Json = field(default_factory=dict)
    """Variables of the chat template, which agents and sessions may replace."""
