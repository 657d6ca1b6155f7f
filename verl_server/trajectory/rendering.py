"""Messages to tokens without ever tokenizing twice: the prompt of a turn is what is there plus a suffix.

Chat templates render whole conversations. Here one is asked only for what follows an assistant's turn, behind a short
stand-in for the history: work grows with the new messages alone, and what earlier turns were made of does not matter
(a template that strips their thoughts cannot reach the ids that are recorded). That this is what the template means is
proved on the template itself, once; one that cannot be cut so is refused (UnsupportedError), never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError

Json = dict[str, Any]
Message = Mapping[str, Any]

MARK = "\u2042verl\u2042"
"""The stand-in for what the policy said; in no template and no message."""
HISTORIES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "a"},),
    (
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ),
)
PROBES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "f"},),
    ({"role": "user", "content": " \n g"}, {"role": "user", "content": "h"}),
)
CHARACTERS = 16
"""That a token says at most, nearly always."""
CUT = " [cut]"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Call:
    """A tool call in a turn's tokens, well-formed or not."""

    raw: str
    """What the policy said."""
    name: str | None
    arguments: Json | None
    fault: str | None
    """Why it cannot be read."""


class Renderer:
    """One tokenizer with its chat template (a Hugging Face tokenizer: `apply_chat_template`, `encode`).

    Raises UnsupportedError when the template does not render what follows a turn independently of the turns before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedError("this tokenizer has no chat template")
        self._prove()

    def _prove(self) -> None:
        for probe in PROBES:
            suffixes = {self._rest(history, probe) for history in HISTORIES}
            if len(suffixes) > 1:
                raise UnsupportedError(
                    f"this chat template renders {probe[0]['role']!r} messages differently after different histories: "
                    f"{sorted(suffixes)}"
                )
            (rest,) = suffixes
            for before in ("x", "x ", "y\n"):
                apart = [*self._encode(before), *self._encode(rest)]
                if self._encode(before + rest) != apart:
                    raise UnsupportedError(f"the tokenizer joins what a policy says with what follows: {rest[:40]!r}")

    def first(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        """The prompt of a conversation's first turn. Raises BadInputError for messages that the template refuses."""
        require_messages(messages)
        return self._encode(self._render(messages, tools))

    def suffix(self, messages: Sequence[Message], after: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """What follows a turn whose tokens were `after` up to the next turn's first token: `messages` and the opening.

        The turn's end belongs to it, unless the policy has said it itself. `before`: what the world said last before
        that turn (a family may have opened a thought there). Raises BadInputError.
        """
        require_messages(messages)
        tokens = self._encode(self._rest(HISTORIES[0], messages))
        return tokens[1:] if after and tokens and after[-1] == tokens[0] else tokens

    def text(self, ids: Sequence[int]) -> str:
        """What tokens say, for people and parsers."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def calls(self, ids: Sequence[int], before: Sequence[int], tools: Sequence[Json]) -> list[Call] | None:
        """The tools that a turn calls; None: only its text can tell."""
        return None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that stands by itself."""
        return self._encode(text)

    def cut(self, text: str, tokens: int) -> str:
        """The text, or as much of its beginning as about so many tokens say, and a word that there was more."""
        text, more = text[: CHARACTERS * tokens], len(text) > CHARACTERS * tokens  # never encode ten megabytes
        ids = self._encode(text)
        if len(ids) <= tokens and not more:
            return text
        return self.text(ids[:tokens]) + CUT

    def _rest(self, history: Sequence[Message], messages: Sequence[Message]) -> str:
        """What the template puts behind an assistant's turn."""
        text = self._render([*history, {"role": "assistant", "content": MARK}, *messages], None)
        _, found, rest = text.rpartition(MARK)
        if not found:
            raise UnsupportedError("this chat template does not show what an assistant said before other messages")
        return rest

    def _render(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:
            raise BadInputError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def require_messages(messages: Sequence[Message]) -> None:
    """Raises BadInputError for what is no list of messages."""
    if not messages:
        raise BadInputError("there are no messages")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
        if not isinstance(message, Mapping) or not isinstance(role, str) or role not in ROLES:
            raise BadInputError(f"message {number} has the role {role!r}; roles are {sorted(ROLES)}")
        content = message.get("content")
        if not (content is None or isinstance(content, (str, list))):
            raise BadInputError(f"the content of message {number} is a {type(content).__name__}, not text or parts")
        if isinstance(content, str) and MARK in content:
            raise BadInputError(f"message {number} contains the mark {MARK!r} that stands for sampled text")
