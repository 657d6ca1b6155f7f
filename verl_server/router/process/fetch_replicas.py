"""The requests of `verl-server status` to a router."""

from __future__ import annotations

from typing import Any

import requests

from verl_server.errors import ServerError

TIMEOUT_S = 10.0


def is_paused(url: str) -> bool:
    """Whether all requests wait in a router that answers. False also if `/health` does not say so."""
    try:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(f"{url}/health", timeout=TIMEOUT_S).json().get("paused") is True
    except (requests.RequestException, AttributeError):
        return False


def fetch_replicas(url: str, api_key: str, key_hint: str) -> list[dict[str, Any]]:
    """The rows of a router's `/replicas`. Raises ServerError; `key_hint` says what to do when the key is refused.

    Ignores proxy variables, as the other clients do.
    """
    try:
        with requests.Session() as session:
            session.trust_env = False
            headers = {"Authorization": f"Bearer {api_key}"}
            response = session.get(f"{url}/replicas", headers=headers, timeout=TIMEOUT_S)
    except requests.ConnectionError as error:
        raise ServerError(f"nothing answers at {url}; check the URL and that the router runs", url=url) from error
    except requests.RequestException as error:
        raise ServerError(f"the request to {url} failed: {error}", url=url) from error
    if response.status_code == 401:
        raise ServerError(f"the router at {url} refused the key (401); {key_hint}", url=url)
    if response.status_code == 404:
        raise ServerError(f"{url} is not a router (404 for /replicas); pass the URL that `verl-server router` printed")
    if response.status_code != 200:
        raise ServerError(f"the router at {url} replied with status {response.status_code}: {response.text[:200]}")
    try:
        rows: list[dict[str, Any]] = response.json()
    except requests.JSONDecodeError as error:
        message = f"{url} is not a router (/replicas is not JSON); pass the URL that `verl-server router` printed"
        raise ServerError(message, url=url) from error
    return rows
