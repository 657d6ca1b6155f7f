"""Two clients of one server: what one of them releases, the other one knows, because the server decides."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both_engines import KINDS, SharedEngines
from helpers import GREEDY, adapter_of, free_port, processes, reference_model, remote_server_of, wait_until
from pushing_trainer import push_once
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, VerlEngine
from verl_server.adapter.sglang.replies import count_requests
from verl_server.config import MemoryTag
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError, ServerError, TornWeightsError
from verl_server.platforms import scheduler_hooks
from verl_server.platforms.server_report import RELEASED_MEMORY

KV_CACHE = MemoryTag.KV_CACHE.value


@pytest.fixture
def other(adapter: HttpServerEngineAdapter) -> Iterator[HttpServerEngineAdapter]:
    """Another connection to the server of `adapter`."""
    with HttpServerEngineAdapter.attach(
        adapter.base_url, api_key=adapter.api_key, admin_api_key=adapter.admin_api_key
    ) as attached:
        yield attached


def test_one_client_releases_and_the_other_one_resumes(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    expected = adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    adapter.release_memory_occupation([KV_CACHE])
    with pytest.raises(BadInputError, match="released already"):
        other.release_memory_occupation([KV_CACHE])
    with pytest.raises(NotReadyError, match="resume_memory_occupation first"):
        other.continue_generation()
    with pytest.raises(NotReadyError, match="resume_memory_occupation first"):
        other.generate(input_ids=[1, 2], sampling_params=GREEDY)
    other.resume_memory_occupation()
    for client in (other, adapter):
        assert client.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == expected
    with pytest.raises(BadInputError, match="nothing is released"):
        adapter.resume_memory_occupation()


def test_generation_does_not_continue_without_memory(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    """One client releases memory between the pause of another one and the end of that pause."""
    expected = adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    adapter.pause_generation("retract")
    other.release_memory_occupation([KV_CACHE])
    adapter.continue_generation()
    replies: list[Any] = []

    def ask() -> None:
        try:
            replies.append(adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"])
        except NotReadyError:
            replies.append("refused")

    request = threading.Thread(target=ask)
    request.start()
    request.join(1.0)
    assert replies in ([], ["refused"]), "the request waits, or the server refuses it"
    other.resume_memory_occupation()
    request.join(30.0)
    assert not request.is_alive()
    assert adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == expected


def test_a_release_that_is_prepared_can_be_cancelled(
    adapter: HttpServerEngineAdapter, other: HttpServerEngineAdapter
) -> None:
    """A fleet pauses all of its servers, or none, before it releases the memory of the first one."""
    adapter.prepare_release()
    replies: list[Any] = []
    request = threading.Thread(
        target=lambda: replies.append(other.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"])
    )
    request.start()
    request.join(0.5)
    assert not replies, "a request that arrives later waits"
    adapter.cancel_release()
    request.join(30.0)
    assert len(replies) == 1
    long = {"max_new_tokens": 500, "ignore_eos": True}
    request = threading.Thread(target=lambda: other.generate(input_ids=[1, 2], sampling_params=long))
    request.start()
    wait_until(lambda: count_requests(adapter.get_loads()), 10.0, "the request does not run")
    with pytest.raises(ServerBusyError):
        adapter.prepare_release()
    adapter.cancel_release()
    request.join(60.0)
    assert not request.is_alive(), "it was not paused"


def test_schedulers_run_no_batch_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of all platforms, with an object in place of SGLang's scheduler."""
    monkeypatch.setattr(scheduler_hooks, "without_batch", lambda arguments: ("nothing", arguments["running_batch"]))
    updater = SimpleNamespace(offload_tags={"weights", KV_CACHE})
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    server_args = SimpleNamespace(enable_dp_attention=False)
    scheduler = SimpleNamespace(weight_updater=updater, server_args=server_args, tp_worker=worker)
    reply = SimpleNamespace(internal_state={})
    scheduler_hooks.add_state(reply, SimpleNamespace(scheduler=scheduler))
    assert reply.internal_state[RELEASED_MEMORY] == [KV_CACHE, "weights"]

    def original(_: Any, **kwargs: Any) -> str:
        return "a batch"

    def run() -> Any:
        return scheduler_hooks.hold_requests(original, scheduler, running_batch="running", last_batch=None)

    assert run() == ("nothing", "running")
    scheduler.server_args.enable_dp_attention = True
    assert run() == "a batch", "the ranks must call SGLang's function together"
    scheduler.server_args.enable_dp_attention = False
    updater.offload_tags.clear()
    assert run() == "a batch"


def test_a_second_trainer_is_noticed(
    shared_engine: VerlEngine, adapter: HttpServerEngineAdapter, one_rank: DeviceMesh
) -> None:
    """The trainer that comes second takes over. The first one learns of it, and its version does not go back."""
    folder = adapter.server_args["model_path"]
    weights = dict(reference_model(folder).state_dict())
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    shared_engine.update_weights_from_tensor(weights.items())
    first = shared_engine.weight_version
    with VerlEngine(one_rank, servers=[remote_server_of(adapter)], model_path=folder, dtype="float32") as second:
        for _ in range(2):
            second.update_weights_from_tensor(weights.items())
        with pytest.raises(ServerError, match=f"has weight version {first + 2}, .*version {first}. Use one of the two"):
            shared_engine.update_weights_from_tensor(weights.items())
        with pytest.raises(TornWeightsError, match="updated by another client"):
            shared_engine.generate(input_ids=[1, 2], sampling_params=GREEDY)
        with pytest.raises(TornWeightsError, match="updated by another client"):
            shared_engine.update_weights_from_tensor(norm.items())
        assert second.generate(input_ids=[1], sampling_params=GREEDY)["meta_info"]["weight_version"] == first + 2
        with pytest.raises(BadInputError, match=f"above the current version {first + 2}"):
            shared_engine.update_weights_from_tensor(weights.items(), weight_version=first + 1)
        shared_engine.update_weights_from_tensor(weights.items())
        assert shared_engine.weight_version == first + 3, "a version names one set of weights"
        shared_engine.update_weights_from_tensor(norm.items())
        with pytest.raises(ServerError, match="another VerlEngine of this process has changed the weights"):
            second.update_weights_from_tensor(norm.items())


def test_one_server_under_two_addresses_is_refused(adapter: HttpServerEngineAdapter, one_rank: DeviceMesh) -> None:
    """It would load each update twice at the same time."""
    remote = remote_server_of(adapter)
    other = dataclasses.replace(remote, base_url=remote.base_url.replace("127.0.0.1", "localhost"))
    folder = adapter.server_args["model_path"]
    for second in (other, remote):
        with pytest.raises(BadInputError, match=f"one server answers at {remote.base_url} and at {second.base_url}"):
            VerlEngine(one_rank, servers=[remote, second], model_path=folder, dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_that_push_at_the_same_time_do_not_mix_weights(
    kind: str, shared_engines: SharedEngines, one_rank: DeviceMesh, tmp_path: Path
) -> None:
    """Another process pushes between this trainer's look at the server and its update: the server's ranks refuse it."""
    engine, folder = shared_engines.of(kind), str(shared_engines.model)
    adapter, weights = adapter_of(engine), dict(reference_model(folder).state_dict())
    engine.update_weights_from_tensor(weights.items())
    arguments = (folder, tmp_path, "shared_memory", remote_server_of(adapter))
    process = processes().Process(target=push_once, args=arguments)
    process.start()
    process.join(60.0)
    assert process.exitcode == 0
    version = adapter.get_model_info()["weight_version"]
    adapter.asynchronous.connection.known_versions.add(version)  # as if this trainer had looked before
    try:
        with pytest.raises(TornWeightsError, match=rf"two trainers update this server: process {process.pid} on"):
            engine.update_weights_from_tensor(weights.items())
    finally:
        adapter.continue_generation()
        with VerlEngine(one_rank, servers=[remote_server_of(adapter)], model_path=folder, dtype="float32") as next_one:
            next_one.update_weights_from_tensor(weights.items())


def test_a_server_that_was_started_again_needs_all_weights(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """Its owner starts it again at the same address: it has the weights of its checkpoint, and the same keys."""
    folder, port = str(tiny("qwen3")), free_port()
    keys: dict[str, Any] = {"api_key": "generation", "admin_api_key": "administration"}
    weights = dict(reference_model(folder).state_dict())
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    request: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": GREEDY}

    def start() -> HttpServerEngineAdapter:
        return HttpServerEngineAdapter(folder, dtype="float32", max_total_tokens=4096, port=port, **keys)

    server = start()
    try:
        remote = remote_server_of(server)
        with VerlEngine(one_rank, servers=[remote], model_path=folder, dtype="float32") as engine:
            server.shutdown()
            server = start()
            assert engine.generate(**request)["meta_info"]["weight_version"] == 0, (
                "nothing was lost: no weights were pushed"
            )
            engine.update_weights_from_tensor(weights.items())
            server.shutdown()
            server = start()
            with pytest.raises(ServerError, match="another server process answers"):
                engine.generate(**request)
            with pytest.raises(TornWeightsError, match="was started again"):
                engine.generate(**request)
            engine.update_weights_from_tensor(weights.items())
            server.shutdown()
            server = start()
            with pytest.raises(TornWeightsError, match="was started again"):
                engine.update_weights_from_tensor(norm.items())
            engine.update_weights_from_tensor(weights.items())
            engine.update_weights_from_tensor(norm.items())
            assert engine.generate(**request)["meta_info"]["weight_version"] == engine.weight_version == 4
    finally:
        server.shutdown()
