"""Recorded sessions: token graphs of agent turns, rendering of prompts, files on disk, and batches for trainers.

All names are imported lazily: `import verl_server.trajectory` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.trajectory.batches import to_batch, to_packed, to_tree
    from verl_server.trajectory.divergence import Divergence, find_divergences
    from verl_server.trajectory.families import FamilyRenderer, get_renderer
    from verl_server.trajectory.graph import Termination, TrajectoryGraph
    from verl_server.trajectory.messages import ASSISTANT_PLACEHOLDER, Message, image_sources
    from verl_server.trajectory.nodes import NO_VERSION, ForkReason, Node, Span, TokenSequence
    from verl_server.trajectory.recorder import Recorder, list_sessions, load_session, session_file
    from verl_server.trajectory.rendering import ChatRenderer, ParsedToolCall

__all__ = [
    "ASSISTANT_PLACEHOLDER",
    "NO_VERSION",
    "ChatRenderer",
    "Divergence",
    "FamilyRenderer",
    "ForkReason",
    "Message",
    "Node",
    "ParsedToolCall",
    "Recorder",
    "Span",
    "Termination",
    "TokenSequence",
    "TrajectoryGraph",
    "find_divergences",
    "get_renderer",
    "image_sources",
    "list_sessions",
    "load_session",
    "session_file",
    "to_batch",
    "to_packed",
    "to_tree",
]

_MODULES = {
    "ASSISTANT_PLACEHOLDER": "messages",
    "NO_VERSION": "nodes",
    "ChatRenderer": "rendering",
    "Divergence": "divergence",
    "FamilyRenderer": "families",
    "ForkReason": "nodes",
    "Message": "messages",
    "Node": "nodes",
    "ParsedToolCall": "rendering",
    "Recorder": "recorder",
    "Span": "nodes",
    "Termination": "graph",
    "TokenSequence": "nodes",
    "TrajectoryGraph": "graph",
    "find_divergences": "divergence",
    "get_renderer": "families",
    "image_sources": "messages",
    "list_sessions": "recorder",
    "load_session": "recorder",
    "session_file": "recorder",
    "to_batch": "batches",
    "to_packed": "batches",
    "to_tree": "batches",
}
"""Module of this package that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
