"""Control tokens in the text of messages and of tool schemas, which must not become control tokens.

A tokenizer turns `<|im_end|>` in the result of a tool into the token that ends a message. What a web page says would
then become a turn of the assistant. Here a mark is inserted after the first character of each such string, and the text
is tokenized in the parts between the marks. The policy reads the same characters, as ordinary tokens. The same holds
for the schema of a tool, for example from an MCP server.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.messages import ASSISTANT_PLACEHOLDER, IMAGE_TYPES, Message, stand_in_calls
from verl_server.types import Json

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode reserves for the internal use of programs. Texts do not contain them."""
WORD_CHARACTER = re.compile(r"\w")


class ControlTokens:
    """The control tokens of a tokenizer, and how messages that contain their text are marked."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {
            *map(str, getattr(tokenizer, "all_special_tokens", ())),
            *(token.content for token in added if token.special),
        }
        self._special_names = special - {""}
        self.special_ids = frozenset(
            {
                *getattr(tokenizer, "all_special_ids", ()),
                *(index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special),
            }
        )
        """Ids of the tokens that `decode` leaves out of a text."""
        self._can_split = _keeps_parts(tokenizer)
        words = (token.content for token in added if token.content.strip())  # no tokens of white space, as Gemma's
        self._names = {*special, *words} - {""}
        self._special, self._all = _starts_of(special), _starts_of(self._names)
        self._turn = _starts_of(())

    def learn_turn_tokens(self, render: Callable[[Sequence[Message], bool], str], end_markers: str) -> None:
        """Let the tokens that begin and end messages count in all messages. Some tokenizers do not call them special.

        `render`: renders messages, and the header of the next turn if the second argument is true. The texts before
        the first message, which may be instructions, do not count, nor do tokens that are words.
        """
        user, turn, system = (
            {"role": role, "content": ASSISTANT_PLACEHOLDER} for role in ("user", "assistant", "system")
        )
        result: Message = {"role": "tool", "content": ASSISTANT_PLACEHOLDER, "tool_call_id": "call00000", "name": "f"}
        calling = [user, turn | stand_in_calls([result])]

        def parts_of(*messages: Message, is_prompt: bool = False) -> list[str]:
            """The text before, between and after the contents. Empty texts if the template refuses the messages."""
            with contextlib.suppress(Exception):
                if len(parts := render(messages, is_prompt).split(ASSISTANT_PLACEHOLDER)) > len(messages):
                    return parts
            return [""] * (len(messages) + 1)

        _, to_turn, to_user, end = parts_of(user, turn, user)
        turn_header = to_turn.removeprefix(end)
        prompt_header = parts_of(user, is_prompt=True)[-1].removeprefix(end)
        to_result = parts_of(*calling, result)[-2].removeprefix(parts_of(*calling)[-1])
        is_special = self._special_names.__contains__
        found = {*self._tokens_in(end_markers + to_user + end)}
        # The other tokens of these headers may open a thought, which belongs to the text of a turn.
        for header in (turn_header, prompt_header, to_result):
            found |= {name for name in self._tokens_in(header)[:1] if header.lstrip().startswith(name)}
        found |= {*filter(is_special, self._tokens_in(turn_header))} & {*self._tokens_in(prompt_header)}
        before_system = parts_of(system, user)[0].rstrip()
        found |= {name for name in self._tokens_in(before_system)[-1:] if before_system.endswith(name)}
        found = {name for name in found if is_special(name) or not name.isalnum()}
        self._turn, self._special = _starts_of(found), _starts_of({*self._special_names, *found})

    def _tokens_in(self, text: str) -> list[str]:
        names = sorted(filter(text.__contains__, self._names), key=len, reverse=True)
        return re.findall("|".join(map(re.escape, names)), text) if names else []

    def _pattern_of(self, message: Message) -> re.Pattern[str]:
        patterns = {"assistant": self._turn, "tool": self._all}
        return patterns.get(message["role"], self._special)

    def mark_prompt(self, messages: Sequence[Message], tools: Sequence[Json]) -> tuple[list[Message], list[Json], str]:
        """The messages and tools with marks in their texts, and the mark. Empty if no text has the text of a token.

        In the result of a tool and in the schema of a tool, also the text of tokens counts that tokenizers do not call
        special, for example `<tool_call>`. In an assistant message, only tokens that end or begin a message count:
        templates look for the end of a thought in it. Raises BadInputError if no mark is free.
        """
        in_messages = ["".join(_foreign_texts(message)) for message in messages]
        in_tools = ["\n".join(strings_of(tool)) for tool in tools]
        has_tokens = any(
            self._pattern_of(message).search(text) for message, text in zip(messages, in_messages, strict=True)
        )
        if not (has_tokens or any(map(self._all.search, in_tools))):
            return list(messages), list(tools), ""
        named = [tool for tool, text in zip(tools, in_tools, strict=True) if self._all.search(text)]
        mark = self._free_mark([*in_messages, *in_tools], f"the tool {name_of(named[0])!r}" if named else "a message")

        def change(message: Message) -> Message:
            pattern = self._pattern_of(message)
            if message["role"] == "assistant":
                return dict(_map_strings(message, lambda text: pattern.sub(rf"\g<0>{mark}", text)))
            changed = _map_texts(message, lambda text: pattern.sub(rf"\g<0>{mark}", text), mark)
            names = ("name", "tool_call_id") if message["role"] == "tool" else ()
            given = {key: changed[key] for key in names if isinstance(changed.get(key), str)}
            return changed | {key: pattern.sub(rf"\g<0>{mark}", value) for key, value in given.items()}

        marked_tools = [_map_strings(tool, lambda text: self._all.sub(rf"\g<0>{mark}", text)) for tool in tools]
        return [change(message) for message in messages], marked_tools, mark

    def _free_mark(self, texts: Sequence[str], source: str) -> str:
        """A mark that is in none of the texts, also not as JSON. Raises BadInputError. `source`: what has the token."""
        if not self._can_split:
            raise BadInputError(
                f"{source} contains the text of a control token, and this tokenizer cannot tokenize a text in parts: "
                "it would add a space to each part. Remove the text of the token, for example '<|im_end|>'"
            )
        for mark in MARKS:
            if not any(mark in text or _escape_of(mark) in text for text in texts):
                return mark
        raise BadInputError(
            "a text contains control tokens, and all code points from U+FDD0 to U+FDEF, which are reserved for "
            "programs; remove these characters"
        )

    def find_end(self, text: str) -> int:
        """The offset of the special token with which a text ends, before white space. -1 if it ends with other text."""
        text = text.rstrip()
        return min((len(text) - len(name) for name in self._special_names if text.endswith(name)), default=-1)

    def mark_text(self, text: str) -> tuple[str, str]:
        """A text from outside with marks, and the mark, as in the result of a tool."""
        if not self._all.search(text):
            return text, ""
        mark = self._free_mark([text], "a text")
        return self._all.sub(rf"\g<0>{mark}", text), mark


def encode_parts(encode: Callable[[str], Iterable[int]], text: str, mark: str) -> list[int]:
    """The token ids of the parts of a text between the marks, one after the other. JSON may have escaped the marks."""
    parts = text.replace(_escape_of(mark), mark).split(mark) if mark else [text]
    return [token for part in parts for token in encode(part)]


def without_mark(text: str, mark: str) -> str:
    """A text without the marks in it, which JSON may have escaped."""
    return text.replace(_escape_of(mark), "").replace(mark, "") if mark else text


def has_mark(text: str, mark: str) -> bool:
    """Whether a text has the mark, which JSON may have escaped."""
    return bool(mark) and (mark in text or _escape_of(mark) in text)


def _escape_of(mark: str) -> str:
    """The mark in JSON that has ASCII characters only."""
    return json.dumps(mark)[1:-1]


def require_shown(messages: Sequence[Message], rendered: str) -> None:
    """Raise BadInputError if a rendered text lacks the content of a message that is no assistant message.

    Templates may change white space, and may write the content as JSON or with the escapes of HTML.
    """
    shown = ["".join(text.split()) for text in (rendered, html.unescape(rendered))]
    position = 0
    for index, message in enumerate(messages):
        for text in texts_of(message) if message["role"] != "assistant" else ():
            form = "".join(text.split())
            found = shown[0].find(form, position)  # after the last message, which is fast; else in the whole text
            if found >= 0:
                position = found + len(form)
            elif not any(form in shown_text for form in _forms_of(text) for shown_text in shown):
                raise BadInputError(
                    f"the chat template does not show the content of message {index} (role {message['role']!r}) at "
                    f"this place of a conversation, so the policy would not see it: {text.strip()[:80]!r}. Give the "
                    "content another role, or use a template that shows it"
                )


def _forms_of(text: str) -> Iterator[str]:
    """The forms in which templates write a text, without white space: as it is, and as JSON."""
    for form in (text, *(json.dumps(text, ensure_ascii=flag)[1:-1] for flag in (False, True))):
        yield "".join(form.split())


def require_tools_shown(tools: Sequence[Json], rendered: str) -> None:
    """Raise BadInputError if a rendered prompt lacks the name of a tool: the policy could not know that it exists."""
    names = list(map(name_of, tools))
    if missing := [name for name in names if not _has_word(rendered, name)]:
        raise BadInputError(
            f"the chat template does not show the tools {missing}, so the policy would not know them. Set "
            "tokenizer.chat_template to a template that renders `tools`, or describe the tools in the messages. A tool "
            "that the policy should not be told of is no tool of the agent: call it in the agent loop"
        )


def name_of(tool: Json) -> str:
    """The name of a tool, from its schema."""
    return str((tool.get("function") or tool).get("name"))


def _has_word(text: str, word: str) -> bool:
    """Whether `word` is in a text, not as a part of a longer word."""
    start = text.find(word)
    while start >= 0:
        before, after = text[max(start - 1, 0) : start], text[start + len(word) : start + len(word) + 1]
        if not WORD_CHARACTER.match(before) and not WORD_CHARACTER.match(after):
            return True
        start = text.find(word, start + 1)
    return False


def texts_of(message: Message) -> list[str]:
    """The texts in the content of a message."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") not in IMAGE_TYPES else part
        for part in parts
    ]
    return [text for text in texts if isinstance(text, str)]


def _foreign_texts(message: Message) -> list[str]:
    """All texts of a message that come from outside. For the result of a tool also the name that the policy called."""
    if message["role"] == "assistant":
        return list(strings_of(message))
    names = [str(message.get(key, "")) for key in ("name", "tool_call_id")] if message["role"] == "tool" else []
    return [*texts_of(message), *names]


def strings_of(value: Any) -> Iterator[str]:
    """All strings of a JSON value, also the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with other strings, also as keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _keeps_parts(tokenizer: Any) -> bool:
    """Whether the token ids of two texts, one after the other, are those characters. Some tokenizers add spaces."""
    try:
        ids = [token for text in ("x<", "|y") for token in tokenizer.encode(text, add_special_tokens=False)]
        return "x<|y" in str(tokenizer.decode(ids))
    except Exception:  # noqa: BLE001 - a tokenizer that has never seen these characters
        return True


def _map_texts(message: Message, change: Callable[[str], str], mark: str) -> dict[str, Any]:
    """The message with other texts in its content. Parts end with `mark`: a token may extend over two of them."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    parts = [
        {**part, "text": change(part["text"]) + mark}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content or []
    ]
    return {**message, "content": parts} if parts else dict(message)


def _starts_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the first character of each occurrence of a token, also where occurrences overlap."""
    rests = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    if not rests:
        return re.compile(r"(?!)")
    by_first: dict[str, set[str]] = {}
    for token in rests:
        by_first.setdefault(token[0], set()).add(token[1:])
    return re.compile("|".join(f"{re.escape(first)}(?={_any_of(others)})" for first, others in by_first.items()))


def _any_of(texts: set[str]) -> str:
    """A pattern that finds the beginning of any of the texts, in which their common beginnings occur once.

    Tokenizers have thousands of tokens such as `<unused1>`.
    """
    if len(texts) == 1:
        return re.escape(*texts)
    by_first: dict[str, set[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], set()).add(text[1:])
    if "" in by_first:
        return ""
    return "|".join(f"{re.escape(first)}(?:{_any_of(others)})" for first, others in by_first.items())
