"""The live page of the gateway, on a real server and in a real browser."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import needs_browser, open_page
from test_gateway import ADD, SHORT, ask, gateway, generate, graph_of, openai_client

from verl_server.gateway import Gateway
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.http import routes
from verl_server.gateway.threads import OneAtATime
from verl_server.trajectory.recorder import Recorder

__all__ = ["gateway", "generate"]

HELLO = [{"role": "user", "content": "<script>document.title='attacked'</script> hello"}]


def say(gateway: Gateway, key: str, content: str = "hello") -> None:
    openai_client(gateway, key).chat.completions.create(model="m", messages=[{"role": "user", "content": content}])


def get(gateway: Gateway, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.get(gateway.url + path, headers=headers, timeout=30.0)


def test_a_key_reads_its_own_session_only(gateway: Gateway) -> None:
    first, first_key = gateway.create_session("ui-first", sampling_params=SHORT)
    second, second_key = gateway.create_session("ui-second", sampling_params=SHORT, metadata={"trial": 7})
    say(gateway, first_key)
    listing = get(gateway, "/ui/sessions", first_key)
    assert listing.headers["content-type"] == "application/json"
    own = listing.json()["sessions"]
    assert [session["id"] for session in own] == [first.id]
    listed = {session["id"]: session for session in get(gateway, "/ui/sessions", gateway.admin_key).json()["sessions"]}
    assert {first.id, second.id} <= listed.keys()
    assert listed[second.id]["metadata"] == '{"trial":7}'
    assert get(gateway, "/ui/sessions", second_key).json()["sessions"][0]["metadata"] == "{}", "the agent has this key"
    assert listed[second.id]["kilobytes"] is None
    assert get(gateway, f"/ui/sessions/{first.id}", first_key).status_code == 200
    assert get(gateway, f"/ui/sessions/{second.id}", first_key).status_code == 404
    assert get(gateway, f"/ui/sessions/{second.id}", gateway.admin_key).status_code == 404, "it has no turn yet"
    for path in ("/ui/sessions", f"/ui/sessions/{first.id}"):
        assert get(gateway, path).status_code == 401
        assert get(gateway, path, "sk-wrong").status_code == 401
    gateway.end_session(first.id, reward=0.5)
    (ended,) = get(gateway, "/ui/sessions", first_key).json()["sessions"]
    assert (ended["is_open"], ended["stop_reason"], ended["reward"]) == (False, "done", 0.5)


def test_the_view_of_a_session_changes_with_its_record(gateway: Gateway) -> None:
    info, key = gateway.create_session("ui-view", sampling_params=SHORT)
    say(gateway, key, "<b>bold</b>")
    path = f"/ui/sessions/{info.id}"
    page = get(gateway, path, key)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-store", "the texts stay out of the browser's disk cache"
    assert "<b>bold</b>" not in page.text, "texts are escaped"
    assert 'class="run v' in page.text
    tag = page.headers["etag"]
    assert get(gateway, path, key, **{"If-None-Match": tag}).status_code == 304
    say(gateway, key, "another")
    changed = get(gateway, path, key, **{"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] != tag) == (200, True)


def test_the_view_has_the_kinds_of_conversations_and_the_refused_prompts(gateway: Gateway) -> None:
    """The session runs: its file has no kinds yet."""
    info, key = gateway.create_session("ui-kinds", sampling_params=SHORT)
    assert ask(gateway, key, "What is 1 + 2?", tools=[ADD]).status_code == 200
    title: Any = [{"role": "system", "content": "Write a title."}, {"role": "user", "content": "What is 1 + 2?"}]
    openai_client(gateway, key).chat.completions.create(model="m", messages=title)
    assert ask(gateway, key, "long " * 3000).status_code == 400
    page = get(gateway, f"/ui/sessions/{info.id}", key).text
    assert re.findall(r'<b class="conversation">(.*?)</b>', page) == ["main", "title"]
    assert re.search("<h2>Notes</h2>\n<ul><li>refused: limit max_context_tokens", page)


def test_pages_are_rendered_one_at_a_time_and_not_for_a_client_that_has_left() -> None:
    running, renders = list[str](), list[int]()

    def render() -> str:
        running.append(threading.current_thread().name)
        renders.append(len(running))
        time.sleep(0.01)
        return running.pop()

    async def leaves(has_left: bool) -> bool:
        return has_left

    async def run() -> None:
        pages = OneAtATime()
        calls = [pages.call(functools.partial(leaves, has_left), render) for has_left in (False, True, False)]
        found = await asyncio.gather(*calls)
        assert [name is None for name in found] == [False, True, False]
        assert renders == [1, 1]
        assert threading.current_thread().name not in found

    asyncio.run(run())


def test_a_record_that_is_too_long_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path, "a") as recorder:
        recorder.add_node(None, [1, 2, 3], sampled=False)
    file = tmp_path / "a.jsonl"
    monkeypatch.setattr(routes, "MAX_SHOWN_TOKENS", 2)
    with pytest.raises(GatewayError, match="more than 2 tokens; `verl-server trajectory show --html`"):
        routes._render(file, str)
    with file.open("ab") as record:
        record.truncate((1 << 20) + 1)
    monkeypatch.setattr(routes, "MAX_RECORD_BYTES", 1 << 20)
    with pytest.raises(GatewayError, match="more than 1 MiB; `verl-server trajectory show --html`"):
        routes._render(file, str)


@needs_browser
def test_the_page_follows_a_session_in_a_browser(gateway: Gateway, tmp_path: Path) -> None:
    """The page lists the session, shows its tokens, and shows a turn that comes later. No script of a text runs."""
    info, key = gateway.create_session("ui-browser", sampling_params=SHORT)

    def ask(content: str) -> None:
        say(gateway, key, content)

    async def run() -> None:
        await asyncio.to_thread(ask, "<script>document.title='attacked'</script> hello")
        async with open_page(f"{gateway.url}/ui#100%", tmp_path / "profile") as page:  # the hash has no character
            assert await page.wait_for("!document.getElementById('hint').hidden")
            assert await page.evaluate("document.getElementById('error').textContent") == ""
            for entered in ("sk-wrong", key):
                await page.evaluate(
                    f"document.getElementById('key').value = {entered!r}; document.querySelector('form button').click()"
                )
                if entered != key:
                    error = await page.wait_for("document.getElementById('error').textContent")
                    assert "enter the admin key or the key of a session" in error
            assert await page.evaluate("document.getElementById('hint').hidden")
            assert info.id in await page.wait_for("document.getElementById('sessions').textContent")
            nodes = "document.getElementById('page').contentDocument?.querySelectorAll('.sampled').length"
            assert await page.wait_for(nodes) == 1
            tokens = "document.getElementById('page').contentDocument.querySelectorAll('.run i').length"
            num_tokens = sum(len(node.token_ids) for node in graph_of(gateway, info.id).nodes if node.sampled)
            assert await page.evaluate(tokens) == num_tokens
            await asyncio.to_thread(ask, "another conversation")
            assert await page.wait_for(f"{nodes} === 2")
            assert await page.evaluate("document.title") == "Gateway"
            text = "document.getElementById('page').contentDocument.body.textContent"
            assert "document.title='attacked'" in await page.evaluate(text), "the text is shown, not run"
            if shot := os.environ.get("VERL_SERVER_TEST_SCREENSHOT"):
                found = await page.call("Page.captureScreenshot", format="png")
                Path(shot).write_bytes(base64.b64decode(found["data"]))
            await page.evaluate("document.querySelector('button.session').click()")
            assert await page.evaluate("location.hash") == f"#{info.id}"

    asyncio.run(asyncio.wait_for(run(), 120))
