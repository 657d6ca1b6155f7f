"""The gateway streams turns token by token, with the official SDKs: on a real server, and with turns that are known."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_helpers import RecordingGenerateFn
from anthropic.types import Message
from helpers import adapter_of
from openai.types.chat import ChatCompletionChunk
from test_dispatcher import API_KEY, http_router
from test_gateway import gateway, generate, graph_of, num_turns, openai_client
from test_gateway_anthropic import EVENT_TYPES, client_of
from test_gateway_responses import EVENT
from transformers import AutoTokenizer

from verl_server import RouterClient, VerlEngine
from verl_server.adapter.blocking import EventLoopThread
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.router.dispatcher import Dispatcher
from verl_server.trajectory import ChatRenderer

__all__ = ["gateway", "generate"]

LETTERS = {str(token): 100.0 for token in range(64, 90)}
"""Bias by which the tiny model writes capital and small letters only. Such a generation can continue elsewhere."""
LONG = {"max_new_tokens": 400, "ignore_eos": True, "logit_bias": LETTERS}
HELLO: list[Any] = [{"role": "user", "content": "a"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADD_IN_MESSAGES: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
FLAT_ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
TURN = f"<think>\nWhy not?\n</think>\n\nSo it is. \n{CALL % 1}\n{CALL % 2}"
WAIT_S = 30.0


@dataclass
class Seen:
    """What a client has seen of a stream."""

    deltas: list[str] = field(default_factory=list)
    """Parts of the text."""
    thoughts: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Types of the events, those that repeat once."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names and arguments."""
    end: str | None = None
    """Why the turn has ended."""

    def note(self, kind: str) -> None:
        if self.kinds[-1:] != [kind]:
            self.kinds.append(kind)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


LAST_STREAM = list[openai.Stream[Any]]()
"""The last stream of OpenAI's client, which a client that leaves has to close."""
Stream = Callable[[Gateway, str, Callable[[Seen], None]], Seen]
"""A client that streams one turn. The function is called after each event."""


def closing(stream: openai.Stream[Any]) -> Iterator[Any]:
    """The events of a stream, which the client can close."""
    LAST_STREAM[:] = [stream]
    yield from stream


def stream_chat(gateway: Gateway, key: str, look: Callable[[Seen], None]) -> Seen:
    seen, arguments = Seen(), dict[int, list[str]]()
    stream = openai_client(gateway, key).chat.completions.create(
        model="m", messages=HELLO, tools=[ADD], stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    tokens, usage = list[str](), None
    for chunk in closing(stream):
        ChatCompletionChunk.model_validate(chunk.to_dict())
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            if thought := getattr(delta, "reasoning_content", None):
                seen.thoughts.append(thought)
                seen.note("thought")
            if delta.content:
                seen.deltas.append(delta.content)
                seen.note("text")
            for call in delta.tool_calls or ():
                seen.note("call")
                assert call.function is not None
                arguments.setdefault(call.index, []).append(call.function.arguments or "")
                if call.function.name:
                    seen.calls.append((call.function.name, None))
            tokens += [entry.token for entry in (choice.logprobs.content or () if choice.logprobs else ())]
            seen.end = choice.finish_reason or seen.end
        look(seen)
    assert usage is not None
    assert len(tokens) == usage.completion_tokens, "each token has its log probability once"
    assert all(line in "".join(tokens) for line in seen.text.split("\n"))
    seen.calls = [(name, json.loads("".join(arguments[index]))) for index, (name, _) in enumerate(seen.calls)]
    return seen


def stream_responses(gateway: Gateway, key: str, look: Callable[[Seen], None]) -> Seen:
    seen = Seen()
    stream = openai_client(gateway, key).responses.create(model="m", input="a", tools=[FLAT_ADD], stream=True)
    received = list[Any]()
    for number, event in enumerate(closing(stream)):
        received.append(event)
        assert event.sequence_number == number
        seen.note(event.type.removeprefix("response."))
        if event.type == "response.reasoning_text.delta":
            seen.thoughts.append(event.delta)
        elif event.type == "response.output_text.delta":
            seen.deltas.append(event.delta)
        elif event.type == "response.output_text.done":
            assert event.text == seen.text
        elif event.type == "response.function_call_arguments.done":
            seen.calls.append((event.name, json.loads(event.arguments)))
        elif event.type in ("response.completed", "response.incomplete"):
            seen.end = event.response.status
            assert event.response.output_text == seen.text
        look(seen)
    for event in received:
        EVENT.validate_python(event.to_dict())
    return seen


def stream_messages(gateway: Gateway, key: str, look: Callable[[Seen], None]) -> Seen:
    seen, client = Seen(), client_of(gateway, key)
    with client.messages.stream(model="m", max_tokens=400, messages=HELLO, tools=[ADD_IN_MESSAGES]) as stream:
        for event in stream:
            if event.type not in EVENT_TYPES:
                continue  # made by the SDK
            seen.note(event.type)
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                seen.deltas.append(event.delta.text)
            elif event.type == "content_block_delta" and event.delta.type == "thinking_delta":
                seen.thoughts.append(event.delta.thinking)
            elif event.type == "message_delta":
                seen.end = event.delta.stop_reason
            look(seen)
        final = stream.get_final_message()
    Message.model_validate(final.to_dict())
    assert "".join(block.text for block in final.content if block.type == "text") == seen.text
    seen.calls = [(block.name, block.input) for block in final.content if block.type == "tool_use"]
    return seen


def stream_completion(gateway: Gateway, key: str, look: Callable[[Seen], None]) -> Seen:
    seen, token_ids = Seen(), list[int]()
    stream = openai_client(gateway, key).completions.create(
        model="m", prompt="a", max_tokens=400, logprobs=1, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    for chunk in closing(stream):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.text:
                seen.deltas.append(choice.text)
            new_ids = (choice.model_extra or {})["token_ids"]
            token_ids += new_ids
            assert len(choice.logprobs.token_logprobs if choice.logprobs else ()) == len(new_ids)
            seen.end = choice.finish_reason or seen.end
        look(seen)
    assert usage is not None
    assert usage.completion_tokens == len(token_ids)
    return seen


STREAMS: dict[str, Stream] = {
    "chat": stream_chat,
    "responses": stream_responses,
    "messages": stream_messages,
    "completions": stream_completion,
}
END_AT_LENGTH: dict[Stream, str] = {
    stream_chat: "length", stream_responses: "incomplete", stream_messages: "max_tokens", stream_completion: "length"
}  # fmt: skip
with_each_dialect = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)


# -- on a real server --------------------------------------------------------------------------------


@with_each_dialect
def test_text_arrives_before_the_turn_ends(gateway: Gateway, tiny: Callable[..., Path], stream: Stream) -> None:
    info, key = gateway.create_session(sampling_params={**LONG, "max_new_tokens": 1500})
    early = list[str]()

    def look(seen: Seen) -> None:
        if len(seen.deltas) == 3 and not early:
            early.extend(seen.deltas)
            assert num_turns(graph_of(gateway, info.id)) == 0, "the turn has ended already"

    seen = stream(gateway, key, look)
    (turn,) = (node for node in graph_of(gateway, info.id).nodes if node.sampled)
    assert len(early) == 3
    assert len(seen.deltas) > 50
    assert seen.text == AutoTokenizer.from_pretrained(tiny("qwen3")).decode(turn.token_ids)
    assert (len(seen.text), seen.end) == (1500, END_AT_LENGTH[stream])


def test_streams_and_replies_have_the_same_tokens(gateway: Gateway, generate: RecordingGenerateFn) -> None:
    """Greedy decoding gives the same turn, whether its tokens are reported or not."""
    texts = set[str]()
    for is_stream in (False, True):
        _, key = gateway.create_session(sampling_params={**LONG, "temperature": 0, "max_new_tokens": 60})
        if is_stream:
            texts.add(stream_chat(gateway, key, lambda seen: None).text)
        else:
            reply = openai_client(gateway, key).chat.completions.create(model="m", messages=HELLO, tools=[ADD])
            texts.add(reply.choices[0].message.content or "")
    assert len(texts) == 1


@pytest.mark.parametrize("is_retry", [True, False])
def test_a_retry_gets_all_deltas_of_the_running_turn(gateway: Gateway, is_retry: bool) -> None:
    """While the first client still reads, and after the first client has gone."""
    info, key = gateway.create_session(sampling_params={**LONG, "max_new_tokens": 600})
    body = {"model": "m", "messages": HELLO, "stream": True}
    url, found = f"{gateway.openai_url}/chat/completions", list[list[str]]()

    def read(stream: httpx.Response, max_deltas: int) -> None:
        deltas = list[str]()
        found.append(deltas)
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                deltas.append(json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", ""))
            if len(deltas) >= max_deltas:
                return

    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as first:
        read(first, 5)
        if is_retry:
            retry = {**headers, "x-stainless-retry-count": "1"}
            with httpx.stream("POST", url, json=body, headers=retry, timeout=60.0) as second:
                read(second, 10**6)
    if not is_retry:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as second:
            read(second, 10**6)
    first_text, second_text = ("".join(deltas) for deltas in found)
    assert first_text
    assert len(second_text) == 600
    assert second_text.startswith(first_text)
    assert num_turns(graph_of(gateway, info.id)) == 1


@pytest.mark.parametrize("stream", [stream_chat, stream_messages, stream_responses])
def test_a_session_that_ends_in_the_middle_of_a_text(gateway: Gateway, stream: Stream) -> None:
    """The stream ends with the error of the dialect."""
    info, key = gateway.create_session(sampling_params=LONG)
    found = list[Seen]()

    def look(seen: Seen) -> None:
        if len(seen.deltas) == 2 and not found:
            gateway.end_session(info.id)
            found.append(seen)

    if stream is stream_responses:
        assert stream(gateway, key, look).kinds[-1] == "failed"
    else:
        with pytest.raises((openai.APIError, anthropic.APIError), match="has ended"):
            stream(gateway, key, look)
    assert found[0].end is None


def test_stop_strings_and_grammars_arrive_at_the_end(gateway: Gateway) -> None:
    """Such a turn starts again when its server is lost, so none of its tokens are certain before its end."""
    _, key = gateway.create_session(sampling_params={"max_new_tokens": 100, "regex": "[a-z]{20}END", "stop": ["END"]})
    seen = stream_messages(gateway, key, lambda _: None)
    assert len(seen.deltas) == 1
    assert len(seen.text) == 20
    assert seen.end == "stop_sequence"


# -- turns that are known ----------------------------------------------------------------------------


class KnownTurn:
    """A policy whose turn is known. It reports a token at a time, and waits at `pause_after` until `go` is set."""

    def __init__(self, renderer: ChatRenderer, turn: str, pause_after: str) -> None:
        self._token_ids = [*renderer.encode(turn), *renderer.stop_token_ids]
        self._pause = len(renderer.encode(turn[: turn.index(pause_after) + len(pause_after)]))
        self.go = threading.Event()
        self.has_paused = False
        self.num_calls = 0
        self.reported: list[int] | None = None
        """Tokens that are reported in place of those of the turn."""

    async def __call__(self, *, rid: str, session_id: str, on_tokens: Any = None, **request: Any) -> Any:
        self.num_calls += 1
        for position, token in enumerate(self.reported or self._token_ids):
            if position == self._pause:
                self.has_paused = True
                deadline = time.monotonic() + WAIT_S
                while not self.go.is_set():
                    assert time.monotonic() < deadline, "the client has not seen the text before the pause"
                    await asyncio.sleep(0.005)
            if on_tokens is not None:
                on_tokens(position, [token], [-1.0])
            await asyncio.sleep(0)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        logprobs = [[-1.0, token, None] for token in self._token_ids]
        return {"output_ids": self._token_ids, "meta_info": {**meta, "output_token_logprobs": logprobs}}


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def open_gateway(policy: Any, renderer: ChatRenderer, folder: Path) -> Gateway:
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    return Gateway(policy, folder, renderer=renderer, limits=limits)


EVENTS = {
    "chat": ["thought", "text", "call"],
    "responses": [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
          "output_item.done") * 2,
        "completed",
    ],
    "messages": [
        "message_start", *("content_block_start", "content_block_delta", "content_block_stop") * 4,
        "message_delta", "message_stop",
    ],
}  # fmt: skip


@pytest.mark.parametrize("dialect", EVENTS)
@pytest.mark.parametrize("pause_after", ["Why", "So i", '"add"'])
@pytest.mark.parametrize("between", ["", "\nAnd then"])
def test_events_of_a_turn_with_all_parts(
    renderer: ChatRenderer, tmp_path: Path, dialect: str, pause_after: str, between: str
) -> None:
    """The policy goes on only when the client has seen the characters before the pause.

    `between`: text between the two calls. The text of a turn comes before its calls.
    """
    policy = KnownTurn(renderer, TURN.replace("</tool_call>", f"</tool_call>{between}", 1), pause_after)
    expected = {"Why": ("Why", ""), "So i": ("Why not?", "So i"), '"add"': ("Why not?", "So it is.")}[pause_after]

    def look(seen: Seen) -> None:
        if ("".join(seen.thoughts), seen.text) == expected:
            policy.go.set()

    with open_gateway(policy, renderer, tmp_path) as gateway:
        _, key = gateway.create_session()
        seen = STREAMS[dialect](gateway, key, look)
    assert policy.has_paused
    assert ("".join(seen.thoughts), seen.text.rstrip()) == ("Why not?", f"So it is. {between}".rstrip())
    assert seen.calls == [("add", {"a": 1}), ("add", {"a": 2})]
    assert seen.kinds == EVENTS[dialect]
    assert seen.end == {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}[dialect]
    assert len(seen.deltas) >= 8


def test_a_completion_is_not_split(renderer: ChatRenderer, tmp_path: Path) -> None:
    policy = KnownTurn(renderer, TURN, "Why")

    def look(seen: Seen) -> None:
        if seen.text == "<think>\nWhy":
            policy.go.set()

    with open_gateway(policy, renderer, tmp_path) as gateway:
        _, key = gateway.create_session()
        assert stream_completion(gateway, key, look).text == TURN


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_keep_alives_while_no_text_is_certain(renderer: ChatRenderer, tmp_path: Path, dialect: str) -> None:
    """In the middle of a text, and within a tool call whose tokens arrive but cannot be sent."""
    policy = KnownTurn(renderer, TURN, '"arguments"')
    path = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}[dialect]
    body = {"model": "m", "max_tokens": 300, "messages": HELLO, "input": "a", "stream": True}
    sign = {"chat": ": keep-alive", "messages": "event: ping", "responses": "event: keepalive"}[dialect]
    with open_gateway(policy, renderer, tmp_path) as gateway:
        object.__setattr__(gateway.config, "keep_alive_s", 0.05)
        _, key = gateway.create_session()
        signs_after_text, has_text = 0, False
        with httpx.stream("POST", gateway.url + path, json=body, headers={"x-api-key": key}, timeout=WAIT_S) as reply:
            for line in reply.iter_lines():
                has_text |= ':"S"' in line
                signs_after_text += has_text and line == sign
                if signs_after_text == 3:
                    policy.go.set()
        assert signs_after_text >= 3


@with_each_dialect
def test_a_client_that_comes_back_gets_the_deltas_of_the_first(
    renderer: ChatRenderer, tmp_path: Path, stream: Stream
) -> None:
    """The turn still runs when the second client has all that the first client had."""
    policy = KnownTurn(renderer, "One road, and no other way.", "One road")
    found = list[str]()

    class LeftError(Exception):
        """The first client leaves."""

    def leave(seen: Seen) -> None:
        if seen.text == "One road":
            found.append(seen.text)
            for opened in LAST_STREAM:
                opened.close()
            raise LeftError

    def look(seen: Seen) -> None:
        if seen.text == "One road":
            found.append(seen.text)
            policy.go.set()

    with open_gateway(policy, renderer, tmp_path) as gateway:
        info, key = gateway.create_session()
        with pytest.raises(LeftError):
            stream(gateway, key, leave)
        seen = stream(gateway, key, look)
        assert num_turns(graph_of(gateway, info.id)) == 1
    assert found[0] == found[1] == "One road"
    assert (seen.text, policy.num_calls) == ("One road, and no other way.", 1)


def test_a_turn_that_was_generated_again_ends_the_stream_with_an_error(renderer: ChatRenderer, tmp_path: Path) -> None:
    """The client that sends the request again gets the whole turn, which is one sample."""
    policy = KnownTurn(renderer, "One road", "One road")
    policy.reported = renderer.encode("One way")
    policy.go.set()
    with open_gateway(policy, renderer, tmp_path) as gateway:
        info, key = gateway.create_session()
        with pytest.raises(openai.APIError, match="send the request again"):
            stream_chat(gateway, key, lambda _: None)
        seen = stream_chat(gateway, key, lambda _: None)
        assert (seen.text, policy.num_calls) == ("One road", 1)
        assert num_turns(graph_of(gateway, info.id)) == 1


def test_a_generate_function_without_reports_still_works(renderer: ChatRenderer, tmp_path: Path) -> None:
    policy = KnownTurn(renderer, TURN, "Why")
    policy.go.set()

    async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
        assert "on_tokens" not in request, "the request may be sent as JSON"
        return await policy(rid=rid, session_id=session_id, **request)

    with open_gateway(generate, renderer, tmp_path) as gateway:
        _, key = gateway.create_session()
        seen = stream_messages(gateway, key, lambda _: None)
    assert (seen.thoughts, [text.rstrip() for text in seen.deltas]) == (["Why not?"], ["So it is."])
    assert seen.kinds == EVENTS["messages"]


def test_a_gateway_in_front_of_a_router_streams(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """The tokens come from the server through the router and its client."""
    loop = EventLoopThread()
    try:

        async def make() -> Any:
            dispatcher = Dispatcher()
            dispatcher.pool.add_replica("a", adapter_of(shared_engine).asynchronous, 0)
            return http_router(dispatcher)

        router = loop.run(make())
        client = RouterClient(loop.run(router.__aenter__()), API_KEY)
        try:
            with open_gateway(client, renderer, tmp_path) as gateway:
                info, key = gateway.create_session(sampling_params=LONG)
                seen = stream_chat(gateway, key, lambda _: None)
                (turn,) = (node for node in graph_of(gateway, info.id).nodes if node.sampled)
                assert len(seen.deltas) > 50
                assert seen.text == renderer.decode(turn.token_ids)
        finally:
            loop.run(router.__aexit__(None, None, None))
    finally:
        loop.close()
