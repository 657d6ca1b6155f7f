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
import time
from collections import Counter
from collections.abc import Sequence

from verl_server.agent.episodes.cursor import Cursor
from verl_server.agent.episodes.episode_state import EpisodeState
from verl_server.agent.limits import EpisodeStopped
from verl_server.gateway.conversation import AssistantTurn, TurnRequest, message_of, normalize_messages
from verl_server.gateway.dialects.known_items import KnownItems
from verl_server.gateway.errors import ErrorKind, GatewayError, overflow_error
from verl_server.gateway.image_check import ImageCheck
from verl_server.gateway.records.observed_recorder import ObservedRecorder
from verl_server.gateway.sessions.conversation_labels import RootForkReasons
from verl_server.gateway.sessions.generation import Client, Generation
from verl_server.gateway.sessions.history import (
    TEMPLATE_ARGUMENTS,
    History,
    Key,
    closing_text,
    conversation_keys,
    next_branch,
    tools_digest,
)
from verl_server.gateway.sessions.key_memo import KeyMemo
from verl_server.gateway.sessions.length_check import is_certainly_longer
from verl_server.gateway.sessions.raw_prompts import append_raw_prompt, encode_raw_prompt
from verl_server.gateway.sessions.slots import Slots
from verl_server.gateway.sessions.turn_details import (
    OMITTED,
    REFUSED,
    Prompt,
    ignored_wishes,
    read_turn,
    record_turn,
    reply_id_of,
    request_of,
)
from verl_server.gateway.sessions.turns import RecordedTurns, Turns
from verl_server.gateway.turn_text.grammar import turn_params
from verl_server.gateway.turn_text.sampled_calls import SampledCalls
from verl_server.gateway.turn_text.turn_progress import TurnProgress
from verl_server.gateway.worker_threads import is_short_body, is_short_prompt, run_aside
from verl_server.trajectory.nodes import ForkReason, Node
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.types import Json


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
        self._root_fork_reasons = RootForkReasons(self.graph)
        self._recorded_turns = RecordedTurns(self.graph)
        self._turns = Turns(self._recorded_turns)
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
            self._recorded_turns.restore()

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
                self._recorded_turns.take(client.fingerprint, known)
            else:
                with self._turns.refusals_of(client), self.slots.taken():
                    generation = await self._start(request, client.fingerprint)
            self._turns.add(client.fingerprint, generation)
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
        self._turns, self._recorded_turns = earlier._turns, earlier._recorded_turns
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
                reasons = self._root_fork_reasons
                is_short = is_short_prompt(messages, request.num_bytes + reasons.num_compared_tokens)
                cursor.fork_reason = await run_aside(is_short, reasons.reason_of, messages, known_tools)
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
