"""A gateway in a process with a small limit of open files. Run by `test_gateway_files.py`; prints JSON."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from agent_helpers import ScriptedGenerateFn, renderer_with_template

from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer

NUM_SESSIONS = 60


def main(folder: Path) -> dict[str, Any]:
    """What the gateway answers before, while and after the process has no free file."""
    renderer = renderer_with_template(make_tokenizer(folder / "tokenizer"), CHAT_TEMPLATE)
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    with Gateway(generate, folder / "run", renderer=renderer, limits=limits) as gateway:
        keys = [gateway.create_session(f"s{index}")[1] for index in range(NUM_SESSIONS)]
        gateway.create_session("without-a-turn")
        clients = [http.client.HTTPConnection(*gateway._address, timeout=60.0) for _ in range(2)]

        def request(path: str, key: str = "", body: Any = None, client: int = 0) -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"}
            method = "GET" if body is None else "POST"
            clients[client].request(method, path, None if body is None else json.dumps(body), headers)
            reply = clients[client].getresponse()
            return reply.status, json.loads(reply.read())

        def chat(key: str, *texts: str) -> int:
            roles = ("user", "assistant")
            messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
            return request("/v1/chat/completions", key, {"model": "m", "messages": messages})[0]

        request("/health/readiness", client=1)
        found: dict[str, Any] = {"turns": [chat(key, "a") for key in keys]}
        found["open_records"] = sum(target.endswith(".jsonl") for target in open_targets())
        filled = list[int]()
        found["full_readiness"] = full = []
        for _ in range(100):  # each request may close the files of some records
            fill(filled)
            full.append(request("/health/readiness", client=1))
            if full[-1][0] == 503:
                break
        fill(filled)
        found["created"] = request("/admin/sessions", gateway.admin_key, {"session_id": "new"})
        ends = ("s59", "s0", "without-a-turn")
        found["ends"] = []
        for name in ends:
            fill(filled)
            found["ends"].append(request(f"/admin/sessions/{name}/end", gateway.admin_key, {"reward": 1.0})[0])
        for descriptor in filled:
            os.close(descriptor)
        found["later_turns"] = [chat(key, "a", "yes", "b") for key in keys[1:59]]
        found["later_readiness"] = request("/health/readiness")
        found["later_created"] = request("/admin/sessions", gateway.admin_key, {"session_id": "new"})[0]
    return found


def open_targets() -> list[str]:
    """The paths of the open files of this process."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return targets


def fill(filled: list[int]) -> None:
    """Take all free descriptors of this process."""
    try:
        while True:
            filled.append(os.dup(0))
    except OSError as error:
        assert error.errno == errno.EMFILE  # noqa: PT017 - the loop ends with this error


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
