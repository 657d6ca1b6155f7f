"""The ways of asking one server for tokens that `bench_generate` compares.

Two hand-written clients are the limit that nothing can beat by much: `raw aiohttp` for an event loop and
`raw threads` (standard library, one kept connection a thread) for blocking callers. They send bytes that
were encoded beforehand and decode the reply, no more. The other ways are this library's own calls.
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
from load import AsyncSend, Json, OpenSend, Round, Send, run_tasks, run_threads

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 16
SAMPLING = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
RAW_TASKS, RAW_THREADS = "raw aiohttp", "raw threads"


def make_prompts() -> list[list[int]]:
    """The token ids that every way sends: byte tokens, the same on every run."""
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def check_reply(reply: Json) -> None:
    """All ways must get the same amount of work done. Raises ValueError for a reply that is not whole."""
    tokens, logprobs = len(reply["output_ids"]), len(reply["meta_info"]["output_token_logprobs"])
    if (tokens, logprobs) != (NEW_TOKENS, NEW_TOKENS):
        raise ValueError(f"a reply with {tokens} tokens and {logprobs} logprobs instead of {NEW_TOKENS}")


@dataclass(frozen=True)
class Way:
    """One way of sending. `peers`: the raw ways that it is compared with, by name; none for a raw way."""

    name: str
    run: Callable[[int, int], Round]
    """`run(in_flight, requests)`."""
    peers: tuple[str, ...] = ()


class Ways:
    """All ways to the server of `engine`. The asynchronous ones share one event loop in this thread."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._adapter = engine, engine.adapter
        self._url = self._adapter.base_url
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self._adapter.asynchronous.api_key}",
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

    def _tasks(self, name: str, send: AsyncSend, peers: tuple[str, ...] = ()) -> Way:
        def run(in_flight: int, requests: int) -> Round:
            return self._loop.run_until_complete(run_tasks(send, in_flight, requests, check_reply))

        return Way(name, run, peers)

    def _threads(self, name: str, open_send: OpenSend, peers: tuple[str, ...] = ()) -> Way:
        return Way(name, lambda in_flight, requests: run_threads(open_send, in_flight, requests, check_reply), peers)

    async def _raw_task(self, number: int) -> Json:
        body = self._bodies[number % PROMPTS]
        async with self._session.post(self._url + "/generate", data=body, headers=self._headers) as response:
            return dict(orjson.loads(await response.read()))

    @contextlib.contextmanager
    def _raw_thread(self) -> Iterator[Send]:
        """One connection, kept open, used by one thread."""
        where = urlsplit(self._url)
        connection = http.client.HTTPConnection(str(where.hostname), where.port)

        def send(number: int) -> Json:
            connection.request("POST", "/generate", self._bodies[number % PROMPTS], self._headers)
            return dict(orjson.loads(connection.getresponse().read()))

        with contextlib.closing(connection):
            yield send

    def _shared(self, generate: Callable[..., Any]) -> OpenSend:
        """A blocking call of ours; all threads use the same object."""

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
        """Close what was opened in this object's loop, the adapters' connections too. The server lives on."""
        self._loop.run_until_complete(self._session.close())
        # `shutdown` would end the server, too; there is no public call for one loop's connections alone.
        self._loop.run_until_complete(self._adapter.asynchronous.close_connections())
        self._loop.close()
