"""Who sends a request for a turn: its fingerprint and its retries, by which a request that is sent again is known."""

from __future__ import annotations

import functools
import hashlib

from fastapi import Request

from verl_server.gateway.dialects.dialect import Dialect
from verl_server.gateway.dialects.known_items import KnownItems, ParsedBody
from verl_server.gateway.http.bodies import parse_body
from verl_server.gateway.http.connections import is_closed
from verl_server.gateway.sessions.generation import Client


def client_of(request: Request, fingerprint: bytes) -> Client:
    """The client of a request, with its digest. The official SDKs count their retries in a header."""
    headers, has_left = request.headers, functools.partial(is_closed, request.scope)
    count = headers.get("x-stainless-retry-count", "0")
    num_retries = int(count.lstrip("0")[:4] or 0) if count.isdecimal() else 0
    return Client(fingerprint, num_retries=num_retries, has_id=bool(headers.get("idempotency-key")), has_left=has_left)


def fingerprint_of(dialect: Dialect, key: str, body: ParsedBody) -> bytes:
    """The digest of a request.

    The official SDKs send no id of the request, unless a program asks for it: an `Idempotency-Key` distinguishes
    several requests with the same body.
    """
    digest = hashlib.sha256(dialect.path.encode())  # CPUs have instructions for SHA-256
    digest.update(hashlib.sha256(key.encode()).digest() if key else b"")
    for name, part in {**body.parts, **dialect.identity(body.fields)}.items():
        digest.update(b"%d %d %b%b" % (len(encoded := name.encode()), len(part), encoded, part))
    return digest.digest()


def read_fingerprint(dialect: Dialect, key: str, raw: bytes, known: KnownItems) -> bytes:
    """`fingerprint_of` a request that is not parsed yet. Raises GatewayError for a body that is no JSON object."""
    return fingerprint_of(dialect, key, parse_body(raw, known))
