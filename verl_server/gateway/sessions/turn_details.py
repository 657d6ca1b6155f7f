"""The prompt of a turn, and what a session records of the turn besides the tokens for a later process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_server.agent.episodes.cursor import Cursor
from verl_server.errors import BadInputError, ServerError
from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.sessions.history import Key
from verl_server.gateway.sessions.raw_prompts import unsplit_turn
from verl_server.gateway.turn_text.grammar import has_grammar_of_calls
from verl_server.gateway.turn_text.token_decoder import bytes_of_tokens
from verl_server.gateway.turn_text.turn_parsing import split_turn
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json

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


def turn_details(prompt: Prompt, reply: Json, started_at: float, ignored: Sequence[str]) -> Json:
    """Keys for the recorded message of a turn.

    `stop_sequence`: the stop sequence at which the turn ended, if there is one. `request`: the digest of the request,
    by which a repeated request is recognised, the id of its reply (`reply`), what labels of conversations depend on
    (`conversation_kinds.py`), and the times of the turn, which exports read: `started_at`, seconds since 1970, and
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
    preceding = () if node.parent is None else graph.node(node.parent).token_ids
    split = split_turn if request.raw_prompt is None else unsplit_turn
    parts = split(
        renderer,
        node.token_ids,
        preceding,
        request.tools,
        turn_id,
        stop_sequence=stop,
        allows_calls=request.allows_calls,
    )
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


def record_turn(prompt: Prompt, reply: Json, started_at: float, ignored: Sequence[str]) -> Node:
    """Record the reply of the engine. Raises ServerError for a reply that the record refuses, for example with NaN."""
    details = turn_details(prompt, reply, started_at, ignored)
    try:
        return prompt.cursor.add_turn(reply, details)
    except BadInputError as error:  # it is no mistake of the agent
        raise ServerError(f"the reply of the engine cannot be recorded: {error.message}") from error
