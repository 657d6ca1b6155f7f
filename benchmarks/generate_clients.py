"""The clients of one server that `bench_generate` compares.

Two minimal clients are the baselines: `raw aiohttp` for an event loop, and `raw threads` (standard library, one
persistent connection per thread) for blocking callers. They send bodies that were encoded beforehand and decode the
reply. The other clients are calls of this library.
"""

from __future__ import annotations

import contextlib
import http.client
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop
from load import AsyncSend, OpenSend, Round, Send, run_tasks, run_threads

from verl_server.types import Json

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 16
SAMPLING = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
RAW_TASKS, RAW_THREADS = "raw aiohttp", "raw threads"


def make_prompts() -> list[list[int]]:
    """The token ids that every client sends: byte tokens, equal in every run."""
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def check_reply(reply: Json) -> None:
    """Check that a reply has the expected number of tokens, so that all clients cause equal work. Raises ValueError."""
    tokens, logprobs = len(reply["output_ids"]), len(reply["meta_info"]["output_token_logprobs"])
    if (tokens, logprobs) != (NEW_TOKENS, NEW_TOKENS):
        raise ValueError(f"a reply with {tokens} tokens and {logprobs} logprobs instead of {NEW_TOKENS}")


@dataclass(frozen=True)
class GenerateClient:
    """One client. `baselines` are the names of the raw clients with which it is compared; empty for a raw client."""

    name: str
    run: Callable[[int, int], Round]
    """`run(in_flight, requests)` sends `requests` requests with `in_flight` in flight."""
    baselines: tuple[str, ...] = ()


class GenerateClients:
    """All clients of the server of `engine`. The asynchronous clients share one event loop in this thread."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._adapter = engine, engine.adapter
        self._url = self._adapter.base_url
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self._adapter.api_key}",
        }
        self._prompts = make_prompts()
        self._bodies = [
            orjson.dumps({"input_ids": prompt, "sampling_params": SAMPLING, "return_logprob": True})
            for prompt in self._prompts
        ]
        self._loop = uvloop.new_event_loop()
        self._session = self._loop.run_until_complete(self._open_session())
        self.all = (
            self._tasks(RAW_TASKS, self._raw_task),
            self._threads(RAW_THREADS, self._raw_thread),
            self._threads("sync adapter", self._shared(self._adapter.generate), (RAW_TASKS, RAW_THREADS)),
            self._tasks("async adapter", self._call(self._adapter.asynchronous.generate), (RAW_TASKS,)),
            self._threads("VerlEngine", self._shared(engine.generate), (RAW_TASKS, RAW_THREADS)),
            self._tasks("VerlEngine async", self._call(engine.async_generate), (RAW_TASKS,)),
        )

    async def _open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # SGLang closes idle connections after 5 s
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    def _tasks(self, name: str, send: AsyncSend, baselines: tuple[str, ...] = ()) -> GenerateClient:
        def run(in_flight: int, requests: int) -> Round:
            return self._loop.run_until_complete(run_tasks(send, in_flight, requests, check_reply))

        return GenerateClient(name, run, baselines)

    def _threads(self, name: str, open_send: OpenSend, baselines: tuple[str, ...] = ()) -> GenerateClient:
        return GenerateClient(
            name, lambda in_flight, requests: run_threads(open_send, in_flight, requests, check_reply), baselines
        )

    async def _raw_task(self, number: int) -> Json:
        body = self._bodies[number % PROMPTS]
        async with self._session.post(self._url + "/generate", data=body, headers=self._headers) as response:
            return dict(orjson.loads(await response.read()))

    @contextlib.contextmanager
    def _raw_thread(self) -> Iterator[Send]:
        """A persistent connection for one thread."""
        address = urlsplit(self._url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port)

        def send(number: int) -> Json:
            connection.request("POST", "/generate", self._bodies[number % PROMPTS], self._headers)
            return dict(orjson.loads(connection.getresponse().read()))

        with contextlib.closing(connection):
            yield send

    def _shared(self, generate: Callable[..., Any]) -> OpenSend:
        """A blocking call of this library; all threads share the object."""

        def send(number: int) -> Json:
            prompt = self._prompts[number % PROMPTS]
            return dict(generate(input_ids=prompt, sampling_params=SAMPLING, return_logprob=True))

        return lambda: contextlib.nullcontext(send)

    def _call(self, generate: Callable[..., Awaitable[Any]]) -> AsyncSend:
        async def send(number: int) -> Json:
            prompt = self._prompts[number % PROMPTS]
            return dict(await generate(input_ids=prompt, sampling_params=SAMPLING, return_logprob=True))

        return send

    def close(self) -> None:
        """Close the event loop and all connections that were opened in it. The server keeps running."""
        self._loop.run_until_complete(self._session.close())
        # `shutdown` would end the server as well.
        self._loop.run_until_complete(self._adapter.asynchronous.close_connections())
        self._loop.close()
