"""The Agent Trajectory Interchange Format (ATIF) of Harbor, version 1.8. Exports write it, and imports read 1.0 to 1.8.

The fields are those of the models in Harbor 0.25.0. As in Harbor, unknown fields and unknown versions are refused. The
comments say what `to_atif` writes into a field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl_server.trajectory.exports.documents import Count, Logprobs, TokenIds
from verl_server.types import Json

ATIF_VERSION: Literal["ATIF-v1.8"] = "ATIF-v1.8"
AtifVersion = Literal[
    "ATIF-v1.0",
    "ATIF-v1.1",
    "ATIF-v1.2",
    "ATIF-v1.3",
    "ATIF-v1.4",
    "ATIF-v1.5",
    "ATIF-v1.6",
    "ATIF-v1.7",
    "ATIF-v1.8",
]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MediaSource(_Closed):
    """The file or URL of an image or of a sound."""

    media_type: str
    path: str
    duration_sec: float | None = None


class ContentPart(_Closed):
    """A text, an image or a sound of a message."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: MediaSource | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Self:
        has_text, has_source = self.text is not None, self.source is not None
        if (has_text, has_source) != (self.type == "text", self.type != "text"):
            raise ValueError("a part of the type 'text' has the field 'text' only, other parts have 'source' only")
        return self


Content = str | list[ContentPart]


class ToolCall(_Closed):
    """A tool call of a turn."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Json | None = None
    """`arguments` has the text of arguments that are no JSON object."""


class SubagentRef(_Closed):
    """The trajectory of a sub-agent: in this document by its id, or in another file."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Json | None = None


class ObservationResult(_Closed):
    """What the environment returned after a turn."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentRef] | None = None
    extra: Json | None = None
    """`tool_call_id` of a result whose call is no call of the turn, and `name` of the tool."""


class Observation(_Closed):
    """All results after a turn."""

    results: list[ObservationResult]


class Metrics(_Closed):
    """Tokens of a turn."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: TokenIds | None = None
    """All tokens of the path before the turn."""
    completion_token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    extra: Json | None = None
    """`finish_reason`, and `weight_versions`: `version`, `start` and `end` of each span."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        num_logprobs, num_tokens = len(self.logprobs or ()), len(self.completion_token_ids or ())
        if self.logprobs and self.completion_token_ids and num_logprobs != num_tokens:
            raise ValueError(f"{num_tokens} completion_token_ids need as many logprobs, got {num_logprobs}")
        return self


class FinalMetrics(_Closed):
    """Sums over a trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: Count | None = None
    extra: Json | None = None
    """`reward`, `rewards` by name, and `weight` of the path in the loss."""


class Agent(_Closed):
    """The agent."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class Step(_Closed):
    """A message or a turn, with the results that follow it."""

    step_id: int
    """Number of the step, from 1."""
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    """True for turns that an earlier path of the session contains, too. They are trained there."""
    llm_call_count: Count | None = None
    """1 for turns of the policy, 0 for messages of the assistant that were given."""
    extra: Json | None = None
    """`role` of a message whose role is not that of the source."""


class Trajectory(_Closed):
    """One document: one path of a session."""

    schema_version: AtifVersion
    session_id: str | None = None
    trajectory_id: str | None = None
    """Session id and id of the last node."""
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    """File name of the path that continues this path with a compacted history."""
    extra: Json | None = None
    """The fields of `PathExtra`."""
    subagent_trajectories: list[Trajectory] | None = None

    @model_validator(mode="after")
    def _steps_are_numbered(self) -> Self:
        for index, step in enumerate(self.steps):
            if step.step_id != index + 1:
                raise ValueError(f"steps[{index}].step_id is {step.step_id}; steps are numbered from 1")
            calls = {call.tool_call_id for call in step.tool_calls or ()}
            for result in step.observation.results if step.observation else ():
                if result.source_call_id is not None and result.source_call_id not in calls:
                    raise ValueError(f"steps[{index}] has a result of the unknown tool call {result.source_call_id!r}")
        return self


class PathExtra(BaseModel):
    """What `to_atif` writes into `Trajectory.extra` for other programs."""

    stop_reason: str | None = None
    conversation_kind: str | None = None
    """Kind of the conversation that the path ends in, for example `main` or `sub_agent`."""
    error: Json | None = None
    """Exception of a failed session."""
    token_ids_after_last_turn: TokenIds | None = None
    """Tokens of the path that no turn follows. No field of ATIF has them."""


def is_link(result: ObservationResult) -> bool:
    """Whether a result is only a reference to the trajectory of a sub-agent."""
    return result.content is None and bool(result.subagent_trajectory_ref)
