"""One sample of one task: it grows turn by turn, within its budget, and every token of it is recorded.

A record that has turns already is played again first: what is put there and has been put there before is found, and
so are the policy's answers; only then is anything sampled. (Tools are called again. One that answers something else
this time begins another branch.)
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_server.errors import BadInputError
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.trajectory.graph import ForkReason, Node, Session, Span
from verl_server.trajectory.recorder import Recorder
from verl_server.trajectory.rendering import Call, Message, Renderer

Json = dict[str, Any]

AGAIN_S = 0.05
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
MAX_CUTS = 64
"""Weight updates that may cut off one turn."""


class Generate(Protocol):
    """Tokens in, tokens out: `RolloutRouter.generate`, `RouterClient.generate`, or an engine's by `generate_of`."""

    async def __call__(self, *, request_id: str, session_id: str, **request: Any) -> Json: ...


@dataclass(frozen=True)
class Budget:
    """Of one sample, over all of its turns."""

    response_tokens: int
    """Everything after the first prompt: sampled, and put there by tools."""
    turns: int = 64
    wall_s: float | None = None
    """A turn that is being sampled when it is over is given up; a tool has a limit of its own."""
    tool_tokens: int = 2048
    """Of one result; the rest of it is cut."""

    def __post_init__(self) -> None:
        for name in ("response_tokens", "turns", "tool_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInputError(f"budget.{name} must be a whole number, 1 or more, got {value!r}")
        if self.wall_s is not None and not self.wall_s > 0:
            raise BadInputError(f"budget.wall_s must be a positive number of seconds, got {self.wall_s!r}")


@dataclass(frozen=True)
class Task:
    """What an agent is to do."""

    id: str
    messages: Sequence[Message]
    data: Mapping[str, Any] = field(default_factory=dict)
    """For tools and rewards; the policy does not see it."""


@dataclass(frozen=True)
class Turn:
    """What the policy said."""

    text: str
    ids: list[int]
    node: int
    finish: str
    """SGLang's `finish_reason`: `stop`, `length`, ..."""
    calls: Sequence[Call] | None = None
    """The tools that it calls, where the renderer knows the family's tokens; None: the text tells."""


class EndedError(Exception):
    """The budget is spent: thrown through an agent's loop, not at its caller."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rollout:
    """What an agent's loop works with. `record` is a `Recorder`, or a `Session` that is kept in memory only."""

    def __init__(
        self,
        task: Task,
        record: Recorder | Session,
        generate: Generate,
        renderer: Renderer,
        budget: Budget,
        sampling_params: Mapping[str, Any],
        tools: Sequence[Json] = (),
    ) -> None:
        self.task, self.budget = task, budget
        self._record, self._generate, self._renderer = record, generate, renderer
        self._params, self._tools = dict(sampling_params), list(tools)
        self._deadline = None if budget.wall_s is None else time.monotonic() + budget.wall_s
        self._prompt = 0
        self._had = len(self.session.nodes)
        self._passed: set[int] = set()
        """Nodes that were played again: a fork's other way is another node."""
        self._has_images = False
        self._fork = ForkReason.RETRY
        """Why the next node is beside another, should it be."""
        self.leaf: int | None = None
        """The last node."""
        self.reason: str | None = None
        """How it ended."""
        self.error: Json | None = None
        """The exception of one that failed, as it travels (`verl_server.errors.to_wire`)."""

    @property
    def session(self) -> Session:
        return self._record if isinstance(self._record, Session) else self._record.session

    @property
    def used(self) -> int:
        """Response tokens so far."""
        return 0 if self.leaf is None else self.session.length(self.leaf) - self._prompt

    async def turn(self, messages: Sequence[Message], **sampling_params: Any) -> Turn:
        """Put `messages` there and let the policy speak.

        Raises EndedError when that is more than the budget, and what generating raises.
        """
        self.put(messages)
        return await self.speak(**sampling_params)

    def put(self, messages: Sequence[Message]) -> None:
        """Add what the world says. Raises EndedError when it does not fit; then the last turn is the end."""
        if self.leaf is None:
            ids = self._renderer.first(messages, self._tools or None)
            self._prompt = len(ids)
        else:
            cut = [self._cut(message) for message in messages]
            ids = self._renderer.suffix(cut, self.session.node(self.leaf).tokens, self._before(self.leaf))
            if self.used + len(ids) >= self.budget.response_tokens:
                raise EndedError("response_tokens")
            messages = cut
        self._has_images = self._has_images or any(images_of(message) for message in messages)
        self._add(ids, sampled=False, message={"messages": [dict(message) for message in messages]})

    async def speak(self, **sampling_params: Any) -> Turn:
        """One turn of the policy's; `max_new_tokens` is cut to what is left. See `turn`."""
        if self.leaf is None:
            raise BadInputError("an agent's first turn needs messages")
        if self.session.turns(self.leaf) >= self.budget.turns:
            raise EndedError("turns")
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise EndedError("wall_s")
        if (played := self._played(True)) is not None:
            return self._turn(played)
        params = {**self._params, **sampling_params}
        left = self.budget.response_tokens - self.used
        params["max_new_tokens"] = min(int(params.get("max_new_tokens") or left), left)
        images = self._images(self.leaf)
        limit = asyncio.timeout(left_s)
        try:
            async with limit:
                reply = await self._whole(
                    request_id=f"{self.session.id}-{self.leaf}-{uuid.uuid4().hex[:8]}",
                    session_id=self.session.id,
                    input_ids=self.session.ids(self.leaf),
                    sampling_params=params,
                    return_logprob=True,
                    **({"image_data": images} if images else {}),
                )
        except TimeoutError as error:
            if limit.expired():
                raise EndedError("wall_s") from error
            raise  # a deadline of whoever generates
        return self._turn(self._sampled(reply))

    def _images(self, leaf: int) -> list[str]:
        """Those of the path, in their order. Its tokens have one placeholder for each, which SGLang makes longer."""
        if not self._has_images:
            return []
        messages = [one for node in self.session.path(leaf) for one in (node.message or {}).get("messages", ())]
        return [image for message in messages for image in images_of(message)]

    def _turn(self, node: Node) -> Turn:
        ids = list(node.tokens)
        called = self._renderer.calls(ids, self._before(node.id), self._tools)
        return Turn(str((node.message or {})["content"]), ids, node.id, node.finish or "", called)

    def _before(self, node: int) -> Sequence[int]:
        """What the world said last before a node."""
        parent = self.session.node(node).parent
        return () if parent is None else self.session.node(parent).tokens

    async def _whole(self, **request: Any) -> Json:
        """The reply; what a weight update has cut off is taken up by asking again."""
        for _ in range(MAX_CUTS):
            reply = await self._generate(**request)
            if not _is_cut(reply):
                break
            await asyncio.sleep(AGAIN_S)
        return reply

    def _sampled(self, reply: Json) -> Node:
        meta, ids = reply["meta_info"], reply["output_ids"]
        whole = [{"version": meta.get("weight_version"), "start": 0, "end": len(ids)}] if ids else []
        reason = meta.get("finish_reason") or {}
        return self._add(
            ids,
            sampled=True,
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            spans=[Span(str(one["version"]), one["start"], one["end"]) for one in meta.get("weight_versions") or whole],
            message={"role": "assistant", "content": self._renderer.text(ids)},
            finish=str(reason.get("type")),
            experts=meta.get("routed_experts"),
        )

    def _cut(self, message: Message) -> Message:
        """A tool's result within its budget."""
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, str):
            return message
        return {**message, "content": self._renderer.cut(content, self.budget.tool_tokens)}

    def insert(self, text: str) -> None:
        """Put `text` behind what the policy has just said, within its turn. Raises EndedError when it does not fit."""
        ids = self._renderer.encode(text)[: self.budget.tool_tokens]
        if self.used + len(ids) >= self.budget.response_tokens:
            raise EndedError("response_tokens")
        self._add(ids, sampled=False, message={"inserted": text})

    def fork(self, node: int, reason: ForkReason) -> None:
        """Go on from an earlier node: what comes next is another branch. Raises BadInputError."""
        self.session.node(node)
        self.leaf, self._fork = node, reason

    def _played(self, sampled: bool, ids: Sequence[int] = ()) -> Node | None:
        """The next node, if the record had it from the beginning: sampled, or with these tokens."""
        for child in self.session.children(self.leaf):
            node = self.session.node(child)
            known = child < self._had and child not in self._passed
            if known and node.sampled == sampled and (sampled or node.tokens == tuple(ids)):
                self._passed.add(child)
                self.leaf = child
                return node
        return None

    def _add(self, ids: Sequence[int], **fields: Any) -> Node:
        if not fields["sampled"] and (played := self._played(False, ids)) is not None:
            return played
        fork = self._fork if self.session.children(self.leaf) else None
        node = self._record.add(self.leaf, ids, fork=fork, **fields)
        self.leaf, self._fork = node.id, ForkReason.RETRY
        return node


def images_of(message: Message) -> list[str]:
    """Paths, URLs or base64 of a message's images: parts `{"type": "image", "image": ...}`, or OpenAI's `image_url`."""
    content = message.get("content")
    found = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            given = next((part[key] for key in IMAGE_KEYS if part.get(key)), None)
            image = given.get("url") if isinstance(given, Mapping) else given
            if not isinstance(image, str) or not image:
                raise BadInputError(f"an image is given by one of {IMAGE_KEYS}, as text; got {type(image).__name__}")
            found.append(image)
    return found


def _is_cut(reply: Json) -> bool:
    reason = reply["meta_info"].get("finish_reason") or {}
    return bool(reason.get("type") == "abort")


def generate_of(adapter: Any) -> Generate:
    """Of one server: an `AsyncHttpServerEngineAdapter` as `Generate`."""

    async def generate(*, request_id: str, session_id: str, **request: Any) -> Json:
        del session_id  # there is only one place to go
        sample = ResumableGeneration(request)
        for _ in range(MAX_CUTS):
            sample.arrived(await adapter.generate(rid=f"{request_id}~{sample.attempts}", **sample.begin()))
            reply = sample.reply()
            if not sample.is_partial:
                break
            sample.interrupted()
            if sample.is_full:
                return sample.reply()
            await asyncio.sleep(AGAIN_S)
        return reply

    return generate
