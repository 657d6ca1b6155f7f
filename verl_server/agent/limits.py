"""Limits of an episode, and the exception that ends an episode at a limit."""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.argument_names import explain_constructor
from verl_server.config import Positive, PositiveInt
from verl_server.type_checks import check_fields


@explain_constructor
@dataclass(frozen=True)
class RolloutLimits:
    """Limits of one episode over all of its turns. The stop reason of an episode is the name of the limit it reached.

    Raises BadInputError for a limit that is not a whole number of at least 1, and for a `timeout_s` that is not a
    positive number.
    """

    max_response_tokens: PositiveInt | None = None
    """Maximum number of tokens after the first prompt: sampled tokens, and tokens of tool results and messages. None:
    `max_context_tokens` is the only limit of the number of tokens."""
    max_turns: PositiveInt = 64
    """Maximum number of turns that the policy generates."""
    timeout_s: Positive | None = None
    """Maximum duration in seconds. A turn that is being generated is abandoned; tools have their own timeout."""
    max_tool_tokens: PositiveInt = 2048
    """Maximum number of text tokens of one tool result, and of one text of `Episode.append_text`. A longer text is
    truncated; the episode goes on."""
    max_context_tokens: PositiveInt | None = None
    """Maximum number of tokens of prompt plus response. None: a runner takes the context length of its engine, less 6
    tokens that SGLang reserves, if the engine can be asked. For an engine that cannot be asked, pass the context length
    less 6: an episode then stops at this limit, and does not fail at the context length of the server."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def has_token_limit(self) -> bool:
        """Whether the number of tokens of an episode is limited. An `Episode` needs such a limit."""
        return self.max_response_tokens is not None or self.max_context_tokens is not None


class EpisodeStopped(BaseException):
    """An episode has reached a limit. Raised through the agent loop of the episode, and caught by `run_episode`.

    It is no `Exception`, so that an agent loop which repeats failed turns with `except Exception` ends at the limit.
    Code that runs another episode, for example a reward or a tool, must catch the `EpisodeStopped` of that other
    episode. Otherwise the code fails with a RuntimeError.
    """

    def __init__(self, stop_reason: str, state: object) -> None:
        super().__init__(f"the episode reached its limit {stop_reason}")
        self.stop_reason = stop_reason
        """Name of the field of `RolloutLimits`."""
        self._state = state

    def is_of(self, state: object) -> bool:
        """Whether the episode with this `EpisodeState` has reached the limit."""
        return self._state is state


class LastStop:
    """Remembers at which limit the last block with this context manager has stopped. The exception goes on."""

    stop_reason: str | None = None
    """Name of the limit. None if the block did not stop at a limit."""

    def __enter__(self) -> None:
        self.stop_reason = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EpisodeStopped):
            self.stop_reason = error.stop_reason
