"""Servers that are forked are servers like others: the same deaths, the same words, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import GREEDY, MARK, marked_processes, no_new_shared_memory, wait_until

from verl_server import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, ServerDiedError
from verl_server.rollout.launcher import LocalLauncher
from verl_server.server import forkserver as forkserver_module
from verl_server.server.forkserver import ForkedWarden, Forkserver
from verl_server.server.process import ServerProcess, never_abort

READY_S = 250.0


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Forkserver]:
    forkserver = Forkserver()
    assert forkserver.wait_ready(READY_S, never_abort)
    yield forkserver
    forkserver.close()
    assert forkserver.ended


def start(tiny: Callable[..., Path], warden: Any, **changed: Any) -> HttpServerEngineAdapter:
    given = {"model_path": str(tiny("qwen3")), "dtype": "float32", "max_total_tokens": 8192, **changed}
    return HttpServerEngineAdapter(warden_factory=warden, **given)


def answer(adapter: HttpServerEngineAdapter) -> Any:
    return adapter.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)["output_ids"]


def process_of(adapter: HttpServerEngineAdapter) -> ServerProcess:
    process = adapter.asynchronous.process
    assert isinstance(process, ServerProcess)
    return process


def tree(adapter: HttpServerEngineAdapter) -> tuple[psutil.Process, list[psutil.Process]]:
    """The server's warden, and all below it."""
    warden = psutil.Process(process_of(adapter).pid).parent()
    assert warden is not None
    return warden, warden.children(recursive=True)


def test_a_forked_server_equals_a_spawned_one(adapter: Any, forkserver: Forkserver, tiny: Callable[..., Path]) -> None:
    with no_new_shared_memory():
        one, two = start(tiny, forkserver.warden), start(tiny, forkserver.warden)
        try:
            assert answer(one) == answer(two) == answer(adapter)
            for server in (one, two):
                process = process_of(server)
                assert isinstance(process._warden, ForkedWarden)
                assert str(server.asynchronous.api_key) not in process.log_path.read_text()
                assert "server_args" in process.log_path.read_text()
            warden, below = tree(one)
            os.kill(below[0].pid, signal.SIGKILL)
            with pytest.raises(ServerDiedError, match="SIGKILL"):
                one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1500, "ignore_eos": True})
            _, alive = psutil.wait_procs([warden, *below], 10.0)
            assert not alive
            assert answer(two) == answer(adapter), "the other one was not touched"
        finally:
            left = [*tree(two)[1], tree(two)[0]]
            one.shutdown()
            two.shutdown()
        _, alive = psutil.wait_procs(left, 10.0)
        assert not alive
    assert not forkserver.ended


def test_a_killed_warden_of_a_forked_server(forkserver: Forkserver, tiny: Callable[..., Path]) -> None:
    with no_new_shared_memory():
        server = start(tiny, forkserver.warden)
        warden, below = tree(server)
        warden.kill()
        _, alive = psutil.wait_procs([warden, *below], 10.0)
        assert not alive
        with pytest.raises(ServerDiedError):
            answer(server)
        server.shutdown()


def test_a_wrong_argument_is_told(forkserver: Forkserver, tiny: Callable[..., Path]) -> None:
    with pytest.raises(BadInputError, match="did not start"):
        start(tiny, forkserver.warden, no_such_argument=1)


def test_a_forkserver_that_is_lost_or_hangs(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs a server gets it in the usual way; the next one is forked again."""
    place = LocalLauncher()

    def forks() -> Forkserver:
        wardens = place._wardens(AdapterConfig(), never_abort)
        owner = getattr(wardens, "__self__", None)
        assert isinstance(owner, Forkserver), "not forked"
        return owner

    try:
        first = forks()
        os.kill(first._process.pid, signal.SIGKILL)
        with no_new_shared_memory():
            server = start(tiny, first.warden)
            assert not isinstance(process_of(server)._warden, ForkedWarden)
            server.shutdown()
        second = forks()
        assert second is not first
        monkeypatch.setattr(forkserver_module, "FORK_S", 1.0)  # shorter, that is all
        os.kill(second._process.pid, signal.SIGSTOP)
        spawned = second.warden()
        assert not isinstance(spawned, ForkedWarden)
        assert spawned.stdin is not None
        spawned.stdin.close()
        spawned.wait(10.0)
        assert second.ended
    finally:
        place.close()


TRAINER = """
import sys, time
from verl_server import HttpServerEngineAdapter
from verl_server.server.process import ServerProcess, never_abort
from verl_server.server.forkserver import Forkserver
forkserver = Forkserver()
print("importing", flush=True)
if len(sys.argv) > 1:
    assert forkserver.wait_ready(250, never_abort)
    server = HttpServerEngineAdapter(
        warden_factory=forkserver.warden, model_path=sys.argv[1], dtype="float32", max_total_tokens=8192
    )
    print("working", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("working", [False, True], ids=["while it imports", "at work"])
def test_a_killed_trainer_leaves_nothing(tiny: Callable[..., Path], working: bool) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", TRAINER, *([str(tiny("qwen3"))] if working else [])]
    with no_new_shared_memory():
        trainer = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "importing\n"
        if working:
            assert trainer.stdout.readline() == "working\n"
        else:
            time.sleep(2.0)
        assert len(marked_processes(mark)) > 1
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not marked_processes(mark), 10.0, f"left behind: {marked_processes(mark)}")
