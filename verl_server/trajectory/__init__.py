"""Recorded sessions: token graphs of agent turns, rendering of prompts, files on disk, and batches for trainers.

All names are imported lazily: `import verl_server.trajectory` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.trajectory.batches import to_batch, to_packed, to_tree
    from verl_server.trajectory.exports.atif import from_atif, to_atif
    from verl_server.trajectory.exports.litellm import to_litellm
    from verl_server.trajectory.exports.verifiers import from_verifiers, to_verifiers
    from verl_server.trajectory.graph import (
        NO_VERSION,
        Divergence,
        ForkReason,
        Node,
        Note,
        Span,
        Termination,
        TokenSequence,
        TrajectoryGraph,
        find_divergences,
    )
    from verl_server.trajectory.recorder import Recorder, list_sessions, load_session, session_file
    from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
    from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer
    from verl_server.trajectory.rendering.messages import ASSISTANT_PLACEHOLDER, Message, ParsedToolCall, image_sources
    from verl_server.trajectory.rendering.vision import VisionInputs, VisionRenderer, image_data_url
    from verl_server.trajectory.routed_experts import ExpertLayout
    from verl_server.trajectory.template_check import CheckedConversation, TemplateReport, Verdict, check_template

__all__ = [
    "ASSISTANT_PLACEHOLDER",
    "NO_VERSION",
    "ChatRenderer",
    "CheckedConversation",
    "Divergence",
    "ExpertLayout",
    "FamilyRenderer",
    "ForkReason",
    "Message",
    "Node",
    "Note",
    "ParsedToolCall",
    "Recorder",
    "Span",
    "TemplateReport",
    "Termination",
    "TokenSequence",
    "TrajectoryGraph",
    "Verdict",
    "VisionInputs",
    "VisionRenderer",
    "check_template",
    "find_divergences",
    "from_atif",
    "from_verifiers",
    "get_renderer",
    "image_data_url",
    "image_sources",
    "list_sessions",
    "load_session",
    "session_file",
    "to_atif",
    "to_batch",
    "to_litellm",
    "to_packed",
    "to_tree",
    "to_verifiers",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.trajectory.batches": ("to_batch", "to_packed", "to_tree"),
        "verl_server.trajectory.routed_experts": ("ExpertLayout",),
        "verl_server.trajectory.exports.atif": ("from_atif", "to_atif"),
        "verl_server.trajectory.exports.litellm": ("to_litellm",),
        "verl_server.trajectory.exports.verifiers": ("from_verifiers", "to_verifiers"),
        "verl_server.trajectory.graph": (
            "Divergence",
            "ForkReason",
            "NO_VERSION",
            "Node",
            "Note",
            "Span",
            "Termination",
            "TokenSequence",
            "TrajectoryGraph",
            "find_divergences",
        ),
        "verl_server.trajectory.recorder": ("Recorder", "list_sessions", "load_session", "session_file"),
        "verl_server.trajectory.rendering.chat_renderer": ("ChatRenderer",),
        "verl_server.trajectory.rendering.families": ("FamilyRenderer", "get_renderer"),
        "verl_server.trajectory.rendering.vision": ("VisionInputs", "VisionRenderer", "image_data_url"),
        "verl_server.trajectory.rendering.messages": (
            "ASSISTANT_PLACEHOLDER",
            "Message",
            "ParsedToolCall",
            "image_sources",
        ),
        "verl_server.trajectory.template_check": (
            "CheckedConversation",
            "TemplateReport",
            "Verdict",
            "check_template",
        ),
    },
)
