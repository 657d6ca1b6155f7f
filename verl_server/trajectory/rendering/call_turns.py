"""Turns with tool calls in a chat template: where they end, and the text that the template renders after them.

Some templates refuse results of tools without calls before them, or read the names of the tools from the calls. So the
renderer renders results after a turn with calls. These calls only stand for those that the policy has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_server.trajectory.rendering.foreign_text import ControlTokens
from verl_server.trajectory.rendering.messages import ASSISTANT_PLACEHOLDER, Message, as_json, stand_in_calls
from verl_server.types import Json

MAX_CACHED_TURNS = 64
ApplyTemplate = Callable[[Sequence[Message], Sequence[Json] | None, bool], str]
"""Renders messages with tools. The last argument: whether the header of the next turn is added."""


class CallTurns:
    """Renders results of tools after a turn with calls. Keeps rendered turns: most results are of a few tools."""

    def __init__(self, apply_template: ApplyTemplate, control_tokens: ControlTokens) -> None:
        self._apply_template, self._control_tokens = apply_template, control_tokens
        self._turns: dict[bytes, tuple[str, int | None]] = {}
        """Rendered turns, and where they end. The text is empty if the template does not show turns with calls."""

    def render(
        self, history: Sequence[Message], results: Sequence[Message], tools: Sequence[Json] | None
    ) -> tuple[str, int | None]:
        """The text of `history`, a turn with calls and `results`, and the offset of the end marker of the turn.

        The offset is None if the template has no end marker for all turns, or if the results change how the turn is
        rendered. The text is empty if the template does not show turns with calls. Raises BadInputError if the template
        refuses the messages.
        """
        plain = {"role": "assistant", "content": ASSISTANT_PLACEHOLDER}
        turns = [*history, plain | stand_in_calls(results)]
        key, text = as_json([turns, tools]), self._apply_template([*turns, *results], tools, True)
        turn, end = self._turns.get(key, (None, None))
        if turn is None or not text.startswith(turn):  # a template may write the present date
            turn, end = self._render_turn(turns, [*history, plain], tools)
            if len(self._turns) >= MAX_CACHED_TURNS:
                self._turns.clear()
            self._turns[key] = turn, end
        return text if turn else "", end if text.startswith(turn) else None

    def _render_turn(
        self, turns: Sequence[Message], without_calls: Sequence[Message], tools: Sequence[Json] | None
    ) -> tuple[str, int | None]:
        """The text of `turns`, of which the last turn has calls, and the offset of its end marker.

        The end marker is a control token at the end of the turn, with the white space after it. A turn without calls
        ends with a control token too, which may be another one: otherwise the token may close a call.
        """
        turn, plain = self._apply_template(turns, tools, False), self._apply_template(without_calls, tools, False)
        before, found, _ = plain.rpartition(ASSISTANT_PLACEHOLDER)
        if found and before.startswith(turn):
            return "", None
        end, end_without_calls = self._control_tokens.find_end(turn), self._control_tokens.find_end(plain)
        has_end = bool(found) and end_without_calls > len(before) and end > turn.rfind(ASSISTANT_PLACEHOLDER)
        return turn, end if has_end else None
