"""Tests of the benchmarks: a short run of every method on the shared server, with its tables, files and targets."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import adapter_of
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, RolloutManager, VerlEngine

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


def test_bench_generate_measures_every_client(
    shared_engine: VerlEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_generate
    from common import Options, environment
    from generate_clients import GenerateClients

    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    plan = bench_generate.Plan(rounds=2, requests={1: 2, 4: 8})
    clients = GenerateClients(shared_engine)
    try:
        samples = bench_generate.measure(clients, plan)
    finally:
        clients.close()
    bench_generate.report(options, environment(), plan, clients.all, samples)

    text = options.json.read_text()
    record = json.loads(text)
    assert len(record["samples"]) == 6 * 2 * 2  # clients, numbers in flight, rounds
    assert all(len(one["latencies_ms"]) == plan.requests[one["in_flight"]] for one in record["samples"])
    assert len(record["targets"]) == 4 * 2 * 2  # clients of this library, numbers in flight, targets
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(Path.home()) not in text
    assert options.png.read_bytes().startswith(b"\x89PNG")
    assert shared_engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_bench_weight_sync_measures_our_methods(
    shared_engine: VerlEngine,
    one_rank: DeviceMesh,
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_weight_sync as bench
    from common import Options, environment
    from weight_sync_report import Configuration, report
    from weight_update_methods import TWO_BUCKETS, arena_and_state_dict_methods, engine_method, memcpy_method

    greedy = {"max_new_tokens": 4, "temperature": 0.0}
    before = shared_engine.generate(input_ids=[1, 2], sampling_params=greedy)["output_ids"]
    weights = bench.weights_of(tiny("qwen3"))
    size = sum(tensor.nbytes for tensor in weights.values())
    with bench.engine_with_buckets(one_rank, tiny("qwen3"), 1) as bucket_engine:
        methods = [memcpy_method(size), *arena_and_state_dict_methods(shared_engine, weights)]
        samples = bench.run_rounds([*methods, engine_method(bucket_engine, TWO_BUCKETS, weights, False)], rounds=2)
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    report(options, environment(), [Configuration("0.5 B", 1, size, samples)], rounds=2)
    record = json.loads(options.json.read_text())
    assert {name: len(seconds) for name, seconds in record["samples"][0]["samples"].items()} == dict.fromkeys(
        samples, 2
    )
    assert len(record["targets"]) == 5  # the targets for 0.5 B whose methods were measured
    assert options.png.read_bytes().startswith(b"\x89PNG")
    assert shared_engine.generate(input_ids=[1, 2], sampling_params=greedy)["output_ids"] == before


def test_bench_agent_loop_measures_every_way(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_agent_loop as bench
    from agent_workload import INDEPENDENT, VARIANTS, Plan
    from common import Options, environment
    from transformers import AutoTokenizer

    plan = Plan(
        rounds=2,
        num_sessions=3,
        turns_per_session=3,
        tokens_per_turn=4,
        long_conversation_turns=12,
        long_conversation_repeats=2,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    found = asyncio.run(bench.measure(adapter_of(shared_engine), tokenizer, plan))
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    bench.report(options, environment(), plan, found)
    record = json.loads(options.json.read_text())
    assert {way: len(found) for way, found in record["samples"]["seconds"].items()} == dict.fromkeys(VARIANTS, 2)
    assert [len(cpu_ms[INDEPENDENT]) for cpu_ms in record["samples"]["conversation_cpu_ms"]] == [12, 12]
    assert len(record["targets"]) == 4
    assert options.png.read_bytes().startswith(b"\x89PNG")


def test_bench_steps_measures_an_endless_data_set(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_steps as bench
    from common import Options, environment
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    found = asyncio.run(bench.measure_steps(tokenizer, 1100))
    assert found["samples"][-1] >= 1100
    assert found["turns"][-1] == bench.TURNS_PER_SAMPLE * found["samples"][-1], "every sample has all of its turns"
    limits = [asyncio.run(bench.measure_limit(tokenizer, 50)) for _ in range(2)]
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    bench.report(options, environment(), {"steps": found, "limit_turns_per_s": limits})
    record = json.loads(options.json.read_text())
    assert len(record["samples"]["steps"]["memory_mb"]) == len(found["samples"]) > 1
    assert len(record["targets"]) == 2
    assert options.png.read_bytes().startswith(b"\x89PNG")


def test_bench_async_measures_steps_with_and_without_staleness(
    fleet_and_engine: tuple[RolloutManager, VerlEngine],
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_async as bench
    from common import Options, environment

    plan = bench.Plan(
        rounds=1, steps=2, groups_per_step=2, samples_per_group=2, turns_per_sample=2, tokens_per_turn=4, epochs=1
    )
    found = bench.measure(*fleet_and_engine, tiny("qwen3"), plan, min(os.sched_getaffinity(0)))
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    bench.report(options, environment(), plan, found)
    record = json.loads(options.json.read_text())
    for variant, (run,) in record["samples"].items():
        assert [len(run[name]) for name in ("wait_s", "train_s", "staleness")] == [2, 2, 2]
        assert max(run["staleness"]) <= (0 if variant == bench.SYNCHRONOUS else 1)
    assert len(record["targets"]) == 2
    assert options.png.read_bytes().startswith(b"\x89PNG")


def test_bench_dispatch_measures_placements_bursts_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes settings of Python, as the router process does. They are restored here."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_dispatch as bench
    from common import Options, environment

    thresholds = gc.get_threshold()
    try:
        samples = bench.measure(rounds=2, placements=40, in_flight=50, burst=60)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    bench.report(options, environment(), samples, {"rounds": 2, "placements": 40, "in_flight": 50, "burst": 60})
    record = json.loads(options.json.read_text())
    replicas = {str(number) for number in bench.REPLICAS}
    assert {len(us) for rule in record["samples"]["placement_us"].values() for us in rule.values()} == {2}
    assert set(record["samples"]["bursts"]["sent_s"]) == replicas
    assert set(record["samples"]["results"]) == set(bench.RESULTS)
    assert len(record["targets"]) == 5
    assert options.png.read_bytes().startswith(b"\x89PNG")


def test_bench_gateway_measures_every_part(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM's proxy, which needs most of the time, runs in front of the fake upstream only."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_gateway as bench
    from bench_router import KEY, our_router
    from common import Options, environment
    from gateway_conversation import DIALECTS
    from gateway_report import report
    from gateway_systems import (
        ENGINE,
        ENGINE_LOGPROBS,
        GATEWAY,
        LITELLM,
        ROUTER,
        UPSTREAM,
        engine_with_logprobs,
        gateway,
        with_key,
    )

    plan = replace(bench.QUICK, in_flight=(1, 2, 3), turns=5)
    samples = bench.measure(plan, ("upstream", "turns"))
    arguments = {**bench.SERVER, "max_total_tokens": 8192}
    with (
        HttpServerEngineAdapter(model_path=str(tiny("qwen3")), **arguments) as server,
        our_router([server.base_url]) as router,
        gateway(tmp_path, server_url=server.base_url) as ours,
    ):
        systems = {ENGINE: with_key(server.base_url, KEY), ROUTER: with_key(router, KEY), GATEWAY: ours}
        systems[ENGINE_LOGPROBS] = engine_with_logprobs(server.base_url, tiny("qwen3"))
        samples["engine"] = asyncio.run(bench.measure_systems(systems, plan, lambda _: (1, 0.1), plan.engine_tokens))
    options = Options(True, tmp_path / "out.json", tmp_path / "out.png", argparse.Namespace())
    report(options, environment(), plan, samples)
    record = json.loads(options.json.read_text())
    assert len(record["targets"]) == 4 + 2 + len(DIALECTS)
    assert set(record["samples"]["upstream"]) == {case.name for case in plan.cases}
    for systems_of_case in record["samples"]["upstream"].values():
        assert set(systems_of_case) == {UPSTREAM, GATEWAY, LITELLM}
        assert all(burst["num_requests"] > 0 for bursts in systems_of_case.values() for burst in bursts)
        assert all(burst["cpu_ms"] > 0 for burst in systems_of_case[GATEWAY])
    assert [len(turns) for turns in record["samples"]["turns"]["cpu_ms"]["messages"]] == [5] * plan.conversations
    assert options.png.read_bytes().startswith(b"\x89PNG")


def test_statistics_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common import Summary, Target, summarize

    assert summarize([4.0]) == Summary(4.0, 4.0, 4.0, 1)
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, 2.0, 4.0, 5)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])
    assert Target("ratio", 0.95, 0.95, at_least=True).met
    assert not Target("ratio", 0.94, 0.95, at_least=True).met
    assert not Target("latency", 1.1, 1.0, at_least=False).met
