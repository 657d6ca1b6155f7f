"""`Session`: the conversations of one run of an agent program, as one token graph.

A request contains the whole conversation. The session finds the recorded path that the conversation continues, appends
the tokens of the new messages only, and lets the policy generate after exactly the recorded tokens. A conversation that
continues no recorded path begins with a prompt of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import operator
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from verl_server.agent.episode import MAX_JOINED_TOKENS, Cursor, EpisodeState
from verl_server.agent.limits import EpisodeStopped
from verl_server.errors import BadInputError, ServerError
from verl_server.gateway.conversation import AssistantTurn, TurnRequest, message_of, normalize_messages
from verl_server.gateway.dialects.base import KnownItems
from verl_server.gateway.dialects.content import ImageCheck
from verl_server.gateway.errors import ErrorKind, GatewayError, overflow_error
from verl_server.gateway.records import ObservedRecorder
from verl_server.gateway.sessions.history import (
    MAX_COMPARED,
    TEMPLATE_ARGUMENTS,
    History,
    Key,
    closing_text,
    conversation_keys,
    next_branch,
    prompt_digest,
    raw_prompt_key,
    root_fork_reason,
    tools_digest,
)
from verl_server.gateway.sessions.turns import Client, Generation, Slots, Turns
from verl_server.gateway.threads import is_short_body, is_short_prompt, run_aside
from verl_server.gateway.turn_text.grammar import has_grammar_of_calls, turn_params
from verl_server.gateway.turn_text.splitting import (
    SampledCalls,
    TurnParts,
    TurnProgress,
    bytes_of_tokens,
    decode_turn,
    split_turn,
    until_stop,
)
from verl_server.trajectory.graph import ForkReason, Node, TrajectoryGraph
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message, as_json, image_sources
from verl_server.trajectory.rendering.vision import VisionRenderer
from verl_server.types import Json

# -- Raw prompts ------------------------------------------------------------------------------------
# Prompts that are no chats: their tokens, and the turns after them.


def encode_raw_prompt(renderer: ChatRenderer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a raw prompt. May be called in any thread."""
    return renderer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def append_raw_prompt(
    state: EpisodeState,
    branch: str,
    token_ids: Sequence[int],
    refuse: Callable[[int | None, str, int | None], GatewayError],
) -> tuple[Cursor, Key]:
    """Record a raw prompt after the longest recorded path with which the prompt begins.

    `refuse`: makes the error for a prompt that does not fit, of the end of this path, the name of the limit, and the
    number of tokens of the prompt. Returns the end of the prompt, and the key of the prompt. Raises this error, and
    GatewayError for tokens that the model cannot read.
    """
    leaf, num_known = state.graph.longest_prefix(token_ids)
    new_ids = token_ids[num_known:]
    reason = ForkReason.SUB_AGENT if leaf is None else ForkReason.EDITED if new_ids else ForkReason.SAMPLE
    cursor = Cursor(state, branch, leaf, reason)
    if new_ids or leaf is None:
        _require_readable(state.renderer, new_ids)
        remaining, limit = state.remaining_tokens(leaf)
        if leaf is None:  # a prompt at the beginning counts for the context only
            remaining, limit = state.limits.max_context_tokens or len(new_ids) + 1, "max_context_tokens"
        if len(new_ids) >= remaining:
            raise refuse(leaf, limit, len(token_ids))
        text = state.renderer.decode_all(new_ids)
        cursor.add_context(new_ids, {"appended_text": text})
    return cursor, raw_prompt_key(token_ids)


def _require_readable(renderer: ChatRenderer, token_ids: Sequence[int]) -> None:
    """Raise GatewayError unless the tokenizer has the tokens, and for tokens that stand for an image.

    A token that is too large ends the process of a server. The policy may sample such a token: the model can have more
    tokens than the tokenizer. These tokens are in the recorded path.
    """
    num_tokens = len(renderer.tokenizer)
    if not token_ids or max(token_ids) >= num_tokens:
        raise GatewayError(
            ErrorKind.INVALID_REQUEST, f"'prompt' must have token ids from 0 to {num_tokens - 1}, and at least one"
        )
    if isinstance(renderer, VisionRenderer):
        try:
            renderer.require_no_placeholder(token_ids)
        except BadInputError:
            message = "'prompt' has a token that stands for an image; send images as messages of a chat"
            raise GatewayError(ErrorKind.INVALID_REQUEST, message) from None


def unsplit_turn(renderer: ChatRenderer, token_ids: Sequence[int], stop_sequence: str | None) -> TurnParts:
    """The turn after a raw prompt: thoughts and tool calls stay in the text."""
    return TurnParts(until_stop(decode_turn(renderer, token_ids), stop_sequence), "", ())


# -- Turn details -----------------------------------------------------------------------------------
# The prompt of a turn, and what a session records of the turn besides the tokens for a later process.

REFUSED = "refused"
"""Name of the notes in a record about prompts that do not fit."""
OMITTED = "omitted"
"""Name of the notes about what the policy does not see of a prompt: how often each type of parts and tools."""


@dataclass(frozen=True)
class Prompt:
    """The end of a recorded prompt, and what the turn after it needs."""

    cursor: Cursor
    key: Key
    """Key of the conversation that the prompt ends, without `said`."""
    request: TurnRequest
    fingerprint: bytes
    """Digest of the request, by which a request that is sent again is recognised."""
    said: Sequence[Json] = ()
    """The assistant message at the end of the prompt, if there is one. With the turn after it, it becomes one."""
    reply_id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Id of the reply of a stream, before the turn has an id."""


def ignored_wishes(request: TurnRequest, params: Json) -> list[str]:
    """Fields of a request that have no effect on its turn. `params`: sampling parameters of the turn."""
    wishes = {
        "parallel_tool_calls": request.allows_calls
        and not request.allows_parallel_calls
        and not has_grammar_of_calls(request, params),
        "reasoning_effort": request.reasoning_effort is not None,
    }
    return [name for name, is_ignored in wishes.items() if is_ignored]


def request_of(node: Node, tools: Sequence[Json]) -> TurnRequest:
    """What reading a recorded turn needs of its request. `tools`: those of its prompt."""
    has_no_calls = ((node.message or {}).get("request") or {}).get("tool_choice") == "none"
    return TurnRequest("", (), tools, forced_tools=() if has_no_calls else None)


def turn_details(prompt: Prompt, reply: Mapping[str, Any], started_at: float, ignored: Sequence[str]) -> Json:
    """Keys for the recorded message of a turn.

    `stop_sequence`: the stop sequence at which the turn ended, if there is one. `request`: the digest of the request,
    by which a repeated request is recognised, the id of its reply (`reply`), what labels of conversations depend on
    (`history.py`), and the times of the turn, which exports read: `started_at`, seconds since 1970, and
    `duration_s`. Records of earlier versions have no times. `tool_choice` is none if calls are text. `ignored`: fields
    that have no effect on the turn.
    """
    matched = (reply["meta_info"].get("finish_reason") or {}).get("matched")
    request = prompt.request
    asked: Json = {"digest": prompt.fingerprint.hex(), "reply": prompt.reply_id, "model": request.model}
    if (max_new_tokens := request.sampling_params.get("max_new_tokens")) is not None:
        asked["max_new_tokens"] = max_new_tokens
    asked |= {"tool_choice": "none"} if request.tools and not request.allows_calls else {}
    asked |= {"ignored": list(ignored)} if ignored else {}
    asked |= {"started_at": round(started_at, 6), "duration_s": round(max(time.time() - started_at, 0.0), 6)}
    return {"request": asked, **({"stop_sequence": matched} if isinstance(matched, str) else {})}


def reply_id_of(node: Node) -> str:
    """Id of the reply of a recorded turn, if it was streamed. Empty for records of earlier versions."""
    return str((node.message or {}).get("request", {}).get("reply", ""))


def read_turn(
    renderer: ChatRenderer, graph: TrajectoryGraph, node: Node, request: TurnRequest, num_prompt_tokens: int, meta: Json
) -> AssistantTurn:
    """The turn that a node contains, in no dialect. `meta`: SGLang's `meta_info` of the reply, empty for a replay."""
    turn_id, stop = f"{graph.session_id}-{node.id}", (node.message or {}).get("stop_sequence")
    if request.raw_prompt is not None:
        parts = unsplit_turn(renderer, node.token_ids, stop)
    else:
        before = () if node.parent is None else graph.node(node.parent).token_ids
        options: Json = {"stop_sequence": stop, "allows_calls": request.allows_calls}
        parts = split_turn(renderer, node.token_ids, before, request.tools, turn_id, **options)
    return AssistantTurn(
        id=turn_id,
        node=node.id,
        text=parts.text,
        reasoning=parts.reasoning,
        tool_calls=parts.tool_calls,
        finish_reason="length" if node.finish_reason == "length" else "tool_calls" if parts.tool_calls else "stop",
        stop_sequence=stop,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        token_ids=node.token_ids,
        logprobs=node.logprobs,
        tokens=bytes_of_tokens(renderer, node.token_ids) if request.logprobs else (),
    )


def record_turn(prompt: Prompt, reply: Mapping[str, Any], started_at: float, ignored: Sequence[str]) -> Node:
    """Record the reply of the engine. Raises ServerError for a reply that the record refuses, for example with NaN."""
    details = turn_details(prompt, reply, started_at, ignored)
    try:
        return prompt.cursor.add_turn(reply, details)
    except BadInputError as error:  # it is no mistake of the agent
        raise ServerError(f"the reply of the engine cannot be recorded: {error.message}") from error


# -- Length check -----------------------------------------------------------------------------------
# Finds texts that are too long for a context without the work for all of their tokens.

CHARS_PER_TOKEN = 8
"""Texts with fewer characters for each token of the context are not checked: nearly all of them are rendered anyway."""
PIECE_CHARS = 1 << 16
MAX_CUT_TOKENS = 64
"""Tokens that a long text may have less than its pieces, for each piece."""


async def is_certainly_longer(renderer: ChatRenderer, prompt: Sequence[Message] | str, num_tokens: int) -> bool:
    """Whether a prompt has more than `num_tokens` tokens for certain. False: the prompt has to be rendered.

    A worker thread counts the tokens of the texts, piece by piece, until there are too many. Messages of the assistant
    do not count: some chat templates leave out their thoughts.
    """
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [text for message in prompt if message["role"] != "assistant" for text in texts_of(message)]
    if sum(map(len, texts)) <= CHARS_PER_TOKEN * num_tokens:
        return False
    return await run_aside(False, _are_longer, renderer, texts, num_tokens)


def _are_longer(renderer: ChatRenderer, texts: Sequence[str], num_tokens: int) -> bool:
    count = 0
    for text in texts:
        pieces = [text[start : start + PIECE_CHARS].strip() for start in range(0, len(text), PIECE_CHARS)]
        for piece in pieces:
            count += max(len(renderer.encode(piece)) - (MAX_JOINED_TOKENS if len(pieces) == 1 else MAX_CUT_TOKENS), 0)
            if count > num_tokens:
                return True
    return False


# -- Key memo ---------------------------------------------------------------------------------------
# `KeyMemo`: the keys of conversations, of which each message is hashed once.
#
# An agent sends its whole conversation with each request. To compare a message with that of the request before takes a
# tenth of the time of its hash.

MAX_CONVERSATIONS = 4
"""Number of conversations that are remembered: the agents of a session take turns."""


@dataclass(frozen=True)
class _Conversation:
    tools: Sequence[Json]
    template_arguments: bytes
    """Variables of the chat template as JSON."""
    digest: str
    """Digest of both."""
    messages: Sequence[Message]
    calls: Sequence[bytes]
    """Tool calls of each message as JSON: for Python, 1 and True are equal."""
    keys: Sequence[Key]

    def is_for(self, tools: Sequence[Json], template_arguments: bytes) -> bool:
        """Whether these are the same tools, as objects: `KnownItems` gives them to each request that repeats them."""
        if template_arguments != self.template_arguments:
            return False
        return len(tools) == len(self.tools) and all(map(operator.is_, tools, self.tools))

    def num_common(self, digest: str, messages: Sequence[Message]) -> int:
        """Number of messages at the beginning that are those of this conversation."""
        if digest != self.digest:
            return 0
        count = 0
        for message, own, own_call in zip(messages, self.messages, self.calls, strict=False):
            if message is not own and (message != own or _encoded_calls(message) != own_call):
                break
            count += 1
        return count


class KeyMemo:
    """The keys of the latest conversations of a session. May be used in several threads."""

    def __init__(self) -> None:
        self._latest: tuple[_Conversation, ...] = ()
        """The latest first."""

    def keys_of(
        self, tools: Sequence[Json], messages: Sequence[Message], template_arguments: Json | None = None
    ) -> list[Key]:
        """`conversation_keys` of a conversation with these tools and variables of the chat template."""
        latest, arguments = self._latest, as_json(template_arguments or {})
        known_digest = next((known.digest for known in latest if known.is_for(tools, arguments)), None)
        digest = known_digest or prompt_digest(tools, template_arguments or {})
        counts = [known.num_common(digest, messages) for known in latest]
        count = max(counts, default=0)
        keys, calls = list[Key](), list[bytes]()
        if count:
            known = latest[counts.index(count)]
            keys, calls = list(known.keys[:count]), list(known.calls[:count])
        new = messages[count:]
        keys += conversation_keys(digest, new, keys[-1] if keys else None, messages[:count])
        conversation = _Conversation(tools, arguments, digest, messages, [*calls, *map(_encoded_calls, new)], keys)
        others = [known for known, common in zip(latest, counts, strict=True) if common < len(known.messages)]
        self._latest = (conversation, *others[: MAX_CONVERSATIONS - 1])
        return keys


def _encoded_calls(message: Message) -> bytes:
    return orjson.dumps(found) if (found := message.get("tool_calls")) else b""


# -- Session ----------------------------------------------------------------------------------------


class Session:
    """One run of an agent program. Use it in one event loop."""

    def __init__(
        self,
        state: EpisodeState,
        sampling: Json,
        record: ObservedRecorder | None,
        slots: Slots | None = None,
        *,
        template_defaults: Json | None = None,
        template_arguments: Json | None = None,
    ) -> None:
        """`sampling`: SGLang's sampling parameters of every turn, which replace those of the agent.
        `template_arguments`: variables of the chat template, which replace those of the agent. `template_defaults`:
        variables that the agent may replace.

        `record`: what `state` records in, with the conversations of an earlier process. None for the session of an
        episode, which closes its record itself, and whose earlier conversations are not continued. `slots`: requests
        of the session that may be open at a time, by default any number.
        """
        self.record, self.graph, self._state = record, state.graph, state
        self.id, self._renderer, self._sampling = self.graph.session_id, state.renderer, sampling
        self._template_defaults, self._template_arguments = template_defaults or {}, template_arguments or {}
        self.reached_limit: str | None = None
        """Name of the limit for which a request was refused, except `max_context_tokens`."""
        self._history, self._key_memo, self._calls, self.slots = History(), KeyMemo(), SampledCalls(), slots or Slots()
        self._branches = itertools.count(next_branch(self.graph))
        self._turns = Turns(self.graph)
        self._lock = asyncio.Lock()
        """Held while the prompt of a request is rendered and recorded."""
        self.images = ImageCheck(state.renderer)
        self.known_items = KnownItems()
        """Messages and tools of the latest requests."""
        self._reply_nodes, self._num_known_replies = dict[str, int](), 0
        """The nodes of turns by the ids of their replies, and how many nodes were looked at for them."""
        self._closed: GatewayError | None = None
        """The error of requests after `close`."""
        if record is not None:
            for node in self.graph.nodes:
                self._state.restore(node)
            self._history.restore(self.graph, self._message_of)
            self._turns.restore()

    # -- turns --------------------------------------------------------------------------------------

    def arriving(self) -> contextlib.AbstractContextManager[None]:
        """Count a request while it is read, until `start_turn` returns. Raises GatewayError without a slot."""
        return self._turns.arriving(self.slots)

    def note_refusal(self, client: Client) -> None:
        """Note that `arriving` has refused the request of a client."""
        self._turns.note_refusal(client)

    async def start_turn(self, request: TurnRequest, client: Client) -> Generation:
        """Start the turn of a request, or return the turn of the same request that was sent before.

        `client` waits for the turn until the end of its `with` block. A turn whose client has gone before the end of
        the reply comes first. Raises GatewayError, and BadInputError for messages that the renderer refuses.
        """
        async with self._lock:
            if not self.is_open:
                self.note_refusal(client)
            self._require_open()
            known = self._turns.find(client)
            if isinstance(known, Generation):
                known.join(client)
                return known
            if known is not None:
                with self.slots.taken():
                    generation = self._replay(known, request)
            else:
                with self._turns.refusals_of(client), self.slots.taken():
                    generation = await self._start(request, client.fingerprint)
            self._turns.add(client, generation)
            generation.join(client)
            return generation

    async def _start(self, request: TurnRequest, fingerprint: bytes) -> Generation:
        request = self._with_template_arguments(request)
        try:
            return self._begin(await self._append_prompt(request, fingerprint))
        except EpisodeStopped as stopped:
            raise self._limit_error(stopped.stop_reason) from None

    def _with_template_arguments(self, request: TurnRequest) -> TurnRequest:
        """The request with all variables of the chat template. Its effort is None if it has become one of them."""
        effort = request.reasoning_effort
        wished: Json = {}
        if effort is not None and self._renderer.has_template_argument("reasoning_effort"):
            wished["reasoning_effort"] = effort
        elif effort == "none" and self._renderer.has_template_argument("enable_thinking"):
            wished["enable_thinking"] = False
        arguments = self._template_defaults | wished | request.template_arguments | self._template_arguments
        return dataclasses.replace(
            request, template_arguments=arguments, reasoning_effort=None if wished else request.reasoning_effort
        )

    def _begin(self, prompt: Prompt) -> Generation:
        assert prompt.cursor.leaf is not None
        request, preceding_ids = prompt.request, self.graph.node(prompt.cursor.leaf).token_ids
        params = turn_params(self._renderer, request, preceding_ids, self._sampling)
        progress = TurnProgress(self._renderer, preceding_ids, request, params)
        turn = self._generate(prompt, params, progress)
        return Generation(turn, self._num_tokens(prompt.cursor), progress, self.slots, prompt.reply_id)

    def _replay(self, node: Node, request: TurnRequest) -> Generation:
        """A recorded turn as the turn of a request that was sent again."""
        num_prompt_tokens = 0 if node.parent is None else self.graph.num_tokens(node.parent)
        progress = TurnProgress(self._renderer, (), request, {})
        progress.node_id = node.id

        async def turn() -> AssistantTurn:
            return self._as_turn(node, request, num_prompt_tokens, {})

        reply_id = reply_id_of(node) or f"{self.id}-{node.id}"
        return Generation.of_recorded(turn(), num_prompt_tokens, progress, self.slots, reply_id)

    def find_turn(self, issued_id: str) -> AssistantTurn | None:
        """The turn with a call or a reply of an id that the gateway has issued. None without such a turn."""
        for node in self.graph.nodes[self._num_known_replies :]:
            if node.sampled:
                self._reply_nodes |= {f"{self.id}-{node.id}": node.id, reply_id_of(node) or "-": node.id}
        self._num_known_replies = len(self.graph.nodes)
        found = self._calls.nodes.get(issued_id, self._reply_nodes.get(issued_id))
        if found is None:
            return None
        node = self.graph.node(found)
        return self._as_turn(node, request_of(node, self._tools_of(found)), 0, {})

    def conversation_to(self, turn: AssistantTurn) -> list[Message]:
        """The messages from the beginning of a conversation to a turn."""
        tools, messages = self._tools_of(turn.node), list[Message]()
        for node in self.graph.path(turn.node):
            found = (node.message or {}).get("messages", ())
            messages += [self._message_of(node, tools)] if node.sampled else found
        return messages

    def _tools_of(self, node: int) -> Sequence[Json]:
        """The tools of the conversation of a node."""
        tools: Sequence[Json] = (self.graph.path(node)[0].message or {}).get("tools", ())
        return tools

    async def count_tokens(self, request: TurnRequest) -> int:
        """Number of tokens of the prompt that `start_turn` would give to the engine, also of a prompt without room."""
        request = self._with_template_arguments(request)
        cursor, messages = self._find_path(request, await self._keys(request))
        num_tokens = self._num_tokens(cursor)
        if messages or self._is_turn(cursor.leaf):
            num_tokens += len((await self._render(cursor, messages, request))[1])
        return num_tokens

    def close(self, error: GatewayError | None = None) -> None:
        """Abort all turns and close the record. `error`: what clients get, by default that the session has ended."""
        self._closed = error or GatewayError(ErrorKind.PERMISSION, f"the session {self.id!r} has ended")
        if self.record is not None:
            self._state.close()
            self.record.close()
        for generation in self._turns:
            generation.abort(self._closed)

    def continue_turns_of(self, earlier: Session) -> None:
        """Continue a closed session with the same record: know its turns, and the requests that had no turn."""
        self._turns = earlier._turns
        self._turns.continue_with(self.graph)

    async def wait_for_turns(self) -> None:
        """Wait until all turns have ended, after `close`."""
        await asyncio.gather(*(generation.task for generation in self._turns), return_exceptions=True)

    @property
    def failure(self) -> Exception | None:
        """Why the last request without a turn failed, see `Turns.failure`."""
        return self._turns.failure

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return self._closed is None

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _find_path(
        self, request: TurnRequest, keys: Sequence[Key], branch: str = ""
    ) -> tuple[Cursor, Sequence[Message]]:
        """The end of the recorded path that the conversation continues, and the messages that the path lacks.

        `branch`: name of the branch of the nodes that follow.
        """
        leaf, new = self._history.find_path(self.graph, request, keys, self._as_turn)
        ends_with_turn = request.messages[-1]["role"] == "assistant"
        if ends_with_turn and self._is_turn(leaf) and not self._renderer.appends_assistant_messages:
            leaf, new = None, request.messages
        reason = ForkReason.SUB_AGENT if leaf is None else ForkReason.EDITED if new else ForkReason.SAMPLE
        return Cursor(self._state, branch, leaf, reason), new

    async def _append_prompt(self, request: TurnRequest, fingerprint: bytes) -> Prompt:
        """Record the prompt of a request. Only the event loop changes the graph; worker threads render messages."""
        self._state.require_turn()
        if request.raw_prompt is not None:
            raw, maximum = request.raw_prompt, self._state.limits.max_context_tokens
            if isinstance(raw, str) and maximum and await is_certainly_longer(self._renderer, raw, maximum):
                raise self._refuse(None, "max_context_tokens", None)
            token_ids = await run_aside(is_short_prompt((), request.num_bytes), encode_raw_prompt, self._renderer, raw)
            self._require_open()
            cursor, key = append_raw_prompt(self._state, str(next(self._branches)), token_ids, self._refuse)
            return Prompt(cursor, key, request, fingerprint)
        keys = await self._keys(request)
        cursor, messages = self._find_path(request, keys, str(next(self._branches)))
        if messages or self._is_turn(cursor.leaf):
            is_root = cursor.leaf is None
            remaining, limit = self._state.remaining_tokens(cursor.leaf)
            is_limited = limit == "max_context_tokens" or not is_root
            if is_limited and await is_certainly_longer(self._renderer, messages, remaining):
                raise self._refuse(cursor.leaf, limit, None)
            omitted = Counter(kind for message in messages for kind in message.get(OMITTED, ()))
            omitted.update(f"tool {kind}" for kind in (request.omitted_tools if is_root else ()))
            messages, token_ids = await self._render(cursor, messages, request)
            self._require_open()
            self._state.has_images |= any(map(image_sources, messages))
            content: Json = {"messages": [dict(message) for message in messages]}
            if is_root:
                content["tools"] = list(request.tools)
                content |= {TEMPLATE_ARGUMENTS: request.template_arguments} if request.template_arguments else {}
            remaining, limit = self._state.remaining_tokens(cursor.leaf)
            if is_limited and len(token_ids) >= remaining:
                raise self._refuse(cursor.leaf, limit, self._num_tokens(cursor) + len(token_ids))
            digest = tools_digest(request.tools) if is_root else None
            if is_root and self.graph.nodes:
                known_tools = digest if request.tools else None
                # The time also grows with the turns that the messages are searched for: at least a byte for each token.
                num_compared = sum(len(node.token_ids) for node in self.graph.nodes[-MAX_COMPARED:] if node.sampled)
                is_short = is_short_prompt(messages, request.num_bytes + num_compared)
                cursor.fork_reason = await run_aside(is_short, root_fork_reason, self.graph, messages, known_tools)
                self._require_open()
            # A prompt with equal tokens that the history does not know has other messages, which are recorded, too.
            cursor.add_context(token_ids, content, digest, is_new=self.record is not None)
            if omitted:
                self._state.record.add_note(cursor.leaf, OMITTED, dict(omitted))
            cursor.fork_reason = ForkReason.SAMPLE  # of another turn after this prompt
        self._require_open()
        assert cursor.leaf is not None
        self._history.add(keys[-1], cursor.leaf)
        said = closing_text(request.messages[1:])
        return Prompt(cursor, keys[-1 - len(said)], request, fingerprint, said)

    async def _render(
        self, cursor: Cursor, messages: Sequence[Message], request: TurnRequest
    ) -> tuple[Sequence[Message], list[int]]:
        """The messages with their images, and their token ids at the end of a path, also if the context has no room."""
        node = None if cursor.leaf is None else self.graph.node(cursor.leaf)
        preceding = () if node is None else cursor.preceding_ids(node.id)
        before = list(request.messages[: len(request.messages) - len(messages)][-1:])  # the calls of results
        messages = [{key: value for key, value in message.items() if key != OMITTED} for message in messages]
        if node is not None:
            before[0], *messages = self._calls.as_issued(node.id, before[0], messages)

        def render() -> tuple[Sequence[Message], list[int]]:
            tools = list(request.tools) or None
            sampled = self._calls.as_sampled(before, messages)  # not recorded: agents have the ids of the gateway
            renderer = self._renderer.with_arguments(request.template_arguments)
            if node is None:
                return messages, renderer.render_prompt(sampled, tools)
            if not messages:
                return messages, renderer.render_new_turn(node.token_ids, tools)
            return messages, renderer.render_next_turn(sampled, node.token_ids, preceding, tools)

        return await run_aside(is_short_prompt(messages, request.num_bytes if node is None else None), render)

    def _is_turn(self, leaf: int | None) -> bool:
        return leaf is not None and self.graph.node(leaf).sampled

    def _num_tokens(self, cursor: Cursor) -> int:
        return 0 if cursor.leaf is None else self.graph.num_tokens(cursor.leaf)

    async def _generate(self, prompt: Prompt, params: Json, progress: TurnProgress) -> AssistantTurn:
        state, cursor, request = self._state, prompt.cursor, prompt.request
        assert cursor.leaf is not None
        params["stop_token_ids"] = [*(params.get("stop_token_ids") or ()), *self._renderer.stop_token_ids]
        num_prompt_tokens, node, started_at = self.graph.num_tokens(cursor.leaf), None, time.time()
        try:
            state.begin_turn()
            try:
                on_tokens = progress.add if request.stream else None
                reply = await state.run_request(cursor.request_turn(params, on_tokens))
                node = record_turn(prompt, reply, started_at, ignored_wishes(request, params))
                progress.node_id = node.id
            finally:
                if node is None:
                    state.fail_turn()
        except EpisodeStopped as stopped:
            raise self._limit_error(stopped.stop_reason) from None
        turn = self._as_turn(node, request, num_prompt_tokens, reply["meta_info"])
        said = normalize_messages([*prompt.said, message_of(turn)])
        self._history.add(conversation_keys("", said, prompt.key)[0], node.id)
        return turn

    def _as_turn(self, node: Node, request: TurnRequest, num_prompt_tokens: int, meta: Json) -> AssistantTurn:
        return self._calls.add(read_turn(self._renderer, self.graph, node, request, num_prompt_tokens, meta))

    def _message_of(self, node: Node, tools: Sequence[Json]) -> Message:
        """The message of a recorded turn, as agents repeat it."""
        return message_of(self._as_turn(node, request_of(node, tools), 0, {}))

    async def _keys(self, request: TurnRequest) -> list[Key]:
        is_short, arguments = is_short_body(request.num_bytes), request.template_arguments
        return await run_aside(is_short, self._key_memo.keys_of, request.tools, request.messages, arguments)

    def _refuse(self, leaf: int | None, limit: str, num_tokens: int | None) -> GatewayError:
        """The error for a prompt that does not fit. The record gets a note: an agent may shorten its history then."""
        self._require_open()
        self._state.record.add_note(leaf, REFUSED, {"limit": limit, "num_tokens": num_tokens})
        return self._limit_error(limit, num_tokens)

    def _limit_error(self, limit: str, num_tokens: int | None = None) -> GatewayError:
        """`num_tokens`: number of tokens of the prompt, if it is known."""
        if limit == "max_context_tokens":
            return overflow_error(num_tokens, self._state.limits.max_context_tokens or 0)
        if limit == "max_turns" and self._turns.is_aborting:
            return GatewayError(ErrorKind.OVERLOADED, "a turn of the session is being aborted; send the request again")
        self.reached_limit = limit
        return GatewayError(ErrorKind.LIMIT_REACHED, f"the session has reached its limit {limit}")
