"""An episode: one sample of one task. It grows turn by turn within its limits, and every token is recorded.

If the record already contains turns, the episode replays them first. Messages that were added before are found in the
record, and so are the turns of the policy. The policy generates only what the record does not contain. Tools are
called again during the replay. A tool that returns a different result starts another branch.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.agent.generate_fn import (
    GenerateFn,
    generate_whole_turn,
    require_generate_fn,
    require_sampling_params,
)
from verl_server.agent.limits import EpisodeStopped, RolloutLimits
from verl_server.agent.samples import Task, Turn
from verl_server.errors import BadInputError, to_wire
from verl_server.router.resumable_generation import version_spans
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.messages import Message, image_sources
from verl_server.trajectory.nodes import ForkReason, Node, Span
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.rendering import ChatRenderer
from verl_server.types import Json


def validate_episode_arguments(renderer: object, limits: object, sampling_params: object) -> None:
    """Raise BadInputError for arguments that an `Episode`, and therefore a runner of episodes, cannot use."""
    if not isinstance(renderer, ChatRenderer):
        got = type(renderer).__name__
        raise BadInputError(f"renderer must be a ChatRenderer, got {got}; pass get_renderer(tokenizer)")
    if not isinstance(limits, RolloutLimits):
        got = type(limits).__name__
        raise BadInputError(f"limits must be RolloutLimits, got {got}; pass RolloutLimits(max_response_tokens=1024)")
    require_sampling_params(sampling_params)


class Episode:
    """One sample of one task, which an agent loop drives with `generate`, `add_messages`, `append_text` and `fork`.

    `record`: a `Recorder`, or a `TrajectoryGraph` that is kept in memory only. `sampling_params`: SGLang's sampling
    parameters of every turn. `tools`: JSON schemas of the tools. Raises BadInputError for arguments of a wrong type.
    """

    def __init__(
        self,
        task: Task,
        record: Recorder | TrajectoryGraph,
        generate: GenerateFn,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        sampling_params: Mapping[str, Any],
        tools: Sequence[Json] = (),
    ) -> None:
        validate_episode_arguments(renderer, limits, sampling_params)
        require_generate_fn("generate", generate)
        self.task, self.limits = task, limits
        self._record, self._generate, self._renderer = record, generate, renderer
        self._sampling_params, self._tools = dict(sampling_params), list(tools)
        self._deadline = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        self._num_prompt_tokens = 0
        self._num_recorded_nodes = len(self.graph.nodes)
        """Number of nodes that the record contained at the start."""
        self._replayed_nodes: set[int] = set()
        """Ids of recorded nodes that were replayed. A node is replayed once, because the branches of a fork differ."""
        self._is_generating = False
        """Whether a turn is being generated, which will be added below `leaf`."""
        self._has_images = False
        self._fork_reason = ForkReason.RETRY
        """Reason of the next node's fork, in case the next node is a fork."""
        self.leaf: int | None = None
        """Id of the last node. None before the first prompt."""
        self.stop_reason: str | None = None
        """Why the episode stopped: `done`, `error`, or the name of a limit. None while the episode runs."""
        self.exception: Exception | None = None
        """Exception of a failed episode."""

    @property
    def error(self) -> Json | None:
        """Exception of a failed episode as JSON (`verl_server.errors.to_wire`)."""
        return None if self.exception is None else to_wire(self.exception)

    @property
    def graph(self) -> TrajectoryGraph:
        """The token graph of the episode."""
        return self._record if isinstance(self._record, TrajectoryGraph) else self._record.graph

    @property
    def reached_limit(self) -> str | None:
        """Name of the limit that cut off the last turn. None if no limit did."""
        if self.leaf is None or self.graph.node(self.leaf).finish_reason != "length":
            return None
        remaining, limit = self._remaining_tokens()
        return limit if remaining <= 0 else None

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the first prompt so far."""
        return 0 if self.leaf is None else self.graph.num_tokens(self.leaf) - self._num_prompt_tokens

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages from the environment (user, tool, system). The first call adds the first prompt.

        Tool results after the first prompt are truncated to `max_tool_tokens`. Raises EpisodeStopped if messages after
        the first prompt do not fit into the limits; the path then ends with the last turn. Raises BadInputError for
        messages that the renderer refuses, and while a turn is being generated.
        """
        self._require_idle()
        if self.leaf is None:
            token_ids = self._renderer.render_prompt(messages, self._tools or None)
            self._num_prompt_tokens = len(token_ids)
        else:
            messages = [self._truncate_tool_result(message) for message in messages]
            turn_ids = self.graph.node(self.leaf).token_ids
            token_ids = self._renderer.render_next_turn(messages, turn_ids, self._preceding_ids(self.leaf))
            self._require_room(len(token_ids))
        self._has_images = self._has_images or any(image_sources(message) for message in messages)
        self._add_context(token_ids, {"messages": [dict(message) for message in messages]})

    def append_text(self, text: str, *, prefix: str = "", suffix: str = "") -> None:
        """Append `prefix`, `text` and `suffix` to the turn that the policy has just generated, within that turn.

        The text is truncated to `max_tool_tokens`. The prefix and the suffix, for example tags around a result, are
        not. Raises EpisodeStopped if the limits have no room for all of them, and BadInputError while a turn is being
        generated.
        """
        self._require_idle()
        appended = prefix + self._renderer.truncate(text, self.limits.max_tool_tokens) + suffix
        token_ids = self._renderer.encode(appended)
        self._require_room(len(token_ids))
        self._add_context(token_ids, {"appended_text": appended})

    def fork(self, node: int, reason: ForkReason) -> None:
        """Continue from an earlier node: the next node is a new branch.

        Raises BadInputError for an unknown node, and while a turn is being generated.
        """
        self._require_idle()
        self.graph.node(node)
        self.leaf, self._fork_reason = node, reason

    async def generate(self, messages: Sequence[Message] | None = None, **sampling_params: Any) -> Turn:
        """Let the policy generate a turn, after appending `messages` if given.

        `sampling_params` override those of the episode for this turn. `max_new_tokens` is reduced to the tokens that
        the limits leave. Raises EpisodeStopped at a limit, BadInputError for messages that the renderer refuses, for a
        first turn without messages and while another turn is being generated, and the exceptions of the generate
        function.
        """
        self._require_idle()
        params = require_sampling_params({**self._sampling_params, **sampling_params})
        if messages is not None:
            self.add_messages(messages)
        if self.leaf is None:
            raise BadInputError("the first turn of an episode needs messages")
        if self.graph.num_turns(self.leaf) >= self.limits.max_turns:
            raise EpisodeStopped("max_turns")
        remaining_s = None if self._deadline is None else self._deadline - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise EpisodeStopped("timeout_s")
        if (replayed := self._replay_node(sampled=True)) is not None:
            return self._as_turn(replayed)
        self._require_room(0)
        timeout = asyncio.timeout(remaining_s)
        self._is_generating = True
        try:
            async with timeout:
                reply = await self._request_turn(self.leaf, params)
        except TimeoutError as error:
            if timeout.expired():
                raise EpisodeStopped("timeout_s") from error
            raise  # a timeout of the generate function
        finally:
            self._is_generating = False
        return self._as_turn(self._add_sampled(reply))

    async def _request_turn(self, leaf: int, params: Json) -> Json:
        remaining, _ = self._remaining_tokens()
        params["max_new_tokens"] = min(params.get("max_new_tokens") or remaining, remaining)
        images = self._image_data(leaf)
        return await generate_whole_turn(
            self._generate,
            rid=f"{self.graph.session_id}-{leaf}-{uuid.uuid4().hex[:8]}",
            session_id=self.graph.session_id,
            input_ids=self.graph.token_ids(leaf),
            sampling_params=params,
            return_logprob=True,
            **({"image_data": images} if images else {}),
        )

    def _require_idle(self) -> None:
        if self._is_generating:
            raise BadInputError(
                f"the episode of task {self.task.id!r} is generating a turn; await it first, also for another branch. "
                "For concurrent samples, call RolloutRunner.run(tasks, n=...)"
            )

    def _remaining_tokens(self) -> tuple[int, str]:
        """Number of tokens that may still be added, and the name of the limit that determines the number."""
        remaining = [(self.limits.max_response_tokens - self.num_response_tokens, "max_response_tokens")]
        if self.limits.max_context_tokens is not None:
            num_tokens = 0 if self.leaf is None else self.graph.num_tokens(self.leaf)
            remaining.append((self.limits.max_context_tokens - num_tokens, "max_context_tokens"))
        return min(remaining, key=lambda entry: entry[0])

    def _require_room(self, num_tokens: int) -> None:
        """Raise EpisodeStopped unless `num_tokens` more tokens and at least one sampled token fit into the limits."""
        remaining, limit = self._remaining_tokens()
        if num_tokens >= remaining:
            raise EpisodeStopped(limit)

    def _image_data(self, leaf: int) -> list[str]:
        """Images of the path in their order. The tokens have one placeholder per image, which SGLang expands."""
        if not self._has_images:
            return []
        nodes = self.graph.path(leaf)
        messages = [message for node in nodes for message in (node.message or {}).get("messages", ())]
        return [source for message in messages for source in image_sources(message)]

    def _preceding_ids(self, node: int) -> Sequence[int]:
        """Token ids of a node's parent."""
        parent = self.graph.node(node).parent
        return () if parent is None else self.graph.node(parent).token_ids

    def _truncate_tool_result(self, message: Message) -> Message:
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, (str, list)):
            return message
        return {**message, "content": self._renderer.truncate_content(content, self.limits.max_tool_tokens)}

    def _as_turn(self, node: Node) -> Turn:
        token_ids = list(node.token_ids)
        tool_calls = self._renderer.parse_tool_calls(token_ids, self._preceding_ids(node.id), self._tools)
        text = str((node.message or {})["content"])
        return Turn(text, token_ids, node.id, node.finish_reason or "", tool_calls)

    def _add_sampled(self, reply: Json) -> Node:
        """Record the tokens of a reply."""
        meta, token_ids = reply["meta_info"], reply["output_ids"]
        spans = version_spans(reply) if token_ids else []
        node = self._record.add_node(
            self.leaf,
            token_ids,
            sampled=True,
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            spans=[Span(span["version"], span["start"], span["end"]) for span in spans],
            message={"role": "assistant", "content": self._renderer.decode(token_ids)},
            fork_reason=self._next_fork_reason(),
            finish_reason=str((meta.get("finish_reason") or {}).get("type")),
            routed_experts=meta.get("routed_experts"),
        )
        self._move_to(node)
        return node

    def _add_context(self, token_ids: Sequence[int], message: Json) -> None:
        """Record tokens that the policy did not sample, or replay the recorded node with the same tokens."""
        if self._replay_node(sampled=False, token_ids=token_ids) is None:
            reason = self._next_fork_reason()
            node = self._record.add_node(self.leaf, token_ids, sampled=False, message=message, fork_reason=reason)
            self._move_to(node)

    def _next_fork_reason(self) -> ForkReason | None:
        return self._fork_reason if self.graph.children(self.leaf) else None

    def _move_to(self, node: Node) -> None:
        self.leaf, self._fork_reason = node.id, ForkReason.RETRY

    def _replay_node(self, *, sampled: bool, token_ids: Sequence[int] = ()) -> Node | None:
        """Move to a child that was recorded before this episode started: a sampled node, or one with `token_ids`."""
        for child in self.graph.children(self.leaf):
            node = self.graph.node(child)
            can_replay = child < self._num_recorded_nodes and child not in self._replayed_nodes
            if can_replay and node.sampled == sampled and (sampled or node.token_ids == tuple(token_ids)):
                self._replayed_nodes.add(child)
                self.leaf = child
                return node
        return None
