"""The `verl-server` command, as a user runs it: a process of its own, its output and its exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import MARK, marked_processes, wait_until

from verl_server.cli_arguments import ADMIN_API_KEY, API_KEY, parse_server_args
from verl_server.errors import BadInputError
from verl_server.server.warden import shared_memory_of

COMMAND = [sys.executable, "-m", "verl_server.cli"]
KEYS = {API_KEY: "the-users-key", ADMIN_API_KEY: "the-admins-key"}
SMALL = ["--dtype", "float32", "--max-total-tokens=4096"]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in KEYS}
    return {**kept, **changes}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, env=environment(**env))


def call(url: str, key: str) -> int:
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}).encode()
    request = urllib.request.Request(
        f"{url}/generate", body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as reply:
            assert len(json.load(reply)["output_ids"]) == 4
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_launch_serves_until_sigterm_and_leaves_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "launch", str(tiny("qwen3")), *SMALL, "--log-dir", str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**KEYS, **{MARK: mark, "TMPDIR": str(scratch)}),
    )
    try:
        assert process.stdout is not None
        ready, example = process.stdout.readline(), process.stdout.readline()
        assert ready.startswith("Ready: http://127.0.0.1:"), process.communicate()
        url = ready.split()[1]
        assert call(url, KEYS[API_KEY]) == 200
        assert call(url, "wrong") == 401
        done = subprocess.run(
            ["bash", "-c", f"{example.strip()} -s --fail"], env=environment(**KEYS), capture_output=True
        )
        assert json.loads(done.stdout)["meta_info"]["completion_tokens"] <= 16
        tree = marked_processes(mark)
        shared = shared_memory_of(list(tree))
        assert len(tree) >= 4
        assert shared
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "have ended" in out
    assert not any(key in text for key in KEYS.values() for text in (ready, example, out, err, *tree.values()))
    assert "Traceback" not in err
    wait_until(lambda: not marked_processes(mark), 10.0, f"left behind: {marked_processes(mark)}")
    assert not shared & set(os.listdir("/dev/shm"))
    assert [path.name for path in scratch.iterdir() if path.name.startswith("verl-server-")] == []
    assert list((tmp_path / "logs").iterdir())


def test_dead_server_ends_the_command_with_its_last_words(tmp_path: Path) -> None:
    """A folder without a model: SGLang ends while it starts."""
    done = run("launch", str(tmp_path), **KEYS)
    assert done.returncode == 1
    assert "the server did not start" in done.stderr
    assert "last words of the server" in done.stderr
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr.split("--- last words")[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--api-key", "secret"], API_KEY),
        (["--admin_api_key=secret"], ADMIN_API_KEY),
        (["--port=70000"], "65535"),
        (["stray"], "stray"),
    ],
)
def test_refusals_start_nothing(tiny: Callable[..., Path], args: list[str], words: str) -> None:
    done = run("launch", str(tiny("qwen3")), *args, **KEYS)
    assert done.returncode == 2
    assert words in done.stderr
    assert "secret" not in done.stderr
    assert done.stdout == ""


def test_random_keys_are_not_written_into_a_pipe(tiny: Callable[..., Path]) -> None:
    done = run("launch", str(tiny("qwen3")), **{API_KEY: "only-one"})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"set {ADMIN_API_KEY}" in done.stderr
    assert "only-one" not in done.stderr


def test_ctrl_c_on_a_terminal_before_the_server_is_ready(tiny: Callable[..., Path]) -> None:
    """On a terminal keys may be made, a clock is shown, and Ctrl-C ends everything at any moment."""
    mark = uuid.uuid4().hex
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "launch", str(tiny("qwen3")), *SMALL],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**{MARK: mark, "TERM": "xterm"}),
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while b"0:00:01" not in shown and time.monotonic() < deadline:
            if select.select([master], [], [], 1.0)[0]:
                shown += os.read(master, 65536)
        assert b"0:00:01" in shown
        os.kill(process.pid, signal.SIGINT)
        while select.select([master], [], [], 20.0)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(timeout=30) == 128 + signal.SIGINT
    finally:
        process.kill()
        os.close(master)
    assert b"have ended" in shown
    assert b"Traceback" not in shown
    wait_until(lambda: not marked_processes(mark), 10.0, f"left behind: {marked_processes(mark)}")


def test_server_arguments() -> None:
    words = "Org/Model --mem-fraction-static 0.5 --dtype=bfloat16 --skip-tokenizer-init --tool-call-parser qwen"
    assert parse_server_args(words.split()) == {
        "model_path": "Org/Model",
        "mem_fraction_static": 0.5,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "tool_call_parser": "qwen",
    }
    more = ["Org/Model", "--data-parallel-size", "2", "--lora-paths", "a", "b", "--no-lora-strict-loading"]
    more += ["--json-model-override-args", '{"a": 1}', "--preferred-sampling-params", '{"top_k": 1}', "--x", "-1"]
    assert parse_server_args(more) == {
        "model_path": "Org/Model",
        "dp_size": 2,
        "lora_paths": ["a", "b"],
        "lora_strict_loading": False,
        "json_model_override_args": '{"a": 1}',
        "preferred_sampling_params": {"top_k": 1},
        "x": -1,
    }


@pytest.mark.parametrize(
    "words", ["--dtype auto", "Org/Model stray", "Org/Model -x 1", "Org/Model --tp-size 2", "/no/such/folder"]
)
def test_server_arguments_that_are_refused(words: str) -> None:
    with pytest.raises(BadInputError):
        parse_server_args(words.split())


def test_version_and_light_imports() -> None:
    from verl_server import __version__

    lines = run("version").stdout.splitlines()
    assert lines[0] == f"verl-server {__version__}"
    assert re.match(r"sglang \d", lines[1])
    heavy = "import sys, verl_server.cli; print({'torch', 'sglang', 'transformers', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"
