"""`Reference`: the model of Hugging Face transformers, the weights that the cases push, and the comparison."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import torch

from verl_server.conformance.systems import CheckFailedError

if TYPE_CHECKING:
    from verl_server.conformance.systems import Reply, System

LOGPROB_LIMIT = 1e-5
"""Largest accepted difference between the log probabilities of a system in float32 and those of the reference."""
PROMPTS = ([1, 2, 3, 4, 5], [200, 17, 64], list(range(40, 75)))
NEW_TOKENS = 12
NOISE = 0.2
"""Standard deviation of the relative change of each element in the pushed weights."""

Weights = Mapping[str, torch.Tensor]


class Reference:
    """Hugging Face's model in `folder`, in float64.

    In float32, its own log probabilities would be up to 1.1e-5 away from those in float64.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.original: Weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        """The weights of the checkpoint in float32, by name. A tied tensor has one name only."""
        self._model = model.double()
        self._model.config._experts_implementation = "eager"  # the grouped kernel of experts knows no float64
        self._loaded: Weights = self.original

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Weights that differ from the checkpoint in every tensor. Equal for equal seeds."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator))
            for name, tensor in self.original.items()
        }

    def token_gaps(self, weights: Weights, prompt: list[int], reply: Reply) -> list[float]:
        """How far each generated token is from what `weights` generate greedily.

        The larger of two differences: between the log probabilities of the token, and between those of the token and
        the best token, both in natural units.
        """
        self._load(weights)
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + reply.output_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, torch.tensor(reply.output_ids).unsqueeze(1)).squeeze(1)
        difference = (chosen - torch.tensor(reply.logprobs, dtype=torch.float64)).abs()
        return torch.nan_to_num(torch.maximum(difference, logprobs.amax(1) - chosen), nan=torch.inf).tolist()

    def gap(self, weights: Weights, prompt: list[int], reply: Reply) -> float:
        """The largest of `token_gaps`."""
        return max(self.token_gaps(weights, prompt, reply))

    def measure(self, system: System, weights: Weights, *, lora: str | None = None) -> float:
        """The largest gap of greedy generations of `system` for `PROMPTS`."""
        return max(self.gap(weights, prompt, system.generate(prompt, NEW_TOKENS, lora=lora)) for prompt in PROMPTS)

    def require(self, system: System, weights: Weights, when: str, *, lora: str | None = None) -> float:
        """The largest gap of `system`. Raises CheckFailedError if it exceeds `LOGPROB_LIMIT`."""
        return require_gap(self.measure(system, weights, lora=lora), when)

    def _load(self, weights: Weights) -> None:
        if weights is not self._loaded:
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(weights[name])
            self._loaded = weights


def require_gap(gap: float, when: str) -> float:
    """Return `gap`. Raises CheckFailedError if it exceeds `LOGPROB_LIMIT`. `when` completes the sentence."""
    if not gap <= LOGPROB_LIMIT:
        raise CheckFailedError(f"{when}, log probabilities differ from Hugging Face by {gap:.1e}")
    return gap


def describe_gap(gap: float) -> str:
    """The words for a measured gap."""
    return f"log-prob gap {gap:.1e}"


# -- Interceptor ------------------------------------------------------------------------------------
# A TCP forwarder in front of a server. A case or a test can act at an exact step, for example kill a process.

REQUEST = re.compile(rb"^(?:GET|POST|OPTIONS) (\S+) HTTP/1")


class Interceptor:
    """Forwards connections to `url`. Calls `before(path)` when a request begins, before the server receives it."""

    def __init__(self, url: str, before: Callable[[str], None]) -> None:
        self._target = (str(urlsplit(url).hostname), urlsplit(url).port)
        self._before = before
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.sent_bytes = 0
        """Number of bytes of all requests, from this forwarder to the server."""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._connections += [client, server]
        threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
        self._pump(client, server, watch=True)

    def _pump(self, source: socket.socket, sink: socket.socket, watch: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if watch and (found := REQUEST.match(data)) is not None:
                    self._before(found[1].decode())
                if watch:
                    self.sent_bytes += len(data)
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
