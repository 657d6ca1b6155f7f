"""What all branches of one sample share: the record, the limits, and the requests that run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from verl_server.agent.engines import GenerateFn
from verl_server.agent.limits import EpisodeStopped, Phase, RolloutLimits, measure
from verl_server.agent.tools.tool import ToolRegistry
from verl_server.agent.user_code import CURRENT_EPISODE_STATE, wait_until_done
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import Node, TrajectoryGraph
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message, image_sources, validate_messages
from verl_server.types import Json

logger = logging.getLogger(__name__)


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

    async def run_request(self, request: Coroutine[Any, Any, Json]) -> Json:
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
