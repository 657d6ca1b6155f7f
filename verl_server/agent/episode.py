"""An episode: one sample of one task while it is generated, turn by turn within its limits. Every token is recorded.

An episode has branches, each with an end of its own. `fork` and `new_root` return new branches, and `adopt` continues
at the end of another branch. All branches share the limits and the record (`EpisodeState`). An object `Episode` is one
branch.

If the record already contains turns, the episode replays them first. Messages that were added before are found in the
record, and so are the turns of the policy. The policy generates only what the record does not contain. Tools are
called again during the replay. A tool that returns a different result starts another branch.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

from verl_server.agent.engines import GenerateFn, generate_whole_turn, require_sampling_params
from verl_server.agent.limits import EpisodeStopped, LastStop, Phase, RolloutLimits, measure
from verl_server.agent.samples import Segment, Task, Turn, find_segments
from verl_server.agent.tools.parsing import opens_thought
from verl_server.agent.tools.tool import Tool, ToolRegistry, as_tool_registry
from verl_server.agent.user_code import CURRENT_EPISODE_STATE, call_user_function, wait_until_done
from verl_server.config import NotNegativeInt
from verl_server.errors import BadInputError, to_wire
from verl_server.router.resumable_generation import OnTokens, version_spans
from verl_server.trajectory.graph import ForkReason, Node, NodeFields, Span, TrajectoryGraph
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message, copy_json, image_sources, validate_messages
from verl_server.trajectory.rendering.vision import (
    VisionRenderer,
    have_images,
    image_data_url,
    read_images,
    require_same_prompt,
    require_vision_renderer,
)
from verl_server.trajectory.routed_experts import num_recorded_expert_tokens, pack_experts
from verl_server.types import Json
from verl_server.validation import check_arguments, is_finite_number

logger = logging.getLogger(__name__)
TEMPERATURE = "sampling_temperature"
"""Key of a reply of `Cursor.request_turn`: the temperature of the request, if it is in the log probabilities."""


# -- Recorded nodes ---------------------------------------------------------------------------------
# Nodes that an episode finds in its record: branches share prompts, and turns of an earlier process are replayed.


class RecordedNodes:
    """Finds nodes in the graph of an episode. The nodes that the graph contains now were recorded before."""

    def __init__(self, graph: TrajectoryGraph) -> None:
        self._graph = graph
        self._num_recorded_nodes = len(graph.nodes)
        """Number of nodes that the record contained at the start."""
        self._replayed_nodes: set[int] = set()
        """Ids of recorded turns that were replayed. A turn is replayed once."""
        self._contexts = dict[tuple[int | None, tuple[int, ...]], list[Node]]()
        """The nodes that the policy did not sample, by their parents and their tokens."""
        self._num_indexed_nodes = 0
        """Number of nodes of the graph that were looked at for `_contexts`."""

    def find_context(
        self, parent: int | None, branch: str, token_ids: Sequence[int], message: Json, tools_digest: str | None
    ) -> Node | None:
        """The child of `parent` with these tokens that the policy did not sample, or None. Branches share it.

        A first prompt that the branch had recorded before this episode started is also found by its messages and tools:
        a chat template may write the present date. Earlier versions have not recorded the tools.
        """
        images = _images_of(message)
        for node in self._contexts_of(parent, tuple(token_ids)):
            if _images_of(node.message or {}) == images:  # an image is one placeholder
                return node
        if parent is not None or not self._num_recorded_nodes:
            return None
        for node in map(self._graph.node, self._graph.children(None)):
            has_same_tools = node.tools_digest in (None, tools_digest)
            is_recorded = node.id < self._num_recorded_nodes and node.branch == branch and not node.sampled
            if is_recorded and has_same_tools and node.message == message:
                return node
        return None

    def _contexts_of(self, parent: int | None, token_ids: tuple[int, ...]) -> list[Node]:
        """The children of `parent` with these tokens. The work does not grow with the number of children."""
        for node in self._graph.nodes[self._num_indexed_nodes :]:
            if not node.sampled:
                self._contexts.setdefault((node.parent, node.token_ids), []).append(node)
        self._num_indexed_nodes = len(self._graph.nodes)
        return self._contexts.get((parent, token_ids), [])

    def take_recorded_turn(self, parent: int, branch: str) -> Node | None:
        """The next turn of a branch that was recorded after `parent` before this episode started, or None.

        Each turn is taken once.
        """
        for child in self._graph.children(parent):
            node = self._graph.node(child)
            can_replay = child < self._num_recorded_nodes and child not in self._replayed_nodes
            if can_replay and node.sampled and node.branch == branch:
                self._replayed_nodes.add(child)
                return node
        return None


def _images_of(message: Json) -> list[str]:
    return [source for item in message.get("messages", ()) for source in image_sources(item)]


# -- Episode state ----------------------------------------------------------------------------------

ENDED_PAUSE_S = 1.0
"""Seconds before a turn is refused because the episode has ended."""

Result = TypeVar("Result")

MAX_JOINED_TOKENS = 4
"""Tokens that a text may have less in a prompt, where it can be tokenized together with the text around it."""
FirstPrompt = tuple[Sequence[Message], ToolRegistry]
"""Messages of a first prompt, and the tools that it describes."""
CLOSED = "the episode was closed while this turn was being generated"


def require_token_limit(limits: RolloutLimits) -> None:
    """Raise BadInputError if episodes with these limits could have any number of tokens."""
    if not limits.has_token_limit:
        raise BadInputError(
            "the number of tokens of an episode must be limited, for example: RolloutLimits(max_response_tokens=1024)"
        )


class EpisodeState:
    """The record of one sample, its limits, and the requests that its branches make."""

    def __init__(
        self,
        task_id: str,
        record: Recorder | TrajectoryGraph,
        generate: GenerateFn,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        return_routed_experts: bool,
    ) -> None:
        self.record, self.generate, self.renderer, self.limits = record, generate, renderer, limits
        self.return_routed_experts = return_routed_experts
        self.graph = record if isinstance(record, TrajectoryGraph) else record.graph
        self._task_id = task_id
        self._deadline = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        self.recorded = RecordedNodes(self.graph)
        self._counted_nodes: set[int] = set()
        """Ids of the nodes that count against the limits."""
        self.num_response_tokens = 0
        """Number of tokens after the first prompt of each root, in all branches."""
        self._num_turns = 0
        """Number of turns of all branches, with those that are being generated."""
        self._requests: set[asyncio.Task[Any]] = set()
        """Requests and images that are awaited."""
        self._is_closed = self._was_used_after_end = False
        self.first_prompts: dict[int | None, FirstPrompt] = {}
        """Messages and tools of the first prompt at each root that a branch has visited."""
        self.has_images = self.has_turns = False
        """Whether any message has an image, and whether the policy has generated a turn in any branch."""
        self.last_stop_reason: str | None = None
        """Name of the limit at which any branch stopped last, also if the agent loop has caught the exception."""

    # -- limits -------------------------------------------------------------------------------------

    def count(self, node: Node) -> None:
        """Count a node against the limits. A node that is visited again does not count again."""
        if node.id in self._counted_nodes:
            return
        self._counted_nodes.add(node.id)
        if node.sampled:
            self.has_turns = True
        if node.parent is not None or node.sampled:
            self.num_response_tokens += len(node.token_ids)

    def restore(self, node: Node) -> None:
        """Count a node that an earlier process has recorded, its turn, and its images."""
        self.count(node)
        self._num_turns += node.sampled
        self.has_images |= any(map(image_sources, (node.message or {}).get("messages", ())))

    def remaining_tokens(self, leaf: int | None) -> tuple[int, str]:
        """Number of tokens that may still be added after a node, and the name of the limit that gives the number."""
        remaining = []
        if self.limits.max_response_tokens is not None:
            remaining.append((self.limits.max_response_tokens - self.num_response_tokens, "max_response_tokens"))
        if self.limits.max_context_tokens is not None:
            num_tokens = 0 if leaf is None else self.graph.num_tokens(leaf)
            remaining.append((self.limits.max_context_tokens - num_tokens, "max_context_tokens"))
        return min(remaining, key=lambda entry: entry[0])

    def find_reached_limit(self, leaf: int | None) -> str | None:
        """Name of the limit that cut off the turn `leaf`. Before any turn: at which any branch stopped last. Else None.

        After a turn, each branch remembers its own stop (`LastStop`), because other branches may go on. A sample
        without a turn has one stop reason, also if the agent loop called `generate` of new branches only.
        """
        if leaf is None or self.graph.node(leaf).finish_reason != "length":
            return None if self.has_turns else self.last_stop_reason
        remaining, limit = self.remaining_tokens(leaf)
        return limit if remaining <= 0 else None

    def stop(self, limit: str) -> EpisodeStopped:
        """The exception that ends the episode at a limit."""
        self.last_stop_reason = limit
        return EpisodeStopped(limit, self)

    def require_room(self, leaf: int | None, num_tokens: int) -> None:
        """Raise EpisodeStopped unless `num_tokens` more tokens and at least one sampled token fit into the limits."""
        remaining, limit = self.remaining_tokens(leaf)
        if num_tokens >= remaining:
            raise self.stop(limit)

    def truncate_results(self, messages: Sequence[Message], leaf: int | None, tools: ToolRegistry) -> list[Message]:
        """The messages that follow a turn, in which the results of tools are truncated.

        Raises EpisodeStopped as soon as the texts alone need more tokens than the limits leave: a turn may have a
        thousand calls, whose results would be tokenized for nothing.
        """
        remaining, limit = self.remaining_tokens(leaf)
        can_fit = len(messages) == 1 or sum(len(text) for item in messages for text in texts_of(item)) <= remaining
        truncated, num_tokens = list[Message](), 0
        for message in messages:
            truncated.append(tools.truncate_result(message, self.renderer, self.limits))
            if not can_fit:
                text = "".join(texts_of(truncated[-1])).strip()
                num_tokens += max(len(self.renderer.encode(text)) - MAX_JOINED_TOKENS, 0)
                if num_tokens > remaining:
                    raise self.stop(limit)
        return truncated

    def require_open(self) -> None:
        """Raise CancelledError in code of the agent loop, and BadInputError in other code, if the episode has ended."""
        if self._is_closed:
            raise self._ended_error()

    def _ended_error(self) -> BaseException:
        """CancelledError for code of the agent loop: it ends a branch that repeats failed turns. Else BadInputError."""
        text = (
            f"the episode of task {self._task_id!r} has ended, and one of its branches is still used; await all "
            "branches before the agent loop returns"
        )
        return asyncio.CancelledError(text) if CURRENT_EPISODE_STATE.get() is self else BadInputError(text)

    async def end_if_closed(self) -> None:
        """Raise the errors of `require_open` after a pause, so that a branch that repeats its turn blocks nothing."""
        if self._is_closed:
            error = self._ended_error()
            if not self._was_used_after_end:
                self._was_used_after_end = True
                logger.warning("%s", error)
            await asyncio.sleep(ENDED_PAUSE_S)
            raise error

    def require_turn(self) -> None:
        """Raise EpisodeStopped if the limits allow no other turn."""
        if self._num_turns >= self.limits.max_turns:
            raise self.stop("max_turns")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self.stop("timeout_s")

    def require_new_messages(self, messages: Sequence[Message], leaf: int | None) -> None:
        """Raise BadInputError for messages that cannot follow the node `leaf`.

        Two lists of messages without a turn between them would give a prompt that the template never writes. The turns
        of the policy are in the prompt already, so an assistant message would be a second turn.
        """
        validate_messages(messages)
        if leaf is None:
            return
        end = self.graph.node(leaf)
        if not end.sampled and "messages" in (end.message or {}):
            raise BadInputError(
                "this branch ends with messages, after which the policy must generate a turn; pass all messages in one "
                "call"
            )
        if any(message["role"] == "assistant" for message in messages):
            raise BadInputError(
                "the messages after a turn contain an assistant message, but the prompt contains the turns of the "
                "policy already; pass only the new messages"
            )

    # -- turns --------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Count a turn. Raises the errors of `require_turn`."""
        self.require_turn()
        self._num_turns += 1

    def fail_turn(self) -> None:
        """Take back `begin_turn`: the turn has no tokens."""
        self._num_turns -= 1

    async def run_request(self, request: Coroutine[Any, Any, Mapping[str, Any]]) -> Mapping[str, Any]:
        """The reply to a request. Raises the errors of `finish_in_time`."""
        with measure(Phase.GENERATE) as opened:
            reply = await self.finish_in_time(request, "the request to the engine")  # in this span
            opened.set_attribute("gen_ai.usage.output_tokens", len(reply["output_ids"]))
            return reply

    async def finish_in_time(self, coroutine: Coroutine[Any, Any, Result], name: str) -> Result:
        """The result of a coroutine, which is cancelled at the deadline of the episode and by `close`.

        Raises EpisodeStopped at the deadline, CancelledError after `close`, and the exceptions of the coroutine.
        `name`: what is awaited, for a warning.
        """
        task = asyncio.create_task(coroutine)
        self._requests.add(task)
        try:
            remaining_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            # This ends also if the coroutine ignores its cancellation.
            is_late = await wait_until_done(task, remaining_s, f"{name} of task {self._task_id!r}")
        finally:
            self._requests.discard(task)
        if self._is_closed:  # a result that arrived while the episode ended belongs to no segment
            raise asyncio.CancelledError(CLOSED)
        if is_late:
            raise self.stop("timeout_s")
        return task.result()

    def first_prompt(self, leaf: int | None, node: int | None) -> FirstPrompt | None:
        """Messages and tools of the path to `node`. None if its root is that of `leaf`, or was not visited yet."""
        roots = [None if end is None else self.graph.path(end)[0].id for end in (leaf, node)]
        return None if roots[0] == roots[1] else self.first_prompts.get(roots[1])

    def close(self) -> None:
        """Cancel all requests. No branch can generate a turn any more."""
        self._is_closed = True
        for request in self._requests:
            request.cancel(CLOSED)


# -- Cursor -----------------------------------------------------------------------------------------
# The end of one branch of an episode: renders the next messages, requests the next turn, and records both.


class Cursor:
    """The end of the branch `branch` (see `Node.branch`), after the node `leaf`.

    `fork_reason`: reason of the next node's fork, in case the next node is a fork.
    """

    def __init__(self, state: EpisodeState, branch: str, leaf: int | None, fork_reason: ForkReason) -> None:
        self.branch, self.leaf, self.fork_reason = branch, leaf, fork_reason
        self._state, self._graph, self._renderer = state, state.graph, state.renderer
        self.has_turns = False
        """Whether the branch has a turn of its own with a token."""

    def __copy__(self) -> Cursor:
        copied = Cursor(self._state, self.branch, self.leaf, self.fork_reason)
        copied.has_turns = self.has_turns
        return copied

    def render(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> list[int]:
        """Token ids of messages at the end of the branch. Raises EpisodeStopped if they do not fit after a turn."""
        if self.leaf is None:
            return self._renderer.render_prompt(messages, tools)
        turn_ids = self._graph.node(self.leaf).token_ids
        token_ids = self._renderer.render_next_turn(messages, turn_ids, self.preceding_ids(self.leaf), tools)
        self._state.require_room(self.leaf, len(token_ids))
        return token_ids

    def add_context(
        self, token_ids: Sequence[int], message: Json, tools_digest: str | None = None, *, is_new: bool = False
    ) -> None:
        """Record tokens that the policy did not sample, or move to their node (`RecordedNodes.find_context`).

        `is_new`: record the tokens in any case. Other messages can have the same tokens. No node is added for an empty
        list of tokens: the last node stays the turn, in which the renderer looks for the end marker.
        """
        recorded = self._state.recorded
        node = None if is_new else recorded.find_context(self.leaf, self.branch, token_ids, message, tools_digest)
        if node is not None:
            self._state.count(node)
            self.leaf = node.id
        elif token_ids:
            self._add_node(token_ids, sampled=False, message=message, tools_digest=tools_digest)

    def replay_turn(self) -> Node | None:
        """Move to the recorded turn that continues the branch, if there is one."""
        assert self.leaf is not None
        node = self._state.recorded.take_recorded_turn(self.leaf, self.branch)
        if node is not None:
            self._move_to(node)
            self.has_turns |= bool(node.token_ids)
        return node

    def add_turn(self, reply: Mapping[str, Any], details: Json | None = None) -> Node:
        """Record the tokens of a reply. `details`: further keys of the recorded message.

        Raises BadInputError if the server has read another prompt than that of the path, because it expands images in
        another way, for a turn with a token that stands for an image, and if the server has not returned the routed
        experts that the episode asks for.
        """
        meta, token_ids = reply["meta_info"], reply["output_ids"]
        if self._state.return_routed_experts and token_ids and meta.get("routed_experts") is None:
            raise BadInputError(
                "the server has returned no routed experts; start it with enable_return_routed_experts=True, and do "
                "not put sglang-router in front of it, which removes the request field"
            )
        if isinstance(self._renderer, VisionRenderer):
            self._renderer.require_no_placeholder(token_ids)
        if (prompt := reply.get("prompt_token_ids")) is not None and self.leaf is not None:
            require_same_prompt(self._graph.token_ids(self.leaf), prompt)
        spans = version_spans(reply) if token_ids else []
        self.has_turns |= bool(token_ids)
        return self._add_node(
            token_ids,
            sampled=True,
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            spans=[Span(span["version"], span["start"], span["end"]) for span in spans],
            message={"role": "assistant", "content": self._renderer.decode(token_ids), **(details or {})},
            finish_reason=str((meta.get("finish_reason") or {}).get("type")),
            routed_experts=pack_experts(meta.get("routed_experts")),
            temperature=reply.get(TEMPERATURE),
        )

    async def generate_turn(self, params: Json, tools: Sequence[Json]) -> Turn:
        """The next turn: a recorded one, or the reply to a request. `tools`: schemas of the tools it may call."""
        state = self._state
        state.begin_turn()
        node = None
        try:
            node = self.replay_turn()
            if node is None:
                state.require_room(self.leaf, 0)
                node = self.add_turn(await state.run_request(self.request_turn(params)))
        finally:
            if node is None:
                state.fail_turn()
        return self.as_turn(node, tools)

    async def request_turn(self, params: Json, on_tokens: OnTokens | None = None) -> Mapping[str, Any]:
        """Request a turn after the path and return the reply, which `add_turn` records.

        `params`: the sampling parameters of the turn. `max_new_tokens` is at most what the limits leave. `on_tokens`:
        gets the tokens while they are generated, if the generate function can report them.
        """
        leaf, session_id = self.leaf, self._graph.session_id
        remaining, limit = self._state.remaining_tokens(leaf)
        if remaining <= 0:  # another branch has added tokens since this turn has begun
            raise self._state.stop(limit)
        reply = await generate_whole_turn(
            self._state.generate,
            rid=f"{session_id}-{leaf}-{secrets.token_hex(4)}",
            session_id=session_id,
            on_tokens=on_tokens,
            return_logprob=True,
            **self._prompt_fields(),
            **self._routed_experts_fields(),
            sampling_params={**params, "max_new_tokens": min(params.get("max_new_tokens") or remaining, remaining)},
        )
        temperature = params.get("temperature")  # that of a greedy turn, 0, is in no log probability
        return reply if temperature in (None, 0, 1) else {**reply, TEMPERATURE: float(temperature)}

    def _routed_experts_fields(self) -> Json:
        if not self._state.return_routed_experts:
            return {}
        start = num_recorded_expert_tokens(self._graph, self.leaf)  # earlier turns have those of these tokens
        return {"return_routed_experts": True} | ({"routed_experts_start_len": start} if start else {})

    def _prompt_fields(self) -> Json:
        """The fields of a request that give SGLang the path as its prompt.

        For a path with images, the request has one placeholder for each image, which SGLang expands, and the bytes of
        the images.
        """
        assert self.leaf is not None
        token_ids = self._graph.token_ids(self.leaf)
        images = self._graph.images(self.leaf) if self._state.has_images else []
        if not images:
            return {"input_ids": token_ids}
        return {
            "input_ids": require_vision_renderer(self._renderer).collapse_images(token_ids, len(images)),
            "image_data": [image_data_url(source) for source in images],
            "return_prompt_token_ids": True,
        }

    def as_turn(self, node: Node, tools: Sequence[Json]) -> Turn:
        """The turn that a node contains. `tools`: schemas of the tools that the turn may call."""
        token_ids = list(node.token_ids)
        preceding_ids = self.preceding_ids(node.id)
        parsed = self._renderer.parse_turn(token_ids, preceding_ids, tools)
        tool_calls = None if parsed is None else parsed.tool_calls
        text = str((node.message or {})["content"])
        raw_text = self._renderer.decode_raw(token_ids, text)
        is_open = opens_thought(self._renderer, preceding_ids)
        return Turn(text, token_ids, node.id, node.finish_reason or "", tool_calls, raw_text, is_open)

    def preceding_ids(self, node: int) -> Sequence[int]:
        """Token ids of a node's parent."""
        parent = self._graph.node(node).parent
        return () if parent is None else self._graph.node(parent).token_ids

    def _add_node(self, token_ids: Sequence[int], **fields: Unpack[NodeFields]) -> Node:
        fields["fork_reason"] = self.fork_reason if self._graph.children(self.leaf) else None
        fields["branch"] = self.branch
        node = self._state.record.add_node(self.leaf, token_ids, **fields)
        self._move_to(node)
        return node

    def _move_to(self, node: Node) -> None:
        self._state.count(node)
        self.leaf, self.fork_reason = node.id, ForkReason.RETRY


# -- Episode ----------------------------------------------------------------------------------------


class Episode:
    """A branch of an episode, which an agent loop drives with `generate`, `add_messages` and `append_text`.

    The agent loop gets the first branch; `fork` and `new_root` return others. `leaf`, `loss_weight`, `messages`,
    `tools`, `reached_limit` and `num_context_tokens` belong to the branch; `task`, `graph`, `limits`, `segments` and
    `num_response_tokens` belong to the episode. `record`: a `Recorder`, or a `TrajectoryGraph` that is kept in memory
    only. `sampling_params`: SGLang's sampling parameters of every turn. `tools`: tools and functions for the policy.
    `return_routed_experts`: whether routed experts are recorded. Raises BadInputError for limits without a maximum
    number of tokens, and for a sampling parameter with a wrong value.
    """

    def __init__(
        self,
        task: Task,
        record: Recorder | TrajectoryGraph,
        generate: GenerateFn,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        sampling_params: Mapping[str, Any],
        tools: ToolRegistry | Sequence[Tool | Callable[..., Any]] = (),
        *,
        return_routed_experts: bool = False,
    ) -> None:
        require_token_limit(limits)
        self.task, self.limits = task, limits
        self.messages: Sequence[Message] = task.messages
        """Messages of the first prompt of this branch. Those of the task in the first branch."""
        self.tools = as_tool_registry(tools)
        """Tools that the policy may call in this branch."""
        self._renderer = renderer
        self._state = EpisodeState(task.id, record, generate, renderer, limits, return_routed_experts)
        self._sampling_params = require_sampling_params(sampling_params)
        self._first: Episode | None = None  # None in the first branch: a cycle would keep the sample in memory
        self._branches: list[Episode] = []  # all other branches
        self._start_branch("", None, ForkReason.RETRY)
        self.stop_reason: str | None = None
        """Why the episode stopped: `done`, `error`, or the name of a limit. None before that, and in other branches."""
        self.exception: Exception | None = None
        """Exception of a failed episode. None in other branches than the first."""

    def _start_branch(self, name: str, leaf: int | None, fork_reason: ForkReason) -> None:
        self._cursor = Cursor(self._state, name, leaf, fork_reason)
        self._loss_weight = 1.0
        self._order = len(self._branches)  # position of the branch's path in `segments`; `adopt` hands it over
        self._left_paths: dict[int, tuple[int | None, float]] = {}  # by position: last node and weight, see `adopt`
        self._num_forks = 0  # number of branches that `fork` and `new_root` made from this branch
        self._is_adopted = False
        self._cursor_before: Cursor | None = None  # where the branch ended before the turn that it is generating
        self._last_stop = LastStop()

    @property
    def leaf(self) -> int | None:
        """Id of the last node of this branch. None before the first prompt."""
        return self._cursor.leaf

    @property
    def loss_weight(self) -> float:
        """Weight in the loss of the path to the end of this branch. Default: 1.0, or the weight of the forked branch.

        A path with the weight 0.0 is not trained. A turn that several trained paths share is trained once, with the
        weight of the branch that was made first. Raises BadInputError for a value that is no finite number >= 0.
        """
        return self._loss_weight

    @loss_weight.setter
    def loss_weight(self, loss_weight: float) -> None:
        if not is_finite_number(loss_weight) or loss_weight < 0:
            raise BadInputError(f"the loss_weight of a branch must be a finite number >= 0, got {loss_weight!r}")
        self._loss_weight = float(loss_weight)

    @property
    def error(self) -> Json | None:
        """Exception of a failed episode as JSON (`verl_server.errors.to_wire`)."""
        return None if self.exception is None else to_wire(self.exception)

    @property
    def graph(self) -> TrajectoryGraph:
        """The token graph of the episode."""
        return self._state.graph

    @property
    def reached_limit(self) -> str | None:
        """Name of the limit that cut off the last turn of this branch, or at which the branch stopped after it.

        None if no limit was reached. If the sample has no turn yet: the limit at which any branch stopped last.
        """
        return self._last_stop.stop_reason or self._state.find_reached_limit(self.leaf)

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens of all branches so far, without the first prompt of each root."""
        return self._state.num_response_tokens

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens of this branch's path so far. The next prompt has at least as many tokens."""
        return 0 if self.leaf is None else self.graph.num_tokens(self.leaf)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The trained paths in the order of their branches, also those left by `adopt`: see `Sample.segments`."""
        ends: dict[int, tuple[int | None, float]] = {}
        for branch in (self._first or self, *self._branches):
            if not branch._is_adopted:
                leaf = branch.leaf if branch._cursor.has_turns else None
                ends |= {**branch._left_paths, branch._order: (leaf, branch.loss_weight)}
        return find_segments(self.graph, [ends[order] for order in sorted(ends)])

    # -- branches -----------------------------------------------------------------------------------

    @check_arguments()
    def fork(self, node: NotNegativeInt | None = None, reason: ForkReason = ForkReason.SAMPLE) -> Self:
        """A new branch that continues after `node`, by default at the end of this branch. Raises BadInputError.

        Branches generate concurrently if they are awaited together, for example with `asyncio.gather`. The new branch
        has the messages and the tools of the first prompt of its path.
        """
        if node is not None:
            self.graph.node(node)
        branch = self._new_branch(self.leaf if node is None else node, reason, self.loss_weight)
        branch.messages, branch.tools = self._state.first_prompt(self.leaf, node) or (self.messages, self.tools)
        return branch

    @check_arguments(skip=("messages", "tools"))
    def new_root(
        self,
        messages: Sequence[Message],
        tools: ToolRegistry | Sequence[Tool | Callable[..., Any]] | None = None,
        reason: ForkReason = ForkReason.SUB_AGENT,
    ) -> Self:
        """A new branch with a first prompt of its own, for example of a sub-agent. Raises BadInputError.

        `tools`: tools of the new branch. None: those of this branch.
        """
        validate_messages(messages)
        registry = self.tools if tools is None else as_tool_registry(tools)
        branch = self._new_branch(None, reason, 1.0)
        branch.messages, branch.tools = copy_json(messages), registry
        return branch

    def adopt(self, branch: Episode) -> None:
        """Continue at the end of `branch`, with the loss weight, messages and tools of `branch`.

        `branch` cannot be used any more. The tokens that this branch leaves are trained with the loss weight that
        this branch had. Raises BadInputError for a branch of another episode or of itself, and while one of the two is
        generating a turn.
        """
        if not isinstance(branch, Episode) or branch._state is not self._state or branch is self:
            raise BadInputError("adopt needs another branch of this episode: one that its fork or new_root returned")
        self._require_idle()
        branch._require_idle()
        if self._cursor.has_turns:
            self._left_paths[self._order] = self.leaf, self.loss_weight
        self._left_paths |= branch._left_paths
        self._order = branch._order
        name, end = self._cursor.branch, branch._cursor
        self._cursor, self.loss_weight = Cursor(self._state, name, end.leaf, end.fork_reason), branch.loss_weight
        self._cursor.has_turns = end.has_turns
        self.messages, self.tools, self._last_stop = branch.messages, branch.tools, branch._last_stop
        branch._is_adopted = True

    def _new_branch(self, leaf: int | None, reason: ForkReason, loss_weight: float) -> Self:
        branch = copy.copy(self)
        branch._first = self._first or self
        name = f"{self._cursor.branch}.{self._num_forks}".removeprefix(".")
        self._num_forks += 1
        self._branches.append(branch)
        branch._start_branch(name, leaf, reason)
        branch.loss_weight = loss_weight
        return branch

    # -- tokens -------------------------------------------------------------------------------------

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages from the environment (user, tool, system). The first call adds the first prompt.

        Images are decoded in the event loop. `generate(messages)` decodes images in a thread. Tool results after the
        first prompt are truncated to `max_tool_tokens`. Raises EpisodeStopped if messages after the first prompt do not
        fit into the limits; the path then ends with the last turn. Raises BadInputError for messages that the renderer
        refuses, and while this branch is generating a turn.
        """
        self._require_idle()
        with self._last_stop:
            self._append(read_images(messages, self._renderer))

    def _append(self, messages: Sequence[Message]) -> None:
        self._state.require_new_messages(messages, self.leaf)
        tools_digest = self.tools.digest if self.leaf is None else None
        if self.leaf is not None:
            messages = self._state.truncate_results(messages, self.leaf, self.tools)
        token_ids = self._cursor.render(messages, self.tools.schemas or None)
        self._state.has_images |= have_images(messages, self._renderer)
        self._cursor.add_context(token_ids, {"messages": [dict(message) for message in messages]}, tools_digest)
        if tools_digest is not None:
            self._state.first_prompts.setdefault(self.leaf, (copy_json(messages), self.tools))

    def append_text(self, text: str, *, prefix: str = "", suffix: str = "") -> None:
        """Append `prefix`, `text` and `suffix` to the turn that the policy has just generated, within that turn.

        The text is truncated to `max_tool_tokens`. The prefix and the suffix, for example tags around a result, are
        not. Raises EpisodeStopped if the limits have no room for all of them, and BadInputError while this branch is
        generating a turn.
        """
        self._require_idle()
        text = self._renderer.truncate(text, self.limits.max_tool_tokens)
        token_ids = self._renderer.encode_foreign(text, prefix=prefix, suffix=suffix)
        with self._last_stop:
            self._state.require_room(self.leaf, len(token_ids))
        self._cursor.add_context(token_ids, {"appended_text": prefix + text + suffix})

    async def generate(self, messages: Sequence[Message] | None = None, **sampling_params: Any) -> Turn:
        """Let the policy generate a turn, after appending `messages` if given.

        If `messages` is None in the first call of a branch, its first prompt is `Episode.messages`. `sampling_params`
        override those of the episode for this turn. `max_new_tokens` is reduced to the tokens that the limits leave;
        branches that generate at the same time can each use all of them. After an exception this branch ends where it
        ended before, so that the call can be repeated. Raises EpisodeStopped at a limit, BadInputError for messages
        that the renderer refuses and while this branch is generating another turn, CancelledError if the episode has
        ended, and the exceptions of the generate function.
        """
        try:
            with self._last_stop:
                return await self._generate_next(messages, sampling_params)
        except (BadInputError, EpisodeStopped):
            await asyncio.sleep(0)  # a loop that repeats the call without a wait must not block the event loop
            raise

    async def _generate_next(self, messages: Sequence[Message] | None, sampling_params: Json) -> Turn:
        await self._state.end_if_closed()
        self._require_idle()
        params = self._sampling_params | sampling_params
        params = require_sampling_params(params) if sampling_params else params
        self._state.require_turn()
        before = self._cursor_before = copy.copy(self._cursor)
        try:
            if messages is None and self.leaf is None:
                messages = self.messages
            if messages is not None and isinstance(self._renderer, VisionRenderer):
                reading = call_user_function(read_images, messages, self._renderer)  # not in the event loop
                messages = await self._state.finish_in_time(reading, "the decoding of images")
            if messages is not None:
                self._append(messages)
            return await self._cursor.generate_turn(params, self.tools.schemas)
        except BaseException as failure:
            if before.leaf is not None or not isinstance(failure, EpisodeStopped):  # a limit keeps the first prompt
                self._cursor = before
            raise
        finally:
            self._cursor_before = None

    def close(self) -> None:
        """End the episode: cancel the turns that are being generated. No branch can be used any more."""
        self._state.close()
        for branch in (self._first or self, *self._branches):
            branch._cursor = branch._cursor_before or branch._cursor  # without the messages of a turn that never came

    def _require_idle(self) -> None:
        self._state.require_open()
        if self._is_adopted:
            raise BadInputError("this branch was adopted: use the branch that adopted it")
        if self._cursor_before is not None:
            raise BadInputError(
                f"this branch of the episode of task {self.task.id!r} is generating a turn; await it first. For "
                "concurrent turns, make a branch for each: episode.fork()"
            )


# -- Recorded paths ---------------------------------------------------------------------------------
# Lets an episode end at paths that other code has recorded in its graph, for example a session of the gateway.


def end_at(episode: Episode, ends: Sequence[int]) -> None:
    """Make a branch of each path to `ends`, and let the episode end with the path that has the most turns.

    Each path is a segment of the sample, for example that of a sub-agent, or the conversation before a compaction. Of
    paths with equally many turns, the episode ends with the last one.
    """
    branches = []
    for end in ends:
        branch = episode.fork(end)
        branch._cursor.has_turns = True
        branches.append(branch)
    if branches:
        episode.adopt(max(reversed(branches), key=lambda branch: episode.graph.num_turns(branch.leaf or 0)))
