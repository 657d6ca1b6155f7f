"""Sessions of the gateway: the admin API, settings and results, files, keys, and the start of a gateway."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from agent_helpers import ScriptedGenerateFn, renderer_with_template
from helpers import free_port

from verl_server.agent import RolloutLimits
from verl_server.errors import BadInputError, ServerBusyError
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.gateway.sessions.session_store import SessionInfo, SessionStore, write_info
from verl_server.server.process import WANTED_OPEN_FILES
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import ChatRenderer, load_session

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return renderer_with_template(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), CHAT_TEMPLATE)


def start_gateway(renderer: ChatRenderer, run_dir: Path, **options: Any) -> Gateway:
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    return Gateway(generate, run_dir, **{"renderer": renderer, "limits": LIMITS, **options})


@pytest.fixture(scope="module")
def gateway(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with start_gateway(renderer, tmp_path_factory.mktemp("run")) as gateway:
        yield gateway


def admin(gateway: Gateway, path: str = "", content: bytes | str | None = None) -> httpx.Response:
    """A request of the admin API: POST with content, GET without."""
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    method = "GET" if content is None else "POST"
    return httpx.request(method, f"{gateway.url}/admin/sessions{path}", content=content, headers=headers, timeout=60.0)


def ask(gateway: Gateway, key: str | None) -> int:
    """The status of a turn."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0).status_code


@pytest.mark.parametrize("word", ["Bearer", "bearer", "BEARER"])
def test_the_word_bearer_may_be_written_in_any_case(gateway: Gateway, word: str) -> None:
    headers = {"Authorization": f"{word} {gateway.create_session()[1]}"}
    assert httpx.get(f"{gateway.url}/v1/models", headers=headers, timeout=60.0).status_code == 200


def test_many_sessions_that_expire_together_do_not_stop_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.session_store.MAX_WORK_S", 0.0)

    def no_turn(*_: Any) -> Any:
        raise AssertionError("the sessions have no turns")

    async def run() -> list[int]:
        store, seen = SessionStore(tmp_path, no_turn, LIMITS, expiry_s=1e-9), list[int]()
        for _ in range(20):
            store.create()

        async def watch() -> None:
            while store.num_open:
                seen.append(store.num_open)
                await asyncio.sleep(0)

        await asyncio.gather(watch(), store.end_expired())
        return seen

    assert set(range(1, 20)) <= set(asyncio.run(run()))


# -- the admin API ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/any/end"])
def test_the_admin_api_refuses_a_wrong_key_before_the_body_arrives(gateway: Gateway, path: str) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        head = f"POST /admin/sessions{path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer wrong\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 400000000\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_the_admin_api_limits_the_size_of_a_body(gateway: Gateway) -> None:
    body = b'{"metadata": {"a": "' + b"x" * gateway.config.max_body_bytes + b'"}}'
    assert admin(gateway, content=body).status_code == 413


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"limit": {"max_turns": 1}}', "limit: there is no such field; did you mean 'limits'?"),
        ('{"sesion_id": "secret"}', "sesion_id: there is no such field; did you mean 'session_id'?"),
        ('{"user": "secret"}', "user: there is no such field; the fields are session_id, key, metadata, limits, sampl"),
        ('{"expires_in_s": NaN}', "JSON"),
        ('{"expires_in_s": 1e999}', "JSON"),
        ('{"expires_in_s": -1}', "expires_in_s"),
        ('{"metadata": "sk-secret"}', "metadata"),
        ("[]", "object"),
        ("", "JSON"),
    ],
)
def test_the_admin_api_names_a_wrong_field_and_repeats_no_value(gateway: Gateway, body: str, named: str) -> None:
    reply = admin(gateway, content=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert named in message
    assert "secret" not in message


@pytest.mark.parametrize("body", ['{"reward": NaN}', '{"reward": 1e999}', '{"rewards": {"a": 1e999}}', '{"score": 1}'])
def test_a_wrong_result_does_not_end_a_session(gateway: Gateway, body: str) -> None:
    info, _ = gateway.create_session()
    assert admin(gateway, f"/{info.id}/end", body).status_code == 400
    assert admin(gateway, f"/{info.id}").json()["ended_at"] is None


def test_the_sessions_are_listed_in_pages(renderer: ChatRenderer, tmp_path: Path) -> None:
    """In the order of their creation, also after a restart."""
    names = [f"s{index}" for index in (5, 3, 9, 1, 7)]
    with start_gateway(renderer, tmp_path) as gateway:
        for name in names:
            gateway.create_session(name)
        gateway.end_session("s3")

    def pages(query: str) -> list[list[str]]:
        found, after = list[list[str]](), ""
        while True:
            reply = admin(gateway, f"?limit=2{query}{after}").json()
            found.append([session["id"] for session in reply["sessions"]])
            if reply["next"] is None:
                return found
            after = f"&after={reply['next']}"

    with start_gateway(renderer, tmp_path) as gateway:
        assert pages("") == [["s5", "s3"], ["s9", "s1"], ["s7"]]
        gateway.end_session("s9")
        assert pages("&open=true") == [["s5", "s1"], ["s7"]]
        assert pages("&open=false") == [["s3", "s9"]]
        assert admin(gateway).json()["next"] is None
        assert admin(gateway, "?after=unknown").status_code == 404
        for query in ("limit=0", "limit=10001", "limit=x", "open=maybe", "offset=3"):
            reply = admin(gateway, f"?{query}")
            assert (reply.status_code, query.partition("=")[0] in reply.text) == (400, True)


# -- settings and results ---------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else "a"


NO_JSON: Any = [{"a": Path("a")}, {"a": "\ud800"}, {"a": nested(300)}, {1: 2}, "text"]
NO_JSON += [{"a": [{"b": number}]} for number in (math.nan, math.inf, -math.inf)]


@pytest.mark.parametrize("metadata", NO_JSON)
def test_metadata_that_is_no_json_changes_nothing(renderer: ChatRenderer, tmp_path: Path, metadata: Any) -> None:
    with start_gateway(renderer, tmp_path) as gateway:
        with pytest.raises(BadInputError, match="metadata must"):
            gateway.create_session("a", metadata=metadata)
        _, key = gateway.create_session("a")
        with pytest.raises(BadInputError, match="metadata must"):
            gateway.end_session("a", reward=1.0, metadata=metadata)
        assert ask(gateway, key) == 200
        assert admin(gateway).json()["sessions"][0]["reward"] is None
    with start_gateway(renderer, tmp_path) as gateway:
        assert ask(gateway, key) == 200


@pytest.mark.parametrize(
    "result",
    [{"reward": float("nan")}, {"reward": 10**400}, {"reward": "1"}, {"reward": 1.0, "rewards": {"a": float("inf")}}],
)
def test_wrong_rewards_do_not_end_a_session(gateway: Gateway, result: Any) -> None:
    info, key = gateway.create_session()
    with pytest.raises(BadInputError, match="finite numbers"):
        gateway.end_session(info.id, **result)
    assert ask(gateway, key) == 200


@pytest.mark.parametrize("stop_reason", [5, ["x"], None, b"done"])
def test_a_stop_reason_that_is_no_text_does_not_end_a_session(
    renderer: ChatRenderer, tmp_path: Path, stop_reason: Any
) -> None:
    """The next gateway could not read the file of the session, and would serve no session of the folder."""
    with start_gateway(renderer, tmp_path) as gateway:
        _, key = gateway.create_session("a")
        with pytest.raises(BadInputError, match="stop_reason must be a string"):
            gateway.end_session("a", 1.0, stop_reason=stop_reason)
        assert ask(gateway, key) == 200
    with start_gateway(renderer, tmp_path) as gateway:
        assert ask(gateway, key) == 200


def test_settings_that_cannot_be_read_are_not_written(tmp_path: Path) -> None:
    wrong: Any = 5
    with pytest.raises(BadInputError, match="the session 'a' has wrong settings: stop_reason: "):
        write_info(tmp_path, SessionInfo("a", "digest", 1.0, stop_reason=wrong))
    assert list(tmp_path.iterdir()) == []


def test_rewards_need_no_reward(gateway: Gateway) -> None:
    info, key = gateway.create_session()
    assert ask(gateway, key) == 200
    assert gateway.end_session(info.id, rewards={"accuracy": 1.0}).rewards == {"accuracy": 1.0}
    ended = gateway.end_session(info.id, reward=0.5)
    assert (ended.reward, ended.rewards) == (0.5, {"accuracy": 1.0})
    termination = load_session(gateway.config.run_dir / f"{info.id}.jsonl").last_termination
    assert termination is not None
    assert (termination.reward, termination.rewards) == (0.5, {"accuracy": 1.0})


def test_a_session_that_is_ended_again_keeps_its_stop_reason_and_gets_the_new_rewards(gateway: Gateway) -> None:
    info, key = gateway.create_session()
    assert ask(gateway, key) == 200
    for stop_reason, name in (("failed", "accuracy"), ("done", "style")):
        ended = gateway.end_session(info.id, stop_reason=stop_reason, rewards={name: 0.5})
        termination = load_session(gateway.config.run_dir / f"{info.id}.jsonl").last_termination
        assert termination is not None
        assert (ended.stop_reason, termination.stop_reason) == ("failed", "failed")
        assert ended.rewards == termination.rewards == {name: 0.5}


def test_a_session_can_be_ended_without_training(gateway: Gateway) -> None:
    """Also if it was ended with training before, and the other way round."""
    info, key = gateway.create_session()
    assert ask(gateway, key) == 200
    for train, num_trained in (([], 0), (["main"], 1), ([], 0), (None, 0)):
        assert gateway.end_session(info.id, reward=1.0, train=train).train == (train or [])
        graph = load_session(gateway.config.run_dir / f"{info.id}.jsonl")
        assert (len(graph.trained_segments or ()), len(graph.rewards)) == (num_trained, num_trained)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sampling_params": {"n": 4}}, "'n'"),
        ({"sampling_params": {"temperature": "hot"}}, "'temperature'"),
        ({"sampling_params": {"max_new_tokens": 0}}, "'max_new_tokens'"),
        ({"limits": {"max_context_tokens": None}}, "max_context_tokens"),
        ({"limits": LIMITS}, "limits must be a dict"),
        ({"expires_in_s": float("nan")}, "expires_in_s"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"expires_in_s": 10**400}, "expires_in_s"),
        ({"sampling_params": {"custom_params": {"x": math.nan}}}, "sampling_params must have values of JSON only"),
        ({"key": ""}, "key must be a string of at least 16"),
        ({"key": "sk-0123456789ab"}, "key must be a string of at least 16"),
        ({"key": "a key with spaces"}, "without spaces"),
        ({"key": "der-schl\u00fcssel-der-sitzung"}, "printable ASCII"),
        ({"key": b"sk-of-bytes-of-16"}, "key must be a string"),
    ],
)
def test_wrong_settings_make_no_session(gateway: Gateway, settings: Any, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        gateway.create_session("wrong", **settings)
    assert all(info.id != "wrong" for info in gateway.sessions())


def test_a_misspelled_limit_is_refused_before_the_engine_is_known(tmp_path: Path) -> None:
    with Gateway(DiscoveredServers(dict), tmp_path) as gateway:
        with pytest.raises(BadInputError, match=r"limits .*'max_turn'; did you mean 'max_turns'; its fields are "):
            gateway.create_session("a", limits={"max_turn": 3})
        with pytest.raises(BadInputError, match="max_turns must be"):
            gateway.create_session("a", limits={"max_turns": "3"})
        assert gateway.sessions() == []
        gateway.create_session("a", limits={"max_turns": 3})


def test_a_key_may_come_in_three_headers(gateway: Gateway) -> None:
    info, key = gateway.create_session()
    _, other = gateway.create_session()
    gateway.end_session(info.id)
    url, body = f"{gateway.openai_url}/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    both: list[dict[str, str]] = [
        {"x-api-key": other, "api-key": key},
        {"Authorization": f"Bearer {other}", "api-key": key},
    ]
    for headers, status in (({"api-key": other}, 200), ({"api-key": key}, 403), *((headers, 200) for headers in both)):
        assert httpx.post(url, json=body, headers=headers, timeout=60.0).status_code == status


def test_the_admin_key_is_the_key_of_no_turn(gateway: Gateway) -> None:
    for path in ("/v1/chat/completions", "/v1/models"):
        method = "GET" if path.endswith("models") else "POST"
        reply = httpx.request(method, gateway.url + path, headers={"x-api-key": gateway.admin_key}, timeout=60.0)
        assert reply.status_code == 401
        assert "the key of the admin API; create a session with POST /admin/sessions" in reply.text


def test_two_sessions_have_two_keys(gateway: Gateway) -> None:
    first, key = gateway.create_session(key="sk-of-the-first-session")
    with pytest.raises(BadInputError, match="another session has the key"):
        gateway.create_session(key=key)
    with pytest.raises(BadInputError, match="the key of the admin API"):
        gateway.create_session(key=gateway.admin_key)
    assert ask(gateway, key) == 200
    assert load_session(gateway.config.run_dir / f"{first.id}.jsonl").nodes


# -- files ------------------------------------------------------------------------------------------------


def test_only_the_user_reads_the_files(renderer: ChatRenderer, tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    with start_gateway(renderer, run_dir) as gateway:
        (run_dir / "a.session.new").touch(0o644)
        _, key = gateway.create_session("a")
        assert (run_dir / "a.session.json").stat().st_mode & 0o777 == 0o600
        assert ask(gateway, key) == 200
        gateway.end_session("a", reward=1.0)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in run_dir.iterdir()}
    assert modes == dict.fromkeys((".gateway.lock", "a.jsonl", "a.session.json"), 0o600)


OF_B = '{"id": "b", "key_digest": "a", "created_at": 1.0}'


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"id": "b"}', '{"id": "a", "key_digest": 5}', OF_B])
def test_a_damaged_settings_file_is_named_and_the_other_sessions_are_served(
    renderer: ChatRenderer, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """As after a loss of power. The start names all such files in one line."""
    with start_gateway(renderer, tmp_path) as gateway:
        _, key = gateway.create_session("whole")
    for name in ("a", "c"):
        (tmp_path / f"{name}.session.json").write_text(content)
    with start_gateway(renderer, tmp_path) as gateway:
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        lines = [record.getMessage() for record in errors if record.name.startswith("verl_server")]
        assert len(lines) == 1
        assert all(f"{name}.session.json" in lines[0] for name in ("a", "c"))
        assert ask(gateway, key) == 200
        assert [info.id for info in gateway.sessions()] == ["whole"]
        for reply in (admin(gateway, "/a"), admin(gateway, "/a/end", "{}"), admin(gateway, "/a/record")):
            assert reply.status_code == 404
            assert "the session 'a' is not served: a.session.json cannot be read" in reply.json()["error"]["message"]
        with pytest.raises(BadInputError, match=r"cannot be created: a\.session\.json cannot be read"):
            gateway.create_session("a")
    (tmp_path / "a.session.json").rename(tmp_path / "a.session.new")  # as a process that was killed leaves the file
    with start_gateway(renderer, tmp_path) as gateway:
        _, key = gateway.create_session("a", metadata={"a": [1, None, {"b": 0.5}]})
    with start_gateway(renderer, tmp_path) as gateway:
        assert ask(gateway, key) == 200
        assert gateway.sessions()[-1].metadata == {"a": [1, None, {"b": 0.5}]}


def test_settings_are_on_the_disk_before_they_replace_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power, the file has the earlier or the new settings, and is not empty."""
    synced, fdatasync, replace = set[int](), os.fdatasync, os.replace
    replaced = list[bool]()

    def observed_fdatasync(fd: int) -> None:
        fdatasync(fd)
        synced.add(os.fstat(fd).st_ino)

    def observed_replace(source: Path, target: Path) -> None:
        replaced.append(source.stat().st_ino in synced)
        replace(source, target)

    monkeypatch.setattr(os, "fdatasync", observed_fdatasync)
    monkeypatch.setattr(os, "replace", observed_replace)
    for ended_at in (None, 2.0):
        write_info(tmp_path, SessionInfo("a", "digest", 1.0, ended_at=ended_at))
    assert replaced == [True, True]


# -- the start of a gateway -------------------------------------------------------------------------------


def test_a_folder_has_one_gateway(renderer: ChatRenderer, tmp_path: Path) -> None:
    with start_gateway(renderer, tmp_path) as first:
        named = (
            f"another gateway serves .*{re.escape(first.url)}, process {os.getpid()} on the host .*; use that gateway"
        )
        with pytest.raises(ServerBusyError, match=named):
            start_gateway(renderer, tmp_path)
        _, key = first.create_session()
        assert ask(first, key) == 200
    with start_gateway(renderer, tmp_path) as second:
        assert ask(second, key) == 200


def test_a_gateway_listens_when_it_has_read_its_folder(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Clients would wait for a folder with many sessions. A pipe as a settings file is read until it is closed."""
    port, fifo = free_port(), tmp_path / "a.session.json"
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start_gateway, renderer, tmp_path, port=port)
        with fifo.open("wb"):  # waits until the gateway reads
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=30.0)
            assert f"http://127.0.0.1:{port}" in (tmp_path / ".gateway.lock").read_text()
        with starting.result() as gateway:
            assert ask(gateway, gateway.create_session("b")[1]) == 200


def test_the_limit_of_open_files_is_raised(renderer: ChatRenderer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted // 2, hard))
    try:
        with start_gateway(renderer, tmp_path):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_is_no_folder_of_records(renderer: ChatRenderer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="run_dir"):
        start_gateway(renderer, tmp_path / "file")


def test_a_port_in_use_is_named_with_the_cure(
    gateway: Gateway, renderer: ChatRenderer, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    port = int(gateway.url.rpartition(":")[2])
    cure = f"cannot listen on port {port} of 127.0.0.1: Address already in use; choose another port"
    with pytest.raises(BadInputError, match=cure):
        start_gateway(renderer, tmp_path, port=port)
    with pytest.raises(BadInputError, match=r"of 192\.0\.2\.1: .*another host"):
        start_gateway(renderer, tmp_path, host="192.0.2.1")
    with pytest.raises(BadInputError, match="from 0 to 65535"):
        start_gateway(renderer, tmp_path, port=70000)
    with start_gateway(renderer, tmp_path) as other:  # the folder is free
        assert ask(other, other.create_session()[1]) == 200
    arguments = ["--router", "http://127.0.0.1:9", "--model", str(tiny("qwen3")), "--max-context-tokens", "100"]
    done = run_command(str(tmp_path), *arguments, "--port", str(port))
    assert done.returncode == 2
    assert cure in " ".join(done.stderr.split())


def test_a_gateway_needs_a_limit_of_tokens(renderer: ChatRenderer, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="max_context_tokens"):
        start_gateway(renderer, tmp_path, limits=None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(({"model_names": names}, "model_names") for names in ("qwen", (), (5,))),
        ({"is_open": "no"}, "is_open must be a valid boolean"),
        ({"limits": {"max_turns": 3}}, "limits must be an instance of RolloutLimits"),
        ({"renderer": 5}, "renderer must be an instance of ChatRenderer"),
        *(({"run_dir": folder}, "run_dir must") for folder in (None, "")),
        ({"host": "http://127.0.0.1"}, "host must match pattern"),
        ({"session_expiry_s": -1}, "session_expiry_s"),
        ({"session_expiry_s": "60"}, "session_expiry_s"),
        *(({"admin_key": key}, "admin_key must be a") for key in ("", "short", 12345678, "sk-admin-key\n")),
    ],
)
def test_wrong_arguments_start_no_gateway(renderer: ChatRenderer, tmp_path: Path, arguments: Any, named: str) -> None:
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    with pytest.raises(BadInputError, match=named):
        Gateway(generate, **{"run_dir": tmp_path, "renderer": renderer, "limits": LIMITS, **arguments})


def test_an_engine_that_is_no_engine_is_named(tmp_path: Path) -> None:
    for engine in (None, "http://127.0.0.1:30000"):
        with pytest.raises(BadInputError, match="engine must be"):
            Gateway(cast("Any", engine), tmp_path)


def run_command(*args: str, key: str = "the-admin-key") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "VERL_SERVER_GATEWAY_ADMIN_KEY": key}
    command = [sys.executable, "-m", "verl_server.cli", "gateway", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_the_command_refuses_a_short_admin_key(tmp_path: Path) -> None:
    done = run_command(str(tmp_path), "--server", "http://127.0.0.1:9", key="k")
    assert done.returncode == 2
    assert "VERL_SERVER_GATEWAY_ADMIN_KEY has 1" in " ".join(done.stderr.split())


def test_a_key_that_was_taken_is_not_in_proc() -> None:
    program = (
        "from pathlib import Path; from verl_server.cli.arguments import take_key; key = take_key('SECRET_OF_TEST');"
        "print(key, key.encode() in Path('/proc/self/environ').read_bytes())"
    )
    env = {**os.environ, "SECRET_OF_TEST": "the-admin-key"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.split() == ["the-admin-key", "False"]
