"""Splits the tokens of a turn into thoughts, text and tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
import string
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from verl_server.agent.tools.parsing import find_calls, opens_thought, parse_hermes_tool_calls
from verl_server.agent.tools.tool import ToolCall
from verl_server.gateway.conversation import AssistantTurn, ToolUse, TurnDelta, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer, without_end
from verl_server.trajectory.rendering.families import FamilyRenderer
from verl_server.trajectory.rendering.messages import Message, ParsedToolCall
from verl_server.types import Json

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPLIT_FAMILIES = frozenset({"qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"})
"""Families of models whose thoughts and tool calls have these marks."""
HERMES_FAMILIES = frozenset({"qwen3", "qwen3-vl"})
"""Those of them whose calls have the format of Hermes."""

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class TurnParts:
    """The parts of a turn."""

    text: str
    reasoning: str
    tool_calls: Sequence[ToolUse]


def split_turn(
    renderer: ChatRenderer,
    token_ids: Sequence[int],
    preceding_ids: Sequence[int],
    tools: Sequence[Json],
    turn_id: str,
    *,
    stop_sequence: str | None = None,
    allows_calls: bool = True,
) -> TurnParts:
    """The parts of a turn. `preceding_ids`: token ids before the turn. `turn_id`: what the ids of calls depend on.
    `stop_sequence`: the stop sequence that ended the turn, which belongs to no part. `allows_calls`: whether the
    request allows calls. Otherwise a call is text.

    The generic renderer, and the families of models that are split by their text, have thoughts between `<think>` and
    `</think>` at the beginning of the turn. The prompt may have opened the thought. The generic renderer reads tool
    calls in the format of Hermes. The renderer of a family parses the tool calls of the family, and the whole turn if
    the family is not split by its text. A call that cannot be parsed stays in the text. The parts of the text before,
    between and after the calls are joined with a line break.
    """
    parsed = renderer.parse_turn(token_ids, preceding_ids, tools)
    raw = until_stop(decode_turn(renderer, token_ids), stop_sequence)
    is_open = opens_thought(renderer, preceding_ids)
    reasoning, text = split_thought(raw, is_open=is_open)
    calls = [] if parsed is None else parsed.tool_calls
    uses = as_tool_uses(calls, turn_id) if allows_calls else []
    if allows_calls and reads_hermes_calls(
        renderer
    ):  # a family looks for the tokens of the marks only, also in the arguments of a call
        found = _parse_calls(raw, is_open=is_open)
        if len(uses) < max(len(calls), len(found)):
            calls, uses = found, as_tool_uses(found, turn_id)
    if parsed is not None and not is_split_by_text(renderer):
        if len(uses) < len(calls) or (not uses and CALL_START in text):
            return TurnParts(text, reasoning, ())
        return TurnParts(until_stop(parsed.text, stop_sequence), until_stop(parsed.reasoning, stop_sequence), uses)
    uses = [] if len(uses) < len(calls) else uses
    if uses and CALL_START in text:
        text = "\n".join(filter(None, _outside_of_calls(text)))
    elif uses:  # the calls ended the thought
        reasoning, *rest = _outside_of_calls(reasoning)
        reasoning, text = reasoning.rstrip(), "\n".join(filter(None, (*rest, text)))
    return TurnParts(text.strip() if is_text_stripped(renderer) else text, reasoning, uses)


def is_split_by_text(renderer: ChatRenderer) -> bool:
    """Whether thoughts and tool calls of a turn are where their marks are in the text."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in SPLIT_FAMILIES


def reads_hermes_calls(renderer: ChatRenderer) -> bool:
    """Whether a turn may have tool calls in the format of Hermes."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in HERMES_FAMILIES


def writes_thoughts(renderer: ChatRenderer) -> bool:
    """Whether the model family, or the model for which the chat template was written, may begin turns with thoughts."""
    if isinstance(renderer, FamilyRenderer):
        return renderer.family in SPLIT_FAMILIES
    return THOUGHT_START in str(renderer.tokenizer.chat_template)


def is_text_stripped(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn has no white space at its ends."""
    return isinstance(renderer, FamilyRenderer)


def decode_turn(renderer: ChatRenderer, token_ids: Sequence[int]) -> str:
    """The text of a turn, with special tokens except its end marker."""
    return renderer.decode_raw(token_ids, renderer.decode(token_ids))


def split_thought(text: str, *, is_open: bool) -> tuple[str, str]:
    """The thought at the beginning of a turn, and the text after it. `is_open`: the prompt has opened the thought.

    A `</think>` in the arguments of a tool call ends no thought.
    """
    first = text.lstrip()
    if not is_open and not first.startswith(THOUGHT_START):
        return "", text
    first = first.removeprefix(THOUGHT_START)
    end = find_calls(first, is_open=True)[1]
    if end is None:
        return first.strip(), ""
    return first[:end].strip(), first[end + len(THOUGHT_END) :].lstrip("\n")


def until_stop(text: str, stop_sequence: str | None) -> str:
    """The text before the stop sequence that ended the turn. None: another reason ended the turn."""
    return text if stop_sequence is None else text.partition(stop_sequence)[0]


def _outside_of_calls(text: str) -> list[str]:
    """The parts of a text before its first call, between its calls, and after its last call."""
    spans, _ = find_calls(text, is_open=False)
    if not spans:  # the renderer of a family has found calls where there are no marks of whole calls
        return [text.partition(CALL_START)[0].rstrip("\n")]
    ends = [*(span.start for span in spans[1:]), len(text)]
    parts = [text[span.end : end].strip() for span, end in zip(spans, ends, strict=True)]
    return [text[: spans[0].start].rstrip("\n"), *parts]


def _parse_calls(text: str, *, is_open: bool) -> list[ParsedToolCall]:
    found = parse_hermes_tool_calls(text, is_open=is_open) if CALL_START in text else []
    return [
        ParsedToolCall(call.name, dict(call.arguments), None)
        if isinstance(call, ToolCall)
        else ParsedToolCall(None, None, "malformed")
        for call in found
    ]


def as_tool_uses(calls: Sequence[ParsedToolCall], turn_id: str) -> list[ToolUse]:
    """The well-formed calls, with ids that only this turn gives.

    A call is left out if JSON cannot give its arguments back: they have too many levels, a NaN or a huge integer.
    """
    uses = list[ToolUse]()
    for number, call in enumerate(calls):
        if call.name is not None and call.arguments is not None and call.parse_error is None:
            with contextlib.suppress(TypeError, RecursionError):
                arguments = orjson.dumps(call.arguments)
                if orjson.loads(arguments) == call.arguments:
                    uses.append(ToolUse(call_id(turn_id, number), call.name, arguments.decode(), call.id))
    return uses


def call_id(turn_id: str, number: int) -> str:
    """The id of a call: the same each time that the turn is parsed, also by another process.

    Nine letters and digits: Mistral's API takes no other ids, and clients that shorten or clean ids leave them alone.
    """
    value = int.from_bytes(hashlib.blake2b(f"{turn_id}:{number}".encode(), digest_size=8).digest())
    return "".join(ID_CHARACTERS[value // len(ID_CHARACTERS) ** place % len(ID_CHARACTERS)] for place in range(9))


# -- Sampled calls ----------------------------------------------------------------------------------
# Calls and results in a conversation, with the ids and the names that the policy has sampled.


class SampledCalls:
    """The calls of a session. Agents repeat the ids of the gateway, or other ids in their place. Some policies read the
    ids that they wrote.

    The renderer of a family needs the name of the tool beside each result. Agents send the id of the call only.
    """

    def __init__(self) -> None:
        self._sampled_ids: dict[str, str] = {}
        """Ids that the policy has sampled, by the ids of the gateway."""
        self._ids = dict[int, list[str]]()
        """Ids of the gateway for the calls of each turn, by the node of the turn."""
        self.nodes = dict[str, int]()
        """The node of the turn of each call, by the id of the gateway."""

    def add(self, turn: AssistantTurn) -> AssistantTurn:
        """Add the calls of a turn, which is returned."""
        self._sampled_ids |= {call.id: call.sampled_id for call in turn.tool_calls if call.sampled_id is not None}
        if turn.tool_calls:
            self._ids[turn.node] = [call.id for call in turn.tool_calls]
            self.nodes |= dict.fromkeys(self._ids[turn.node], turn.node)
        return turn

    def as_issued(self, node: int, turn: Message, messages: Sequence[Message]) -> list[Message]:
        """A recorded turn and the messages after it, with the ids of the gateway. `turn`: as the agent has sent it."""
        calls: Sequence[Json] = turn.get("tool_calls") or ()
        issued = {call["id"]: call_id for call, call_id in zip(calls, self._ids.get(node, ()), strict=False)}
        renamed = [{**call, "id": issued.get(call["id"], call["id"])} for call in calls]
        return [
            {**turn, "tool_calls": renamed} if calls else turn,
            *(
                {**message, "tool_call_id": issued[call_id]}
                if (call_id := message.get("tool_call_id")) in issued
                else message
                for message in messages
            ),
        ]

    def as_sampled(self, before: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
        """The messages for the policy. `before`: messages before them, with the calls whose results they may have.

        Results get the name of the call with their id. A result without such a call gets no name.
        """
        names = dict[str, str]()
        return [self._convert(message, names) for message in (*before, *messages)][len(before) :]

    def _convert(self, message: Message, names: dict[str, str]) -> Message:
        """`names`: names of the calls by the ids of the agent. Gets those of the message."""
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            named = {"name": names[call_id]} if call_id in names else {}
            return {**message, **named, "tool_call_id": self._sampled_ids.get(call_id, call_id)}
        calls: Sequence[Json] = message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls}
        known = [{**call, "id": self._sampled_ids.get(call["id"], call["id"])} for call in calls]
        return {**message, "tool_calls": known} if known else message


# -- Token decoder ----------------------------------------------------------------------------------
# Decodes the tokens of a turn while the turn is generated, and single tokens.

INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are no whole character: further tokens may complete the character."""
SPACED_TEXT = "a . b ? c , d ' e n't f 's g"
"""Text from which some tokenizers remove spaces when they decode it."""
RETRY_SHARE = 8
"""A text that cannot be decoded up to its end is decoded again when it has grown by this part of its tokens."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that is one byte, in vocabularies of SentencePiece."""
_KNOWN_BYTES = weakref.WeakKeyDictionary[ChatRenderer, dict[int, bytes]]()
"""Bytes of the tokens of each renderer that were decoded after another token. At most the tokens of its vocabulary."""


def decodes_in_parts(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn begins with the text of its first tokens: the tokenizer removes no spaces later."""
    return renderer.decode(renderer.encode(SPACED_TEXT)) == SPACED_TEXT


def bytes_of_tokens(renderer: ChatRenderer, turn_ids: Sequence[int], start: int = 0) -> list[bytes]:
    """The bytes of each token of a turn from the index `start` on, which may be a part of a character.

    The bytes of all tokens, one after the other, are the text of the turn. The end marker is no text.
    """
    num_kept = len(without_end(turn_ids, renderer.end_ids))
    before = renderer.encode("a")[-1:]  # some tokenizers write the first token of a text without its space
    known = _KNOWN_BYTES.setdefault(renderer, {})
    for token in set(turn_ids[max(start, 1) : num_kept]) - known.keys():
        known[token] = _bytes_of_token(renderer, before, token)
    return [
        b"" if index >= num_kept else known[token] if index else _bytes_of_token(renderer, [], token)
        for index, token in enumerate(turn_ids[start:], start)
    ]


def _bytes_of_token(renderer: ChatRenderer, before: list[int], token_id: int) -> bytes:
    """The bytes of a token after the tokens `before`. Special tokens have their text."""
    prefix, text = renderer.decode_all(before), renderer.decode_all([*before, token_id])
    text = text[len(prefix) :] if text.startswith(prefix) else renderer.decode_all([token_id])
    if INCOMPLETE not in text:
        return text.encode()
    name = _name_of(renderer, token_id)
    if (byte := BYTE_TOKEN.fullmatch(name)) is not None:
        return bytes.fromhex(byte[1])
    try:
        return bytes(_byte_by_letter()[letter] for letter in name)
    except KeyError:  # the name of the token does not tell its bytes
        return text.encode()


@functools.cache
def _byte_by_letter() -> dict[str, int]:
    """The bytes by the letters with which byte-level BPE writes them in its vocabulary.

    Printable characters of Latin-1 stand for themselves, and the other bytes are the letters from U+0100 on in their
    order (`bytes_to_unicode` of GPT-2).
    """
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte(renderer: ChatRenderer, token_id: int) -> bool:
    """Whether a token is one byte, in vocabularies of SentencePiece."""
    return BYTE_TOKEN.fullmatch(_name_of(renderer, token_id)) is not None


def _name_of(renderer: ChatRenderer, token_id: int) -> str:
    """The token in the vocabulary. Empty if the tokenizer does not tell it."""
    names = getattr(renderer.tokenizer, "convert_ids_to_tokens", None)
    return str(names(token_id)) if names is not None else ""


class TokenDecoder:
    """The text of tokens that arrive one after the other. The texts are the beginning of `decode_turn` of all tokens.

    The work for a token does not depend on the number of tokens before it. The tokens of the last text are decoded
    again with the new ones: some tokenizers write a token at the beginning of a text in another way.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._token_ids = list[int]()
        """Tokens of the last text, and tokens that have no text yet."""
        self._num_decoded = 0
        """Number of `_token_ids` that have a text."""
        self._min_tokens = 0
        """Number of `_token_ids` from which on they are decoded."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens, without the text that `add` has returned before.

        A character whose last bytes are missing is not certain, and an end marker, which is no text if it is the last
        token. Tokens that are bytes are certain when another token follows: some tokenizers write a whole run of them
        in another way if its last byte makes no character.
        """
        self._token_ids += token_ids
        if len(self._token_ids) < self._min_tokens:
            return ""
        known = self._token_ids[: self._num_decoded]
        before, text = decode_turn(self._renderer, known), decode_turn(self._renderer, self._token_ids)
        is_open = text.endswith(INCOMPLETE) or _is_byte(self._renderer, self._token_ids[-1])
        is_whole = bool(decode_turn(self._renderer, self._token_ids[-1:])) and not is_open
        if not is_whole or not text.startswith(before):
            self._min_tokens = len(self._token_ids) + 1 + len(self._token_ids) // RETRY_SHARE
            return ""
        self._token_ids, self._min_tokens = self._token_ids[self._num_decoded :], 0
        self._num_decoded = len(self._token_ids)
        return text[len(before) :]


# -- Turn splitter ----------------------------------------------------------------------------------
# Splits a turn into its thoughts and its text while the turn is generated.

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


# -- Turn progress ----------------------------------------------------------------------------------
# `TurnProgress`: the tokens of a turn that is being generated, for the streams of the clients that wait for it.


class TurnProgress:
    """The tokens of a turn that the engine has reported so far. Use it in one event loop.

    An engine reports tokens only if the turn will have them. It may report other tokens later if it had to begin
    again. Streams that have sent the text of the first tokens then wait for the end of the turn.
    """

    def __init__(
        self, renderer: ChatRenderer, preceding_ids: Sequence[int], request: TurnRequest, sampling_params: Json
    ) -> None:
        """`preceding_ids`: token ids before the turn. `sampling_params`: those of the turn."""
        self.renderer = renderer
        # The request itself is not kept: it has the whole conversation, and a session remembers hundreds of turns.
        self.has_logprobs, self._is_raw = request.logprobs, request.raw_prompt is not None
        self._allows_calls = request.allows_calls
        self._preceding_ids = preceding_ids
        stop: Any = sampling_params.get("stop") or ()
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        self.token_ids = list[int]()
        self.logprobs = list[float]()
        self.num_restarts = 0
        """Number of times that the engine has reported other tokens than before."""
        self.node_id: int | None = None
        """Id of the recorded turn. Its request has its sample then, also if the turn cannot be read."""
        self._news = asyncio.Event()

    def add(self, start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take tokens from position `start` on, as `OnTokens` describes."""
        known = self.token_ids[start : start + len(token_ids)]
        if start > len(self.token_ids) or len(logprobs) != len(token_ids):
            return  # a generate function of somebody else: the text arrives at the end
        if known != list(token_ids[: len(known)]):
            self.num_restarts += 1
            del self.token_ids[start:], self.logprobs[start:]
            known = []
        self.token_ids += token_ids[len(known) :]
        self.logprobs += logprobs[len(known) :]
        self._tell_news()

    def end(self) -> None:
        """The turn has ended: forget its tokens, and let streams take the turn."""
        self.token_ids, self.logprobs = [], []
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for_news(self) -> None:
        """Wait until there are new tokens, or the turn has ended."""
        await self._news.wait()

    def new_splitter(self) -> TurnSplitter:
        """Splits the turn for one stream."""
        return TurnSplitter(
            self.renderer, self._preceding_ids, self._stop, is_raw=self._is_raw, allows_calls=self._allows_calls
        )


class TurnDeltas:
    """The deltas of a turn for one stream, from the beginning of the turn."""

    def __init__(self, progress: TurnProgress) -> None:
        self._progress, self._splitter = progress, progress.new_splitter()
        self._num_restarts = progress.num_restarts
        self._num_split = 0
        """Number of tokens that the splitter has."""
        self._sent_ids = list[int]()
        self._reasoning, self._text = list[str](), list[str]()
        """Thoughts and text that were returned."""

    @property
    def has_news(self) -> bool:
        """Whether there are tokens that `take` has not looked at."""
        return self._num_restarts == self._progress.num_restarts and self._num_split < len(self._progress.token_ids)

    def take(self) -> TurnDelta | None:
        """The delta of the new tokens. None if nothing of the text is certain yet."""
        if not self.has_news:
            return None
        token_ids = self._progress.token_ids
        reasoning, text = self._splitter.add(token_ids[self._num_split :])
        self._num_split = len(token_ids)
        if not reasoning and not text:
            return None
        return self._delta(reasoning, text, token_ids, self._progress.logprobs)

    def take_rest(self, turn: AssistantTurn) -> TurnDelta:
        """The last delta of a turn. Raises GatewayError if the deltas before are no beginning of the turn."""
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        is_beginning = turn.reasoning.startswith(reasoning) and turn.text.startswith(text)
        if not is_beginning or list(turn.token_ids[: len(self._sent_ids)]) != self._sent_ids:
            raise GatewayError(
                ErrorKind.OVERLOADED, "the engine had to generate the turn again; send the request again"
            )
        return self._delta(turn.reasoning[len(reasoning) :], turn.text[len(text) :], turn.token_ids, turn.logprobs)

    def _delta(self, reasoning: str, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> TurnDelta:
        """A delta with the tokens that were not sent yet."""
        num_sent = len(self._sent_ids)
        new_ids = token_ids[num_sent:]
        self._sent_ids += new_ids
        self._reasoning.append(reasoning)
        self._text.append(text)
        wants_tokens = self._progress.has_logprobs
        tokens = bytes_of_tokens(self._progress.renderer, token_ids, num_sent) if wants_tokens else ()
        return TurnDelta(reasoning, text, new_ids, logprobs[num_sent:], tokens)
