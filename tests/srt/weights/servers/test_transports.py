"""Weight updates by every transport to two real servers, one of them with two TP ranks, and refused settings."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    all_at_once,
    assert_equals_reference,
    change_weights,
    reference_model,
    remote_server_of,
    wait_until,
)
from hosts import two_hosts
from model_servers import ModelServers, push, staged_updater, streamed_updater
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig

from verl_server import HttpServerEngineAdapter, RemoteServer, VerlEngine, WeightsConfig
from verl_server.config import TRANSPORTS as ALL_TRANSPORTS
from verl_server.config import PauseMode
from verl_server.conformance.reference import Interceptor
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerBusyError,
    ServerError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
    WeightManifestError,
)
from verl_server.ranks.channel import Channel
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.types import Json, ServerInfo, TensorSpec
from verl_server.weights.arena import XXH3, Arena, plan_arena
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports import delta
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt, is_streamed, sender_class
from verl_server.weights.transports.distributed import arrival_key, connect_to_store, open_store, wait_for_receivers
from verl_server.weights.update.options import UpdateOptions
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.updater import EngineRanks, WeightUpdater

TRANSPORTS = ["shared_memory", "buckets", "distributed", "distributed_buckets", "delta", "disk"]


@pytest.fixture(scope="module")
def servers(tiny: Callable[..., Path]) -> Iterator[list[Any]]:
    """Two servers, as other programs could have started them: TP 1 and TP 2."""

    folder = str(tiny("qwen3"))

    def start(tp_size: int) -> Any:
        return HttpServerEngineAdapter(model_path=folder, dtype="float32", max_total_tokens=8192, tp_size=tp_size)

    with all_at_once(lambda: start(1), lambda: start(2)) as started:
        yield started


def engine_for(servers: list[Any], mesh: Any, model: Path, **weights: Any) -> VerlEngine:
    return VerlEngine(
        mesh,
        servers=[remote_server_of(one) for one in servers],
        model_path=str(model),
        dtype="float32",
        weights=WeightsConfig(**weights),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_server_loads_the_weights(
    transport: str, servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = reference_model(tiny("qwen3"))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in original.values())
    with engine_for(servers, one_rank, tiny("qwen3"), transport=transport, folder=tmp_path) as engine:
        first = engine.update_weights_from_tensor(original.items())
        assert (first.transport, first.num_missing) == (transport, 0)
        assert (first.sent_bytes > 0) is (transport not in ("shared_memory", "buckets"))
        before = [assert_equals_reference(one, model) for one in servers]
        assert before[0] == before[1]

        change_weights(model, seed=5)
        assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
        changed = [assert_equals_reference(one, model) for one in servers]
        assert changed[0] == changed[1] != before[0]

        every_other = {name: original[name] * 0.9 for name in [*original][::2]}
        part = engine.update_weights_from_tensor(every_other.items())
        assert part.num_tensors == len(every_other)
        model.load_state_dict(every_other, strict=False)
        assert_equals_reference(servers[1], model)

        last = engine.weight_version + 20
        engine.update_weights_from_tensor(original.items(), weight_version=last)
        assert [assert_equals_reference(one, with_weights(original, model)) for one in servers] == before
        replies = [one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1}) for one in servers]
        assert {reply["meta_info"]["weight_version"] for reply in replies} == {last}
    with engine_for(servers[:1], one_rank, tiny("qwen3")) as engine:
        assert engine.weight_version == last, "the version would name two sets of weights"
    assert first.num_bytes == size
    assert not list(tmp_path.iterdir()), "no file is left in the folder"


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
def test_released_weights_are_torn_until_all_are_pushed(
    transport: str, servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """Also when only one of the servers has released its weights, because requests run on the other."""
    model = reference_model(tiny("qwen3"))
    weights = dict(model.state_dict())
    norm = {"model.norm.weight": weights["model.norm.weight"]}
    long = {"max_new_tokens": 900, "ignore_eos": True}
    with engine_for(servers, one_rank, tiny("qwen3"), transport=transport) as engine:
        engine.update_weights_from_tensor(weights.items())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(servers[0].generate, input_ids=[1], sampling_params=long)
            wait_until(lambda: servers[0].get_loads()["loads"][0]["num_running_reqs"], 30.0, "the request does not run")
            with pytest.raises(ServerBusyError, match="1 requests run"):
                engine.release_memory_occupation(["weights"])
            assert len(running.result()["output_ids"]) == 900
        with pytest.raises(BadInputError, match=r"released: call resume_memory_occupation"):
            engine.update_weights_from_tensor(weights.items())
        engine.resume_memory_occupation()
        for some in (norm.items(), iter(norm.items())):
            with pytest.raises(TornWeightsError, match="push all of them"):
                engine.update_weights_from_tensor(some)
            with pytest.raises(TornWeightsError, match="released and resumed"):
                engine.generate(input_ids=[1])
        engine.update_weights_from_tensor(weights.items())
        for one in servers:
            assert_equals_reference(one, model)
        assert engine.update_weights_from_tensor(norm.items()).num_missing == len(weights) - 1


def with_weights(weights: dict[str, torch.Tensor], model: Any) -> Any:
    model.load_state_dict(weights)
    return model


def test_delta_sends_what_changed(servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """When 1 % of the elements change, less than 5 % of the bytes are sent. Every TP rank verifies its checksums."""
    model = reference_model(tiny("qwen3"))
    generator = torch.Generator().manual_seed(3)
    with engine_for(servers, one_rank, tiny("qwen3"), transport="delta") as engine:
        whole = engine.update_weights_from_tensor(model.state_dict().items())
        assert whole.sent_bytes >= whole.num_bytes
        with torch.no_grad():
            for parameter in model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.01
                parameter[chosen] += 0.05
        part = engine.update_weights_from_tensor(model.state_dict().items())  # checksums cover all tensors
        assert 0 < part.sent_bytes < 0.05 * part.num_bytes
        for one in servers:
            assert_equals_reference(one, model)
        nothing = engine.update_weights_from_tensor(model.state_dict().items())
        assert nothing.sent_bytes < 0.01 * part.num_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests_of_an_update_are_small(
    transport: str, servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """All HTTP requests of an update together have a few kilobytes."""
    weights = reference_model(tiny("qwen3")).state_dict()
    args = servers[1].server_args
    with (
        Interceptor(servers[1].base_url, lambda _: None) as front,
        VerlEngine(
            one_rank,
            servers=[RemoteServer(front.url, args["api_key"], args["admin_api_key"])],
            model_path=str(tiny("qwen3")),
            dtype="float32",
            weights=WeightsConfig(transport=transport, folder=tmp_path),
        ) as engine,
    ):
        before = front.sent_bytes
        engine.update_weights_from_tensor(weights.items())
        assert 0 < front.sent_bytes - before < 16_000


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
def test_a_step_that_fails_on_one_of_two_servers(
    transport: str, servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """If no session can be opened, nothing has happened. If generation does not continue, the new version counts."""
    model, broken = reference_model(tiny("qwen3")), {""}

    def before(path: str) -> None:
        if path in broken:
            raise ConnectionError

    args = servers[1].server_args
    with Interceptor(servers[1].base_url, before) as front:
        remote = [remote_server_of(servers[0]), RemoteServer(front.url, args["api_key"], args["admin_api_key"])]
        with VerlEngine(
            one_rank,
            servers=remote,
            model_path=str(tiny("qwen3")),
            dtype="float32",
            weights=WeightsConfig(transport=transport),
        ) as engine:
            version = engine.update_weights_from_tensor(model.state_dict().items()).weight_version
            change_weights(model, seed=3)
            broken.add("/begin_weight_update")
            with pytest.raises(VerlServerError, match="begin_weight_update"):
                engine.update_weights_from_tensor(model.state_dict().items())
            assert engine.weight_version == version
            for server in servers:
                server.begin_weight_update()  # no session is open
                server.end_weight_update()
                assert_equals_reference(server, reference_model(tiny("qwen3")))
            broken.clear()
            broken.add("/continue_generation")
            with pytest.raises(VerlServerError, match=r"is loaded and verified, but generation does not"):
                engine.update_weights_from_tensor(model.state_dict().items(), weight_version=version + 1)
            broken.clear()
            assert engine.weight_version == version + 1
            for server in servers:
                server.continue_generation()
                assert_equals_reference(server, model)
            engine.update_weights_from_tensor(model.state_dict().items())
            assert engine.weight_version == version + 2


def test_the_message_for_the_loader_does_not_grow_with_the_model() -> None:
    def message_length(num_tensors: int, transport: str) -> int:
        layout = plan_arena({f"layers.{i}.weight": TensorSpec((8, 8), "bfloat16") for i in range(num_tensors)})
        settings = SenderSettings(Arena.create(layout), layout, 10.0, folder="/nowhere")
        sender = sender_class(transport)(settings)
        attempt = UpdateAttempt("0" * 32, list(layout.slots), True, [ServerInfo("a", 2), ServerInfo("b", 2)])
        if transport != "disk":  # preparing it would write its file
            sender.prepare(attempt)
        try:
            return len(json.dumps(sender.loader_message(attempt, 1)))
        finally:
            sender.close()
            settings.arena.close()

    for transport in ALL_TRANSPORTS:
        if is_streamed(transport):  # the message contains the layout of the buckets, which is a few numbers
            continue
        assert abs(message_length(10_000, transport) - message_length(10, transport)) < 32


def test_messages_for_a_thousand_servers_are_short() -> None:
    """A list of all receivers in each of them would take seconds, while all servers are paused."""
    layout = plan_arena({"weight": TensorSpec((8,), "float32")})
    settings = SenderSettings(Arena.create(layout), layout, 10.0)
    sender = sender_class("distributed")(settings)
    attempt = UpdateAttempt("x", ["weight"], True, [ServerInfo(f"server-{number}", 8) for number in range(1000)])
    sender.prepare(attempt)
    messages = [sender.loader_message(attempt, number) for number in range(1000)]
    assert max(len(json.dumps(message)) for message in messages) < 1000
    assert [message["first_receiver"] for message in messages] == list(range(0, 8000, 8))
    assert {message["num_receivers"] for message in messages} == {8000}
    sender.close()
    settings.arena.close()


def test_the_placement_of_receivers_takes_few_round_trips() -> None:
    """The store answers all receivers with one thread."""
    store = CountingStore(open_store("127.0.0.1", 10.0))
    with pytest.raises(DeadlineError, match=r"receivers \[0, 1\] of 2 did not join"):
        wait_for_receivers(store, "late", 2, lambda: True, timeout_s=0.5)
    assert store.num_calls < 40
    for number in range(100):
        store.store.set(arrival_key("group", number), f"machine-{number // 8}")
    store.num_calls = 0
    assert wait_for_receivers(store, "group", 100, lambda: True).leader_of(99) == 96
    assert store.num_calls == 2


class CountingStore:
    """A store of torch that counts its calls. Each call is a round trip."""

    def __init__(self, store: Any) -> None:
        self.store, self.num_calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("transport", ["distributed", "delta", "distributed_buckets", "disk", "shared_memory"])
def test_empty_tensors_do_not_displace_their_neighbours(transport: str, tmp_path: Path) -> None:
    """An empty tensor has the same offset as the tensor after it."""
    sizes = {"a": 0, "b": 1000, "c": 0}
    servers = ModelServers(sizes)
    updater = staged_updater(transport, servers, sizes, folder=str(tmp_path))
    for names, verify in itertools.product(["abc", "bac", "ac", "a"], [False, True]):
        weights = {name: torch.randn(sizes[name]) for name in names}
        assert push(updater, weights, verify).num_tensors == len(names)
        for name, tensor in weights.items():
            assert torch.equal(servers.models[0].tensors[name], tensor), (name, names, verify)
    updater.close()


def test_a_patch_is_not_computed_against_weights_that_new_mirrors_never_had() -> None:
    """A server that is started again has the weights, but its mirror is empty."""
    sizes = {"a": 10_000, "b": 10_000}
    servers = ModelServers(sizes)
    updater = staged_updater("delta", servers, sizes)
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    push(updater, weights, verify=False)
    servers.members = [ServerInfo("the server started again", 1)]
    push(updater, {"a": weights["a"]}, verify=False)
    weights["b"][:10] += 1.0
    sent = push(updater, weights, verify=False).sent_bytes
    assert torch.equal(servers.models[0].tensors["b"], weights["b"])
    assert sent > 40_000, "the mirror has only zeros for b"
    weights["b"][:10] += 1.0
    assert push(updater, weights, verify=False).sent_bytes < 1000
    assert torch.equal(servers.models[0].tensors["b"], weights["b"])
    updater.close()


def raise_after(method: Callable[..., Any], failure: BaseException) -> Callable[..., Any]:
    """A function that calls `method` and raises `failure` afterwards."""

    def raising(*arguments: Any, **options: Any) -> None:
        method(*arguments, **options)
        raise failure

    return raising


FAILURES = [KeyboardInterrupt(), OSError("no space left on device")]


def staged_updater_of(servers: ModelServers, sizes: dict[str, int]) -> WeightUpdater:
    return staged_updater("shared_memory", servers, sizes)


@pytest.mark.parametrize("updater_of", [staged_updater_of, streamed_updater])
@pytest.mark.parametrize("failure", FAILURES, ids=["interrupt", "transport"])
@pytest.mark.parametrize("step", ["load", "published", "resume"])
def test_an_update_that_ends_with_another_exception_after_the_load_leaves_torn_weights(
    step: str,
    failure: BaseException,
    updater_of: Callable[[ModelServers, dict[str, int]], WeightUpdater],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the next update of some tensors would be served together with a part of this update."""
    sizes = {"a": 4, "b": 4}
    servers = ModelServers(sizes)
    updater = updater_of(servers, sizes)
    weights = {name: torch.ones(4) for name in sizes}
    assert push(updater, weights).weight_version == 1
    with monkeypatch.context() as patch:
        patch.setattr(servers, step, raise_after(getattr(servers, step), failure))
        with pytest.raises(type(failure)):
            push(updater, weights)
    assert f"{type(failure).__name__}: {failure}" in str(updater.find_torn())
    with pytest.raises(TornWeightsError, match="lacks 1 parameters"):
        push(updater, {"a": weights["a"]})
    assert push(updater, weights).weight_version == (2 if step == "load" else 3), "a published version names one update"
    assert updater.find_torn() is None
    assert servers.steps[-2:] == ["published", "resume"]
    updater.close()


@pytest.mark.parametrize("interrupted", ["rank 0", "the second node"])
def test_an_update_of_two_nodes_is_confirmed_by_its_own_reports(
    interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update ends between its two calls on one rank. The calls of the next updates are not mixed with it."""
    coordinators = connected_coordinators(arrival_timeout_s=2.0)
    sizes = {"weight": 8}
    servers = [ModelServers(sizes, 2), ModelServers(sizes, 2)]
    updaters: list[Any] = [None, None]

    def make(rank: int) -> None:
        updaters[rank] = staged_updater("shared_memory", servers[rank], sizes, coordinators[rank], nnodes=2)
        updaters[rank].ranks = replace(updaters[rank].ranks, timeout_s=1.5)

    def update(value: float) -> list[object]:
        weights = {"weight": torch.full((8,), value)}
        return on_both_ranks(lambda rank: push(updaters[rank], weights).weight_version)

    on_both_ranks(make)
    assert update(1.0) == [1, 1]
    with monkeypatch.context() as patch:
        if interrupted == "rank 0":
            patch.setattr(updaters[0], "_confirm_on_all_nodes", raise_after(lambda *_: None, KeyboardInterrupt()))
        else:
            patch.setattr("verl_server.weights.update.staged.verify_reports", raise_after(lambda *_: None, OSError()))
        assert all(isinstance(outcome, BaseException) for outcome in update(2.0))
    assert isinstance(updaters[0].find_torn(), TornWeightsError)
    servers[0].steps.clear()
    servers[0].models[1].is_broken = True
    assert all(isinstance(outcome, TornWeightsError) for outcome in update(3.0))
    assert "published" not in servers[0].steps
    assert "resume" not in servers[0].steps
    servers[0].models[1].is_broken = False
    assert update(4.0) == [2, 2]
    assert updaters[0].find_torn() is None
    for updater in updaters:
        updater.close()
    on_both_ranks(lambda rank: coordinators[rank].close())


def connected_coordinators(arrival_timeout_s: float) -> list[RankCoordinator]:
    """The coordinators of two ranks in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    channels = [{1: Channel(theirs, 1)}, {0: Channel(mine, 0)}]
    return [RankCoordinator(rank, 2, channels[rank], arrival_timeout_s) for rank in (0, 1)]


def on_both_ranks(work: Callable[[int], object]) -> list[object]:
    """Call `work(rank)` in a thread for each rank. Returns the results, and the exception of a rank that failed."""

    def run(rank: int) -> object:
        try:
            return work(rank)
        except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


@pytest.mark.parametrize("failure", FAILURES, ids=["interrupt", "transport"])
@pytest.mark.parametrize("step", ["pause", "begin_weight_update"])
def test_generation_continues_after_any_exception_before_the_load(
    step: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 4, "b": 4}
    weights = {name: torch.ones(size) for name, size in sizes.items()}
    for updater_of in (staged_updater_of, streamed_updater):
        servers = ModelServers(sizes)
        updater = updater_of(servers, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(servers, step, raise_after(getattr(servers, step), failure))
            with pytest.raises(type(failure)):
                push(updater, weights)
        assert servers.steps == ["pause", *(["begin", "end"] if step == "begin_weight_update" else []), "resume"]
        assert push(updater, {"a": weights["a"]}).weight_version == 1
        updater.close()


@pytest.mark.parametrize("failure", FAILURES, ids=["interrupt", "buckets"])
def test_generation_continues_when_the_buckets_cannot_be_opened(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 4}
    servers = ModelServers(sizes)
    updater = streamed_updater(servers, sizes)
    with monkeypatch.context() as patch:
        patch.setattr(servers, "load", raise_after(servers.load, failure))
        with pytest.raises(type(failure)):
            push(updater, {"a": torch.ones(4)})
    assert servers.steps == ["pause", "begin", "end", "resume"]
    assert push(updater, {"a": torch.ones(4)}).weight_version == 1
    updater.close()


@pytest.mark.parametrize("failure", FAILURES, ids=["interrupt", "error"])
def test_an_update_that_ends_before_the_ranks_know_of_it_leaves_torn_weights(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaders have started, and the call that tells the ranks does not return."""
    sizes = {"a": 4, "b": 4}
    servers = ModelServers(sizes)
    updater = streamed_updater(servers, sizes)
    weights = {name: torch.ones(size) for name, size in sizes.items()}
    with monkeypatch.context() as patch:
        patch.setattr(updater.coordinator, "agree", raise_after(updater.coordinator.agree, failure))
        with pytest.raises(type(failure)):
            push(updater, weights)
    assert servers.steps == ["pause", "begin", "end"], "generation stays paused"
    with pytest.raises(TornWeightsError, match="lacks 1 parameters"):
        push(updater, {"a": weights["a"]})
    assert push(updater, weights).weight_version == 1
    assert torch.equal(servers.models[0].tensors["b"], weights["b"])
    updater.close()


@pytest.mark.parametrize("failure", FAILURES, ids=["interrupt", "error"])
def test_a_broadcast_that_is_interrupted_ends_at_once(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receivers learn of it, and the exception is raised unchanged."""
    sizes = {"a": 1000, "b": 2000}
    servers = ModelServers(sizes)
    updater = staged_updater("distributed", servers, sizes)
    weights = {name: torch.ones(size) for name, size in sizes.items()}
    push(updater, weights)
    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(sender_class("distributed"), "broadcast", raise_after(lambda *_: None, failure))
        with pytest.raises(type(failure)):
            push(updater, weights)
    assert time.monotonic() - started < 10.0, "the receivers do not wait for their deadline of 20 s"
    assert push(updater, weights).weight_version == 2
    updater.close()


@pytest.mark.parametrize("transport", ["distributed", "delta", "distributed_buckets"])
@pytest.mark.parametrize("step", ["submit", "deliver"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_interrupt_before_the_broadcast_ends_at_once(
    num_before: int, step: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receivers have started, and wait for the group or for the first bytes.

    A transport that stages has sent nothing to load yet: the servers serve the weights before.
    """
    sizes = {"a": 1000, "b": 2000}
    servers = ModelServers(sizes)
    updater = staged_updater(transport, servers, sizes)
    weights = {name: torch.ones(size) for name, size in sizes.items()}
    for _ in range(num_before):
        push(updater, weights)
    servers.steps.clear()
    started = time.monotonic()
    with monkeypatch.context() as patch:
        owner: Any = ThreadPoolExecutor if step == "submit" else sender_class(transport)
        calls = getattr(owner, step) if step == "submit" else lambda *_, **__: time.sleep(0.2)
        patch.setattr(owner, step, raise_after(calls, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            push(updater, weights)
    assert time.monotonic() - started < 10.0, "the receivers do not wait for their deadlines"
    session = ["begin", "end"]
    if not sender_class(transport).stages:
        expected = ["pause", *session]
    elif num_before:  # the servers serve while the weights travel
        expected = ["pause", *session, "resume", *(["pause", *session] if step == "submit" else ["resume"])]
    else:
        expected = ["pause", *session, *(session if step == "submit" else ["resume"])]
    assert servers.steps == expected
    weights["a"] += 1.0
    assert push(updater, weights, verify=False).weight_version == num_before + 1
    assert torch.equal(servers.models[0].tensors["a"], weights["a"])
    updater.close()


def test_an_interrupt_after_a_patch_leaves_no_base_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's copy of the last weights is then partly old: a patch against it would lack changes."""
    sizes = {"a": 1000, "b": 1000}
    servers = ModelServers(sizes)
    updater = staged_updater("delta", servers, sizes)
    weights = {name: torch.ones(size) for name, size in sizes.items()}
    push(updater, weights)
    weights["a"][:10] = 2.0
    with monkeypatch.context() as patch:
        apply = delta.apply

        def interrupted(*arguments: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            apply(*arguments)  # the receiver's

        patch.setattr(delta, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            push(updater, weights, verify=False)
    weights["a"][:10] = 1.0
    push(updater, weights, verify=False)
    assert torch.equal(servers.models[0].tensors["a"], weights["a"])
    updater.close()


@pytest.mark.parametrize("updater_of", [staged_updater_of, streamed_updater])
def test_no_session_stays_open_after_an_interrupt(
    updater_of: Callable[[ModelServers, dict[str, int]], WeightUpdater], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the session is open and the loaders are about to start."""
    sizes = {"a": 4}
    servers = ModelServers(sizes)
    updater = updater_of(servers, sizes)
    with monkeypatch.context() as patch:
        interrupting = raise_after(lambda *_, **__: None, KeyboardInterrupt())
        for module in ("staged", "streamed"):
            patch.setattr(f"verl_server.weights.update.{module}.ThreadPoolExecutor", interrupting)
        with pytest.raises(KeyboardInterrupt):
            push(updater, {"a": torch.ones(4)})
    assert servers.steps == ["pause", "begin", "end"]
    assert updater.find_torn() is not None
    assert push(updater, {"a": torch.ones(4)}).weight_version == 1
    updater.close()


@pytest.mark.parametrize("bad", [torch.ones(3), torch.full((2,), float("nan"))], ids=["shape", "not finite"])
def test_a_refused_dict_leaves_the_staged_weights_unchanged(bad: torch.Tensor) -> None:
    """A server that is started again can then still load the published weights."""
    specs = {name: TensorSpec((2,), "float32") for name in ("a", "b")}
    layout = plan_arena(specs)
    arena = Arena.create(layout)
    ranks = EngineRanks(RankCoordinator(0, 1, {}, 1.0), compute_placement(0, 1, 1, {}), frozenset({0}), None, 1.0)
    updater = StagedUpdater(ranks, Manifest(specs), 3, layout, arena, frozenset({0}), None, XXH3)
    for staged in updater.staging_tensors().values():
        staged.fill_(1.0)
    options = UpdateOptions(None, True, True, PauseMode.RETRACT, True)
    for tensors in ({"a": torch.zeros(2), "b": bad}, [("a", torch.zeros(2)), ("b", bad)]):
        with pytest.raises(WeightManifestError, match="'b'"):
            updater.update(tensors, None, options)
        assert all(bool((staged == 1.0).all()) for staged in updater.staging_tensors().values())
    assert updater.weight_version == 3
    updater.close()


def test_a_model_that_does_not_fit_into_memory_goes_through_buckets(
    servers: list[Any], one_rank: DeviceMesh, tmp_path: Path
) -> None:
    """Otherwise the kernel would kill the trainer or the server during the first update."""
    LlamaConfig(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=32).save_pretrained(tmp_path)
    arguments: dict[str, Any] = {
        "servers": [remote_server_of(one) for one in servers], "model_path": str(tmp_path), "load_format": "dummy"
    }  # fmt: skip
    with pytest.raises(BadInputError, match=r"takes \d{13} bytes of memory, but only \d+ bytes are available"):
        VerlEngine(one_rank, weights=WeightsConfig(transport="shared_memory"), **arguments)
    with VerlEngine(one_rank, **arguments) as engine, pytest.raises(UnsupportedError, match="transport 'buckets'"):
        engine.staging_tensors()


def test_bad_settings_are_refused(servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3")
    with pytest.raises(BadInputError, match="carrier_pigeon"):
        engine_for(servers, one_rank, folder, transport="carrier_pigeon")
    with pytest.raises(BadInputError, match=r"needs WeightsConfig\(folder="):
        engine_for(servers, one_rank, folder, transport="disk")
    with pytest.raises(BadInputError, match="max_staging_bytes=1000"):
        engine_for(servers, one_rank, folder, transport="distributed", max_staging_bytes=1000)
    model = reference_model(folder)
    with engine_for(servers, one_rank, folder) as engine:
        weights = model.state_dict()
        engine.update_weights_from_tensor(weights.items())
        for given in ("new", "20", True, 1, -3, 0.5):
            with pytest.raises(BadInputError, match="weight_version"):
                engine.update_weights_from_tensor(weights.items(), weight_version=given)  # type: ignore[arg-type]
        with pytest.raises(BadInputError, match="flush_cache=False"):
            engine.update_weights_from_tensor(weights.items(), pause_mode="in_place")
        with pytest.raises(BadInputError, match="pause_mode 'nap'"):
            engine.update_weights_from_tensor(weights.items(), pause_mode="nap")
        poisoned = {**weights, "model.norm.weight": torch.full((64,), float("nan"))}
        with pytest.raises(WeightManifestError, match=r"'model.norm.weight' has values that are not finite"):
            engine.update_weights_from_tensor(poisoned.items(), check_finite=True)
        assert_equals_reference(servers[0], model)


def test_a_folder_that_cannot_be_written_changes_nothing(
    servers: list[Any], one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = reference_model(tiny("qwen3"))
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with engine_for(servers, one_rank, tiny("qwen3"), transport="disk", folder=blocked) as engine:
        with pytest.raises(VerlServerError, match="cannot write the weights"):
            engine.update_weights_from_tensor(model.state_dict().items())
        for one in servers:
            assert one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["output_ids"]


OTHER_FOLDER_TRAINER = """
import ctypes, subprocess, sys
import torch, torch.distributed as dist
from helpers import mesh_of, reference_model
from verl_server import VerlEngine, WeightsConfig
from verl_server.config import RemoteServer
from verl_server.errors import VerlServerError
model_path, shared, scratch, *keys = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
weights = WeightsConfig(transport="disk", folder=shared)
servers = [RemoteServer(*keys[:3]), RemoteServer(*keys[3:])]
with VerlEngine(mesh_of(1), servers=servers, model_path=model_path, dtype="float32", weights=weights) as engine:
    try:
        engine.update_weights_from_tensor(reference_model(model_path).state_dict().items())
    except VerlServerError as error:
        print(type(error).__name__, error.message)
"""


@pytest.mark.parametrize("server_has_folder", [False, True])
def test_a_folder_that_the_server_does_not_see_is_named(
    server_has_folder: bool, servers: list[Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The trainer has a file system of its own there, as on a machine where the server's is not mounted.

    Takes 14 s: the trainer is a program of its own, which imports torch.
    """
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    shared = mounted if server_has_folder else mounted / "updates"
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"', "sh", str(mounted)]
    if os.geteuid() or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let the user mount file systems")
    command += [sys.executable, "-c", OTHER_FOLDER_TRAINER, str(tiny("qwen3")), str(shared), str(tmp_path)]
    for server in map(remote_server_of, servers):
        command += [server.base_url, str(server.api_key), str(server.admin_api_key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("UnsupportedError"), done.stdout
    cure = "mount one file system at this path on both machines. The server keeps its weights"
    for part in (servers[0].base_url, str(shared), cure):
        assert part in done.stdout, done.stdout
    for one in servers:
        assert one.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})["output_ids"]
    folder = shared / "checkpoint"
    with pytest.raises(ServerError, match=f"could not load {folder}: .*on its own machine, 127.0.0.1: check that"):
        servers[0].update_weights_from_disk(folder)
    for one in servers:
        one.update_weights_from_disk(tiny("qwen3"))
        one.continue_generation()


TRAINER_STORE = """
import time
import uuid
from verl_server.weights.transports.distributed import open_store
store = open_store("10.77.0.1", 30.0)
store.set("set", "value")
print(store.port, flush=True)
time.sleep(60.0)
"""
RECEIVER = """
import sys, time
from verl_server.weights.transports.distributed import connect_to_store
store = connect_to_store("10.77.0.1", int(sys.argv[1]))
print(store.check(["set"]), store.get("set").decode(), flush=True)
sys.stdin.readline()
for operation in (lambda: store.check(["set"]), lambda: store.set("report", "done")):
    started = time.monotonic()
    try:
        operation()
        print("no error", flush=True)
    except ConnectionError as error:
        print(f"{time.monotonic() - started:.1f} {error}", flush=True)
"""


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """The first one has the address 10.77.0.1."""
    with two_hosts(("10.77.0.1", "10.77.0.2")) as names:
        yield names


def test_a_server_does_not_wait_for_a_trainer_whose_machine_has_vanished(two_machines: tuple[str, str]) -> None:
    """No packet comes any more, so torch's client would wait for ever. Takes 10 s: the deadline of one operation."""

    def start(machine: str, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", machine, sys.executable, "-c", program, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    trainer = start(two_machines[0], TRAINER_STORE)
    assert trainer.stdout is not None
    server = start(two_machines[1], RECEIVER, trainer.stdout.readline().strip())
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "True value\n"
        subprocess.run(["ip", "-n", two_machines[0], "link", "set", "e0", "down"], check=True)
        lines = server.communicate("\n", timeout=40.0)[0].splitlines()
        for line in lines:
            seconds, _, message = line.partition(" ")
            assert message == "the trainer's machine did not answer within 10 s"
            assert float(seconds) < 12.0
        assert len(lines) == 2
    finally:
        trainer.kill()
        server.kill()


def test_a_server_does_not_wait_for_a_trainer_that_is_stopped() -> None:
    """Takes 10 s: the deadline of one operation. What the server wrote meanwhile arrives when the trainer continues."""
    program = TRAINER_STORE.replace("10.77.0.1", "127.0.0.1")
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        port = int(trainer.stdout.readline())
        store = connect_to_store("127.0.0.1", port)
        assert len({store.call(lambda _: threading.get_ident()) for _ in range(100)}) == 1, "one thread for all polls"
        os.kill(trainer.pid, signal.SIGSTOP)
        threads = [psutil.Process(thread.id) for thread in psutil.Process(trainer.pid).threads()]
        wait_until(lambda: {thread.status() for thread in threads} == {psutil.STATUS_STOPPED}, 10.0, "threads run")
        started = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            for attempt in [pool.submit(store.check, ["set"]), pool.submit(connect_to_store, "127.0.0.1", port)]:
                assert isinstance(attempt.exception(), ConnectionError)
        with pytest.raises(ConnectionError):
            store.set("report", "done")
        assert time.monotonic() - started < 12.0
        os.kill(trainer.pid, signal.SIGCONT)
        assert store.get("report") == b"done"
    finally:
        trainer.kill()


class ServersInAnotherContainer(ModelServers):
    """The TP rank runs in a PID namespace of its own, so that it does not see the processes of the trainer."""

    PROGRAM = """
import json, sys
from verl_server.weights.transports.base import receiver_class
message = json.loads(sys.stdin.read())
receiver_class(message["transport"]).open_only(message, 0)
"""

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
        subprocess.run([*command, self.PROGRAM], input=json.dumps(messages[0]), text=True, stderr=subprocess.DEVNULL)


class ServersWithOtherNccl(ModelServers):
    """The trainer's environment has another version of NCCL."""

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        super().load([{**message, "nccl_version": "2.29.7"} for message in messages], weight_version, flush_cache)


@pytest.mark.parametrize(
    ("transport", "servers_class", "reason"),
    [
        ("shared_memory", ServersInAnotherContainer, "it did not report; see the server's log"),
        ("distributed_buckets", ServersWithOtherNccl, "the trainer has NCCL 2.29.7, but this server has"),
    ],
)
def test_what_a_server_lacks_is_found_before_its_weights_change(
    transport: str, servers_class: type[ModelServers], reason: str
) -> None:
    servers = servers_class({"a": 4})
    updater = staged_updater(transport, servers, {"a": 4})
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"TP rank 0 of the server cannot open .*{transport}.*: {reason}"):
            push(updater, {"a": torch.ones(4)})
        assert servers.steps == ["pause", "begin", "end", "resume"]
        servers.steps.clear()
    assert updater.find_torn() is None
    servers.__class__ = ModelServers
    assert push(updater, {"a": torch.ones(4)}).weight_version == 1
    updater.close()


class SecondServerRefuses(ModelServers):
    """Two servers that belong to others. The second one cannot open what the transport needs."""

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        assert all(message.get("opens_only") for message in messages), "a server loads"
        self.steps.append("open")
        raise ServerError("the second server cannot open the staging memory", status=500)


def test_a_refused_opening_leaves_the_weights_of_all_static_servers_whole() -> None:
    servers = SecondServerRefuses({"weight": 8})
    servers.members = [ServerInfo("first", 1), ServerInfo("second", 1)]
    updater = staged_updater("shared_memory", servers, {"weight": 8})
    with pytest.raises(ServerError, match="cannot open the staging memory"):
        push(updater, {"weight": torch.ones(8)})
    assert servers.steps == ["pause", "begin", "open", "end", "resume"]
    assert updater.find_torn() is None
    updater.close()
