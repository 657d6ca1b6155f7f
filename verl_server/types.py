"""Values that cross a boundary between folders, processes or ranks. Imports neither torch, ray nor sglang."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, Required, Self

import orjson
from typing_extensions import TypedDict

from verl_server.errors import BadInputError

Json = dict[str, Any]
"""A JSON object."""


# -- Replies of a generation ------------------------------------------------------------------------


class WeightSpan(TypedDict):
    """Consecutive tokens of a reply that the same weights have produced."""

    version: int
    """Weight version."""
    start: int
    """Index of the first token in `output_ids`."""
    end: int
    """Index after the last token."""


class FinishReason(TypedDict, total=False):
    """Why a generation has ended."""

    type: Required[Literal["stop", "length", "abort"]]
    """`stop`: an end token or a stop string. `length`: the limit of tokens. `abort`: it was aborted."""
    matched: int | str
    """For `stop`: the token or the string."""
    length: int
    """For `length`: the limit."""
    message: str
    """For `abort`: why."""


class MetaInfo(TypedDict, total=False):
    """What a server says about a reply: the fields on which this library relies. Engines add others."""

    id: Required[str]
    """Request id."""
    finish_reason: Required[FinishReason | None]
    """None in an event of a stream that goes on."""
    prompt_tokens: Required[int]
    """Number of tokens of the prompt."""
    completion_tokens: Required[int]
    """Number of tokens in `output_ids`."""
    cached_tokens: int
    """Number of tokens of the prompt that were in the prefix cache."""
    weight_version: int
    """Version of the weights of the last token."""
    weight_versions: list[WeightSpan]
    """The weights of all tokens."""
    output_token_logprobs: list[list[Any]]
    """With `return_logprob`: `[log probability after the temperature, token id, text or None]` for each token."""
    input_token_logprobs: list[list[Any]]
    """With `logprob_start_len`: the same for tokens of the prompt. The first token has no log probability."""
    attempts: int
    """From a router: number of attempts, without those that the server aborted for a weight update."""


class GenerateReply(TypedDict, total=False):
    """The reply to one prompt, from `generate` of a router, an engine or an adapter."""

    output_ids: Required[list[int]]
    """The sampled tokens, the end token included."""
    meta_info: Required[MetaInfo]
    """What the server says about them."""
    text: str
    """The decoded tokens. Missing from a server without a tokenizer, and when another replica has continued."""


# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Full shape, without sharding."""
    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """The spec of a `torch.Tensor`. That of a DTensor has the full shape."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class ServerInfo:
    """One server that takes part in a weight update."""

    name: str
    """Name of the server. It changes when a different server process takes over."""
    tp_size: int
    """Number of TP ranks of the server."""
    fused_modules: tuple[tuple[str, ...], ...] | None = None
    """For an engine that loads a module only with all of its tensors (vLLM): ends of the names of tensors that it loads
    together, for example `("k_proj.weight", "q_proj.weight", "v_proj.weight")`. `*` is a number: all experts of a layer
    are one module. None: every tensor can be loaded alone."""
    is_current: bool = field(default=True, compare=False)
    """Whether it has all published weights. False: it was started again and has its checkpoint."""


@dataclass(frozen=True)
class WeightUpdateResult:
    """Result of a finished weight update, equal on every trainer rank except `gather_s`."""

    weight_version: int
    """Version of the new weights. Requests that start from now on carry it."""
    num_tensors: int
    """Number of tensors in the update."""
    num_bytes: int
    """Number of bytes of these tensors."""
    num_missing: int
    """Number of the served parameters that the update did not contain. 0 for a whole update."""
    transport: str
    """Name of the weight transport: a file of `verl_server/weights/transports/`."""
    staging_bytes: int
    """Number of bytes of staging memory on this machine, of all ranks together."""
    sent_bytes: int
    """Number of tensor bytes that went over a network or into a file. 0 when the servers read them in place."""
    gather_s: float
    """Seconds in which this rank copied its shards into the staging memory. With a transport that streams tensors, they
    include waiting for free buckets."""
    load_s: float
    """Seconds from the pause of generation until its continuation."""
    missing_from: str | None = None
    """Where the parameters come from that the update did not contain: "earlier updates" of this engine, the servers'
    "checkpoint", or "earlier weights" that others have loaded. Both, for example "earlier updates and checkpoint", if
    some were pushed before and others never. None for a whole update."""


def parse_weight_version(label: int | str | None) -> int:
    """The weight version that a server's label names.

    SGLang labels weights with strings. A missing label and SGLang's own "default" name the checkpoint's weights:
    version 0. Raises BadInputError for any other label that is not a whole number.
    """
    if label is None or label == "default":
        return 0
    try:
        return int(label)
    except ValueError:
        raise BadInputError(
            f"the server labels its weights {label!r}, but a weight version must be a whole number. "
            "Start the server with weight_version=0."
        ) from None


# -- JSON bodies ------------------------------------------------------------------------------------

_SURROGATES = re.compile(
    rb"\\(?:\\|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u([dD][89a-fA-F][\da-fA-F]{2}))"
)
"""An escaped backslash, a surrogate pair, or half of a pair (group 1) in JSON."""


def without_half_characters(raw: bytes) -> bytes:
    """JSON with U+FFFD in place of each half of a surrogate pair. Agents cut pairs; no tokenizer reads a half."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    return _SURROGATES.sub(lambda found: rb"\ufffd" if found[1] else found[0], raw)


def encode_json(body: Any) -> bytes:
    """The JSON text of `body`; numpy scalars become numbers. Raises BadInputError for a value that is not JSON."""
    try:
        return orjson.dumps(body, default=_refuse, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise BadInputError(f"the request cannot be sent as JSON: {error.__cause__ or error}") from error


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no JSON value{tolist_hint(value)}")


def tolist_hint(value: Any) -> str:
    """The end of an error about a tensor or an array, which must be a list instead. Empty for other values."""
    return "; convert it with .tolist()" if hasattr(value, "tolist") else ""
