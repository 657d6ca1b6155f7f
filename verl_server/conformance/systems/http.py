"""SGLang's HTTP endpoints that neither of the adapters has as a method, and requests to any server."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

import requests
import torch

from verl_server.conformance.systems.base import NotOfferedError, Reply
from verl_server.types import Json

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
