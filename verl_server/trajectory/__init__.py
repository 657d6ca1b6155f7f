"""Recorded sessions: token graphs of agent turns, rendering of prompts, files on disk, and batches for trainers.

All names are imported lazily: `import verl_server.trajectory` loads neither torch nor SGLang nor `renderers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.trajectory.batches.conversion import to_batch, to_packed
    from verl_server.trajectory.batches.routed_experts import ExpertLayout
    from verl_server.trajectory.batches.tree import to_tree
    from verl_server.trajectory.divergence import Divergence, find_divergences
    from verl_server.trajectory.exports.atif_export import to_atif
    from verl_server.trajectory.exports.atif_import import from_atif
    from verl_server.trajectory.exports.litellm_export import to_litellm
    from verl_server.trajectory.exports.verifiers_export import to_verifiers
    from verl_server.trajectory.exports.verifiers_import import from_verifiers
    from verl_server.trajectory.graph import TrajectoryGraph
    from verl_server.trajectory.nodes import NO_VERSION, ForkReason, Node, Note, Span, TokenSequence
    from verl_server.trajectory.recorder import Recorder, list_sessions, load_session, session_file
    from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
    from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer
    from verl_server.trajectory.rendering.images import image_data_url
    from verl_server.trajectory.rendering.messages import ASSISTANT_PLACEHOLDER, Message, ParsedToolCall, image_sources
    from verl_server.trajectory.rendering.vision_renderer import VisionRenderer
    from verl_server.trajectory.template_check.check import CheckedConversation, TemplateReport, check_template
    from verl_server.trajectory.template_check.comparison import Verdict
    from verl_server.trajectory.termination import Termination
    from verl_server.trajectory.vision import VisionInputs

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
        "verl_server.trajectory.batches.conversion": (
            "to_batch",
            "to_packed",
        ),
        "verl_server.trajectory.batches.routed_experts": ("ExpertLayout",),
        "verl_server.trajectory.batches.tree": ("to_tree",),
        "verl_server.trajectory.divergence": (
            "Divergence",
            "find_divergences",
        ),
        "verl_server.trajectory.exports.atif_export": ("to_atif",),
        "verl_server.trajectory.exports.atif_import": ("from_atif",),
        "verl_server.trajectory.exports.litellm_export": ("to_litellm",),
        "verl_server.trajectory.exports.verifiers_export": ("to_verifiers",),
        "verl_server.trajectory.exports.verifiers_import": ("from_verifiers",),
        "verl_server.trajectory.graph": ("TrajectoryGraph",),
        "verl_server.trajectory.nodes": (
            "NO_VERSION",
            "ForkReason",
            "Node",
            "Note",
            "Span",
            "TokenSequence",
        ),
        "verl_server.trajectory.recorder": (
            "Recorder",
            "list_sessions",
            "load_session",
            "session_file",
        ),
        "verl_server.trajectory.rendering.chat_renderer": ("ChatRenderer",),
        "verl_server.trajectory.rendering.families": (
            "FamilyRenderer",
            "get_renderer",
        ),
        "verl_server.trajectory.rendering.images": ("image_data_url",),
        "verl_server.trajectory.rendering.messages": (
            "ASSISTANT_PLACEHOLDER",
            "Message",
            "ParsedToolCall",
            "image_sources",
        ),
        "verl_server.trajectory.rendering.vision_renderer": ("VisionRenderer",),
        "verl_server.trajectory.template_check.check": (
            "CheckedConversation",
            "TemplateReport",
            "check_template",
        ),
        "verl_server.trajectory.template_check.comparison": ("Verdict",),
        "verl_server.trajectory.termination": ("Termination",),
        "verl_server.trajectory.vision": ("VisionInputs",),
    },
)
