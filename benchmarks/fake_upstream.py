"""An upstream that answers at once, in two forms: `python fake_upstream.py server` and `... gateway RUN_DIR MODEL`.

`server` is an HTTP server with OpenAI's chat API, for LiteLLM's proxy. `gateway` is a gateway whose generate function
answers at once. Both print their URL. The policy calls a tool; `max_tokens` below 25 cuts the turn before the call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

import orjson
from http_load import LENGTH

TURN = 'I will look at the file. <tool_call>{"name": "read_file", "arguments": {"path": "a"}}</tool_call>'
NUM_TEXT_TOKENS = 16
CHOICE = {"index": 0, "logprobs": None}
TEXT = TURN[:NUM_TEXT_TOKENS]
USAGE = {"prompt_tokens": 9, "completion_tokens": NUM_TEXT_TOKENS, "total_tokens": 9 + NUM_TEXT_TOKENS}
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "policy"}


def canned_reply() -> bytes:
    """The HTTP reply to a request that is not streamed."""
    choice = {**CHOICE, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "length"}
    body = orjson.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE})
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def canned_stream() -> bytes:
    """The HTTP reply to a request that is streamed: all events at once."""
    deltas: list[tuple[Any, Any]] = [({"role": "assistant", "content": ""}, None), ({"content": TEXT}, None)]
    deltas.append(({}, "length"))
    chunks = [
        {**HEAD, "object": "chat.completion.chunk", "choices": [{**CHOICE, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    data = b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


REPLY, STREAM = canned_reply(), canned_stream()
STREAM_MARKS = (b'"stream":true', b'"stream": true')


class Answer(asyncio.Protocol):
    """A connection of the server: answers each request when all of its body has arrived."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._received, 0, end)
            end += 4 + (0 if length is None else int(length[1]))
            if len(self._received) < end:
                return
            request = bytes(self._received[:end])
            del self._received[:end]
            assert self._transport is not None
            self._transport.write(STREAM if any(mark in request for mark in STREAM_MARKS) else REPLY)


async def serve() -> None:
    """The HTTP server, until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answer, "127.0.0.1", 0)
    print(f"Ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def run_gateway(run_dir: str, model: str) -> None:
    """A gateway without an engine, until the process ends."""
    from transformers import AutoTokenizer

    from verl_server.agent import RolloutLimits
    from verl_server.gateway import Gateway
    from verl_server.tracing import collect_garbage_rarely
    from verl_server.trajectory import ChatRenderer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turn_ids = tokenizer.encode(f"{TURN}<|im_end|>", add_special_tokens=False)

    @functools.cache
    def reply(max_tokens: int) -> Any:
        token_ids = turn_ids[:max_tokens]
        meta = {
            "finish_reason": {"type": "stop" if len(token_ids) == len(turn_ids) else "length"},
            "weight_version": "1",
            "cached_tokens": 0,
            "output_token_logprobs": [[-1.0, token, None] for token in token_ids],
        }
        return {"output_ids": token_ids, "meta_info": meta}

    async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
        return reply(min(request["sampling_params"]["max_new_tokens"], len(turn_ids)))

    limits = RolloutLimits(max_context_tokens=10_000_000, max_turns=10_000_000)
    key = os.environ["VERL_SERVER_GATEWAY_ADMIN_KEY"]
    with Gateway(generate, Path(run_dir), renderer=ChatRenderer(tokenizer), limits=limits, admin_key=key) as gateway:
        collect_garbage_rarely()  # as `verl-server gateway` does
        print(f"Ready: {gateway.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        import uvloop

        uvloop.run(serve())
    else:
        run_gateway(*sys.argv[2:4])
