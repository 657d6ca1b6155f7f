"""The tests of `test_cli.py` that need servers."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import MARK, marked_processes, wait_until
from test_cli import COMMAND, DEFAULT_SIGNALS, KEYS, environment, run

from verl_server.cli.arguments import (
    API_KEY,
)
from verl_server.config import FORKSERVER_FOLDER
from verl_server.server.warden.processes import find_shared_memory, list_descendants

SMALL_SERVER = ["--dtype", "float32", "--max-total-tokens=4096"]


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


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty folder with a short path: SGLang creates Unix sockets in it, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="vs-") as folder:
        yield Path(folder)


def test_launch_serves_until_sigterm_and_leaves_nothing(
    tiny: Callable[..., Path], tmp_path: Path, scratch: Path
) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*COMMAND, "launch", str(tiny("qwen3")), *SMALL_SERVER, "--log-dir", str(tmp_path / "logs")],
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
        shared = find_shared_memory(list_descendants(process.pid))  # a scheduler, which maps it, has no mark in `/proc`
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
    assert not shared.keys() & set(os.listdir("/dev/shm"))
    assert [path.name for path in scratch.iterdir() if path.name.startswith("verl-server-")] == []
    assert list((tmp_path / "logs").iterdir())


def test_failed_start_prints_the_end_of_the_servers_log(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """SGLang does not know the model and ends during its start. The forkserver of the suite has forked the server."""
    model = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "no_such_model"}')
    done = run("launch", str(model), **KEYS, **{FORKSERVER_FOLDER: os.environ[FORKSERVER_FOLDER]})
    assert done.returncode == 1
    assert "the server did not start" in done.stderr
    assert "end of the server's log" in done.stderr
    assert "no_such_model" in done.stderr
    assert "Traceback" not in done.stderr.split("--- end of the server's log")[0]


def test_ctrl_c_on_a_terminal_before_the_server_is_ready(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """On a terminal missing keys are generated, the elapsed time is shown, and Ctrl-C ends all processes."""
    mark = uuid.uuid4().hex
    folder = tmp_path / ("long_" * 20)  # a path that does not fit into one line must not hide the time
    folder.symlink_to(tiny("qwen3"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*DEFAULT_SIGNALS, *COMMAND, "launch", str(folder), *SMALL_SERVER],
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
