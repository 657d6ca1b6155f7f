"""What every dialect is converted to and from: the request for one turn, and the turn that the policy generated."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

FinishReason = Literal["stop", "length", "tool_calls"]
LITELLM_EMPTY_TEXT = "[System: Empty message content sanitised to satisfy protocol]"
"""What LiteLLM writes for an empty text, because Anthropic's servers refuse it: that of a turn with calls only."""


@dataclass(frozen=True)
class TurnRequest:
    """A request of an agent for the next turn, in no dialect."""

    model: str
    """Name of the model as the agent wrote it. Replies repeat the name."""
    messages: Sequence[Message]
    """Whole conversation as chat templates take it. Empty with `raw_prompt`."""
    tools: Sequence[Json] = ()
    """Tools that the policy sees: `{"type": "function", "function": {name, description, parameters}}`."""
    omitted_tools: Sequence[str] = ()
    """Types of the tools that the policy does not see."""
    sampling_params: Json = field(default_factory=dict)
    """SGLang's sampling parameters that the agent has set."""
    last_thought: str = ""
    """Thought of the last turn in `messages`, if the agent repeats it. It tells turns apart that say the same."""
    stream: bool = False
    """Whether the agent wants server-sent events."""
    logprobs: bool = False
    """Whether the agent wants the log probabilities of the sampled tokens."""
    include_usage: bool = False
    """Whether a stream of OpenAI's chat dialect ends with the numbers of tokens."""
    forced_tools: Sequence[str] | None = None
    """Names of the tools of which the turn must call one. None: the policy chooses. Empty: the turn has no call."""
    allows_parallel_calls: bool = True
    """Whether the turn may have several calls. Without a grammar of calls, the policy does not know it."""
    template_arguments: Json = field(default_factory=dict)
    """Variables of the chat template: those of the request, and in a session also those of the session."""
    reasoning_effort: str | None = None
    """How much the policy should think. A session makes it a variable of the template, if the template has one."""
    num_bytes: int = 0
    """Size of the body. 0 if it is unknown: then the work on the request counts as short."""
    raw_prompt: str | Sequence[int] | None = None
    """Prompt that is not a chat: a text, or token ids. The turn after a raw prompt is not split into parts."""

    @property
    def allows_calls(self) -> bool:
        """Whether the turn may have tool calls: there are tools, and `tool_choice` is not none."""
        return bool(self.tools) and (self.forced_tools is None or bool(self.forced_tools))


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool in a turn."""

    id: str
    """Id that the agent repeats beside the result. It is derived from the session, the turn and the position."""
    name: str
    arguments: str
    """Arguments as JSON text."""
    sampled_id: str | None = None
    """Id that the policy has sampled. None if the family of models samples no ids."""


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the policy, in no dialect."""

    id: str
    """Unique name of the turn in the gateway: the session and the node of the turn."""
    node: int
    """Id of the turn's node in the trajectory graph."""
    text: str
    """Text outside of thoughts and tool calls."""
    reasoning: str
    """Text of the thoughts."""
    tool_calls: Sequence[ToolUse]
    finish_reason: FinishReason
    stop_sequence: str | None
    """Stop sequence of the request at which the turn ended."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Number of prompt tokens that the engine found in its prefix cache."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log probability of each token in nats."""
    tokens: Sequence[bytes]
    """Bytes of each token, which may be a part of a character. Empty if the agent wants no log probabilities.

    Together they are the text of the turn with thoughts, calls and special tokens. The end marker has no bytes.
    """


@dataclass(frozen=True)
class TurnDelta:
    """The part of a turn since the delta before. All deltas of a turn together have its thoughts, text and tokens."""

    reasoning: str
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log probability of each token in nats."""
    tokens: Sequence[bytes]
    """Bytes of each token, which may be a part of a character. Empty if the agent wants no log probabilities."""


def require_size(request: TurnRequest, config: GatewayConfig) -> None:
    """Raise GatewayError (413) for a request with more messages or tools than the gateway allows."""
    for name, values, maximum in (
        ("messages", request.messages, config.max_messages),
        ("tools", request.tools, config.max_tools),
    ):
        if len(values) > maximum:
            raise GatewayError(ErrorKind.TOO_LARGE, f"the request has {len(values)} {name}, and {maximum} are allowed")
    maximum = config.max_tool_name_chars
    if any(len(tool["function"]["name"]) > maximum for tool in request.tools):
        raise GatewayError(ErrorKind.INVALID_REQUEST, f"the name of a tool has more than {maximum} characters")


def message_of(turn: AssistantTurn) -> Json:
    """The turn as an assistant message in the form of chat templates, as agents repeat it."""
    message: Json = {"role": "assistant", "content": turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [as_template_call(call.id, call.name, call.arguments) for call in turn.tool_calls]
    return message


def normalize_messages(messages: Sequence[Json]) -> list[Json]:
    """The messages in the one form in which conversations are compared, recorded and shown to the policy.

    - System messages are at the beginning only, as many chat templates need them. A later one, such as that of Claude
      Code, stays at its place as text of the user: at the end of the message of the user before it, or on its own.
    - Neighbouring assistant messages are one turn. Some clients send the text and each call of a turn on their own.
    - The results of the calls of a turn stand in the order of the calls, and have their ids (`_with_call_ids`).
    """
    groups = list[list[Json]]()
    """Messages that are joined. The texts of a group are joined at once: there may be thousands."""
    for message in messages:
        last, role = groups[-1][0] if groups else None, message["role"]
        if last is not None and role == last["role"] == "assistant":
            groups[-1].append(message)
        elif role != "system" or last is None:
            groups.append([message])
        elif last["role"] in ("system", "user") and all(isinstance(item["content"], str) for item in (last, message)):
            groups[-1].append(message)
        else:
            groups.append([{**message, "role": "user"}])
    return _with_call_ids([_joined(group) for group in groups])


def _joined(group: Sequence[Json]) -> Json:
    if len(group) == 1:
        return group[0]
    is_turn = group[0]["role"] == "assistant"
    texts = [message["content"] for message in group if not is_turn or message["content"] != LITELLM_EMPTY_TEXT]
    joined = {**group[0], "content": ("" if is_turn else "\n\n").join(texts)}
    for name in ("tool_calls", "omitted"):
        if values := [value for message in group for value in message.get(name, ())]:
            joined[name] = values
    return joined


def _with_call_ids(messages: Sequence[Json]) -> list[Json]:
    """The messages, in which the id of a result is that of one call of the turn before, and names no other call.

    Clients rewrite ids: they add a prefix, cut them, or use an id twice. A result belongs to the first call with its
    id that has no result yet. Results with ids that no call has belong to the calls that are left, in their order.
    """
    named, ids, waiting = list[Json](), list[str](), dict[int, str]()
    """Ids of the calls of the last turn, and the ids that the client has sent for calls without a result."""
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            named += _match_results(list(group), ids, waiting)
            continue
        for message in group:
            if message["role"] == "assistant":
                calls = message.get("tool_calls") or ()
                ids = [call["id"] for call in calls]
                waiting = dict(enumerate(ids))
                if len(set(ids)) < len(ids):
                    ids = [f"{call_id}-{place}" for place, call_id in waiting.items()]
                    calls = [{**call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)]
                    message = {**message, "tool_calls": calls}
            named.append(message)
    return named


def _match_results(results: Sequence[Json], ids: Sequence[str], waiting: dict[int, str]) -> list[Json]:
    """The results in the order of their calls, with the ids of the calls. Results without a call come last."""
    places, sent = defaultdict[str, deque[int]](deque), {*ids, *waiting.values()}
    for place, call_id in waiting.items():
        places[call_id].append(place)
    found = [queue.popleft() if (queue := places[result["tool_call_id"]]) else None for result in results]
    free = iter(sorted(place for queue in places.values() for place in queue))
    for number, result in enumerate(results):
        if found[number] is None and result["tool_call_id"] not in sent:
            found[number] = next(free, None)
    matched = [(place, result) for place, result in zip(found, results, strict=True) if place is not None]
    for place, _ in matched:
        del waiting[place]
    ordered = sorted(matched, key=lambda item: item[0])
    others = [result for place, result in zip(found, results, strict=True) if place is None]
    return [*({**result, "tool_call_id": ids[place]} for place, result in ordered), *others]


def as_template_call(call_id: str, name: str, arguments: str | Json) -> Json:
    """A tool call in the form of chat templates. `arguments`: a dict, or JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- Context ----------------------------------------------------------------------------------------
# What the tasks of a request know about it.

ARRIVED_AT: ContextVar[float | None] = ContextVar("verl_gateway_arrived_at", default=None)
"""Time at which the request arrived (`time.monotonic`). A generation is a task that its first request has started."""
