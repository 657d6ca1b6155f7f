"""Generated and malformed requests to a gateway in front of a real server.

`benchmarks/check_gateway_fuzz.py` sends thousands. No reply has a status of 500 or more, except 503 and 529, and no
body has a stack trace or the path of a file.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import orjson
import pytest
from check_gateway_fuzz import SESSION, Report, fuzz_bodies, fuzz_schema
from gateway_fuzz_bodies import GOOD, PATHS
from helpers import wait_until
from starlette.routing import Route

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.http.app import make_app
from verl_server.gateway.sessions.session_store import SessionStore

LIMITS = RolloutLimits(max_turns=1_000_000, max_context_tokens=2000)
UNDESCRIBED = {"/", "/session/{session_key}/", "/openapi.json"}


@pytest.fixture(scope="module")
def gateway(shared_engine: VerlEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(shared_engine, tmp_path_factory.mktemp("run"), limits=LIMITS) as gateway:
        yield gateway


def post(gateway: Gateway, path: str, key: str, body: Any = None, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else orjson.dumps(GOOD[PATHS[0]] if body is None else body)
    headers["authorization"] = f"Bearer {key}"
    return httpx.post(f"{gateway.url}{path}", content=content, headers=headers, timeout=60.0)


# -- the fuzz ---------------------------------------------------------------------------------------------


def test_malformed_bodies_are_answered(gateway: Gateway) -> None:
    report = fuzz_bodies(gateway, 400, seed=7)
    assert report.findings == []
    assert report.num_cases == 400
    assert set(report.statuses) >= {200, 400}
    assert post(gateway, PATHS[0], gateway.create_session(**SESSION)[1]).status_code == 200


def test_requests_of_the_description_are_answered(gateway: Gateway) -> None:
    report = fuzz_schema(gateway, 200, seed=7)
    assert report.findings == []
    assert report.num_cases >= 200
    assert set(report.statuses) >= {200, 400}


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b"{}"), (502, b"{}"), (400, b"Traceback (most recent"), (404, b"/tmp/run/a.jsonl"), (503, b'File "a.py"')],
)
def test_the_fuzz_notices_what_is_wrong(status: int, body: bytes) -> None:
    report = Report()
    report.check("a request", status, body)
    assert len(report.findings) == 1
    report.check("a request", 503, b'{"error": "the engine is busy"}')
    report.check("{'vllm_backend.py': 1}", 400, b"vllm_backend.py: there is no such field")
    assert len(report.findings) == 1
    report.check("{'/tmp/a': 1}", 400, b"/tmp/a/secret: there is no such field")
    assert len(report.findings) == 2, "a longer path than that of the request"


# -- the description --------------------------------------------------------------------------------------


def test_the_description_has_every_route(gateway: Gateway, tmp_path: Path) -> None:
    paths = httpx.get(f"{gateway.url}/openapi.json", timeout=60.0).json()["paths"]
    app = make_app(SessionStore(tmp_path, _no_session, LIMITS), GatewayConfig(tmp_path, None, LIMITS), lambda _: "")
    routes = {
        (route.path, method)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"  # a route for GET answers HEAD, too
    }
    routes = {(path.replace(":path", ""), method.lower()) for path, method in routes if path not in UNDESCRIBED}
    described = {(path, method) for path, item in paths.items() for method in item if method != "parameters"}
    assert described == routes


def _no_session(*_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize("path", PATHS)
def test_a_good_body_fits_the_description_and_is_accepted(gateway: Gateway, path: str) -> None:
    paths = httpx.get(f"{gateway.url}/openapi.json", timeout=60.0).json()["paths"]
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {**GOOD[path], "a_field_of_the_future": {"a": 1}}
    validator = jsonschema_rs.validator_for(schema)
    assert [error.message for error in validator.iter_errors(body)] == []
    assert list(validator.iter_errors({**body, "messages": 5, "input": 5, "prompt": {}})) != []
    assert post(gateway, path, gateway.create_session(**SESSION)[1], body).status_code == 200


# -- keys, sizes, methods and paths -----------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_keys_of_others_are_refused(gateway: Gateway, path: str) -> None:
    first, key = gateway.create_session(**SESSION)
    second, _ = gateway.create_session(**SESSION)
    for wrong in (
        "sk-wrong",
        gateway.admin_key,
        key[:-1],
        f"{key}a",
        key.upper(),
        first.id,
        "é".encode().decode("latin-1"),
    ):
        reply = httpx.post(
            f"{gateway.url}{path}", content=b"{}", headers=[(b"x-api-key", wrong.encode("latin-1"))], timeout=60.0
        )
        assert reply.status_code == 401
    assert post(gateway, f"/session/{second.id}{path}", key, GOOD[path]).status_code == 404
    assert post(gateway, f"/session/sk-wrong{path}", "sk-wrong", GOOD[path]).status_code == 401
    for place in ("..", "%2e%2e", "..%2f..%2fadmin", "%2fetc%2fpasswd", f"{first.id}%00", "%ff"):
        reply = post(gateway, f"/session/{place}{path}", "sk-wrong", GOOD[path])
        assert reply.status_code in (401, 404, 405), place
    assert not list(gateway.config.run_dir.glob(f"{second.id}.jsonl"))


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_and_wrong_methods_are_refused(gateway: Gateway, path: str) -> None:
    _, key = gateway.create_session(**SESSION)
    assert post(gateway, path, key, b" " * (gateway.config.max_body_bytes + 1)).status_code == 413
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        reply = httpx.request(method, f"{gateway.url}{path}", headers={"authorization": f"Bearer {key}"}, timeout=60.0)
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        assert method in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/admin/sessions"])
def test_a_body_that_ends_too_early_is_no_failure_of_the_gateway(
    gateway: Gateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="verl_server.gateway")
    key = gateway.admin_key if path.startswith("/admin") else gateway.create_session(**SESSION)[1]
    host, port = gateway.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        connection.sendall(head.encode() + b'{"model":')
    wait_until(lambda: f"POST {path}, status 400" in caplog.text, 10, "the request has not ended")
    assert "failed" not in caplog.text


def test_a_damaged_record_is_told_without_its_path(gateway: Gateway) -> None:
    info, key = gateway.create_session(**SESSION)
    (gateway.config.run_dir / f"{info.id}.jsonl").write_bytes(b'{"format": 1}\n{"node": 5}\n')
    for reply in (
        post(gateway, PATHS[0], key),
        httpx.get(
            f"{gateway.url}/admin/sessions/{info.id}/record?format=atif", headers={"x-api-key": gateway.admin_key}
        ),
        httpx.get(f"{gateway.url}/ui/sessions/{info.id}", headers={"x-api-key": gateway.admin_key}),
    ):
        assert reply.status_code >= 400
        assert str(gateway.config.run_dir) not in reply.text
