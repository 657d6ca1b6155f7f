"""Weight updates in which a process dies or data breaks at an exact step: typed errors, no torn weights, recovery."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    PROMPTS,
    Ranks,
    all_at_once,
    assert_equals_reference,
    change_weights,
    mesh_of,
    no_new_shared_memory,
    processes,
    reference_model,
    remote_server_of,
    run_in_fork,
    tree_of,
    wait_until,
)
from pushing_trainer import push_once
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, Timeouts, VerlEngine
from verl_server.config import RemoteServer, WeightsConfig
from verl_server.conformance.reference import Interceptor
from verl_server.errors import DeadlineError, PeerError, TornWeightsError, VerlServerError

HERE = Path(__file__).parents[2]
STEPS = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/continue_generation",
]
TEARING = STEPS[2:4]
"""Steps at which the server may hold a part of an update."""


def at_step(step: str, act: Callable[[], None]) -> Callable[[str], None]:
    """A function for `Interceptor` that calls `act` once, when the request of a step of a first update begins.

    The server is asked to load twice. The first request asks whether it can open what the transport needs.
    """
    paths: list[str] = []

    def before(path: str) -> None:
        paths.append(path)
        if path == step and paths.count(step) == (2 if step == "/update_weights_from_tensor" else 1):
            act()

    return before


@pytest.fixture(scope="module")
def started(tiny: Callable[..., Path]) -> Iterator[Iterator[Any]]:
    """Servers. The first keeps running; each of the others is killed at one step."""
    folder = str(tiny("qwen3"))

    def start() -> Any:
        return HttpServerEngineAdapter(model_path=folder, dtype="float32", max_total_tokens=8192)

    with all_at_once(*[start] * (1 + len(STEPS))) as servers:
        yield iter(servers)


@pytest.fixture(scope="module")
def server(started: Iterator[Any]) -> Any:
    return next(started)


def push_all(adapter: HttpServerEngineAdapter, mesh: Any, folder: Path) -> None:
    """Do what a new trainer does: connect, push all tensors, and generate with them."""
    model = reference_model(folder)
    with VerlEngine(mesh, servers=[remote_server_of(adapter)], model_path=str(folder), dtype="float32") as engine:
        assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
        assert_equals_reference(engine, model)


@pytest.mark.parametrize(
    ("step", "transport"),
    [
        *((step, "shared_memory") for step in STEPS),
        *((step, other) for other in ("distributed", "distributed_buckets", "buckets") for step in TEARING),
    ],
)
def test_a_trainer_killed_at_each_step(
    step: str, transport: str, server: Any, one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The server serves whole weights or nothing. The next trainer takes over, also if a session is open."""
    model = reference_model(tiny("qwen3"))
    old = assert_equals_reference(server, model)
    change_weights(model, seed=77)
    process: Any = None
    killed = threading.Event()

    def kill() -> None:
        process.kill()
        killed.set()

    with no_new_shared_memory(), Interceptor(server.base_url, at_step(step, kill)) as front:
        arguments = (str(tiny("qwen3")), tmp_path, transport, remote_server_of(server, front.url))
        process = processes().Process(target=push_once, args=arguments)
        process.start()
        process.join(120)
    assert killed.is_set()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "pushed").exists()
    time.sleep(0.2)
    served = [list(reply["output_ids"]) for reply in _generate_or_nothing(server)]
    if served:  # the server serves: either the old weights, or all of the new ones
        assert step not in TEARING or served == old
        if served != old:
            assert_equals_reference(server, model)
    push_all(server, one_rank, tiny("qwen3"))


def _generate_or_nothing(server: Any) -> list[Any]:
    """Replies, or an empty list if the server is paused. The requests are then aborted."""
    results: list[Any] = []
    sampling = {"max_new_tokens": 8, "temperature": 0.0}

    def generate() -> None:
        try:
            results.append(server.generate(input_ids=PROMPTS, sampling_params=sampling))
        except VerlServerError:
            results.append([])

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join(2.0)
    if thread.is_alive():
        server.abort_request(abort_all=True)
        server.continue_generation()
        thread.join(20.0)
        assert not thread.is_alive()
        return []
    return list(results[0])


@pytest.mark.parametrize("step", STEPS)
def test_a_server_killed_at_each_step(
    step: str, server: Any, started: Iterator[Any], one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """The update fails soon with a typed error. The engine's other server takes the next update."""
    victim = next(started)
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=5)

    def kill() -> None:
        os.kill(victim.pids.main, signal.SIGKILL)

    with no_new_shared_memory(), Interceptor(victim.base_url, at_step(step, kill)) as front:
        remotes = [remote_server_of(server), remote_server_of(victim, front.url)]
        started_at = time.monotonic()
        with VerlEngine(
            one_rank, servers=remotes, model_path=str(tiny("qwen3")), dtype="float32",
            weights=WeightsConfig(transport="distributed"), timeouts=Timeouts(weights_s=20.0, control_s=5.0),
        ) as engine:  # fmt: skip
            with pytest.raises(VerlServerError):
                engine.update_weights_from_tensor(model.state_dict().items())
            assert time.monotonic() - started_at < 30.0
            with pytest.raises(VerlServerError):
                engine.update_weights_from_tensor(model.state_dict().items())
        victim.shutdown()
    push_all(server, one_rank, tiny("qwen3"))


def _rank_with_a_dying_peer(rank: int, world: int, folder: str, server: RemoteServer, step: str, transport: str) -> str:
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    model = reference_model(folder)
    change_weights(model, seed=8)

    def kill() -> None:
        os.kill(pids[1], signal.SIGKILL)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(model.state_dict().items()):
            if rank == 1 and step == "staging" and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    with Interceptor(server.base_url, at_step(step, kill)) as front:
        target = replace(server, base_url=front.url) if rank == 0 else server
        with VerlEngine(
            mesh_of(world), servers=[target], model_path=folder, dtype="float32",
            timeouts=Timeouts(weights_s=20.0, control_s=5.0, ranks_s=20.0), weights=WeightsConfig(transport=transport),
        ) as engine:  # fmt: skip
            started = time.monotonic()
            try:
                engine.update_weights_from_tensor(tensors())
                wait_until(lambda: _has_ended(pids[1]), 5.0, "not killed")
                engine.update_weights_from_tensor(tensors())
            except (PeerError, TornWeightsError) as error:
                assert time.monotonic() - started < 30.0
                return type(error).__name__
    return "nothing was raised"


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
@pytest.mark.parametrize("step", ["staging", *STEPS])
def test_a_trainer_rank_killed_at_each_step(
    step: str, transport: str, server: Any, two_ranks: Ranks, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    with no_new_shared_memory():
        raised, _ = two_ranks.run(
            _rank_with_a_dying_peer, str(tiny("qwen3")), remote_server_of(server), step, transport, dying=1
        )
    assert raised in ("PeerError", "TornWeightsError")
    push_all(server, one_rank, tiny("qwen3"))


@pytest.mark.parametrize(
    ("changed_calls", "error", "message"),
    [
        pytest.param({1}, None, "", id="staged once"),
        pytest.param({1, 2}, VerlServerError, "read other weights than were written", id="staged twice"),
        pytest.param({2}, None, "", id="loaded once"),
        pytest.param({2, 4}, TornWeightsError, "read 1 tensors that differ", id="loaded twice"),
    ],
)
def test_a_wrong_checksum_is_repaired_once(
    changed_calls: set[int],
    error: type[VerlServerError] | None,
    message: str,
    server: Any,
    one_rank: DeviceMesh,
    tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """One bit of the file changes before the servers read it while they serve, or later, before they load.

    Once: the engine repairs it. Twice: the servers keep their weights, or after a load, generation is refused.
    """
    model = reference_model(tiny("qwen3"))
    change_weights(model, seed=6)
    num_changed, calls = 0, itertools.count(1)
    is_opened = threading.Event()

    def change_a_bit(path: str) -> None:
        nonlocal num_changed
        if path == "/update_weights_from_tensor" and is_opened.is_set() and next(calls) in changed_calls:
            (file,) = tmp_path.glob("*.safetensors")
            with file.open("r+b") as stream:
                stream.seek(-100, os.SEEK_END)
                byte = stream.read(1)[0]
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte ^ 4]))
            num_changed += 1

    with Interceptor(server.base_url, change_a_bit) as front, VerlEngine(
        one_rank, servers=[remote_server_of(server, front.url)], model_path=str(tiny("qwen3")), dtype="float32",
        weights=WeightsConfig(transport="disk", folder=tmp_path),
    ) as engine:  # fmt: skip
        engine.update_weights_from_tensor(model.state_dict().items())  # the first one opens the folder
        is_opened.set()
        if error is not None:
            with pytest.raises(error, match=message) as raised:
                engine.update_weights_from_tensor(model.state_dict().items())
            if raised.type is TornWeightsError:
                with pytest.raises(TornWeightsError):
                    engine.generate(input_ids=[1])
            else:
                assert_equals_reference(engine, model)
        engine.update_weights_from_tensor(model.state_dict().items())
        assert_equals_reference(engine, model)
    assert num_changed == len(changed_calls)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
def test_a_stalled_server_misses_the_deadline(
    transport: str, server: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """The scheduler is stopped during the load: DeadlineError or TornWeightsError, and the server recovers.

    The first update opens the staging memory. A failure of that would leave the weights whole.
    """
    (scheduler,) = (
        pid for pid in tree_of(server.pids.main) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    model = reference_model(tiny("qwen3"))

    stalls = threading.Event()

    def stop(path: str) -> None:
        if stalls.is_set() and path == "/update_weights_from_tensor":
            os.kill(scheduler, signal.SIGSTOP)

    with Interceptor(server.base_url, stop) as front, VerlEngine(
        one_rank, servers=[remote_server_of(server, front.url)], model_path=str(tiny("qwen3")), dtype="float32",
        timeouts=Timeouts(weights_s=3.0, control_s=3.0), weights=WeightsConfig(transport=transport),
    ) as engine:  # fmt: skip
        engine.update_weights_from_tensor(model.state_dict().items())
        stalls.set()
        try:
            with pytest.raises((TornWeightsError, DeadlineError)):
                engine.update_weights_from_tensor(model.state_dict().items())
            with pytest.raises(TornWeightsError):
                engine.generate(input_ids=[1])
        finally:
            os.kill(scheduler, signal.SIGCONT)
    push_all(server, one_rank, tiny("qwen3"))


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def _may_mount() -> bool:
    """Whether this machine lets users mount file systems in a namespace of their own. Some containers do not."""
    if shutil.which(NAMESPACE[0]) is None:
        return False
    return not subprocess.run(
        [*NAMESPACE, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False
    ).returncode


@pytest.mark.skipif(not _may_mount(), reason="this machine does not let users mount file systems")
def test_updates_with_a_full_dev_shm(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """/dev/shm as in a default container, completely full after the start: updates do not need it."""
    arguments = (str(tiny("qwen3")), str(tmp_path))
    output = run_in_fork(HERE / "full_shm_trainer.py", arguments, tmp_path, timeout_s=240)
    assert output.splitlines()[-1] == "all updates succeeded and /dev/shm is empty"
