"""Splits a turn into its thoughts and its text while the turn is generated."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from verl_server.agent.tools.parsing import opens_thought
from verl_server.gateway.turn_text.token_decoder import TokenDecoder, decodes_in_parts
from verl_server.gateway.turn_text.turn_parsing import (
    CALL_START,
    THOUGHT_END,
    THOUGHT_START,
    is_split_by_text,
    is_text_stripped,
)
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer

MAX_STOP_CHARACTERS = 1024
"""Maximum number of characters of all stop sequences of a request whose text is sent while it is generated."""


class _Part(Enum):
    """The part of the turn to which the next characters belong."""

    START = auto()
    """A thought or the text: the first characters tell."""
    THOUGHT = auto()
    TEXT = auto()
    REST = auto()
    """What is known at the end of the turn only, for example tool calls."""


class TurnSplitter:
    """Thoughts and text of one turn, as far as they are certain.

    What `add` returns is always the beginning of the thoughts and the text that `split_turn` (`unsplit_turn` with
    `is_raw`) gives for the whole turn, cut off at the stop sequence that ended the turn. White space is returned
    together with the characters after it: at the end of a thought or a text it may belong to neither. Nothing is
    returned from the first tool call or the first stop sequence on. Nothing at all is returned for families of models
    that are not split by their text (`is_split_by_text`), and for tokenizers that remove spaces between words.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        preceding_ids: Sequence[int],
        stop: Sequence[str],
        *,
        is_raw: bool = False,
        allows_calls: bool = True,
    ) -> None:
        """`preceding_ids`: token ids before the turn. `stop`: stop sequences of the request. `allows_calls`: whether
        the request allows calls. Otherwise a call is text.
        """
        self._decoder = TokenDecoder(renderer)
        self._stop = tuple(stop)
        self._text_marks = (CALL_START,) if allows_calls and not is_raw else ()
        self._is_open = not is_raw and opens_thought(renderer, preceding_ids)
        self._thought = _WithoutSpace(None)
        self._text = _WithoutSpace(None if not is_raw and is_text_stripped(renderer) else "")
        is_certain = (
            (is_raw or is_split_by_text(renderer))
            and sum(map(len, stop)) <= MAX_STOP_CHARACTERS
            and decodes_in_parts(renderer)
        )
        self._part = (_Part.TEXT if is_raw else _Part.START) if is_certain else _Part.REST
        self._held = ""
        """Characters that may be the beginning of a stop sequence."""
        self._pending = ""
        """Characters that may be the beginning of a mark."""
        self._first_space = list[str]()
        """White space at the beginning of the turn."""

    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The thoughts and the text that are certain after these tokens, and were not returned before."""
        if self._part is _Part.REST:
            return "", ""
        found, stop, self._held = _take_until(self._held + self._decoder.add(token_ids), self._stop)
        self._pending += found
        reasoning, text = self._split()
        if stop is not None:
            self._part = _Part.REST
        return reasoning, text

    def _split(self) -> tuple[str, str]:
        """The thoughts and the text in the pending characters."""
        reasoning = text = ""
        if self._part is _Part.START:
            self._find_start()
        if self._part is _Part.THOUGHT:
            found, mark, self._pending = _take_until(self._pending, (THOUGHT_END, CALL_START))
            reasoning = self._thought.add(found)
            if mark == THOUGHT_END:
                self._part, self._text = _Part.TEXT, _WithoutSpace(None if self._text.left is None else "\n")
            elif mark == CALL_START:  # a part of the thought, or the end of a thought that has no end mark
                self._part = _Part.REST
        if self._part is _Part.TEXT:
            found, mark, self._pending = _take_until(self._pending, self._text_marks)
            text = self._text.add(found)
            if mark is not None:
                self._part = _Part.REST
        return reasoning, text

    def _find_start(self) -> None:
        """Find out whether the turn begins with a thought."""
        first = self._pending.lstrip()
        self._first_space.append(self._pending[: len(self._pending) - len(first)])
        self._pending = first
        if first.startswith(THOUGHT_START):
            self._part, self._pending = _Part.THOUGHT, first.removeprefix(THOUGHT_START)
        elif not THOUGHT_START.startswith(first):
            self._part = _Part.THOUGHT if self._is_open else _Part.TEXT
            self._pending = "".join((*self._first_space, first))


def _take_until(pending: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """The characters before the first of the marks, the mark, and the characters after it.

    Without a mark: the characters that begin no mark, None, and the characters that may begin a mark.
    """
    places = [(place, mark) for mark in marks if (place := pending.find(mark)) >= 0]
    if places:
        place, mark = min(places)
        return pending[:place], mark, pending[place + len(mark) :]
    lengths = (length for length in range(min(len(pending), max(map(len, marks), default=0)), 0, -1))
    held = next((length for length in lengths if any(mark.startswith(pending[-length:]) for mark in marks)), 0)
    return pending[: len(pending) - held], None, pending[len(pending) - held :]


class _WithoutSpace:
    """Characters one after the other, without white space at the end, and without `left` at the beginning.

    `left`: characters that are removed at the beginning. None: all white space.
    """

    def __init__(self, left: str | None) -> None:
        self.left = left
        self._has_begun = False
        self._space = list[str]()
        """White space after the characters that were returned."""

    def add(self, text: str) -> str:
        """The characters up to the last that is no white space."""
        if not self._has_begun:
            text = text.lstrip(self.left)
            self._has_begun = bool(text)
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        found = "".join((*self._space, body))
        self._space = [text[len(body) :]]
        return found
