"""Many updates in a row, release of memory, and failed updates."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    adapter_of,
    assert_equals_reference,
    change_weights,
    greedy_with_logprobs,
    open_files,
    reference_model,
    resident_bytes,
    tree_of,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, VerlEngine
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    TornWeightsError,
    UnsupportedError,
)

UPDATES = 300


def _mappings(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _footprint(server_pids: list[int]) -> dict[str, int]:
    pids = [os.getpid(), *server_pids]
    return {
        "files": sum(open_files(pid) for pid in pids),
        "shared": len({line.split()[-1] for pid in pids for line in _mappings(pid) if "/dev/shm/" in line}),
        "resident": sum(resident_bytes(pid) for pid in pids),
    }


@pytest.mark.smoke
def test_no_request_is_answered_from_the_cache_of_earlier_weights(
    shared_engine: VerlEngine, tiny: Callable[..., Path]
) -> None:
    """The same long prompts after each of 20 updates that keep the KV cache, while another request runs."""
    model = reference_model(tiny("qwen3"))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = [[1 + (7 * i + k) % 249 for i in range(200)] for k in range(3)]
    params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    running = threading.Thread(
        target=shared_engine.generate,
        kwargs={"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}},
    )
    running.start()
    for seed in range(20):
        change_weights(model, seed=seed)
        shared_engine.update_weights_from_tensor(model.state_dict().items(), pause_mode="in_place", flush_cache=False)
        for is_repeated in (False, True):
            replies = shared_engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
            for prompt, reply in zip(prompts, replies, strict=True):
                meta = reply["meta_info"]
                tokens, logprobs = greedy_with_logprobs(model, prompt, 4)
                assert reply["output_ids"] == tokens
                found = [logprob for logprob, *_ in meta["output_token_logprobs"]]
                assert found == pytest.approx(logprobs, abs=1e-5)
                assert meta["weight_version"] == shared_engine.weight_version
                assert (meta["cached_tokens"] > 150) is is_repeated, "the cache works for the present weights"
    running.join(60.0)
    assert not running.is_alive()
    shared_engine.update_weights_from_tensor(original.items())


@pytest.mark.slow
def test_300_updates_interleaved_with_generations(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    """No hang and no leak. Every generation has the tokens of the version that its reply names."""
    model = reference_model(tiny("qwen3"))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change_weights(model, seed=9)
    weights = [original, model.state_dict()]
    first_version = shared_engine.generate(input_ids=[1], sampling_params=GREEDY)["meta_info"]["weight_version"]
    stop, failures, seen, finished = threading.Event(), [], [], []

    def generate() -> None:
        while not stop.is_set():
            try:
                reply = shared_engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
            except Exception as error:  # noqa: BLE001 - counted and shown below
                failures.append(error)
                return
            finished.append(1)
            spans = reply["meta_info"].get("weight_versions") or [{"version": reply["meta_info"]["weight_version"]}]
            if len(spans) == 1:
                seen.append(((spans[0]["version"] - first_version) % 2, tuple(reply["output_ids"])))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    server = tree_of(adapter_of(shared_engine).pids.main)
    warm: dict[str, int] = {}
    try:
        for i in range(1, UPDATES + 1):
            shared_engine.update_weights_from_tensor(weights[i % 2].items())
            if i % 5 == 0:  # time for complete generations with this version; odd and even versions alternate
                finished_before = len(finished)
                wait_until(lambda: len(finished) >= finished_before + 6 or failures, 60.0, "no generation finishes")  # noqa: B023
            if i == 20:
                warm = _footprint(server)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60.0)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    end = _footprint(server)
    assert end["files"] <= warm["files"] + 8, (warm, end)
    assert end["shared"] <= warm["shared"], (warm, end)
    assert end["resident"] <= warm["resident"] + 48 * 2**20, (warm, end)
    tokens = {parity: {t for p, t in seen if p == parity} for parity in (0, 1)}
    assert len(tokens[0]) == len(tokens[1]) == 1, "each version has one result: no torn weights, no stale prefix cache"
    assert tokens[0] != tokens[1]
    assert len(seen) > 30
    print(f"{len(seen)} generations; at update 20 {warm}, at update {UPDATES} {end}")


@pytest.fixture(scope="module")
def large(tiny: Callable[..., Path]) -> Path:
    """About 200 MB of float32 weights, so that released memory is visible in the process's memory."""
    return tiny("qwen3", hidden_size=768, layers=6, heads=8, kv_heads=4, intermediate_size=2304, vocab_size=8000)


def test_released_memory_returns_to_the_machine_and_can_be_resumed(large: Path, one_rank: DeviceMesh) -> None:
    model = reference_model(large)
    weights = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    tokens = 32768
    kv_cache = tokens * 2 * 6 * 4 * 96 * 4  # tokens, key and value, layers, heads, head size, bytes
    with VerlEngine(
        one_rank, model_path=str(large), dtype="float32", max_total_tokens=tokens, chunked_prefill_size=8192
    ) as engine:
        assert engine.adapter is not None
        server = tree_of(adapter_of(engine).pids.main)

        def resident() -> int:
            return sum(resident_bytes(pid) for pid in server)

        # write many pages of the KV cache, as a long run does
        engine.generate(input_ids=[[i % 300 for i in range(2000)]] * 1, sampling_params=GREEDY)
        assert_equals_reference(engine, model, tolerance=1e-4)  # sums are longer than in the tiny models
        awake = resident()
        engine.release_memory_occupation(["weights"])
        fell = awake - resident()
        assert fell >= 0.8 * weights, f"{fell / 2**20:.0f} of {weights / 2**20:.0f} MiB"
        with pytest.raises(NotReadyError, match="weights"):
            engine.generate(input_ids=[1], sampling_params=GREEDY)
        with pytest.raises(BadInputError, match="resume_memory_occupation"):
            engine.update_weights_from_tensor(model.state_dict().items())
        with pytest.raises(BadInputError, match="released already"):
            engine.release_memory_occupation(["weights"])
        engine.release_memory_occupation(["kv_cache"])
        asleep = resident()
        engine.resume_memory_occupation(["weights"])
        norm = [("model.norm.weight", torch.ones(768))]
        for some in (norm, iter(norm)):
            with pytest.raises(TornWeightsError, match=r"push all of them.*released and resumed"):
                engine.update_weights_from_tensor(some)
        with pytest.raises(TornWeightsError, match=r"released and resumed: push all tensors"):
            engine.generate(input_ids=[1], sampling_params=GREEDY)
        change_weights(model, seed=4, scale=0.02)
        engine.update_weights_from_tensor(model.state_dict().items())  # still without KV cache, as trainers do
        engine.resume_memory_occupation(["kv_cache"])
        assert_equals_reference(engine, model, tolerance=1e-4)
        assert resident() - asleep >= 0.8 * weights
        for _ in range(3):
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
            engine.update_weights_from_tensor(model.state_dict().items())
        assert_equals_reference(engine, model, tolerance=1e-4)
        engine.release_memory_occupation(["weights"])
        engine.resume_memory_occupation()
        adapter_of(engine).update_weights_from_disk(str(large))
        assert_equals_reference(engine, reference_model(large), tolerance=1e-4)
        print(
            f"weights {weights >> 20} MiB, KV up to {kv_cache >> 20} MiB: awake {awake >> 20}, "
            f"fell by {fell >> 20}, asleep {asleep >> 20}, again {resident() >> 20}"
        )


def test_memory_release_is_refused_while_requests_run(shared_engine: VerlEngine) -> None:
    long = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 0.0}
    replies: list[Any] = []
    running = threading.Thread(
        target=lambda: replies.append(shared_engine.generate(input_ids=[7, 8], sampling_params=long))
    )
    running.start()
    try:
        threading.Event().wait(0.5)
        assert running.is_alive()
        with pytest.raises(ServerBusyError, match="requests run"):
            shared_engine.release_memory_occupation()
        with pytest.raises(ServerBusyError, match="requests are running"):
            shared_engine.flush_cache()
    finally:
        running.join(200.0)
    assert len(replies[0]["output_ids"]) == 900, "the running request is complete"
    shared_engine.flush_cache()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a server with an accelerator does not refuse this")
def test_the_server_serves_on_after_a_refused_memory_release(adapter: HttpServerEngineAdapter) -> None:
    adapter.begin_weight_update()
    try:
        with pytest.raises(ServerBusyError, match="weight update"):
            adapter.release_memory_occupation(["weights"])
        assert not adapter.released_memory
    finally:
        adapter.end_weight_update()
    assert adapter.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"]


@pytest.mark.smoke
def test_a_trainer_can_keep_its_parameters_in_the_staging_memory(
    shared_engine: VerlEngine, tiny: Callable[..., Path]
) -> None:
    model = reference_model(tiny("qwen3"))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = assert_equals_reference(shared_engine, model)
    staging = shared_engine.staging_tensors()
    for name, parameter in model.named_parameters():
        staging[name].copy_(parameter.data)
        parameter.data = staging[name]
    change_weights(model, seed=21)  # an optimizer step in the memory that the server reads
    assert shared_engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
    assert assert_equals_reference(shared_engine, model) != first
    shared_engine.update_weights_from_tensor(original.items())
    assert [r["output_ids"] for r in shared_engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)] == first


@pytest.mark.smoke
def test_nan_weights_give_no_tokens(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    """SGLang answers with token 0 and the log probability null."""
    name, tensor = next(iter(reference_model(tiny("qwen3")).state_dict().items()))
    shared_engine.update_weights_from_tensor([(name, torch.full_like(tensor, torch.nan))])
    request: dict[str, Any] = {"input_ids": PROMPTS[0], "sampling_params": GREEDY, "return_logprob": True}
    calls: list[Callable[[], Any]] = [
        lambda: shared_engine.generate(**request),
        lambda: shared_engine.generate(**{**request, "input_ids": PROMPTS}),
        lambda: list(shared_engine.generate(**request, stream=True)),
    ]
    try:
        for call in calls:
            with pytest.raises(ServerError, match="output token 0 is NaN"):
                call()
    finally:
        shared_engine.update_weights_from_tensor([(name, tensor)])
    assert_equals_reference(shared_engine, reference_model(tiny("qwen3")))


@pytest.mark.smoke
def test_writes_to_staged_weights_during_an_update_are_detected(
    shared_engine: VerlEngine, tiny: Callable[..., Path]
) -> None:
    """A thread writes the staging memory continuously: the checksums of trainer and server differ."""
    model = reference_model(tiny("qwen3"))
    staging, stop = shared_engine.staging_tensors(), threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            for tensor in staging.values():
                tensor.view(-1)[0] += 1.0

    writer = threading.Thread(target=keep_writing)
    writer.start()

    def push_often() -> None:
        for _ in range(20):
            shared_engine.update_weights_from_tensor(model.state_dict().items())

    try:
        with pytest.raises(TornWeightsError, match="differ from what was staged"):
            push_often()
    finally:
        stop.set()
        writer.join()
    with pytest.raises(TornWeightsError):
        shared_engine.generate(input_ids=[1], sampling_params=GREEDY)
    shared_engine.update_weights_from_tensor(model.state_dict().items())
    assert_equals_reference(shared_engine, model)


@contextlib.contextmanager
def more_files(pid: int, count: int) -> Iterator[None]:
    """Limit a process to `count` more open files. SGLang can work. A load opens one file, and a new mapping two."""
    process = psutil.Process(pid)
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in used), count, None)
    process.rlimit(psutil.RLIMIT_NOFILE, (next(free), usual[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, usual)


def test_a_torn_update_blocks_generation_until_an_update_of_all_tensors(
    one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """The scheduler cannot open the staged weights. Generation is refused until an update of all tensors succeeds.

    A scheduler that cannot map them at all is found before its weights change.
    """
    model = reference_model(tiny("qwen2"))
    with VerlEngine(one_rank, model_path=str(tiny("qwen2")), dtype="float32", max_total_tokens=8192) as engine:
        first = assert_equals_reference(engine, model)
        assert engine.adapter is not None
        tree = tree_of(adapter_of(engine).pids.main)
        (scheduler,) = (pid for pid in tree if "scheduler" in psutil.Process(pid).cmdline()[0])
        with more_files(scheduler, 1), pytest.raises(UnsupportedError, match="cannot open the staging memory"):
            engine.update_weights_from_tensor(model.state_dict().items())
        assert engine.weight_version == 0
        assert assert_equals_reference(engine, model) == first
        engine.update_weights_from_tensor(model.state_dict().items())
        with more_files(scheduler, 0), pytest.raises(TornWeightsError, match=r"half-way.*did not report"):
            engine.update_weights_from_tensor(model.state_dict().items(), weight_version=7)
        assert engine.weight_version == 1, "a torn update does not change the version"
        with pytest.raises(TornWeightsError):
            engine.generate(input_ids=[1], sampling_params=GREEDY)
        with pytest.raises(TornWeightsError, match="push all"):
            engine.update_weights_from_tensor([("model.norm.weight", torch.ones(64))], weight_version=7)
        engine.update_weights_from_tensor(model.state_dict().items(), weight_version=7)
        assert engine.weight_version == 7
        with pytest.raises(BadInputError, match="above the current version 7"):
            engine.update_weights_from_tensor(model.state_dict().items(), weight_version=7)
        assert assert_equals_reference(engine, model) == first
