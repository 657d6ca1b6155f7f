"""The open mode of the gateway: requests without a key, from programs of this machine and from pages in its browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from test_gateway_sessions import ask, renderer, start_gateway

from verl_server.errors import BadInputError
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, load_session

__all__ = ["renderer"]
BODY = '{"model": "m", "messages": [{"role": "user", "content": "a"}]}'


@pytest.fixture(scope="module")
def gateway(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with start_gateway(renderer, tmp_path_factory.mktemp("run"), is_open=True) as gateway:
        yield gateway


def send(gateway: Gateway, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    """A request as a page can send it without asking first: the body has the type of a plain text."""
    headers = {"Content-Type": "text/plain", **headers}
    return httpx.post(gateway.url + path, content=BODY, headers=headers, timeout=60.0)


def host_of(gateway: Gateway, name: str) -> str:
    return f"{name}:{gateway.url.rpartition(':')[2]}"


def test_requests_without_any_key_share_a_session(renderer: ChatRenderer, tmp_path: Path) -> None:
    with start_gateway(renderer, tmp_path, is_open=True) as gateway:
        _, key = gateway.create_session("a")
        assert [ask(gateway, sent) for sent in (None, "open", key, "sk-mistyped")] == [200, 200, 200, 401]
    assert sum(node.sampled for node in load_session(tmp_path / "open.jsonl").nodes) == 2


def test_the_shared_session_does_not_expire(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Its end would be the end of the open mode: no client could get another session without a key."""
    with start_gateway(renderer, tmp_path, is_open=True, session_expiry_s=1e-6) as gateway:
        _, key = gateway.create_session("a")
        assert [ask(gateway, None), ask(gateway, "open"), ask(gateway, key)] == [200, 200, 403]
    with start_gateway(renderer, tmp_path, is_open=True, session_expiry_s=1e-6) as gateway:
        assert ask(gateway, None) == 200


def test_the_end_of_the_shared_session_is_answered_with_the_cure(renderer: ChatRenderer, tmp_path: Path) -> None:
    for _ in range(2):
        with start_gateway(renderer, tmp_path, is_open=True) as gateway:
            if not gateway.sessions():
                assert ask(gateway, None) == 200
                gateway.end_session("open")
            reply = send(gateway)
            assert reply.status_code == 403
            assert "has ended (done); create a session and send its key, or use another folder" in reply.text


def test_another_machine_cannot_reach_the_open_mode(renderer: ChatRenderer, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(BadInputError, match="without a key"):
            start_gateway(renderer, tmp_path, is_open=True, host=host)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/session/open/v1/chat/completions"])
@pytest.mark.parametrize("origin", ["https://example.com", "http://localhost:3000", "http://127.0.0.1", "null"])
def test_a_page_of_another_origin_is_refused(gateway: Gateway, path: str, origin: str) -> None:
    reply = send(gateway, path, Origin=origin)
    assert reply.status_code == 403
    assert "Origin" in reply.json()["error"]["message"]


@pytest.mark.parametrize("host", ["evil.example", "192.0.2.1", "127.0.0.1.evil.example", "localhost.evil.example", "["])
def test_another_name_for_the_loopback_address_is_refused(gateway: Gateway, host: str) -> None:
    """A page whose name leads to the loopback address counts as the same origin in the browser (DNS rebinding)."""
    named = host_of(gateway, host)
    for headers in ({}, {"Authorization": "Bearer open"}, {"Origin": f"http://{named}"}):
        reply = send(gateway, Host=named, **headers)
        assert reply.status_code == 403
        assert "Host" in reply.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/ui/sessions", headers={"Host": named}).status_code == 403


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2", "[::1]"])
def test_programs_and_pages_of_the_gateway_are_served(gateway: Gateway, name: str) -> None:
    host = host_of(gateway, name)
    assert send(gateway, Host=host).status_code == 200
    assert send(gateway, Host=host, Origin=f"http://{host}").status_code == 200


def test_a_request_with_a_key_may_come_from_anywhere(gateway: Gateway) -> None:
    """A page does not know the key of a session. A proxy in front of the gateway can have any name."""
    _, key = gateway.create_session()
    for headers in ({"Origin": "https://example.com"}, {"Host": "gateway.example"}):
        assert send(gateway, Authorization=f"Bearer {key}", **headers).status_code == 200
        assert send(gateway, f"/session/{key}/v1/chat/completions", **headers).status_code == 200


def test_the_live_page_takes_the_key_of_the_open_mode(gateway: Gateway) -> None:
    assert ask(gateway, None) == 200
    for headers in ({}, {"Authorization": "Bearer open"}):
        listed = httpx.get(f"{gateway.url}/ui/sessions", headers=headers).json()["sessions"]
        assert [session["id"] for session in listed] == ["open"]
        assert httpx.get(f"{gateway.url}/ui/sessions/open", headers=headers).status_code == 200
    assert httpx.get(f"{gateway.url}/ui/sessions", headers={"Authorization": "Bearer wrong"}).status_code == 401
