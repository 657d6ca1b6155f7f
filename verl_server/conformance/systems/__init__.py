"""`System`: what the cases of the conformance suite need from a trainer's connection to an inference server.

The modules of this folder are the systems that the suite can test.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil
import requests
import torch

from verl_server.server.warden.processes import find_shared_memory, remove_shared_memory
from verl_server.types import Json


class CheckFailedError(Exception):
    """The system does not do what the case claims."""


class NotOfferedError(Exception):
    """The system does not offer what a case needs. The message says what is missing."""


@dataclass(frozen=True)
class Reply:
    """The generation of one prompt."""

    output_ids: list[int]
    """Generated token ids."""
    logprobs: list[float]
    """Log probability of each generated token."""
    finish_reason: str
    """"length", "abort" or another of SGLang's reasons."""
    cached_tokens: int
    """Number of prompt tokens that came from the prefix cache."""
    weight_version: str | None
    """Version of the weights as the reply names it. None if the reply names none."""


class System(Protocol):
    """A trainer's connection to one inference server that serves a model in float32.

    A method that the system does not offer raises NotOfferedError. Other failures raise any other exception. All
    methods may block; `generate` is called by several threads at once, also during `update`.
    """

    name: str
    """Name of the system in the results."""
    url: str
    """Base URL of the server."""
    load_path: str
    """Path of the HTTP request of an update with which the server loads tensors."""
    num_load_requests: int
    """Number of requests to `load_path` in the first update with a server. The last one loads the tensors."""
    finish_path: str
    """Path of the last HTTP request of an update after the tensors were loaded."""
    owns_server: bool
    """Whether this object has started the server and ends the server in `close`."""

    def update(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        pause_mode: str | None = None,
        flush_cache: bool = True,
        check_finite: bool = False,
    ) -> None:
        """Load tensors by Hugging Face name. Returns when the server uses them.

        `pause_mode`: what happens to running requests, one of SGLang's modes; None: the default of the system.
        `check_finite`: refuse NaN and infinity.
        """

    def generate(self, prompt: list[int], max_new_tokens: int, *, lora: str | None = None) -> Reply:
        """Generate greedily exactly `max_new_tokens` tokens, unless an update aborts the request."""

    def read_tensor(self, name: str) -> torch.Tensor:
        """The served value of one tensor, by Hugging Face name, in float32."""

    @property
    def weight_version(self) -> str:
        """Version of the weights that the last update has loaded."""

    def load_lora(self, name: str, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Load a LoRA adapter with PEFT's names and configuration, or replace the adapter of that name."""

    def release_memory(self) -> None:
        """Release the memory of weights and KV cache."""

    def resume_memory(self) -> None:
        """Take the released memory back. The weights are then undefined."""

    def connect(self, url: str) -> Callable[[], System]:
        """How another trainer reaches the server at `url`: a function that can be pickled."""

    def server_pids(self) -> list[int]:
        """Process ids of the server and all processes below it."""

    def kill_server(self) -> None:
        """Kill the server's main process with SIGKILL."""

    def close(self) -> None:
        """End the connection, and the server if this object owns it."""


class SystemFactory(Protocol):
    """Starts a system: a function that can be pickled."""

    def __call__(self, model: Path, **server_args: Any) -> System:
        """Start a server for the model in the folder `model`, or connect to a running server that serves this model.

        `server_args`: further server arguments, with SGLang's names. Raises NotOfferedError for an argument that no
        server of the system has.
        """


# -- Http -------------------------------------------------------------------------------------------
# SGLang's HTTP endpoints that neither of the adapters has as a method, and requests to any server.

TIMEOUT_S = 60.0
ALL_ROWS = 1 << 30
"""Number of rows that `/get_weights_by_name` returns: all."""


class RefusedRequestError(Exception):
    """The server answered a request with an error."""


def post(url: str, body: Json, key: str | None = None, *, is_json: bool = True) -> Any:
    """Send one request and return the decoded reply. `is_json`: False for a reply of plain text.

    Raises RefusedRequestError for any status but 200.
    """
    with requests.Session() as session:
        session.trust_env = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = session.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        raise RefusedRequestError(f"{urlsplit(url).path} answered {reply.status_code}: {reply.text[:300]}")
    return reply.json() if is_json else reply.text


def read_tensor(base_url: str, name: str, key: str | None = None) -> torch.Tensor:
    """The served value of one tensor, by Hugging Face name, in float32."""
    try:
        rows = post(f"{base_url}/get_weights_by_name", {"name": name, "truncate_size": ALL_ROWS}, key)
    except RefusedRequestError as error:
        raise NotOfferedError(f"the server does not return the weights of this model ({error})") from error
    return torch.tensor(rows, dtype=torch.float64).float()


def sampling(max_new_tokens: int) -> Json:
    """Greedy sampling of exactly `max_new_tokens` tokens."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def as_reply(reply: Json) -> Reply:
    """SGLang's reply to `/generate`. A log probability that is no finite number is NaN."""
    meta = reply["meta_info"]
    version = meta.get("weight_version")
    return Reply(
        output_ids=list(reply["output_ids"]),
        logprobs=[math.nan if logprob is None else logprob for logprob, *_ in meta["output_token_logprobs"]],
        finish_reason=str((meta["finish_reason"] or {}).get("type")),
        cached_tokens=int(meta.get("cached_tokens") or 0),  # missing if a request was aborted before it began
        weight_version=None if version in (None, "default") else str(version),
    )


#: Paths of SGLang's requests with which a server loads tensors and ends the update.
LOAD_PATH, FINISH_PATH = "/update_weights_from_tensor", "/end_weight_update"


# -- Messages ---------------------------------------------------------------------------------------
# Texts about errors as the results contain them.

MAX_CHARACTERS = 400
#: A path with at least two folders. Results are published, so only its last part is kept.
PATH = re.compile(r"(?<![:/\w])(?:/[\w.+-]+){2,}")


def describe(error: BaseException) -> str:
    """An exception with the name of its type, and with the body of the reply if it is an HTTP error."""
    text = str(error)
    reply = getattr(error, "response", None)
    if reply is not None:
        text += f": {reply.text}"
    return f"{type(error).__name__}: {text}"


def without_paths(text: str) -> str:
    """A text as one line of limited length. Paths of this machine are shortened to their last part."""
    line = PATH.sub(lambda match: match[0].rpartition("/")[2], " ".join(text.split()))
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."


# -- Processes --------------------------------------------------------------------------------------
# The processes of a server, which are removed also when its main process has been killed.

KILL_TIMEOUT_S = 20.0


def tree_of(pid: int) -> set[psutil.Process]:
    """A process and the processes below it, some of which may outlive it. Empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    return set()


@contextlib.contextmanager
def remove_processes(processes: Collection[psutil.Process]) -> Iterator[None]:
    """At the end, kill those of the processes that still run, and remove the files that they leave in `/dev/shm`."""
    files = find_shared_memory([process.pid for process in processes])
    try:
        yield
    finally:
        kill_processes(processes)
        remove_shared_memory(files)


def kill_processes(processes: Collection[psutil.Process]) -> None:
    """Kill processes and wait until they have ended. Does nothing to a later process with the same id."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_TIMEOUT_S)
