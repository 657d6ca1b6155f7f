"""`Session`: the conversations of one run of an agent program, as one token graph.

A request contains the whole conversation. The session finds the recorded path that the conversation continues, appends
the tokens of the new messages only, and lets the policy generate after exactly the recorded tokens. A conversation that
continues no recorded path begins with a prompt of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from verl_server.agent.episodes.cursor import Cursor
from verl_server.agent.episodes.episode_state import EpisodeState
from verl_server.agent.generate_fn import GenerateFn
from verl_server.agent.limits import EpisodeStopped, RolloutLimits
from verl_server.gateway.conversation import AssistantTurn, TurnRequest, message_of
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.history import History, Key, conversation_keys, tools_digest
from verl_server.gateway.raw_prompts import append_raw_prompt, raw_prompt_key, unsplit_turn
from verl_server.gateway.turn_parsing import split_turn
from verl_server.trajectory.nodes import ForkReason, Node
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message
from verl_server.trajectory.rendering.vision_renderer import have_images, read_images
from verl_server.types import Json

ABANDONED_S = 30.0
"""Seconds for which a turn is generated whose client has gone. The client may send the request again."""
MAX_FINISHED_TURNS = 256
"""Number of finished turns that are returned when their requests are repeated."""


@dataclass(frozen=True)
class Prompt:
    """The end of a recorded prompt, and what the turn after it needs."""

    cursor: Cursor
    key: Key
    """Key of the conversation that the prompt ends."""
    request: TurnRequest


class Session:
    """One run of an agent program. Use it in one event loop."""

    def __init__(
        self, record: Recorder, generate: GenerateFn, renderer: ChatRenderer, limits: RolloutLimits, sampling: Json
    ) -> None:
        """`sampling`: SGLang's sampling parameters of every turn, which replace those of the agent."""
        self.record, self.graph = record, record.graph
        self.id = self.graph.session_id
        self._renderer, self._sampling = renderer, sampling
        self._state = EpisodeState(self.id, record, generate, renderer, limits, False)
        self._history = History()
        self._branches = itertools.count(len(self.graph.nodes))
        self._turns = dict[bytes, Generation]()
        self._undelivered = set[int]()
        """Turns of an earlier process that no conversation continues: perhaps no client has received them."""
        for node in self.graph.nodes:
            self._state.count(node)
        self._restore_history()

    # -- turns --------------------------------------------------------------------------------------

    def start_turn(self, request: TurnRequest, fingerprint: bytes, *, is_retry: bool) -> Generation:
        """Start the turn of a request, or return the turn of the same request that was sent before.

        `fingerprint`: digest of the request. `is_retry`: whether the client says that it sends the request again. A
        turn whose client has gone before the end of the reply is returned in any case. Raises GatewayError, and
        BadInputError for messages that the renderer refuses.
        """
        known = self._turns.get(fingerprint)
        if known is not None and not known.has_failed and (is_retry or known.is_abandoned):
            return known
        try:
            prompt = self._append_prompt(request)
        except EpisodeStopped as stopped:
            raise self._limit_error(stopped.stop_reason) from None
        generation = Generation(self._generate(prompt), self._num_tokens(prompt.cursor))
        self._turns.pop(fingerprint, None)
        self._turns[fingerprint] = generation
        self._forget_old_turns()
        return generation

    def _forget_old_turns(self) -> None:
        """Keep the latest finished turns only. A client repeats a request within minutes."""
        finished = [key for key, generation in self._turns.items() if generation.task.done()]
        for key in finished[:-MAX_FINISHED_TURNS]:
            del self._turns[key]

    def count_tokens(self, request: TurnRequest) -> int:
        """Number of tokens of the prompt that `start_turn` would give to the engine, also of a prompt without room."""
        cursor, messages = self._find_path(request)
        if not messages:
            return self._num_tokens(cursor)
        have_images(messages, self._renderer)
        return self._num_tokens(cursor) + len(self._render(cursor, read_images(messages, self._renderer), request))

    def close(self) -> None:
        """Abort all turns and close the record."""
        self._state.close()
        for generation in self._turns.values():
            generation.task.cancel()
        self.record.close()

    def _find_path(self, request: TurnRequest) -> tuple[Cursor, Sequence[Message]]:
        """The end of the recorded path that the conversation continues, and the messages that the path lacks."""
        messages, keys = request.messages, self._keys(request)
        count, node = self._history.find(keys)
        new = messages[count:]
        can_continue = node is not None and (
            not new or (self.graph.node(node).sampled and all(message["role"] != "assistant" for message in new))
        )
        if can_continue:
            reason = ForkReason.EDITED if new else ForkReason.SAMPLE
            return Cursor(self._state, self._branch_name(), node, reason), new
        reason = ForkReason.SUB_AGENT if count == 0 else ForkReason.EDITED
        return Cursor(self._state, self._branch_name(), None, reason), messages

    def _append_prompt(self, request: TurnRequest) -> Prompt:
        self._state.require_turn()
        if request.raw_prompt is not None:
            cursor, key = append_raw_prompt(self._state, self._branch_name(), request.raw_prompt)
            return Prompt(cursor, key, request)
        cursor, messages = self._find_path(request)
        if messages:
            is_root = cursor.leaf is None
            messages = read_images(messages, self._renderer)
            self._state.has_images |= have_images(messages, self._renderer)
            token_ids = self._render(cursor, messages, request)
            content: Json = {"messages": [dict(message) for message in messages]}
            if is_root:
                content["tools"] = list(request.tools)
            remaining, limit = self._state.remaining_tokens(cursor.leaf)
            if len(token_ids) >= remaining and (limit == "max_context_tokens" or not is_root):
                raise self._limit_error(limit, self._num_tokens(cursor) + len(token_ids))
            cursor.add_context(token_ids, content, tools_digest(request.tools) if is_root else None)
        key = self._keys(request)[-1]
        assert cursor.leaf is not None
        self._history.add(key, cursor.leaf)
        return Prompt(cursor, key, request)

    def _render(self, cursor: Cursor, messages: Sequence[Message], request: TurnRequest) -> list[int]:
        """Token ids of messages at the end of a path, also if the context has no room for them."""
        tools = list(request.tools) or None
        if cursor.leaf is None:
            return self._renderer.render_prompt(messages, tools)
        node = self.graph.node(cursor.leaf)
        return self._renderer.render_next_turn(messages, node.token_ids, self._preceding(node), tools)

    def _num_tokens(self, cursor: Cursor) -> int:
        return 0 if cursor.leaf is None else self.graph.num_tokens(cursor.leaf)

    async def _generate(self, prompt: Prompt) -> AssistantTurn:
        state, cursor, request = self._state, prompt.cursor, prompt.request
        assert cursor.leaf is not None
        params = {**request.sampling_params, **self._sampling}
        params["stop_token_ids"] = [*(params.get("stop_token_ids") or ()), *self._renderer.stop_token_ids]
        num_prompt_tokens, node = self.graph.num_tokens(cursor.leaf), None
        if (recorded := self._take_undelivered(cursor.leaf)) is not None:
            return self._as_turn(recorded, request, num_prompt_tokens, {})
        try:
            state.begin_turn()
            try:
                reply = await state.run_request(cursor.request_turn(params))
                node = cursor.add_turn(reply)
            finally:
                if node is None:
                    state.fail_turn()
        except EpisodeStopped as stopped:
            raise self._limit_error(stopped.stop_reason) from None
        turn = self._as_turn(node, request, num_prompt_tokens, reply["meta_info"])
        self._history.add(conversation_keys("", [message_of(turn)], prompt.key)[0], node.id)
        return turn

    def _take_undelivered(self, prompt: int) -> Node | None:
        """A turn after a prompt that an earlier process has recorded and perhaps not delivered. Each turn once."""
        for child in self.graph.children(prompt):
            if child in self._undelivered and not self.graph.children(child):
                self._undelivered.remove(child)
                return self.graph.node(child)
        return None

    def _as_turn(self, node: Node, request: TurnRequest, num_prompt_tokens: int, meta: Json) -> AssistantTurn:
        split = split_turn if request.raw_prompt is None else unsplit_turn
        parts = split(self._renderer, node.token_ids, self._preceding(node), request.tools, f"{self.id}-{node.id}")
        text, matched = parts.text, (meta.get("finish_reason") or {}).get("matched")
        stop = matched if isinstance(matched, str) else None
        if stop is not None and not parts.tool_calls:
            text = text.partition(stop)[0]
        is_cut = node.finish_reason == "length"
        return AssistantTurn(
            id=f"{self.id}-{node.id}",
            node=node.id,
            text=text,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
            finish_reason="length" if is_cut else "tool_calls" if parts.tool_calls else "stop",
            stop_sequence=stop,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=int(meta.get("cached_tokens") or 0),
            token_ids=node.token_ids,
            logprobs=node.logprobs,
            tokens=[self._renderer.decode([token]) for token in node.token_ids] if request.logprobs else (),
        )

    def _preceding(self, node: Node) -> Sequence[int]:
        return () if node.parent is None else self.graph.node(node.parent).token_ids

    def _keys(self, request: TurnRequest) -> list[Key]:
        return conversation_keys(tools_digest(request.tools), request.messages)

    def _branch_name(self) -> str:
        return str(next(self._branches))

    def _limit_error(self, limit: str, num_tokens: int | None = None) -> GatewayError:
        """`num_tokens`: number of tokens of the prompt, if it is known."""
        if limit == "max_context_tokens":
            return _overflow(num_tokens, self._state.limits.max_context_tokens or 0)
        return GatewayError(ErrorKind.LIMIT_REACHED, f"the session has reached its limit {limit}")

    def _restore_history(self) -> None:
        """Find the conversations of an earlier process again."""
        keys, tools = dict[int, Key](), dict[int, Sequence[Json]]()
        for node in self.graph.nodes:
            message = node.message or {}
            if node.parent is None:
                tools[node.id] = message.get("tools", ())
                start = None
            else:
                tools[node.id], start = tools[node.parent], keys[node.parent]
            if node.sampled:
                self._undelivered.add(node.id)
                request = TurnRequest("", (), tools[node.id])
                turn = self._as_turn(node, request, 0, {})
                messages = [message_of(turn)]
            else:
                messages = message.get("messages", ())
            if messages:
                keys[node.id] = conversation_keys(tools_digest(tools[node.id]), messages, start)[-1]
            else:
                keys[node.id] = raw_prompt_key(self.graph.token_ids(node.id))
            self._history.add(keys[node.id], node.id)


class Generation:
    """A turn that is being generated, and the clients that wait for it."""

    def __init__(self, turn: Coroutine[None, None, AssistantTurn], num_prompt_tokens: int) -> None:
        self.task = asyncio.create_task(turn)
        self.num_prompt_tokens = num_prompt_tokens
        self._num_clients = 0
        self._is_delivered = False
        self._abort: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the turn ended with an exception."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_abandoned(self) -> bool:
        """Whether no client waits for the turn, and no client has received all of it."""
        return self._num_clients == 0 and not self._is_delivered

    async def wait(self) -> AssistantTurn:
        """The turn. A client that stops waiting does not end the generation for the others."""
        return await asyncio.shield(self.task)

    def __enter__(self) -> Generation:
        self._num_clients += 1
        if self._abort is not None:
            self._abort.cancel()
        return self

    def __exit__(self, *_: object) -> None:
        self._num_clients -= 1
        if self._num_clients == 0 and not self.task.done():
            self._abort = asyncio.get_running_loop().call_later(ABANDONED_S, self.task.cancel)

    def set_delivered(self) -> None:
        """A client has received the whole reply."""
        self._is_delivered = True


def _overflow(num_tokens: int | None, max_tokens: int) -> GatewayError:
    count = "more" if num_tokens is None else str(num_tokens)
    return GatewayError(
        ErrorKind.CONTEXT_OVERFLOW,
        f"the conversation has {count} tokens, and the context has room for {max_tokens}",
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    )
