"""The end of one branch of an episode: renders the next messages, requests the next turn, and records both."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Unpack

from verl_server.agent.episodes.episode_state import EpisodeState
from verl_server.agent.generate_fn import generate_whole_turn
from verl_server.agent.samples import Turn
from verl_server.agent.tools.parsing import opens_thought
from verl_server.errors import BadInputError
from verl_server.router.resumable_generation import version_spans
from verl_server.router.token_reports import OnTokens
from verl_server.trajectory.batches.routed_experts import num_recorded_expert_tokens, pack_experts
from verl_server.trajectory.nodes import ForkReason, Node, NodeFields, Span
from verl_server.trajectory.rendering.images import image_data_url
from verl_server.trajectory.rendering.messages import Message
from verl_server.trajectory.rendering.vision_renderer import (
    VisionRenderer,
    require_same_prompt,
    require_vision_renderer,
)
from verl_server.types import Json


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

    def add_turn(self, reply: Json, details: Json | None = None) -> Node:
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

    async def request_turn(self, params: Json, on_tokens: OnTokens | None = None) -> Json:
        """Request a turn after the path and return the reply, which `add_turn` records.

        `params`: the sampling parameters of the turn. `max_new_tokens` is at most what the limits leave. `on_tokens`:
        gets the tokens while they are generated, if the generate function can report them.
        """
        leaf, session_id = self.leaf, self._graph.session_id
        remaining, limit = self._state.remaining_tokens(leaf)
        if remaining <= 0:  # another branch has added tokens since this turn has begun
            raise self._state.stop(limit)
        return await generate_whole_turn(
            self._state.generate,
            rid=f"{session_id}-{leaf}-{secrets.token_hex(4)}",
            session_id=session_id,
            on_tokens=on_tokens,
            return_logprob=True,
            **self._prompt_fields(),
            **self._routed_experts_fields(),
            sampling_params={**params, "max_new_tokens": min(params.get("max_new_tokens") or remaining, remaining)},
        )

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
